"""What the core set's own helpers promise, and that both executors run every test of it."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.core_set.checks import Guarded, assert_close, dense_strides
from tests.core_set.executors import (
    OF_THE_RANGE,
    ONE_OF_TWO,
    Simulator,
    left_to_rest,
    others_of_two,
)
from tests.core_set.pairs import all_pairs
from tests.sim.schedules import IN_FULL, some_of

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_on_a_gpu_every_test_of_the_simulator_runs() -> None:
    command = [
        sys.executable, "-m", "pytest", "tests/core_set", "--executor=gpu",
        "--collect-only", "-q", "-p", "no:cacheprovider", "--assert=plain",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    collected = set(re.findall(r"^tests/core_set/(\S+?::\w+)", done.stdout, re.M))
    written = {
        f"{file.name}::{name}"
        for file in (ROOT / "tests" / "core_set").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    assert len(written) > 50
    assert collected == written


def test_any_two_values_of_two_factors_meet() -> None:
    factors = {"a": [1, 2, 3], "b": ["x", "y"], "c": [None, 5], "d": [0, 1, 2, 3]}
    rows = all_pairs(factors)
    assert len(rows) < 3 * 2 * 2 * 4
    for one, other in itertools.combinations(factors, 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(itertools.product(factors[one], factors[other]))


@pytest.mark.parametrize("element", [-1, 16, 24 * 3, 24 * 5 + 16])
def test_a_guarded_output_shows_stray_writes(element: int) -> None:
    shape = (2, 3, 16)
    guarded = Guarded(shape, dense_strides(shape, pad=8), torch.float16, "cpu")
    guarded.view.zero_()
    guarded.assert_untouched_outside()
    start = guarded.view.storage_offset()
    guarded.view.as_strided((1,), (1,), start + element).zero_()
    if element == 24 * 3:  # the first element of the second head
        guarded.assert_untouched_outside()
        return
    with pytest.raises(AssertionError, match=f"first at element {element} "):
        guarded.assert_untouched_outside()


def test_the_simulator_compares_bits_and_the_rule_compares_numbers() -> None:
    on = Simulator()
    q, k, v = on.qkv(5, 9, 16)
    out, lse = on.attend("simt", q, k, v, schedules=[0, 1])
    assert_close(out, lse, q, k, v)
    with pytest.raises(AssertionError, match="WRONG"):
        assert_close(out + 1e-3, lse, q, k, v)
    with pytest.raises(AssertionError, match="log-sum-exp"):
        assert_close(out, lse + 1e-3, q, k, v)


@pytest.mark.skipif(IN_FULL, reason="all schedules run")
def test_calls_have_all_schedules_between_them() -> None:
    for compared, schedules in itertools.product((False, True), ([3], [1, 2], range(3), range(4))):
        chosen = [some_of(schedules, number, compared=compared) for number in range(6)]
        assert {one for of_call in chosen for one in of_call} == set(schedules)
        assert len(schedules) in {len(of_call) for of_call in chosen} or len(schedules) > 2
        assert not compared or all(len(of_call) >= min(2, len(schedules)) for of_call in chosen)


def test_tests_in_float16_are_sampled_where_bfloat16_has_them() -> None:
    both = {f"a[{dtype}-{i}]" for dtype in ("float16", "bfloat16") for i in range(300)}
    alone = {f"b[float16-{i}]" for i in range(300)}
    few = {f"{i}[{dtype}]" for dtype in ("float16", "bfloat16") for i in range(30)}
    left = left_to_rest(both | alone | few)
    assert 150 < len(left) < 250
    assert all(test.startswith("a[float16") for test in left)


def test_float16_stays_where_the_range_of_numbers_counts() -> None:
    written = "".join(file.read_text() for file in (ROOT / "tests" / "core_set").glob("test_*.py"))
    for function in OF_THE_RANGE:
        assert f"def {function[2:]}(" in written
        every = {f"x.py{function}[{d}-{i}]" for d in ("float16", "bfloat16") for i in range(9)}
        assert not left_to_rest(every)


def test_each_case_runs_with_one_of_two_values_in_turns() -> None:
    for name in ONE_OF_TWO:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / "core_set" / file).read_text()
    name = f"tests/core_set/{ONE_OF_TWO[0]}"
    tests = [f"{name}[{case}-{value}]" for case in "abcd" for value in (True, False)]
    left = others_of_two([*tests, f"{name}_too[a-True]", "tests/core_set/test_x.py::test_y"])
    assert left == {f"{name}[{case}]" for case in ("a-False", "b-True", "c-False", "d-True")}


def test_a_schedule_with_other_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.core_set import executors

    real = executors.sim.run

    def run(*tensors: torch.Tensor, mode: str, **options: object) -> object:
        made = real(*tensors, mode=mode, **options)
        if mode == "eager":
            made.out[..., 0, 0] += 1
        return made

    monkeypatch.setattr(executors.sim, "run", run)
    on = Simulator()
    q, k, v = on.qkv(6, 10, 16)  # the shape of a call with two schedules
    with pytest.raises(AssertionError, match="other bits in mode eager"):
        on.attend("simt", q, k, v, schedules=[0, 1])


@pytest.mark.skipif(IN_FULL, reason="every run looks for races")
def test_one_run_of_a_call_looks_for_races(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.core_set import executors

    real, looked = executors.sim.run, []

    def run(*tensors: torch.Tensor, race_check: bool, **options: object) -> object:
        looked.append(race_check)
        return real(*tensors, race_check=race_check, **options)

    monkeypatch.setattr(executors.sim, "run", run)
    on = Simulator()
    q, k, v = on.qkv(6, 10, 16)  # the shape of a call with two schedules
    on.attend("simt", q, k, v, schedules=[0, 1])
    on.attend("simt", q, k, v, schedules=[2])
    assert looked == [False, True, True]
