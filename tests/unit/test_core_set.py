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
from tests.core_set.executors import EXECUTORS, Simulator
from tests.core_set.pairs import all_pairs

ROOT = Path(__file__).parents[2]


def collected(executor: str) -> set[str]:
    """The test functions of the core set, with their files."""
    command = [
        sys.executable, "-m", "pytest", "tests/core_set", f"--executor={executor}",
        "--collect-only", "-q", "-p", "no:cacheprovider",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return set(re.findall(r"^tests/core_set/(\S+?::\w+)", done.stdout, re.M))


@pytest.mark.slow
def test_both_executors_run_every_test() -> None:
    simulator, gpu = (collected(name) for name in EXECUTORS)
    assert len(simulator) > 50
    assert simulator == gpu


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
    q, k, v = on.qkv(5, 9, 16)
    with pytest.raises(AssertionError, match="other bits in mode eager"):
        on.attend("simt", q, k, v, schedules=[0, 1])
