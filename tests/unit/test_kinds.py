"""What is kept for a kind of problem holds for each problem of it, and a call of another length
does without Python's decision.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import call
from tests.many_cases import check_all

import archflash
from archflash import _archflash as _native
from archflash import (
    _dispatch,
    _eager_gradients,
    _forward_operators,
    _overrides,
    _proofs,
    _user_tables,
)
from archflash._api import find_device
from archflash._dispatch import choosing

DEVICES = ("A100", "H200", "B200", "RTX 5090")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"causal": True},
    {"window": (64, 0)},
    {"dropout_p": 0.1},
    {"return_lse": True},
    {"causal": True, "q_offset": 3},
)


def _problem(sizes: tuple[int, int, int], gradients: bool, **rest: Any) -> _native.Problem:
    batch, nq, nk = sizes
    if "dropout_p" in rest:
        rest["rng_state"] = torch.empty(2, dtype=torch.int64, device="meta")
    problem = call(b=batch, nq=nq, nk=nk, **rest)
    return _native.Problem.from_dict(problem.to_dict() | {"needs_grad": int(gradients)})


def _neighbours(dice: random.Random) -> tuple[_native.Problem, _native.Problem]:
    """Two problems, one of whose sizes is at a number where a rule of dispatch may change, or where
    kernels of PyTorch begin to fail, and behind it.
    """
    heads, d = dice.choice(((4, 64), (16, 128), (12, 64)))
    rest = {"dtype": dice.choice(("bfloat16", "bfloat16", "float32")), "hq": heads, "d": d}
    rest |= dice.choice(OPTIONS)
    batch = dice.choice((1, 1, 1, 2, 8, 64, 65534))
    common = (1, 15, 16, 63, 64, 127, 128, 192, 200, 1023, 1024, 8192, 65535, 65536)
    full = ((1 << 15) // heads // batch, (1 << 31) // heads // batch // d)
    sizes = [batch, dice.choice((*common, *full)), 0]
    sizes[2] = dice.choice((sizes[1], *common, *full))
    sizes = [max(x, 1) for x in sizes]
    more = sizes.copy()
    changed = dice.choice(((0,), (1,), (2,), (1, 2)))
    for place in changed:
        more[place] += dice.choice((1, 1, 63, 64))
    gradients = dice.random() < 0.6
    one, other = (_problem((x[0], x[1], x[2]), gradients, **rest) for x in (sizes, more))
    return one, other


@pytest.mark.slow
def test_problems_of_one_kind_are_asked_for_in_one_order() -> None:
    dice = random.Random(0)
    pairs = [_neighbours(dice) for _ in range(1500)]
    differ = 0

    def order(problem: _native.Problem, device: _native.Device) -> Any:
        answers = choosing._Answers(problem, device)
        return answers.order, [answers.when_served(name) for name in answers.order]

    def told_apart(pair: tuple[_native.Problem, _native.Problem]) -> None:
        nonlocal differ
        for name in DEVICES:
            device = find_device(name)
            if order(pair[0], device) != order(pair[1], device):
                differ += 1
                assert pair[0].kind != pair[1].kind, name

    check_all(pairs, told_apart, lambda pair: f"{pair[0].to_dict()} and {pair[1].to_dict()}")
    assert differ > 200


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"nq": 200}, {"nq": 201}, True),
        ({"b": 9, "nq": 150}, {"b": 10, "nq": 150}, True),
        ({"nq": 200}, {"nq": 257}, False),
        ({"nq": 200, "nk": 200}, {"nq": 200, "nk": 201}, False),
        ({"nq": 1, "nk": 200}, {"nq": 2, "nk": 200}, False),
        ({"nq": 200, "nk": 321}, {"nq": 200, "nk": 320}, False),
        ({"nq": 200, "nk": 384}, {"nq": 200, "nk": 320}, False),
        ({"scale": 0.1}, {"scale": 0.2}, True),
        ({"scale": 0.1}, {"scale": -0.1}, False),
        ({"d": 64}, {"d": 72}, False),
        ({"causal": True}, {}, False),
    ],
    ids=str,
)
def test_what_makes_a_kind(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    assert (call(**one).kind == call(**other).kind) == same


class Seen:
    """What was decided in Python, and the plans that were run; zeros are what they write."""

    def __init__(self) -> None:
        self.decided: list[str] = []
        self.plans: list[_native.LaunchPlan] = []

    def noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            self.decided.append(name)
            return function(*given)

        return noted

    def run(self, plan: _native.LaunchPlan, tensors: dict[str, Any]) -> None:
        self.plans.append(plan)
        for name in ("out", "lse") if "dq" not in tensors else ("dq", "dk", "dv"):
            if name in tensors:
                tensors[name].zero_()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    seen = Seen()
    forward = seen.noting("forward", _dispatch.decide)
    backward = seen.noting("backward", _eager_gradients.decide)
    _native.set_decide(forward, seen.noting("kind", _dispatch.order_of_kind))
    _native.set_decide_gradients(backward, seen.noting("gradients", _eager_gradients.order))
    _native.set_simulate(seen.run)
    monkeypatch.setenv("ARCHFLASH_SIM_DEVICE", "H200")
    _native.clear_cache()
    yield seen
    _native.set_decide(_dispatch.decide, _dispatch.order_of_kind)
    _native.set_decide_gradients(_eager_gradients.decide, _eager_gradients.order)
    _native.set_simulate(archflash._simulate)
    _native.clear_cache()


def _train(length: int, kernel: str | None, **options: Any) -> None:
    dtype = torch.float32 if kernel == "simt" else torch.bfloat16
    q, k, v = (torch.randn(1, 2, length, 64, dtype=dtype, requires_grad=True) for _ in range(3))
    out = archflash.attention(q, k, v, implementation=kernel, **options)
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))


@pytest.mark.parametrize("kernel", ["simt", "hopper"])
def test_a_call_of_another_length_needs_no_decision(seen: Seen, kernel: str) -> None:
    for length in (140, 150, 160, 161):
        _train(length, kernel)
    assert seen.decided == ["gradients", "kind"]
    _train(300, kernel)
    assert seen.decided == ["gradients", "kind", "kind"]
    assert [plan.problem.nq for plan in seen.plans[::2]] == [140, 150, 160, 161, 300]


@pytest.mark.parametrize("kernel", ["simt", "hopper"])
def test_the_plans_are_those_that_are_decided_one_by_one(seen: Seen, kernel: str) -> None:
    calls: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"sinks": torch.zeros(2)})
    if kernel == "simt":
        calls = (*calls, {"alibi_slopes": torch.ones(2)})
    lengths = (40, 150, 161, *random.Random(5).sample(range(1, 900), 9))
    for length in lengths:
        for options in calls:
            _train(length, kernel, **options)
    kept = seen.plans.copy()
    _native.set_decide(_dispatch.decide)
    _native.set_decide_gradients(_eager_gradients.decide)
    _native.clear_cache()
    seen.plans.clear()
    for length in lengths:
        for options in calls:
            _train(length, kernel, **options)
    assert [plan.to_dict() for plan in kept] == [plan.to_dict() for plan in seen.plans]


@pytest.mark.parametrize("wanted", [False, True])
def test_the_gradient_of_sinks_is_computed_where_it_is_wanted(seen: Seen, wanted: bool) -> None:
    q, sinks = torch.randn(1, 2, 40, 64, requires_grad=True), torch.zeros(2, requires_grad=wanted)
    out = archflash.attention(q, q, q, sinks=sinks, implementation="simt")
    torch.autograd.grad(out, (q, sinks) if wanted else (q,), torch.zeros_like(out))
    kernels = [launch["kernel"] for launch in seen.plans[-1].to_dict()["launches"]]
    assert ("simt_backward_sinks_f32" in kernels) == wanted


def test_the_forward_pass_plans_the_backward_pass(seen: Seen) -> None:
    device, asked = find_device("H200"), list[str | None]()

    def order(index: int, name: str | None) -> Any:
        asked.append(name)
        return device, [("hopper", False)]

    _native.set_decide(_dispatch.decide, lambda *_: (device, [("hopper", False)]))
    _native.set_decide_gradients(_eager_gradients.decide, order)
    for length in (140, 150):
        _train(length, None)
    assert asked == [None]
    assert len(seen.plans) == 4


def test_pytorchs_operators_of_another_length_need_no_decision(seen: Seen) -> None:
    values = _forward_operators._values(False, None, True)
    _native.set_decide_operator(seen.noting("operator", _overrides._decide))
    try:
        for length in (140, 150, 160):
            q = torch.randn(1, 2, length, 64)
            out, lse = _native.serve_operator(q, q, q, values, "simt")
            assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
        assert seen.decided == ["kind"]
        mask = torch.zeros(160, 160)
        with_mask = _forward_operators._with_mask(values, mask)
        _native.serve_operator(q, q, q, with_mask, "simt")  # PyTorch may read it faster
        assert seen.decided == ["kind", "operator"]
    finally:
        _native.set_decide_operator(lambda *problem: _overrides._decide(*problem))
    for plan in seen.plans[:3]:
        on_cpu = _native.Problem.from_dict(plan.problem.to_dict() | {"on_cuda": 0})
        decided = _overrides._decide(on_cpu, -1, "simt")
        assert isinstance(decided, _native.LaunchPlan)
        assert decided.to_dict() == plan.to_dict()


def test_a_refused_problem_of_a_kind_is_decided_in_python(seen: Seen) -> None:
    q = torch.randn(1, 2, 40, 64, dtype=torch.bfloat16)
    archflash.attention(q, q, q, implementation="hopper")
    with pytest.raises(archflash.ForcedImplementationError, match="hopper is forced, but cannot"):
        archflash.attention(q.float(), q.float(), q.float(), implementation="hopper")
    assert seen.decided == ["kind", "kind", "forward"]


def test_a_table_that_is_written_is_read_for_known_kinds(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(_user_tables.VARIABLE, str(tmp_path))
    _user_tables.entries.cache_clear()
    _train(140, "simt")
    _train(150, "simt")
    assert seen.decided == ["gradients", "kind"]
    _proofs.keep(find_device("H200"), [("simt", _proofs.FORWARD)])
    _train(160, "simt")
    assert seen.decided == ["gradients", "kind"] * 2
    _user_tables.entries.cache_clear()


def test_kernels_without_a_proof_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    device = find_device("H200")
    problem = call("bfloat16", nq=1024).as_if_on_cuda()
    monkeypatch.setattr(choosing.devices, "device_of", lambda *_: (device, None))
    asked = choosing.order_of_kind(problem, 0, None)
    assert asked is not None
    assert asked[1][0] == ("hopper", False)
    assert all(_native.has_code(name, device.capability) for name, _ in asked[1] + asked[2])

    def unproved(name: str, *_: Any, **__: Any) -> str | None:
        return "no proof" if name == "hopper" else None

    noted: list[str] = []
    monkeypatch.setattr(_proofs, "why_not", unproved)
    monkeypatch.setattr(_proofs, "note", lambda name, *_, **__: noted.append(name))
    asked = choosing.order_of_kind(problem, 0, None)
    assert asked is not None
    assert "hopper" not in dict(asked[1] + asked[2])
    assert noted == ["hopper"]
