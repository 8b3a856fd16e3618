"""Where q, k, v and the output may lie, and what lies around them."""

from __future__ import annotations

import math

import pytest
import torch

import archflash

from .checks import assert_close, same_bits
from .executors import DTYPES, executor
from .memory import inside_nan, transposed

on = executor()
each_kernel_and_dtype = pytest.mark.parametrize(("kernel", "dtype"), on.kernels_and_dtypes())


@each_kernel_and_dtype
def test_views_of_one_packed_qkv_buffer(kernel: str, dtype: str) -> None:
    rows = on.pick(simulator=70, gpu=113)
    q, k, v = on.rand(2, rows, 3, 4, 64, seed=0, dtype=dtype).unbind(2)  # of (B, N, 3, H, D)
    on.attend_and_check(kernel, q, k, v, causal=True, layout="bnhd")
    on.attend_and_check(kernel, *(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    ends = on.cu_seqlens((rows - 8, 0, 1, 7))
    on.attend_and_check(kernel, q[0], k[0], v[0], causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends)


@each_kernel_and_dtype
def test_expanded_heads_and_batches(kernel: str, dtype: str) -> None:
    # The error rule wants many numbers, of which the heads are copies.
    nq, nk = on.pick(simulator=(9, 33), gpu=(257, 129))
    q, k, v = on.qkv(nq, nk, dtype=dtype)
    q = q[:, :1].expand(3, 4, -1, -1)
    k = k[:, :1].expand(3, 4, -1, -1)
    v = v[:, 1:].expand(3, 4, -1, -1)
    out, _ = on.attend_and_check(kernel, q, k, v)
    assert same_bits(out, out[:1, :1].expand_as(out))


@each_kernel_and_dtype
def test_one_row_expanded_to_all(kernel: str, dtype: str) -> None:
    q, k, v = (x[:, :, :1].expand(-1, -1, 77, -1) for x in on.qkv(1, 1, dtype=dtype))
    if kernel == "hopper" or kernel.startswith("blackwell_"):  # tensor maps have no stride of 0
        with pytest.raises(archflash.ForcedImplementationError, match="k repeats one row"):
            archflash.attention(q, k, v, implementation=kernel)
        return
    on.attend_and_check(kernel, q, k, v)


@each_kernel_and_dtype
def test_output_into_a_slice_of_a_packed_buffer(kernel: str, dtype: str) -> None:
    rows = on.pick(simulator=40, gpu=113)
    q, k, v = on.qkv(rows, rows, dtype=dtype, batch=2)
    # out is one third of the heads of (B, N, 3 * H, D), seen as (B, H, N, D).
    whole = torch.full((2, rows, 6, 64), math.nan, dtype=DTYPES[dtype], device=on.device)
    out = whole[:, :, 2:4].transpose(1, 2)
    assert archflash.attention(q, k, v, implementation=kernel, out=out) is out
    assert_close(out, None, q, k, v)
    assert bool(whole[:, :, :2].isnan().all())
    assert bool(whole[:, :, 4:].isnan().all())


@pytest.mark.parametrize("kernel", on.kernels())
@pytest.mark.parametrize("memory", ["bhnd", "bnhd", "packed-qkv", "wide-rows"])
def test_outputs_are_dense_in_the_stride_order_of_q(kernel: str, memory: str) -> None:
    n, h, d = 33, 3, 64
    q, k, v = on.qkv(n, n, d, dtype=on.dtypes_of(kernel)[0], batch=2, heads=(h, h))
    if memory == "bnhd":
        q = transposed(q)
    elif memory == "packed-qkv":
        q = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)[:, :, 0].transpose(1, 2)
    elif memory == "wide-rows":
        q = inside_nan(q)
    out = archflash.attention(q, k, v, implementation=kernel)
    rows_first = memory in ("bnhd", "packed-qkv")
    assert out.stride() == ((n * h * d, d, h * d, 1) if rows_first else (h * n * d, n * d, d, 1))


@pytest.mark.parametrize("kernel", on.kernels())
@pytest.mark.parametrize(("nq", "batch", "heads"), [(0, 2, 2), (5, 0, 2), (5, 2, 0)])
def test_no_row_to_write_gives_an_empty_output(
    kernel: str, nq: int, batch: int, heads: int
) -> None:
    for dtype in on.dtypes_of(kernel):
        q, k, v = on.qkv(nq, 7, dtype=dtype, batch=batch, heads=(heads, heads))
        out, lse = archflash.attention(q, k, v, implementation=kernel, return_lse=True)
        assert (out.shape, lse.shape) == ((batch, heads, nq, 64), (batch, heads, nq))
        assert (out.dtype, lse.dtype) == (q.dtype, torch.float32)


# --- caches ---


@each_kernel_and_dtype
@pytest.mark.parametrize("steps", [1, 5])
def test_kv_cache_tail_never_matters(kernel: str, dtype: str, steps: int) -> None:
    q, k, v = on.qkv(steps, 113, dtype=dtype, heads=(4, 2))
    cache_k, cache_v = (k.new_full((1, 2, 256, 64), math.nan) for _ in range(2))
    cache_k[:, :, :113], cache_v[:, :, :113] = k, v
    for length in on.pick(simulator=(113, 64, 1), gpu=(113, 100, 64, 1)):
        keys, values = cache_k[:, :, :length], cache_v[:, :, :length]
        on.attend_and_check(kernel, q, keys, values, causal=True)


@each_kernel_and_dtype
def test_rows_of_a_cache_beyond_q_offset_never_matter(kernel: str, dtype: str) -> None:
    # The whole cache is an argument here: causal and q_offset alone hide its tail. As in PyTorch,
    # values that nobody may see are finite where a tile is partly masked.
    q, k, v = on.qkv(3, 160, dtype=dtype)
    call = {"causal": True, "q_offset": on.int32(40)}
    clean, clean_lse = on.attend_and_check(kernel, q, k, v, **call)
    k[:, :, 43:] = math.nan
    out, lse = on.attend(kernel, q, k, v, **call)
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)
