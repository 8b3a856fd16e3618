"""What is read and written: views, neighbours full of NaN, packed sequences, 64-bit offsets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_cases import (
    DEVICE,
    DTYPES,
    NAN,
    Guarded,
    assert_close,
    attend_and_check,
    cu_seqlens,
    inside_nan,
    int32,
    kernel_dtypes,
    qkv,
    rand,
    same_bits,
)
from torch import Tensor

import archflash
from archflash import reference

pytestmark = pytest.mark.gpu

each_kernel_and_dtype = pytest.mark.parametrize(("kernel", "dtype"), kernel_dtypes())
GIB = 1 << 30


# --- views ---


@each_kernel_and_dtype
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_views_of_one_packed_qkv_buffer(kernel: str, dtype: str, layout: str) -> None:
    buffer = rand(2, 113, 3, 4, 64, seed=0, dtype=dtype)  # (B, N, 3, H, D)
    q, k, v = buffer.unbind(2)
    if layout == "bhnd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend_and_check(kernel, q, k, v, causal=True, layout=layout)


@each_kernel_and_dtype
def test_packed_sequences_in_one_packed_qkv_buffer(kernel: str, dtype: str) -> None:
    q, k, v = rand(200, 3, 2, 64, seed=0, dtype=dtype).unbind(1)
    ends = cu_seqlens((63, 0, 1, 136))
    attend_and_check(kernel, q, k, v, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends)


@each_kernel_and_dtype
def test_expanded_heads_and_batches(kernel: str, dtype: str) -> None:
    q, k, v = qkv(65, 129, dtype=dtype)
    q = q[:, :1].expand(3, 4, -1, -1)
    k = k[:, :1].expand(3, 4, -1, -1)
    v = v[:, 1:].expand(3, 4, -1, -1)
    out, _ = attend_and_check(kernel, q, k, v)
    assert same_bits(out, out[:1, :1].expand_as(out))


@each_kernel_and_dtype
def test_one_row_expanded_to_all(kernel: str, dtype: str) -> None:
    q, k, v = (x[:, :, :1].expand(-1, -1, 77, -1) for x in qkv(1, 1, dtype=dtype))
    if kernel.startswith("blackwell_"):  # tensor maps have no stride of 0
        with pytest.raises(archflash.ForcedImplementationError, match="k repeats one row"):
            archflash.attention(q, k, v, implementation=kernel)
        return
    attend_and_check(kernel, q, k, v)


@each_kernel_and_dtype
def test_output_into_a_slice_of_a_packed_buffer(kernel: str, dtype: str) -> None:
    q, k, v = qkv(113, 113, dtype=dtype, batch=2)
    # out is one third of the heads of (B, N, 3 * H, D), seen as (B, H, N, D).
    guarded = Guarded((2, 2, 113, 64), (113 * 6 * 64, 64, 6 * 64, 1), DTYPES[dtype])
    out = archflash.attention(q, k, v, implementation=kernel, out=guarded.view)
    assert out is guarded.view
    guarded.assert_untouched_outside()
    assert_close(out, None, q, k, v)


@each_kernel_and_dtype
@pytest.mark.parametrize("steps", [1, 5])
def test_kv_cache_tail_never_matters(kernel: str, dtype: str, steps: int) -> None:
    q, k, v = qkv(steps, 113, dtype=dtype, heads=(4, 2))
    cache_k, cache_v = (torch.full_like(x[..., :1, :], NAN).repeat(1, 1, 256, 1) for x in (k, v))
    for cache, x in ((cache_k, k), (cache_v, v)):
        cache[:, :, :113] = x
    for length in (113, 100, 64, 1):
        keys, values = cache_k[:, :, :length], cache_v[:, :, :length]
        attend_and_check(kernel, q, keys, values, causal=True)


# --- NaN ---


@each_kernel_and_dtype
def test_a_nan_query_spoils_its_own_row_only(kernel: str, dtype: str) -> None:
    q, k, v = qkv(130, 129, dtype=dtype)
    clean, _ = archflash.attention(q, k, v, implementation=kernel, return_lse=True)
    q[0, 1, 70, 3] = NAN
    out, lse = attend_and_check(kernel, q, k, v)
    assert bool(out[0, 1, 70].isnan().all())
    assert bool(lse[0, 1, 70].isnan())
    others = torch.ones(2, 130, dtype=torch.bool, device=DEVICE)
    others[1, 70] = False
    assert torch.equal(out[0][others], clean[0][others])


@each_kernel_and_dtype
@pytest.mark.parametrize("value", [NAN, math.inf])
def test_a_non_finite_key_spoils_only_rows_that_see_it(
    kernel: str, dtype: str, value: float
) -> None:
    q, k, v = qkv(130, 130, dtype=dtype)
    clean = archflash.attention(q, k, v, implementation=kernel, causal=True)
    k[0, 0, 70] = value
    out = archflash.attention(q, k, v, implementation=kernel, causal=True)
    assert torch.equal(out[0, 1], clean[0, 1])
    assert torch.equal(out[0, 0, :70], clean[0, 0, :70])
    if math.isnan(value):
        assert bool(out[0, 0, 70:].isnan().all())


@each_kernel_and_dtype
def test_a_window_hides_a_nan_key(kernel: str, dtype: str) -> None:
    q, k, v = qkv(130, 130, dtype=dtype)
    k[0, 0, 70] = NAN
    attend_and_check(kernel, q, k, v, window=(9, 4))


# --- packed sequences ---

SEQUENCES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": ((113,), (239,)),
    "unequal": ((63, 64, 65, 200), (129, 1, 65, 40)),
    "single-tokens": ((1,) * 40, (1,) * 40),
    "decode": ((1,) * 5, (1, 799, 64, 65, 128)),
    "empty-among-others": ((0, 5, 0, 0, 70, 0), (9, 5, 0, 3, 200, 0)),
    "queries-without-keys": ((7, 64, 30), (0, 80, 0)),
    "no-query-at-all": ((0, 0), (5, 6)),
    "no-key-at-all": ((5, 6), (0, 0)),
    "many": (tuple(i * 7 % 5 for i in range(200)), tuple(i * 5 % 7 for i in range(200))),
}


def packed(
    q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], dtype: str, d: int = 64, spare: int = 0
) -> tuple[list[Tensor], dict[str, Any]]:
    """(T, H, D) tensors, with rows of NaN after the last sequence, and the cu_seqlens."""
    totals = (sum(q_lengths), sum(k_lengths), sum(k_lengths))
    tensors = [
        F.pad(rand(total, heads, d, seed=i, dtype=dtype), (0, 0, 0, 0, 0, spare), value=NAN)
        for i, (total, heads) in enumerate(zip(totals, (4, 2, 2), strict=True))
    ]
    return tensors, {
        "cu_seqlens_q": cu_seqlens(q_lengths),
        "cu_seqlens_k": cu_seqlens(k_lengths),
    }


@each_kernel_and_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_packed_sequences(kernel: str, dtype: str, name: str, causal: bool) -> None:
    q_lengths, k_lengths = SEQUENCES[name]
    tensors, ends = packed(q_lengths, k_lengths, dtype)
    attend_and_check(kernel, *tensors, causal=causal, **ends)


@each_kernel_and_dtype
@pytest.mark.parametrize(
    "hint", [(200, 129), (4096, 4096), (1, 1), (0, 0)], ids=["exact", "large", "small", "zero"]
)
def test_max_seqlen_is_a_hint_and_never_a_bound_on_memory(
    kernel: str, dtype: str, hint: tuple[int, int]
) -> None:
    tensors, ends = packed(*SEQUENCES["unequal"], dtype)
    q, k, v = tensors
    guarded = Guarded(q.shape, q.stride(), q.dtype)
    call: dict[str, Any] = {
        "causal": True,
        "max_seqlen_q": hint[0],
        "max_seqlen_k": hint[1],
        **ends,
    }
    out = archflash.attention(q, k, v, implementation=kernel, out=guarded.view, **call)
    torch.cuda.synchronize()
    guarded.assert_untouched_outside()
    if hint[0] >= 200 and hint[1] >= 129:
        assert_close(out, None, q, k, v, **call)


@each_kernel_and_dtype
def test_nan_in_a_packed_neighbour_never_matters(kernel: str, dtype: str) -> None:
    lengths = (63, 65, 40)
    (q, k, v), ends = packed(lengths, lengths, dtype)
    clean, _ = archflash.attention(q, k, v, implementation=kernel, return_lse=True, **ends)
    k[63:128] = NAN
    v[63:128] = NAN
    out, lse = attend_and_check(kernel, q, k, v, **ends)
    assert torch.equal(out[:63], clean[:63])
    assert torch.equal(out[128:], clean[128:])
    assert bool(out[63:128].isnan().all())
    assert bool(lse[:, 63:128].isnan().all())


@each_kernel_and_dtype
def test_rows_after_the_last_sequence_never_matter(kernel: str, dtype: str) -> None:
    lengths = (63, 65, 40)
    (q, k, v), ends = packed(lengths, lengths, dtype, spare=70)
    out, lse = archflash.attention(
        q, k, v, implementation=kernel, return_lse=True, causal=True, **ends
    )
    total = sum(lengths)
    assert_close(out[:total], lse[:, :total], q[:total], k[:total], v[:total], causal=True, **ends)


@pytest.mark.parametrize("kernel", sorted({kernel for kernel, _ in kernel_dtypes()}))
@pytest.mark.parametrize(
    "wrong",
    [(0, 63, 5000, 6000), (-900, -5, 64, 168), (0, 100, 50, 168), (1 << 30, 1 << 30, 3, 1)],
    ids=["beyond", "negative", "decreasing", "huge"],
)
def test_wrong_cu_seqlens_never_leave_the_tensors(kernel: str, wrong: tuple[int, ...]) -> None:
    dtype = next(dtype for name, dtype in kernel_dtypes() if name == kernel)
    (q, k, v), ends = packed((63, 65, 40), (63, 65, 40), dtype)
    guarded = Guarded(q.shape, q.stride(), q.dtype)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        call = {**ends, name: int32(*wrong)}
        archflash.attention(q, k, v, implementation=kernel, out=guarded.view, **call)
        torch.cuda.synchronize()
        guarded.assert_untouched_outside()
    attend_and_check(kernel, q, k, v, **ends)


# --- 64-bit offsets ---


def need_memory(gib: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] // GIB
    if free < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory, {free} are free")


@each_kernel_and_dtype
@pytest.mark.parametrize("far", ["row", "head", "batch"])
def test_offsets_beyond_31_bits(kernel: str, dtype: str, far: str) -> None:
    need_memory(40)
    shape = (2, 2, 70, 64)
    # Rows, or what is as long, in steps of at least 512: q, k, v and out lie side by side.
    strides = {
        "row": (1024, 512, 1 << 25, 1),
        "head": (512 * 70, 9 << 28, 512, 1),
        "batch": (9 << 28, 512 * 70, 512, 1),
    }[far]
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    assert reach > 1 << 31
    buffer = torch.empty(reach + 512, dtype=DTYPES[dtype], device=DEVICE)
    q, k, v, out = (buffer.as_strided(shape, strides, 64 * i) for i in range(4))
    for seed, x in enumerate((q, k, v)):
        x.copy_(rand(*shape, seed=seed, dtype=dtype))
    out.fill_(NAN)
    archflash.attention(q, k, v, implementation=kernel, causal=True, out=out)
    assert_close(out.clone(), None, *(x.clone() for x in (q, k, v)), causal=True)


@each_kernel_and_dtype
def test_more_than_65535_heads_in_all(kernel: str, dtype: str) -> None:
    # Copies of 4 batches: they must agree bit for bit, so only the first need the reference.
    q, k, v = (x.repeat(300, 1, 1, 1) for x in qkv(3, 9, 8, dtype=dtype, batch=4, heads=(64, 64)))
    assert q.shape[0] * q.shape[1] > 65535
    out, lse = archflash.attention(q, k, v, implementation=kernel, return_lse=True, causal=True)
    assert_close(out[:4], lse[:4], q[:4], k[:4], v[:4], causal=True)
    assert same_bits(out, out[:4].repeat(300, 1, 1, 1))
    assert same_bits(lse, lse[:4].repeat(300, 1, 1))


# --- the torch implementation on a GPU ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "call",
    [
        {"softcap": 5.0},
        {"return_lse": True, "causal": True},
        {"window": (16, 9), "return_lse": True},
        {"q_offset": -5, "causal": True, "return_lse": True},
    ],
    ids=str,
)
def test_torch_meets_the_error_rule_too(dtype: str, call: dict[str, Any]) -> None:
    q, k, v = (inside_nan(x) for x in qkv(113, 203, dtype=dtype, heads=(4, 2)))
    result = archflash.attention(q, k, v, implementation="torch", **call)
    out, lse = result if call.get("return_lse") else (result, None)
    semantics = {name: value for name, value in call.items() if name != "return_lse"}
    assert_close(out, lse, q, k, v, **semantics)


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_torch_dequantises_float8(fp8: torch.dtype) -> None:
    q, k, v = (x.to(fp8) for x in qkv(113, 203, heads=(4, 2)))
    descales: dict[str, Any] = {
        "q_descale": rand(4, seed=1).abs(),
        "k_descale": rand(1, 2, seed=2).abs(),
    }
    out = archflash.attention(q, k, v, implementation="torch", causal=True, **descales)
    assert out.dtype == torch.bfloat16
    expected, _ = reference.attention(q, k, v, causal=True, **descales)
    base = reference.baseline(q, k, v, causal=True, **descales)
    report = reference.check(out, expected, base)
    assert report.ok, report
