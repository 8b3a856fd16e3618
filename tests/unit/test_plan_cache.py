"""The plan cache under load, without a GPU: plans are bound, what would run them refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as _native
from archflash import _dispatch

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
    for length in range(1, 400):
        with pytest.raises(archflash.LaunchError):
            archflash.attention(*(torch.zeros(1, 1, length, 8),) * 3)
    _, _, entries, capacity = _native.cache_info()
    assert entries == capacity == 256
