"""attention_with_kvcache by kernels: caches contiguous and in pages of any size, lengths on the
device, the append. What a call means is stated in tests/unit/test_kvcache.py, by the reference.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import reference

from .. import kvcache_cases
from ..kvcache_cases import CacheCall, make, random_mask, random_ranges
from ..replanned import plan_with
from .executors import executor

here = executor()
KERNELS = here.kernels("fp8_cache")  # for 16-bit queries, and caches of 16 and 8 bits
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EXACT = [kernel for kernel in here.kernels("kv_cache") if kernel not in KERNELS]  # for float32
kernels_and_dtypes = pytest.mark.parametrize(
    ("kernel", "dtype"), [*((k, BF16) for k in KERNELS), *((k, F32) for k in EXACT)]
)

# Each has NaN behind the lengths, pages in no order, and a pair or more of what a call may have.
CALLS: dict[str, Callable[[], CacheCall]] = {
    "contiguous-d128-lengths-0-and-full": lambda: make(
        [5, 0, 96], d=128, dtype=F16, device=here.device
    ),
    "contiguous-bhnd-rows-of-a-larger-cache": lambda: make(
        [70, 8, 0], rows_of=[3, 0, 1], n_new=2, nq=2, d=72, dv=40, layout="bhnd", dtype=BF16,
        device=here.device,
    ),
    "page-1-causal-many-rows": lambda: make(
        [15, 140], page_size=1, nq=70, heads=(2, 1), causal=True, capacity=144, shared_pages=9,
        dtype=BF16, device=here.device,
    ),
    "page-16-splits-sinks": lambda: make(
        [15, 300], page_size=16, capacity=304, heads=(4, 2), num_splits=3, dtype=BF16,
        sinks=torch.tensor([0.5, -1, 2, 0], device=here.device), device=here.device,
    ),
    # Sequences have shares of their own number, also beyond the lanes of a warp.
    "page-16-unlike-lengths-d256": lambda: make(
        [700, 0, 40, 330], page_size=16, capacity=704, d=256, heads=(8, 2), n_new=1, dtype=BF16,
        sinks=torch.linspace(-1, 9, 8, device=here.device), device=here.device,
    ),
    "page-8-unlike-lengths-of-36-d192": lambda: make(
        [*range(20), 250, *range(15)], page_size=8, capacity=256, d=192, heads=(1, 1), dtype=F16,
        q_lengths=[*[1, 0, 3, 2, 16] * 7, 1], causal=True, max_seqlen_q=16, device=here.device,
    ),
    "e4m3-page-16-unlike-lengths": lambda: make(
        [15, 600, 97], page_size=16, capacity=608, d=192, heads=(4, 2), nq=3, causal=True,
        cache_dtype=torch.float8_e4m3fn, dtype=BF16, device=here.device,
    ),
    "page-64-softcap-append": lambda: make(
        [63, 100], page_size=64, capacity=128, n_new=3, nq=3, causal=True, softcap=5.0, dtype=F16,
        device=here.device,
    ),
    "page-256-d96-splits-packed-queries": lambda: make(
        [200, 0, 90], page_size=256, capacity=256, d=96, q_lengths=[3, 0, 20], num_splits=2,
        causal=True, dtype=BF16, device=here.device,
    ),
    "page-7-leftpad-window-d192": lambda: make(
        [60, 9, 40], page_size=7, leftpad=[8, 9, 33], nq=2, window=(14, 0), d=192, dv=128,
        dtype=BF16, device=here.device,
    ),
    "page-3-rotary-half-over-the-end": lambda: make(
        [94, 95], page_size=3, n_new=4, nq=4, causal=True, rotary=32, dtype=BF16,
        device=here.device,
    ),
    "rotary-interleaved-packed-queries-leftpad": lambda: make(
        [9, 50], q_lengths=[2, 1], n_new=1, rotary=64, rotary_interleaved=True, leftpad=[2, 33],
        window=(30, None), dtype=F16, device=here.device,
    ),
    "page-5-d256-rotary-splits": lambda: make(
        [70, 33], page_size=5, d=256, heads=(2, 2), n_new=1, rotary=128, num_splits=2, dtype=BF16,
        device=here.device,
    ),
    "e4m3-page-7-packed-queries-splits": lambda: make(
        [15, 300], page_size=7, capacity=304, d=96, q_lengths=[5, 1], num_splits=3, dtype=BF16,
        cache_dtype=torch.float8_e4m3fn, k_descale=here.tensor([[0.5, -2.0], [1.0, 0.25]]),
        device=here.device,
    ),
    "e5m2-page-16-append-softcap": lambda: make(
        [15, 70], page_size=16, n_new=2, nq=2, d=128, causal=True, softcap=4.0, dtype=F16,
        cache_dtype=torch.float8_e5m2, k_descale=here.tensor(0.5),
        v_descale=here.tensor([3.0, 0.125]), device=here.device,
    ),
    "e4m3-contiguous-bhnd-leftpad-d80": lambda: make(
        [15, 70], nq=70, d=80, dv=48, leftpad=[3, 4], layout="bhnd", dtype=BF16,
        cache_dtype=torch.float8_e4m3fn, v_descale=here.tensor([[0.5, 2.0], [1.0, 0.25]]),
        window=(9, 3), device=here.device,
    ),
    "e4m3-page-7-rotary": lambda: make(
        [15, 70], page_size=7, n_new=3, nq=3, causal=True, rotary=48, dtype=BF16,
        cache_dtype=torch.float8_e4m3fn, k_descale=here.tensor(0.5), device=here.device,
    ),
    "e5m2-rotary-interleaved-leftpad": lambda: make(
        [15, 70], leftpad=[2, 0], n_new=2, rotary=64, rotary_interleaved=True, dtype=F16,
        cache_dtype=torch.float8_e5m2, device=here.device,
    ),
    "chunks-page-16-many-rows": lambda: make(
        [15, 140, 97], page_size=16, capacity=144, nq=70, heads=(2, 1), attention_chunk=50,
        causal=True, dtype=BF16, device=here.device,
    ),
    "chunks-leftpad-packed-queries-splits": lambda: make(
        [200, 0, 90], leftpad=[3, 0, 5], q_lengths=[3, 0, 20], capacity=256, attention_chunk=70,
        num_splits=2, d=96, window=(60, 2), dtype=F16, device=here.device,
    ),
    "chunks-e5m2": lambda: make(
        [60, 70], nq=3, d=64, attention_chunk=33, dtype=BF16, cache_dtype=torch.float8_e5m2,
        device=here.device,
    ),
    "alibi-page-16-many-rows-splits": lambda: make(
        [15, 300, 97], page_size=16, capacity=304, nq=20, heads=(4, 2), causal=True, num_splits=2,
        alibi_slopes=here.tensor([0.5, 0.0, 2.0, -0.01]), dtype=BF16, device=here.device,
    ),
    "alibi-leftpad-packed-queries-softcap-d96": lambda: make(
        [200, 0, 90], leftpad=[3, 0, 5], q_lengths=[3, 0, 20], capacity=256, d=96, softcap=4.0,
        window=(60, 2), alibi_slopes=here.rand(3, 4, seed=7), dtype=F16, device=here.device,
    ),
    "alibi-e4m3-append-d128": lambda: make(
        [15, 70], nq=2, n_new=2, page_size=8, d=128, causal=True, cache_dtype=torch.float8_e4m3fn,
        k_descale=here.tensor(0.5), alibi_slopes=here.rand(4, seed=8), dtype=BF16,
        device=here.device,
    ),
    "mask-of-a-tree-page-16": lambda: make(
        [15, 140, 97], page_size=16, capacity=144, nq=6, attn_mask=random_mask(3, 1, 6, 6),
        dtype=BF16, device=here.device,
    ),
    "mask-of-more-keys-than-there-are-append-d128": lambda: make(
        [0, 5, 90], nq=3, n_new=2, d=128, causal=True, attn_mask=random_mask(1, 4, 3, 20),
        dtype=F16, device=here.device,
    ),
    "mask-packed-queries-window-rows-of-a-larger-cache-d96": lambda: make(
        [70, 8, 0], rows_of=[3, 0, 1], q_lengths=[20, 0, 3], window=(40, 5), d=96,
        attn_mask=random_mask(1, 1, 25, 50).transpose(2, 3).contiguous().transpose(2, 3),
        dtype=BF16, device=here.device,
    ),
    "ranges-page-5-many-rows-splits": lambda: make(
        [15, 300, 97], page_size=5, capacity=304, nq=70, num_splits=2, sinks=here.rand(4, seed=3),
        key_ranges=random_ranges(3, 1, 70, 2), dtype=BF16, device=here.device,
    ),
    "ranges-packed-queries-leftpad-causal-d192": lambda: make(
        [200, 0, 90], leftpad=[3, 0, 5], q_lengths=[3, 0, 20], capacity=256, d=192, dv=128,
        causal=True, key_ranges=random_ranges(1, 4, 25, 4), dtype=F16, device=here.device,
    ),
    "ranges-mask-alibi-chunks-softcap-d256": lambda: make(
        [60, 81], nq=5, page_size=3, d=256, softcap=4.0, attention_chunk=50, causal=True,
        key_ranges=random_ranges(2, 1, 1, 3), attn_mask=random_mask(2, 1, 5, 7),
        alibi_slopes=here.tensor([0.5, 0.0, 2.0, -0.01]), dtype=BF16, device=here.device,
    ),
    "qv-page-64-causal-splits-sinks": lambda: make(
        [100, 0, 130], nq=2, page_size=64, capacity=192, heads=(11, 1), d=64, dv=512, qv=True,
        causal=True, num_splits=2, sinks=torch.linspace(-1, 2, 11, device=here.device),
        dtype=BF16, device=here.device,
    ),
    "qv-huge-scores": lambda: make(
        [70, 40], heads=(16, 1), d=64, dv=512, qv=True, scale=1e7, dtype=F16, device=here.device,
    ),
    "qv-contiguous-leftpad-softcap-chunks": lambda: make(
        [70, 33], nq=20, heads=(8, 2), d=64, dv=512, qv=True, leftpad=[3, 32], softcap=4.0,
        attention_chunk=40, layout="bhnd", dtype=F16, device=here.device,
    ),
    "qv-page-5-rotary-packed-queries": lambda: make(
        [94, 9], page_size=5, q_lengths=[2, 5], n_new=2, rotary=64, causal=True, heads=(18, 1),
        d=64, dv=512, qv=True, window=(70, 0), dtype=BF16, device=here.device,
    ),
    "qv-e4m3-page-64-causal-splits-sinks": lambda: make(
        [100, 0, 130], nq=2, page_size=64, capacity=192, heads=(11, 1), d=64, dv=512, qv=True,
        causal=True, num_splits=2, sinks=torch.linspace(-1, 2, 11, device=here.device),
        cache_dtype=torch.float8_e4m3fn, k_descale=here.tensor(3.0), v_descale=here.tensor(0.25),
        dtype=BF16, device=here.device,
    ),
    "qv-e5m2-contiguous-leftpad-softcap-chunks": lambda: make(
        [70, 33], nq=20, heads=(8, 2), d=64, dv=512, qv=True, leftpad=[3, 32], softcap=4.0,
        attention_chunk=40, layout="bhnd", cache_dtype=torch.float8_e5m2,
        k_descale=here.tensor([[0.5, 2.0], [0.0, 0.25]]), v_descale=here.tensor([2.0, 0.5]),
        dtype=F16, device=here.device,
    ),
    "qv-e4m3-page-5-rotary-packed-queries": lambda: make(
        [94, 9], page_size=5, q_lengths=[2, 5], n_new=2, rotary=64, causal=True, heads=(18, 1),
        d=64, dv=512, qv=True, window=(70, 0), cache_dtype=torch.float8_e4m3fn, dtype=F16,
        device=here.device,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_serves_a_call_as_the_reference_does(kernel: str, name: str) -> None:
    call = CALLS[name]()
    kvcache_cases.check(call, lambda mine: here.attend_with_kvcache(kernel, mine)[:2])


def check_and_list_kernels(kernel: str, call: CacheCall) -> set[str]:
    """The kernels of a call that was served as the reference does."""
    ran: set[str] = set()

    def serve(mine: CacheCall) -> tuple[Tensor, Tensor]:
        out, lse, plan = here.attend_with_kvcache(kernel, mine)
        ran.update(plan.kernels)
        return out, lse

    kvcache_cases.check(call, serve)
    return ran


def in_float32(call: CacheCall) -> CacheCall:
    new = {name: call.options[name].float() for name in ("k_new", "v_new") if name in call.options}
    caches = (call.k_cache.float(), call.v_cache.float())
    return CacheCall(call.q.float(), *caches, {**call.options, **new})


@pytest.mark.parametrize("name", [n for n in CALLS if not re.search("qv|e[45]m|unlike", n)])
@pytest.mark.parametrize("kernel", EXACT)
def test_an_exact_kernel_serves_it_in_float32(kernel: str, name: str) -> None:
    call = in_float32(CALLS[name]())
    kvcache_cases.check(call, lambda mine: here.attend_with_kvcache(kernel, mine)[:2])


@pytest.mark.parametrize("kernel", EXACT)
def test_every_exact_kernel_combines_many_shares(kernel: str) -> None:
    ran: set[str] = set()
    for d in (64, 96, 192):  # the last share of a row that sees few keys has none
        call = make(
            [40, 900], d=d, heads=(6, 2), nq=2, page_size=5, capacity=1200, num_splits=36, n_new=1,
            causal=True, sinks=torch.linspace(-1, 9, 6, device=here.device), device=here.device,
        )  # fmt: skip

        ran |= check_and_list_kernels(kernel, call)
    tiles = {f"{kernel}_attention_fwd_f32_d{d}_cache" for d in (64, 128, 256)}
    assert ran == {*tiles, f"{kernel}_combine_f32", f"{kernel}_append_f32"}


# Packed sequences of few rows and of many, and rows of no sequence behind them.
MIXED: dict[str, dict[str, Any]] = {
    "page-16": {"page_size": 16},
    "contiguous-append-rotary-f16": {"n_new": 2, "rotary": 32, "dtype": F16, "leftpad": [0] * 6},
    "chunks-sinks-d96": {"attention_chunk": 40, "d": 96, "sinks": True, "page_size": 5},
    "window-softcap-d192": {"window": (50, 3), "softcap": 4.0, "d": 192, "dv": 128},
}


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_sequences_of_few_rows_have_a_launch_of_their_own(
    kernel: str, name: str, splits: bool
) -> None:
    values = {"dtype": BF16, "d": 64, "causal": True, **MIXED[name]}
    if values.pop("sinks", False):
        values["sinks"] = torch.tensor([0.5, -1, 2, 0], device=here.device)
    if splits:  # of enough keys that a split pays
        longer = {"attention_chunk": 1800, "window": (1800, 3)}
        values |= {option: x for option, x in longer.items() if option in values}
    call = make(
        [1900 if splits else 60, 5, 0, 500 if splits else 81, 88, 90],
        q_lengths=[1, 5, 0, 380 if splits else 40, 8, 9], capacity=2048 if splits else 100,
        heads=(4, 2), device=here.device, **values,
    )  # fmt: skip
    # The tiles of many rows fill the GPU, so that their keys are not split. Those of few rows do
    # not fill the larger one.
    facts = {"sm_count": 12 if splits else 1}
    tensors = (call.q, call.k_cache, call.v_cache)
    plan = plan_with(facts, *tensors, **call.options, implementation=kernel)
    assert sum(name.endswith("_cache") for name in plan.kernels) == 1
    assert sum(name.endswith("_decode") for name in plan.kernels) == (2 if splits else 1)
    assert "few rows" in dict(plan.notes)
    kvcache_cases.check(call, lambda mine: here.attend_with_kvcache(kernel, mine, plan=plan)[:2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_queries_are_rotated_where_no_row_is_appended(kernel: str) -> None:
    call = make([20, 45], nq=2, n_new=1, rotary=32, window=(None, None), dtype=BF16,
                device=here.device)  # fmt: skip
    call = call.with_options(**{name: call.options[name][:, :0] for name in ("k_new", "v_new")})
    kvcache_cases.check(call, lambda mine: here.attend_with_kvcache(kernel, mine)[:2])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_number_of_8_bits_is_rotated_and_rounded(kernel: str, dtype: torch.dtype) -> None:
    """By 0 degrees each number stays as it is; by 30 degrees each is rounded as PyTorch rounds it,
    and one that is too large becomes the largest.
    """
    numbers = torch.arange(256, dtype=torch.uint8, device=here.device).view(dtype)
    k_new = numbers.reshape(1, 1, 1, 256)
    cache = torch.zeros(1, 8, 1, 256, device=here.device).to(dtype)
    q = torch.zeros(1, 1, 1, 256, dtype=BF16, device=here.device)
    largest = torch.finfo(dtype).max
    for degrees in (0, 30):
        angle = torch.full((1, 128), degrees * torch.pi / 180, device=here.device)
        call = CacheCall(
            q, cache, cache,
            {"cache_seqlens": here.int32(0), "k_new": k_new, "v_new": k_new,
             "rotary_cos": angle.cos(), "rotary_sin": angle.sin()},
        ).copied()  # fmt: skip
        here.attend_with_kvcache(kernel, call)
        x, y = numbers.float().chunk(2)
        cos, sin = angle[0].cos(), angle[0].sin()
        want = torch.cat([x * cos - y * sin, x * sin + y * cos]).clamp(-largest, largest).to(dtype)
        got = call.k_cache[0, 0, 0]
        finite = (x.isfinite() & y.isfinite()).repeat(2)
        assert torch.equal(got.float()[finite], want.float()[finite])
        if degrees == 0:
            assert torch.equal(got.float()[finite], numbers.float()[finite])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("of_q", [BF16, F16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_number_of_8_bits_is_read_exactly(
    kernel: str, of_q: torch.dtype, dtype: torch.dtype
) -> None:
    """With one key the output is its row of v, and the log-sum-exp of query row i, which is 1 in
    column i alone, is column i of k: for numbers, infinities and NaN of 8 bits.
    """
    numbers = torch.arange(256, dtype=torch.uint8, device=here.device).view(dtype)
    cache = torch.zeros(1, 8, 1, 256, device=here.device).to(dtype)
    cache[0, 0, 0] = numbers
    q = torch.eye(256, device=here.device).to(of_q)[None, :, None]
    zeros = torch.zeros_like(cache)
    options = {"cache_seqlens": here.int32(1), "scale": 1.0}
    _, lse, _ = here.attend_with_kvcache(kernel, CacheCall(q, cache, zeros, options))
    # A product of 0 with an infinite or undefined number is no number, so that the other columns of
    # such a row count, too.
    finite = numbers.float().isfinite()
    q_finite = q[:, finite]
    clean = torch.where(finite, cache.float(), 0.0).to(dtype)
    _, lse_finite, _ = here.attend_with_kvcache(kernel, CacheCall(q_finite, clean, zeros, options))
    assert lse.isnan().all() == (not finite.all())
    torch.testing.assert_close(lse_finite[0, 0], numbers.float()[finite], rtol=1e-5, atol=0)
    out, _, _ = here.attend_with_kvcache(kernel, CacheCall(q[:, :1], zeros, cache, options))
    assert torch.equal(out[0, 0, 0].isnan(), numbers.float().isnan())
    assert torch.equal(out[0, 0, 0].nan_to_num(0, 7e4, -7e4).float(),
                       numbers.float().nan_to_num(0, 7e4, -7e4).to(of_q).float())  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_q_of_any_size_are_read_with_a_cache_of_8_bits(kernel: str) -> None:
    """bf16 has larger and smaller numbers than the products have, whose scores still count."""
    sizes = torch.tensor([2.0**-120, 2.0**-30, 1.0, 2.0**30, 2.0**110, 0.0], device=here.device)
    call = make(
        [60, 33], nq=6, heads=(2, 1), d=64, dtype=BF16, cache_dtype=torch.float8_e4m3fn,
        device=here.device,
    )  # fmt: skip
    q = call.q.float() * sizes[:, None, None]
    scaled = replace(call.with_options(scale=0.125), q=q.to(BF16))
    kvcache_cases.check(scaled, lambda mine: here.attend_with_kvcache(kernel, mine)[:2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_for_a_cache_runs(kernel: str) -> None:
    ran: set[str] = set()
    dims = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (64, 512))
    fp8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    rows = (1, 17)  # those that share a head of k fit a tile of 16 rows, or do not
    for dtype, cache_dtype, (d, dv), nq in itertools.product((BF16, F16), (None, fp8), dims, rows):
        qv = dv == 512
        if nq > 1 and (qv or cache_dtype is not None):
            continue
        call = make(
            [5, 40], nq=nq, d=d, dv=dv, page_size=16, capacity=48, n_new=1, dtype=dtype, seed=d,
            cache_dtype=cache_dtype and cache_dtype[d // 64 % 2], device=here.device, qv=qv,
            num_splits=2 if qv or nq == 1 else None,
        )  # fmt: skip

        ran |= check_and_list_kernels(kernel, call)
        if nq == 17 and d in (64, 128, 256):
            mask = random_mask(2, 1, 17, 9).to(here.device)
            ran |= check_and_list_kernels(kernel, call.with_options(attn_mask=mask))
    compiled: set[str] = set()
    for file in (files("archflash") / "_kernels" / kernel).iterdir():
        if file.name.endswith(".json"):
            for entries in json.loads(file.read_text()).values():
                compiled |= {
                    name
                    for name in entries
                    if re.search("_cache(_fp8|_masked)?$|_decode$|_append_|_mla$", name)
                }
    assert ran == compiled


@pytest.mark.parametrize(
    "of_values",
    [
        {},
        {"qv": True, "dv": 512},
        {"cache_dtype": torch.float8_e4m3fn},
        {"qv": True, "dv": 512, "cache_dtype": torch.float8_e4m3fn},
    ],
    ids=["", "qv", "e4m3", "qv-e4m3"],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_gets_the_same_bits_whatever_else_is_in_the_call(
    kernel: str, of_values: dict[str, Any]
) -> None:
    call = make(
        [1500, 40, 0], page_size=16, capacity=1504, heads=(2, 1), nq=17, causal=True, dtype=BF16,
        leftpad=[7, 0, 0], batch_invariant=True, device=here.device, **of_values,
    )  # fmt: skip
    out, lse, _ = here.attend_with_kvcache(kernel, call.copied())
    # The last row alone: whether few rows are served by another kernel must not show.
    last = call.with_options(**({"qv": call.options["qv"][:, -1:]} if "qv" in of_values else {}))
    out_last, lse_last, _ = here.attend_with_kvcache(kernel, replace(last, q=call.q[:, -1:]))
    assert torch.equal(out_last[:, 0], out[:, -1])
    assert torch.equal(lse_last[:, :, 0], lse[:, :, -1])
    names = ("cache_seqlens", "page_table", "leftpad_k", "qv")
    alone = {name: call.options[name][:1] for name in names if name in call.options}
    first = replace(call.with_options(**alone), q=call.q[:1])
    out_alone, lse_alone, _ = here.attend_with_kvcache(kernel, first.copied())
    assert torch.equal(out_alone[0], out[0])
    assert torch.equal(lse_alone[0], lse[0])


@pytest.mark.parametrize("of_values", [{}, {"qv": True, "dv": 512}], ids=["", "qv"])
@kernels_and_dtypes
def test_a_plan_serves_other_lengths_and_pages(
    kernel: str, dtype: torch.dtype, of_values: dict[str, Any]
) -> None:
    if of_values and dtype == F32:
        pytest.skip("qv: 16 bits only")

    def call(lengths: list[int], seed: int) -> CacheCall:
        return make(
            lengths, page_size=16, capacity=160, n_new=1, nq=1, rotary=16, num_splits=2,
            dtype=dtype, seed=seed, device=here.device, **of_values,
        )  # fmt: skip

    first = call([0, 9], seed=0)
    plan = here.attend_with_kvcache(kernel, first.copied())[2]
    for lengths, seed in (([150, 0], 1), ([16, 159], 2)):
        kvcache_cases.check(
            call(lengths, seed), lambda mine: here.attend_with_kvcache(kernel, mine, plan=plan)[:2]
        )


@kernels_and_dtypes
@pytest.mark.parametrize("page_size", [None, 8])
def test_what_points_outside_the_cache_is_neither_read_nor_written(
    kernel: str, dtype: torch.dtype, page_size: int | None
) -> None:
    rows_of = [1, 0] if page_size is None else None
    call = make(
        [5, 20], n_new=2, nq=2, capacity=32, page_size=page_size, rows_of=rows_of, rotary=8,
        leftpad=[0, 3], dtype=dtype, device=here.device,
    )  # fmt: skip
    wrong: list[dict[str, Any]] = [
        {"cache_seqlens": here.int32(-3, 20)},
        {"cache_seqlens": here.int32(31, 2**31 - 1), "leftpad_k": here.int32(2**30, -(2**31))},
    ]
    if page_size is None:
        wrong.append({"cache_batch_idx": here.int32(-1, 2**31 - 1)})
    else:
        table = call.options["page_table"].clone()
        table[0, 0], table[1, 2] = -1, 1000  # the second would be written
        wrong.append({"page_table": table})
    for options in wrong:
        mine = call.with_options(**options).copied()
        out, _, _ = here.attend_with_kvcache(kernel, mine)
        assert out.shape == call.q.shape
        seqlens = options.get("cache_seqlens", call.options["cache_seqlens"]).tolist()
        allowed = sum(min(max(n + 2, 0), 32) - min(max(n, 0), 32) for n in seqlens)
        for after, before in ((mine.k_cache, call.k_cache), (mine.v_cache, call.v_cache)):
            changed = after.view(torch.int16) != before.view(torch.int16)
            assert int(changed.flatten(2).any(-1).sum()) <= allowed
        wanted = reference.appended(call.k_cache, call.v_cache, **mine.options)
        kvcache_cases.assert_written_like(mine.k_cache, wanted[0])
        kvcache_cases.assert_written_like(mine.v_cache, wanted[1])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_number_of_8_bits_is_converted_exactly(
    kernel: str, cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """With one key the output is its row of V; infinities and NaN stay in their columns."""
    call = make([1], d=256, heads=(1, 1), capacity=1, dtype=dtype, cache_dtype=cache_dtype,
                device=here.device)  # fmt: skip
    every = torch.arange(256, dtype=torch.uint8).view(cache_dtype).to(here.device)
    call.v_cache[0, 0, 0] = every
    out, _, _ = here.attend_with_kvcache(kernel, call.copied())
    torch.testing.assert_close(out[0, 0, 0], every.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_number_of_a_latent_cache_of_8_bits_is_converted_exactly(
    kernel: str, cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """With one key the output is its row of V. V is part of the key, so its numbers are finite."""
    call = make([1], d=64, dv=512, qv=True, heads=(1, 1), capacity=1, dtype=dtype,
                cache_dtype=cache_dtype, device=here.device)  # fmt: skip
    every = torch.arange(256, dtype=torch.uint8).view(cache_dtype)
    row = every[every.float().isfinite()].repeat(3)[:512].to(here.device)
    call.v_cache[0, 0, 0] = row
    out, _, _ = here.attend_with_kvcache(kernel, call.copied())
    torch.testing.assert_close(out[0, 0, 0], row.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["", "e4m3"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_latent_cache_is_read_once_and_written_once(
    kernel: str, cache_dtype: torch.dtype | None
) -> None:
    """All 128 heads of DeepSeek's models over one latent row, in one call of the public function,
    which appends and rotates.
    """
    call = make(
        [40, 70], n_new=1, heads=(128, 1), d=576, page_size=64, capacity=128, rotary=64,
        causal=True, cache_dtype=cache_dtype, dtype=BF16, device=here.device,
    )  # fmt: skip
    options = {name: x for name, x in call.options.items() if name != "v_new"}
    cache = call.k_cache.clone()
    out, lse = archflash.attention_with_kvcache(
        call.q, cache, **options, dv=512, implementation=kernel, return_lse=True
    )
    new = options["k_new"]
    parts = CacheCall(
        call.q[..., 512:], call.k_cache[..., 512:], call.k_cache[..., :512],
        {**options, "k_new": new[..., 512:], "v_new": new[..., :512], "qv": call.q[..., :512]},
    )  # fmt: skip

    def served(mine: CacheCall) -> tuple[Tensor, Tensor]:
        mine.k_cache.copy_(cache[..., 512:])
        mine.v_cache.copy_(cache[..., :512])
        return out, lse

    kvcache_cases.check(parts, served)
