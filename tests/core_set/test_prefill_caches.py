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
from ..replanned import plan_with
from .executors import executor

here = executor()
KERNELS = here.kernels("kv_cache_prefill")
BF16, F16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
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
    "e4m3-page-7-packed-queries-descales-by-head-d96": lambda: make(
        [200, 0, 90], page_size=7, capacity=203, d=96, q_lengths=[90, 0, 70], causal=True,
        dtype=BF16, cache_dtype=E4M3, k_descale=here.tensor([[0.5, -2.0]] * 3),
        v_descale=here.tensor([[3.0, 0.125], [1.0, 1.0], [0.5, -2.0]]), **ON,
    ),
    "e5m2-page-16-append-rotary-softcap-shared-pages-f16": lambda: make(
        [163, 100, 300], page_size=16, capacity=320, n_new=3, nq=65, heads=(4, 2), d=128,
        softcap=5.0, rotary=32, causal=True, dtype=F16, cache_dtype=E5M2, shared_pages=2,
        k_descale=here.tensor(0.5), v_descale=here.tensor([3.0, 0.125]), **ON,
    ),
    "e4m3-leftpad-rows-of-a-larger-cache-window-bhnd-d192": lambda: make(
        [560, 9, 440], rows_of=[3, 0, 1], leftpad=[8, 9, 33], capacity=560, nq=66, heads=(2, 1),
        window=(14, 0), d=192, dv=128, layout="bhnd", dtype=BF16, cache_dtype=E4M3,
        k_descale=here.tensor(1e-38), **ON,
    ),
    "e5m2-chunks-alibi-page-64": lambda: make(
        [200, 9, 541], page_size=64, attention_chunk=170, capacity=576, nq=66, heads=(4, 2),
        causal=True, alibi_slopes=here.tensor([0.5, 0.2, 0.1, 0.01]), dtype=BF16, cache_dtype=E5M2,
        v_descale=here.tensor(-1.5), **ON,
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
    tensors = (call.q, call.k_cache, call.v_cache)
    return plan_with(facts, *tensors, **call.options, implementation=kernel)


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
@pytest.mark.parametrize("cache_dtype", [None, E4M3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_sequences_of_few_rows_have_a_launch_of_their_own(
    kernel: str, cache_dtype: torch.dtype | None, splits: bool
) -> None:
    # test_mixed_lengths.py has such calls of 64 and 128 columns.
    values: dict[str, Any] = {"n_new": 2, "rotary": 32, "page_size": 16, "causal": True, "d": 96}
    if cache_dtype is not None:
        values |= {"cache_dtype": cache_dtype, "k_descale": here.tensor([0.5, 2.0])}
    call = make(
        [1900 if splits else 60, 5, 0, 500 if splits else 81, 88, 90],
        q_lengths=[1, 5, 0, 380 if splits else 40, 8, 9], capacity=2048 if splits else 112,
        heads=(4, 2), dtype=BF16, **values, **ON,
    )  # fmt: skip
    plan = planned(kernel, call, sm_count=5 if splits else 1)
    assert sum(name.endswith("_cache") for name in plan.kernels) == 1
    few = [name for name in plan.kernels if name.endswith(("_decode", "_cache_fp8"))]
    assert len(few) == (2 if splits else 1)
    assert "few rows" in dict(plan.notes)
    kvcache_cases.check(call, lambda mine: here.attend_with_kvcache(kernel, mine, plan=plan)[:2])


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("kernel", KERNELS)
def test_caches_of_8_bits_are_converted_exactly(
    kernel: str, cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """With one key the output is its row of v, and the log-sum-exp of query row i, which is 1 in
    column i alone, is column i of k: for all numbers of 8 bits, but those that are none in k.
    """
    numbers = torch.arange(256, dtype=torch.uint8, device=here.device).view(cache_dtype)
    v = torch.full((1, 8, 1, 256), torch.nan, device=here.device).to(cache_dtype)
    k = v.clone()
    v[0, 0, 0] = numbers
    k[0, 0, 0] = torch.where(numbers.float().isfinite(), numbers.float(), 0.0).to(cache_dtype)
    q = torch.eye(256, device=here.device).to(dtype)[None, :, None]
    call = CacheCall(q, k, v, {"cache_seqlens": here.int32(1), "scale": 1.0})
    out, lse, plan = here.attend_with_kvcache(kernel, call)
    assert any("_convert_cache_" in name for name in plan.kernels)
    assert "cache" in dict(plan.notes)
    torch.testing.assert_close(lse[0, 0], k[0, 0, 0].float(), rtol=1e-5, atol=0)
    for row in (0, 255):
        torch.testing.assert_close(
            out[0, row, 0].float(), numbers.float(), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("cache_dtype", [None, E5M2])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_serves_other_lengths_and_pages(
    kernel: str, cache_dtype: torch.dtype | None
) -> None:
    def call(lengths: list[int], seed: int) -> CacheCall:
        return make(lengths, nq=65, page_size=16, capacity=160, n_new=1, rotary=16, causal=True,
                    heads=(2, 1), dtype=BF16, cache_dtype=cache_dtype, seed=seed, **ON)  # fmt: skip

    plan = here.attend_with_kvcache(kernel, call([0, 9], seed=0))[2]
    for lengths, seed in (([150, 0], 1), ([16, 159], 2)):
        kvcache_cases.check(
            call(lengths, seed), lambda mine: here.attend_with_kvcache(kernel, mine, plan=plan)[:2]
        )


@pytest.mark.parametrize("cache_dtype", [None, E4M3])
@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_points_outside_the_cache_is_not_read(
    kernel: str, page_size: int | None, cache_dtype: torch.dtype | None
) -> None:
    call = make([20, 40], nq=65, page_size=page_size, capacity=48, leftpad=None if page_size else
                [0, 3], rows_of=None if page_size else [1, 0], dtype=BF16, cache_dtype=cache_dtype,
                **ON)  # fmt: skip
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
        ({**many, "nq": 64, "cache_dtype": E4M3}, "hopper takes more than 128 such rows"),
        ({**many, "q_lengths": [3, 1], "max_seqlen_q": 3}, few),
        ({**many, "page_size": 7}, "rows of a cache in pages of 7: "),
        ({**many, "page_size": 1}, "rows of a cache in pages of 1: "),
        ({**many, "page_size": 16, "leftpad": [1, 0]}, "leftpad_k with a page table: "),
        ({**many, "batch_invariant": True}, "batch_invariant"),
    ):
        call = make([5, 20], **how)
        with pytest.raises(archflash.ForcedImplementationError) as caught:
            archflash.explain(
                call.q, call.k_cache, call.v_cache, **call.options, device=home,
                implementation=kernel,
            )  # fmt: skip
        assert words in str(caught.value)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_cache_whose_copy_would_be_too_large_is_left_to_others(kernel: str) -> None:
    home = native.describe(kernel).home_device
    call = make([5, 20], nq=100, d=256, page_size=64, dtype=BF16, cache_dtype=E4M3)
    for pages, served in ((2**13, True), (2**13 + 1, False)):  # 64 * 2 * 2 * 512 * 2 bytes for one
        table = torch.zeros(2, pages, dtype=torch.int32)
        decision = archflash.explain(
            call.q, call.k_cache, call.v_cache, **{**call.options, "page_table": table},
            device=home,
        )  # fmt: skip
        assert (decision.chosen == kernel) == served
        if not served:
            assert "2048 MiB of at most 2048" in str(decision)
