"""The plan cache under load, without a GPU: plans are bound, what would run them refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as _native
from archflash import _dispatch, _eager_gradients

THREADS = 8
ROUNDS = 10
LENGTHS = range(1, 40)
HEAD_DIMS = (8, 64, 128, 256)  # a kernel each


def refuse_to_run(plan: _native.LaunchPlan, tensors: dict[str, Any]) -> None:
    raise archflash.LaunchError("no driver")


@pytest.fixture
def _plans_for_a_gpu_that_is_not_here() -> Iterator[None]:
    if _native.driver_status().usable:
        pytest.skip("a GPU is here: tests/gpu covers it")
    device = _native.find_known_device("H200").device
    _native.set_decide(
        lambda problem, index, name: _native.plan("simt", problem.as_if_on_cuda(), device)
    )
    _native.set_simulate(refuse_to_run)
    _native.clear_cache()
    yield
    _native.set_decide(_dispatch.decide)
    _native.set_simulate(archflash._simulate)
    _native.clear_cache()


@pytest.mark.usefixtures("_plans_for_a_gpu_that_is_not_here")
def test_threads_share_plans_and_drop_the_oldest() -> None:
    wrong: list[str] = []

    def work(shift: int) -> None:
        for step in range(ROUNDS):
            for length in LENGTHS:
                head_dim = HEAD_DIMS[(length + shift + step) % len(HEAD_DIMS)]
                q = torch.zeros(1, 1, length, head_dim)
                try:
                    archflash.attention(q, q, q)
                except archflash.LaunchError:
                    continue
                wrong.append(f"{length}, {head_dim}: no LaunchError without a driver")
            if shift == 0:
                _native.clear_cache()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for length in range(1, 1100):
        with pytest.raises(archflash.LaunchError):
            archflash.attention(*(torch.zeros(1, 1, length, 8),) * 3)
    _, _, entries, capacity = _native.cache_info()
    assert entries == capacity == 1024


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the runtime asks Python for, while plans are not run: zeros are what they write."""
    asked: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            asked.append(name)
            return function(*given)

        return noted

    def write_zeros(plan: _native.LaunchPlan, tensors: dict[str, Any]) -> None:
        for name in ("out", "lse") if "dq" not in tensors else ("dq", "dk", "dv"):
            tensors[name].zero_()

    _native.set_decide(noting("forward", _dispatch.decide))
    _native.set_decide_gradients(noting("backward", _eager_gradients.decide))
    _native.set_simulate(write_zeros)
    monkeypatch.setenv("ARCHFLASH_SIM_DEVICE", "H200")
    _native.clear_cache()
    yield asked
    _native.set_decide(_dispatch.decide)
    _native.set_decide_gradients(_eager_gradients.decide)
    _native.set_simulate(archflash._simulate)
    _native.clear_cache()


def _train(length: int, **options: Any) -> None:
    q, k, v = (torch.randn(1, 2, length, 64, requires_grad=True) for _ in range(3))
    out = archflash.attention(q, k, v, implementation="simt", **options)
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))


@pytest.mark.usefixtures("asked_for")
def test_gradients_lie_as_their_inputs_in_each_layout() -> None:
    """Two calls that are one problem but for the order of dimensions, which it does not tell."""
    rows_first = [torch.randn(1, 40, 2, 64).requires_grad_() for _ in range(3)]
    heads_first = [x.detach().transpose(1, 2).requires_grad_() for x in rows_first]
    for _ in range(2):
        for inputs, layout in ((rows_first, "bnhd"), (heads_first, "bhnd")):
            out = archflash.attention(*inputs, layout=layout, implementation="simt")
            for x, dx in zip(inputs, torch.autograd.grad(out, inputs, out.detach()), strict=True):
                assert (dx.shape, dx.stride()) == (x.shape, x.stride())


def test_both_passes_of_a_training_call_are_decided_once(asked_for: list[str]) -> None:
    for _ in range(3):
        for length in (40, 72):
            _train(length)
    assert asked_for == ["forward", "backward"] * 2
    with archflash.force("simt"):  # the same implementation, and so the same plans
        _train(40)
    assert len(asked_for) == 4


def test_what_changes_a_backward_plan_is_in_its_key(asked_for: list[str]) -> None:
    _train(40)
    was = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        _train(40)
    finally:
        torch.use_deterministic_algorithms(was)
    q = torch.randn(1, 2, 40, 64, requires_grad=True)
    archflash.attention(q, q, q, implementation="simt").sum().backward()  # dout is expanded
    assert asked_for == ["forward", "backward", "backward", "backward"]


@pytest.mark.usefixtures("asked_for")
def test_saved_tensors_may_come_back_with_other_strides() -> None:
    def moved(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    seen: list[tuple[int, ...]] = []
    q, k, v = (torch.randn(1, 2, 40, 64, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, moved):
        out = archflash.attention(q, k, v, implementation="simt")
    _native.set_simulate(
        lambda _, tensors: seen.extend(tensors[name].stride() for name in ("q", "k", "v", "out"))
    )
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert seen == [(5120, 2560, 1, 40)] * 4
