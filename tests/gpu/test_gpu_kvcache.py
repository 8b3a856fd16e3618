"""KV caches on a GPU, where only a GPU can show it. What a call means: core_set/test_kvcache.py."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from tests import kvcache_cases
from tests.kvcache_cases import CacheCall, make

from .gpu_cases import kernels

pytestmark = pytest.mark.gpu

WITH_CACHE = [
    i.name for i in archflash.implementations() if "kv_cache" in i.features and i.name in kernels()
]
MANY_ROWS = [
    i.name
    for i in archflash.implementations()
    if "kv_cache_prefill" in i.features and i.name in kernels()
]
EXACT = [i.name for i in archflash.implementations() if "float32" in i.dtypes]


PLAIN: dict[str, Any] = {"heads": (8, 2), "d": 128}
OF_VALUES: dict[str, Any] = {"heads": (128, 1), "d": 64, "dv": 512, "qv": True}
PREFILL: dict[str, Any] = {**PLAIN, "nq": 200}
IN_GRAPHS = [
    *((kernel, of) for kernel in [*WITH_CACHE, "torch"] for of in ("plain", "qv", "qv-fp8")),
    *((kernel, of) for kernel in MANY_ROWS for of in ("prefill", "prefill-fp8")),
]


def call_of(
    lengths: list[int], seed: int, of: dict[str, Any] = PLAIN, dtype: torch.dtype = torch.bfloat16
) -> CacheCall:
    return make(
        lengths, page_size=16, capacity=2048, n_new=1, rotary=64, causal=True,
        dtype=dtype, device="cuda", seed=seed, **of,
    )  # fmt: skip


@pytest.mark.parametrize(("kernel", "of_call"), IN_GRAPHS)
def test_a_graph_replays_with_other_lengths_pages_and_caches(kernel: str, of_call: str) -> None:
    of = {
        "plain": PLAIN, "qv": OF_VALUES, "prefill": PREFILL,
        "qv-fp8": {**OF_VALUES, "cache_dtype": torch.float8_e4m3fn},
        "prefill-fp8": {**PREFILL, "cache_dtype": torch.float8_e4m3fn},
    }[of_call]  # fmt: skip
    exact = kernel in EXACT and kernel != "torch"
    if exact and "qv" in of:
        pytest.skip("qv: 16 bits only")
    dtype = torch.float32 if exact else torch.bfloat16
    mine = call_of([1, 900], seed=0, of=of, dtype=dtype)

    def serve() -> tuple[Tensor, Tensor]:
        answer: tuple[Tensor, Tensor] = archflash.attention_with_kvcache(
            mine.q, mine.k_cache, mine.v_cache, **mine.options, implementation=kernel,
            return_lse=True,
        )  # fmt: skip
        return answer

    serve()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = serve()
    for lengths, seed in (([2047, 0], 1), ([33, 1500], 2)):
        other = call_of(lengths, seed, of, dtype)
        mine.q.copy_(other.q)
        for name, tensor in mine.options.items():
            if isinstance(tensor, Tensor):
                tensor.copy_(other.options[name])

        def replay(copied: CacheCall) -> tuple[Tensor, Tensor]:
            mine.k_cache.copy_(copied.k_cache)
            mine.v_cache.copy_(copied.v_cache)
            graph.replay()
            copied.k_cache.copy_(mine.k_cache)
            copied.v_cache.copy_(mine.v_cache)
            return answer

        kvcache_cases.check(other, replay)


def test_a_call_that_forces_nothing_is_served_by_a_kernel_and_does_not_wait() -> None:
    call = call_of([5, 700], seed=3)
    decision = archflash.explain(call.q, call.k_cache, call.v_cache, **call.options)
    assert decision.chosen in WITH_CACHE
    for implementation in (None, "torch"):
        # The first launch of a kernel loads it, which waits for the device.
        serve = functools.partial(
            archflash.attention_with_kvcache, call.q, call.k_cache, call.v_cache,
            **call.options, implementation=implementation,
        )  # fmt: skip
        serve()
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        busy = torch.cuda.Event()
        busy.record()
        serve()
        assert not busy.query(), f"the call of {implementation} waited for the device"
