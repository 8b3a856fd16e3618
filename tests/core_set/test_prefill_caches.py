"""Kernels that read a KV cache for sequences of many query rows only: pages of several sizes,
ragged ends with NaN behind them, masks, the append, packed queries, in every schedule of the
simulator.
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
from ..replanned import replanned
from .executors import executor

here = executor()
KERNELS = here.kernels("kv_cache_prefill")
BF16, F16 = torch.bfloat16, torch.float16
ON: dict[str, Any] = {"device": here.device}

CALLS: dict[str, Callable[[], CacheCall]] = {
    "page-8-causal-shared-pages-bhnd": lambda: make(
        [15, 140], page_size=8, nq=70, heads=(2, 1), causal=True, capacity=144, shared_pages=2,
        layout="bhnd", dtype=BF16, **ON,
    ),
    "page-16-several-tiles-sinks-d128": lambda: make(
        [500, 0], page_size=16, nq=400, capacity=512, heads=(2, 1), d=128, causal=True,
        sinks=torch.tensor([0.5, -1], device=here.device), dtype=BF16, **ON,
    ),
    "page-64-softcap-window-append-f16": lambda: make(
        [163, 100, 300], page_size=64, capacity=320, n_new=3, nq=65, heads=(2, 2), softcap=5.0,
        window=(90, 20), dtype=F16, **ON,
    ),
    "page-48-d96-packed-queries": lambda: make(
        [200, 0, 90], page_size=48, capacity=288, d=96, q_lengths=[90, 0, 70], causal=True,
        dtype=BF16, **ON,
    ),
    "page-256-rotary-over-the-end-d128": lambda: make(
        [510, 200], page_size=256, capacity=512, n_new=4, nq=80, causal=True, rotary=32, d=128,
        heads=(2, 1), dtype=BF16, **ON,
    ),
    "contiguous-leftpad-rows-of-a-larger-cache-d192": lambda: make(
        [160, 9, 140], rows_of=[3, 0, 1], leftpad=[8, 9, 33], capacity=160, nq=66, heads=(2, 1),
        window=(14, 0), d=192, dv=128, dtype=BF16, **ON,
    ),
    "rotary-interleaved-packed-queries-leftpad": lambda: make(
        [9, 150], q_lengths=[64, 130], n_new=1, rotary=64, rotary_interleaved=True, capacity=152,
        leftpad=[2, 33], window=(30, None), dtype=F16, **ON,
    ),
    "chunks-of-positions-leftpad-window": lambda: make(
        [200, 9, 141], attention_chunk=70, leftpad=[8, 0, 33], capacity=208, nq=66, heads=(2, 1),
        window=(90, 20), dtype=BF16, **ON,
    ),
    "page-16-short-chunks-packed-queries-d128": lambda: make(
        [300, 150], page_size=16, capacity=304, attention_chunk=24, q_lengths=[260, 100],
        causal=True, heads=(4, 2), d=128, dtype=BF16, **ON,
    ),
    "page-64-alibi-softcap-d128": lambda: make(
        [163, 300], page_size=64, capacity=320, nq=150, heads=(4, 2), d=128, causal=True,
        softcap=8.0, alibi_slopes=torch.tensor([0.5, 0.2, 0.1, 0.01], device=here.device),
        dtype=BF16, **ON,
    ),
    "alibi-of-each-sequence-window-packed-queries-f16": lambda: make(
        [90, 200], q_lengths=[64, 130], capacity=208, heads=(4, 2), window=(60, 9),
        alibi_slopes=torch.tensor([[0.5, 0.2, 0.1, 0.01], [1, 0, 0.3, 2]], device=here.device),
        dtype=F16, **ON,
    ),
    "page-128-d256-few-columns-of-v": lambda: make(
        [130, 250], page_size=128, capacity=256, nq=70, d=256, dv=72, heads=(2, 2), dtype=BF16,
        **ON,
    ),
}  # fmt: skip


def planned(kernel: str, call: CacheCall, **facts: int) -> native.LaunchPlan:
    """The plan of a call for a GPU with other facts: with few SMs the tiles of many rows fill it,
    with many of them keys are split.
    """
    made = archflash.explain(
        call.q, call.k_cache, call.v_cache, **call.options, implementation=kernel, return_lse=True
    ).plan
    assert made is not None
    return replanned(made, **facts)


@pytest.mark.parametrize("sms", [1, 132])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_serves_many_rows_as_the_reference_does(kernel: str, name: str, sms: int) -> None:
    call = CALLS[name]()
    plan = planned(kernel, call, sm_count=sms)
    kvcache_cases.check(call, lambda mine: here.attend_with_kvcache(kernel, mine, plan=plan)[:2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_for_many_rows_runs(kernel: str) -> None:
    """In both dtypes, with every tile: of contiguous caches, of pages, and with split keys."""
    for dtype, word in ((BF16, "bf16"), (F16, "f16")):
        for name, d, page_size, splits in (
            ("d64_cache", 64, None, 1), ("d64_few_cache", 64, 16, 3), ("d128_cache", 128, None, 1),
            ("d128_pages_cache", 128, 64, 1), ("d128_few_cache", 128, 16, 3),
            ("d128_small_pages_cache", 128, 16, 1), ("d256_cache", 256, None, 1),
            ("d256_pages_cache", 256, 16, 1),
            ("d256_few_cache", 256, 16, 3),
        ):  # fmt: skip
            call = make([240, 15], nq=100, d=d, heads=(2, 1), capacity=256, dtype=dtype,
                        page_size=page_size, num_splits=splits, **ON)  # fmt: skip
            plan = planned(kernel, call, sm_count=1 if splits == 1 else 132)
            combines = [f"{kernel}_combine_{word}"] if splits > 1 else []
            assert plan.kernels == [f"{kernel}_attention_fwd_{word}_{name}", *combines]

            def serve(
                mine: CacheCall, plan: native.LaunchPlan = plan
            ) -> tuple[torch.Tensor, torch.Tensor]:
                return here.attend_with_kvcache(kernel, mine, plan=plan)[:2]

            kvcache_cases.check(call, serve)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_sequences_of_few_rows_have_a_launch_of_their_own(kernel: str, splits: bool) -> None:
    values: dict[str, Any] = {"n_new": 2, "rotary": 32, "page_size": 16, "causal": True, "d": 64}
    call = make(
        [1900 if splits else 60, 5, 0, 500 if splits else 81, 88, 90],
        q_lengths=[1, 5, 0, 380 if splits else 40, 8, 9], capacity=2048 if splits else 112,
        heads=(4, 2), dtype=BF16, **values, **ON,
    )  # fmt: skip
    plan = planned(kernel, call, sm_count=4 if splits else 1)
    assert sum(name.endswith("_cache") for name in plan.kernels) == 1
    assert sum(name.endswith("_decode") for name in plan.kernels) == (2 if splits else 1)
    assert "few rows" in dict(plan.notes)
    kvcache_cases.check(call, lambda mine: here.attend_with_kvcache(kernel, mine, plan=plan)[:2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_serves_other_lengths_and_pages(kernel: str) -> None:
    def call(lengths: list[int], seed: int) -> CacheCall:
        return make(lengths, nq=65, page_size=16, capacity=160, n_new=1, rotary=16, causal=True,
                    heads=(2, 1), dtype=BF16, seed=seed, **ON)  # fmt: skip

    plan = here.attend_with_kvcache(kernel, call([0, 9], seed=0))[2]
    for lengths, seed in (([150, 0], 1), ([16, 159], 2)):
        kvcache_cases.check(
            call(lengths, seed),
            lambda mine: here.attend_with_kvcache(kernel, mine, plan=plan)[:2],
        )


@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_points_outside_the_cache_is_not_read(kernel: str, page_size: int | None) -> None:
    call = make([20, 40], nq=64, page_size=page_size, capacity=48, leftpad=None if page_size else
                [0, 3], rows_of=None if page_size else [1, 0], dtype=BF16, **ON)  # fmt: skip
    wrong = [{"cache_seqlens": here.int32(-3, 2**31 - 1)}]
    if page_size is None:
        wrong.append({"leftpad_k": here.int32(2**30, -(2**31))})
        wrong.append({"cache_batch_idx": here.int32(-1, 2**31 - 1)})
    else:
        table = call.options["page_table"].clone()
        table[0, 0], table[0, 2], table[1, 1] = -1, 2**31 - 1, 1000
        wrong.append({"page_table": table})
    for options in wrong:
        out = here.attend_with_kvcache(kernel, call.with_options(**options))[0]
        assert out.shape == call.q.shape


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_it_does_not_read_has_a_reason(kernel: str) -> None:
    home = native.describe(kernel).home_device
    many: dict[str, Any] = {"nq": 100, "device": "cpu", "dtype": BF16}
    few = "3 query rows of 2 heads for a head of a KV cache: "
    for how, words in (
        ({**many, "nq": 3}, few),
        ({**many, "nq": 8, "page_size": 8}, "8 query rows of 2 heads"),
        ({**many, "nq": 16}, "16 query rows of 2 heads"),
        (
            {**many, "q_lengths": [3, 1], "max_seqlen_q": 3},
            few,
        ),
        ({**many, "page_size": 7}, "rows of a cache in pages of 7: "),
        ({**many, "page_size": 1}, "rows of a cache in pages of 1: "),
        ({**many, "page_size": 16, "leftpad": [1, 0]}, "leftpad_k with a page table: "),
        ({**many, "batch_invariant": True}, "batch_invariant"),
        ({**many, "cache_dtype": torch.float8_e4m3fn}, "takes a cache of q's dtype"),
    ):
        call = make([5, 20], **how)
        with pytest.raises(archflash.ForcedImplementationError) as caught:
            archflash.explain(
                call.q, call.k_cache, call.v_cache, **call.options, device=home,
                implementation=kernel,
            )  # fmt: skip
        assert words in str(caught.value)
