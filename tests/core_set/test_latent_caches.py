"""Kernels that read latent caches alone (qv, no other cache): pages of several sizes, ragged ends
with NaN behind them, splits, masks, the append, in every schedule of the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as native

from .. import kvcache_cases
from ..kvcache_cases import CacheCall, make
from .executors import executor

here = executor()
KERNELS = [name for name in here.kernels("qv") if name not in here.kernels("kv_cache")]
BF16, F16 = torch.bfloat16, torch.float16
LATENT: dict[str, Any] = {"d": 64, "dv": 512, "qv": True, "device": here.device}

CALLS: dict[str, Callable[[], CacheCall]] = {
    "page-64-causal-splits-sinks": lambda: make(
        [100, 0, 130], nq=2, page_size=64, capacity=192, heads=(11, 1), causal=True, num_splits=2,
        sinks=torch.linspace(-1, 2, 11, device=here.device), dtype=BF16, **LATENT,
    ),
    "page-16-five-blocks-two-tiles-of-heads": lambda: make(
        [300], page_size=16, capacity=304, heads=(128, 1), dtype=BF16, **LATENT,
    ),
    "page-128-append-splits-f16": lambda: make(
        [127, 190], page_size=128, capacity=256, heads=(5, 1), n_new=2, nq=2, causal=True,
        num_splits=2, dtype=F16, **LATENT,
    ),
    "huge-scores": lambda: make([70, 40], heads=(16, 1), scale=1e7, dtype=F16, **LATENT),
    "contiguous-leftpad-softcap-chunks-bhnd": lambda: make(
        [70, 33], nq=20, heads=(8, 2), leftpad=[3, 32], softcap=4.0, attention_chunk=40,
        layout="bhnd", dtype=F16, **LATENT,
    ),
    "page-32-rotary-packed-queries-window": lambda: make(
        [94, 9], page_size=32, q_lengths=[2, 5], n_new=2, rotary=64, causal=True, heads=(18, 1),
        window=(70, 0), dtype=BF16, **LATENT,
    ),
    "rows-of-a-larger-cache": lambda: make(
        [70, 8, 0], rows_of=[3, 0, 1], heads=(4, 1), dtype=BF16, **LATENT
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_serves_a_latent_cache_as_the_reference_does(kernel: str, name: str) -> None:
    kvcache_cases.check(CALLS[name](), lambda mine: here.attend_with_kvcache(kernel, mine)[:2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_serves_other_lengths_and_pages(kernel: str) -> None:
    def call(lengths: list[int], seed: int) -> CacheCall:
        return make(lengths, page_size=16, capacity=160, dtype=BF16, seed=seed, **LATENT)

    plan = here.attend_with_kvcache(kernel, call([0, 9], seed=0))[2]
    for lengths, seed in (([150, 0], 1), ([16, 159], 2)):
        kvcache_cases.check(
            call(lengths, seed), lambda mine: here.attend_with_kvcache(kernel, mine, plan=plan)[:2]
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_page_outside_the_cache_is_not_read(kernel: str) -> None:
    call = make([20, 40], page_size=16, capacity=48, dtype=BF16, **LATENT)
    table = call.options["page_table"].clone()
    table[0, 0], table[0, 2], table[1, 1] = -1, 2**31 - 1, 1000
    out = here.attend_with_kvcache(kernel, call.with_options(page_table=table))[0]
    assert out.shape == (2, 1, 4, 512)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_it_does_not_read_has_a_reason(kernel: str) -> None:
    home = native.describe(kernel).home_device
    latent = {**LATENT, "device": "cpu"}
    for how, words in (
        ({**latent, "page_size": 7}, "latent rows in pages of 7: "),
        ({**latent, "page_size": 16, "leftpad": [1, 0]}, "leftpad_k with a page table: "),
        ({"d": 64}, "a KV cache: "),
        ({**latent, "batch_invariant": True}, "batch_invariant"),
    ):
        call = make([5, 20], dtype=BF16, **how)
        with pytest.raises(archflash.ForcedImplementationError) as caught:
            archflash.explain(
                call.q, call.k_cache, call.v_cache, **call.options, device=home,
                implementation=kernel,
            )  # fmt: skip
        assert words in str(caught.value)
