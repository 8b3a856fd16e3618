"""Rows of K and V that no query row of a call sees never matter, whatever memory holds there: keys
before a window and behind a causal offset, pages that a window has left, keys outside every range.
A call with NaN there has the same bits as one with numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ..kvcache_cases import CacheCall, make
from .checks import same_bits
from .executors import executor
from .gradients import differentiate, dtypes_with_gradients

on = executor()
BF16, F32 = torch.bfloat16, torch.float32
each_kernel_and_dtype = pytest.mark.parametrize(("kernel", "dtype"), on.kernels_and_dtypes())

# nq, nk, the keys that some row sees, options. The ends lie inside of blocks of every size.
BANDS: dict[str, tuple[int, int, tuple[int, int], dict[str, Any]]] = {
    "behind a causal offset": (70, 300, (0, 160), {"causal": True, "q_offset": 90}),
    "both sides of a window": (70, 300, (60, 177), {"window": (40, 7), "q_offset": 100}),
    "one block": (3, 300, (131, 147), {"window": (9, 4), "q_offset": 140}),
    "before a window, default offset": (70, 300, (219, 300), {"causal": True, "window": (11, 0)}),
    "no key": (3, 130, (0, 0), {"causal": True, "q_offset": -50}),
}


def spoiled(x: Tensor, seen: tuple[int, int]) -> Tensor:
    """x (..., rows, columns) with NaN in the rows outside `seen`."""
    rows = torch.arange(x.shape[-2], device=x.device)[:, None]
    hidden = (rows < seen[0]) | (rows >= seen[1])
    return torch.where(hidden, math.nan, x.float()).to(x.dtype)


def assert_same_with_nan(kernel: str, q: Tensor, clean: Any, nan: Any, **call: Any) -> None:
    out, lse = on.attend(kernel, q, *clean, **call, schedules=(0,))
    assert not bool(out.isnan().any())
    other, other_lse = on.attend(kernel, q, *nan, **call)
    assert same_bits(other, out)
    assert same_bits(other_lse, lse)


@each_kernel_and_dtype
@pytest.mark.parametrize("band", BANDS)
def test_keys_outside_what_any_row_sees(kernel: str, dtype: str, band: str) -> None:
    nq, nk, seen, call = BANDS[band]
    q, k, v = on.qkv(nq, nk, dtype=dtype)
    assert_same_with_nan(kernel, q, (k, v), (spoiled(k, seen), spoiled(v, seen)), **call)


@each_kernel_and_dtype
def test_offsets_on_the_device(kernel: str, dtype: str) -> None:
    q, k, v = on.qkv(40, 200, dtype=dtype, batch=2)
    ends = ((60, 130), (0, 47))  # what the rows of each sequence see
    nan = [torch.cat([spoiled(x[i : i + 1], ends[i]) for i in range(2)]) for x in (k, v)]
    assert_same_with_nan(
        kernel, q, (k, v), nan, causal=True, window=(30, 0), q_offset=on.int32(90, 7)
    )


@each_kernel_and_dtype
def test_packed_sequences(kernel: str, dtype: str) -> None:
    lengths_q, lengths_k = [5, 70, 0, 33], [150, 100, 40, 130]
    q, k, v = (x[0] for x in on.qkv(sum(lengths_q), sum(lengths_k), dtype=dtype))
    nan = [k.clone(), v.clone()]
    for number, (nq, nk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        start = sum(lengths_k[:number])
        begin = max(nk - nq - 20, 0) if nq else nk
        for x in nan:
            x[:, start : start + begin] = math.nan
    q, k, v, *nan = (x.transpose(0, 1).contiguous() for x in (q, k, v, *nan))
    call = {
        "cu_seqlens_q": on.cu_seqlens(lengths_q), "cu_seqlens_k": on.cu_seqlens(lengths_k),
        "causal": True, "window": (20, 0),
    }  # fmt: skip
    assert_same_with_nan(kernel, q, (k, v), nan, **call)


@pytest.mark.parametrize("option", [{"num_splits": 3}, {"batch_invariant": True}])
@pytest.mark.parametrize("kernel", on.kernels("num_splits"))
def test_shares_of_the_keys(kernel: str, option: dict[str, Any]) -> None:
    if "batch_invariant" in option and kernel not in on.kernels("batch_invariant"):
        return  # it has no such shares
    q, k, v = on.qkv(2, 900, dtype="bfloat16", heads=(4, 1))
    seen = (190, 711)
    nan = (spoiled(k, seen), spoiled(v, seen))
    call = {"causal": True, "window": (519, 0), "q_offset": 709}
    assert_same_with_nan(kernel, q, (k, v), nan, **call, **option)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("kernel", on.kernels("descales"))
def test_8_bits(kernel: str, d: int) -> None:
    x = on.qkv(70, 300, d, min(d, 128) if d == 192 else d, dtype="float32", heads=(2, 1))
    q, k, v = (t.to(torch.float8_e4m3fn) for t in x)
    seen = (60, 177)
    nan = (spoiled(k, seen), spoiled(v, seen))
    assert_same_with_nan(kernel, q, (k, v), nan, window=(40, 7), q_offset=100)


@pytest.mark.parametrize("name", ["int8_qk", "int8", "int8_pv", "fp16_accumulate"])
def test_approximate_products_with_values_that_nobody_sees(name: str) -> None:
    for kernel in on.kernels(name):
        q, k, v = on.qkv(70, 300, dtype="bfloat16")
        nan = (k, spoiled(v, (60, 177)))
        call = {"approximate": name, "window": (40, 7), "q_offset": 100}
        assert_same_with_nan(kernel, q, (k, v), nan, **call)


@pytest.mark.parametrize("band", ["behind a causal offset", "both sides of a window"])
@pytest.mark.parametrize("kernel", on.kernels("dropout_p"))
def test_dropout(kernel: str, band: str) -> None:
    nq, nk, seen, call = BANDS[band]
    q, k, v = on.qkv(nq, nk, dtype="float32" if kernel == "simt" else "bfloat16")
    state = on.tensor([5, 7], torch.int64)
    nan = (spoiled(k, seen), spoiled(v, seen))
    assert_same_with_nan(kernel, q, (k, v), nan, **call, dropout_p=0.25, rng_state=state)


# --- masks as data ---


@pytest.mark.parametrize(("nq", "heads"), [(20, (4, 1)), (150, (2, 2)), (300, (1, 1))])
@pytest.mark.parametrize("kernel", on.kernels("key_ranges"))
def test_keys_outside_all_ranges(kernel: str, nq: int, heads: tuple[int, int]) -> None:
    dtype = on.dtypes_of(kernel)[-1] if kernel != "simt" else "float32"
    q, k, v = on.qkv(nq, 300, dtype=dtype, heads=heads)
    rows = torch.arange(nq, device=on.device)
    first = 37 + rows % 50
    ranges = torch.stack([first, torch.full_like(rows, 201)], -1).int()[None, None, :, None]
    seen = (37, 201)
    nan = (spoiled(k, seen), spoiled(v, seen))
    assert_same_with_nan(kernel, q, (k, v), nan, key_ranges=ranges)


# These look at every key of a block; the others do not look inside of attn_mask.
@pytest.mark.parametrize(("kernel", "d"), [("ampere", 64), ("ampere", 320), ("simt", 64)])
@pytest.mark.parametrize("kind", ["bool", "added", "holes"])
def test_keys_that_a_mask_hides_from_all_rows(kernel: str, d: int, kind: str) -> None:
    if kernel not in on.kernels():
        pytest.skip(f"{kernel} has no code for this GPU")
    q, k, v = on.qkv(70, 200, d, dtype="float32" if kernel == "simt" else "bfloat16")
    keep = torch.zeros(200, dtype=torch.bool, device=on.device)
    keep[:70] = True
    if kind == "holes":
        keep[3:11], keep[40:41], keep[160:163] = False, False, True
    mask = keep if kind != "added" else torch.where(keep, 0.5, -math.inf).to(q.dtype)
    hidden = ~keep[:, None]
    nan = [torch.where(hidden, math.nan, x.float()).to(x.dtype) for x in (k, v)]
    assert_same_with_nan(kernel, q, (k, v), nan, attn_mask=mask[None, None, None])


# --- caches ---


def hidden(call: CacheCall, begins: list[int]) -> CacheCall:
    """The call with NaN in the rows before these ones of each sequence, and numbers of pages that
    no cache has where a whole page is unseen.
    """
    call = call.copied()
    table = call.options.get("page_table")
    bhnd = call.options.get("layout") == "bhnd"
    wrong = None if table is None else table.clone()
    for number, begin in enumerate(begins):
        for row in range(begin):
            place = (number, row)
            if table is not None:
                size = call.k_cache.shape[2 if bhnd else 1]
                place = (int(table[number, row // size]), row % size)
            for cache in (call.k_cache, call.v_cache):
                (cache[place[0], :, place[1]] if bhnd else cache[place])[:] = math.nan
            if wrong is not None and (row + 1) % size == 0:
                wrong[number, row // size] = (-1, 10**6, -(2**31))[row // size % 3]
    options = call.options if wrong is None else {**call.options, "page_table": wrong}
    return replace(call, options=options)


def assert_caches_same_with_nan(kernel: str, call: CacheCall, begins: list[int]) -> None:
    nan = hidden(call, begins)
    out, lse, _ = on.attend_with_kvcache(kernel, call)
    assert not bool(out.isnan().any())
    other, other_lse, _ = on.attend_with_kvcache(kernel, nan)
    assert same_bits(other, out)
    assert same_bits(other_lse, lse)


CACHES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "one row, page 16": ([81, 171], {"nq": 1, "page_size": 16, "window": (18, 0)}),
    "three rows, page 16": ([77, 167], {"nq": 3, "page_size": 16, "window": (20, 0)}),
    "three rows, page 5": ([77, 167], {"nq": 3, "page_size": 5, "window": (20, 0)}),
    "three rows, contiguous bhnd": ([77, 167], {"nq": 3, "layout": "bhnd", "window": (20, 0)}),
    "splits": ([27, 117], {"nq": 3, "page_size": 16, "window": (70, 0), "num_splits": 3}),
    "many rows, page 16": ([13, 103], {"nq": 70, "page_size": 16, "window": (17, 0)}),
    "many rows, contiguous": ([13, 103], {"nq": 70, "window": (17, 0)}),
    "many rows, d 128": ([13, 103], {"nq": 70, "window": (17, 0), "page_size": 16, "d": 128}),
    "many rows, d 320": ([13, 103], {"nq": 70, "window": (17, 0), "page_size": 16, "d": 320}),
    "chunks": ([80, 160], {"nq": 3, "page_size": 16, "attention_chunk": 40}),
    "many rows, chunks": ([0, 120], {"nq": 70, "page_size": 16, "attention_chunk": 40}),
}  # of 100 and 190 rows


def cache_call(name: str, dtype: torch.dtype, **more: Any) -> CacheCall:
    options = {"capacity": 192, "causal": True, **CACHES[name][1], **more}
    return make([100, 190], dtype=dtype, device=on.device, **options)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("kernel", [*on.kernels("kv_cache"), *on.kernels("kv_cache_prefill")])
def test_rows_of_a_cache_that_no_window_reaches(kernel: str, name: str) -> None:
    begins, options = CACHES[name]
    if kernel in on.kernels("kv_cache_prefill") and (options["nq"] < 64 or options.get("d") == 320):
        return  # it has no kernel for these
    if kernel == "simt" and options.get("d") == 320:
        return
    call = cache_call(name, F32 if kernel == "simt" else BF16)
    assert_caches_same_with_nan(kernel, call, begins)


@pytest.mark.parametrize("name", ["three rows, page 16", "three rows, contiguous bhnd", "splits"])
@pytest.mark.parametrize("kernel", on.kernels("fp8_cache"))
def test_caches_of_8_bits(kernel: str, name: str) -> None:
    call = cache_call(name, BF16, cache_dtype=torch.float8_e4m3fn, d=128)
    assert_caches_same_with_nan(kernel, call, CACHES[name][0])


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("kernel", on.kernels("qv"))
def test_latent_caches(kernel: str, page_size: int) -> None:
    call = make(
        [100, 190], nq=2, page_size=page_size, capacity=192, heads=(11, 1), d=64, dv=512, qv=True,
        causal=True, window=(70, 0), dtype=BF16, device=on.device,
    )  # fmt: skip
    assert_caches_same_with_nan(kernel, call, [28, 118])


# --- gradients ---

GRADIENTS = sorted(
    (kernel, dtype)
    for kernel in on.kernels("gradients")
    for dtype in dtypes_with_gradients(on, kernel)[-1:]
)


@pytest.mark.parametrize("band", ["behind a causal offset", "both sides of a window"])
@pytest.mark.parametrize(("kernel", "dtype"), GRADIENTS)
def test_gradients(kernel: str, dtype: str, band: str) -> None:
    nq, nk, seen, call = BANDS[band]
    q, k, v = on.qkv(nq, nk, dtype=dtype, heads=(2, 1))
    dout = on.rand(*q.shape, seed=9, dtype=dtype)
    clean = differentiate(on, kernel, dout, q, k, v, **call)
    nan = differentiate(on, kernel, dout, q, spoiled(k, seen), spoiled(v, seen), **call)
    for name in ("dq", "dk", "dv"):
        want = getattr(clean, name)
        assert not bool(want.isnan().any())
        assert same_bits(getattr(nan, name), want), name


@pytest.mark.parametrize(("kernel", "dtype"), GRADIENTS)
def test_gradients_of_queries_that_see_no_key(kernel: str, dtype: str) -> None:
    """Autograd has NaN for them where it goes through their log-sum-exp of -inf."""
    q, k, v = on.qkv(50, 30, dtype=dtype, heads=(2, 1))
    dout, dlse = on.rand(*q.shape, seed=9, dtype=dtype), on.rand(1, 2, 50, seed=8)
    clean = differentiate(on, kernel, dout, q, k, v, dlse=dlse, causal=True, schedules=(0,))
    q[:, :, :20], dout[:, :, :20], dlse[:, :, :20] = math.nan, math.nan, math.nan
    nan = differentiate(on, kernel, dout, q, k, v, dlse=dlse, causal=True, schedules=(0,))
    for name in ("dq", "dk", "dv"):
        assert same_bits(getattr(nan, name), getattr(clean, name)), name
