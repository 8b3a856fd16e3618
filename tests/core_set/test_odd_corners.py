"""Calls whose tensors kernels cannot read as they are: head dimensions that are no multiples of 8,
rows at no multiples of 16 bytes, a strided last dimension. A kernel copies them, and writes the
output where the caller wants it.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash

from .executors import executor
from .gradients import (
    differentiate_and_check,
    dtypes_with_gradients,
    inputs,
    kernels_with_gradients,
)
from .odd_strides import UNREADABLE, laid_out

on = executor()
KERNELS = on.kernels()
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
NQ, NK = on.pick(simulator=(9, 70), gpu=(150, 333))
# Numbers of the simulator's schedules: one for each call.
SCHEDULE = itertools.cycle(range(4))


def attend_and_check(kernel: str, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> None:
    on.attend_and_check(kernel, q, k, v, schedules=(next(SCHEDULE),), **call)


def dtype_of(kernel: str) -> str:
    return on.dtypes_of(kernel)[-1]


@pytest.mark.parametrize("dims", [(100, 100), (1, 3), (4, 66), (65, 64), (72, 250)], ids=str)
@each_kernel
def test_head_dimensions_that_are_no_multiples_of_8(kernel: str, dims: tuple[int, int]) -> None:
    q, k, v = on.qkv(NQ, NK, *dims, dtype=dtype_of(kernel), heads=(2, 1))
    attend_and_check(kernel, q, k, v, causal=True, out_pad=dims[0] % 2)


@pytest.mark.parametrize("name", UNREADABLE)
@each_kernel
def test_memory_that_loads_of_16_bytes_cannot_read(kernel: str, name: str) -> None:
    """Queries, keys and values in turn; all of them where it is the last dimension."""
    number = UNREADABLE.index(name)
    dtype = getattr(torch, dtype_of(kernel))
    tensors = [
        laid_out(name, shape, dtype, on.device, seed)
        if seed == number % 3 or name in ("transposed", "every other")
        else on.rand(*shape, seed=seed, dtype=dtype)
        for seed, shape in enumerate([(2, 2, NQ, 64), (2, 2, NK, 64), (2, 2, NK, 64)])
    ]
    q, k, v = tensors
    attend_and_check(kernel, q, k, v, softcap=5.0, window=(20, -1))


@each_kernel
def test_a_strided_output_is_written_in_place(kernel: str) -> None:
    dtype = getattr(torch, dtype_of(kernel))
    q, k, v = on.qkv(NQ, NK, 40, 20, dtype=dtype_of(kernel))
    for columns in (1, 2):
        out = torch.full((2, 1, NQ, 2, 20 * columns), 7.0, dtype=dtype, device=on.device)
        view = out[0].transpose(1, 2)[..., ::columns]
        result = archflash.attention(q, k, v, implementation=kernel, out=view)
        assert result is view
        expected = archflash.attention(q, k, v, implementation=kernel)
        assert torch.equal(view, expected)
        assert bool((out[1] == 7.0).all())
        if columns == 2:
            assert bool((out[..., 1::2] == 7.0).all())


@each_kernel
def test_packed_sequences_with_odd_rows(kernel: str) -> None:
    """Rows of no sequence are 0, in a tensor of 3 dimensions with heads inside of rows."""
    lengths_q, lengths_k = (5, 0, 17), (40, 3, 9)
    q, k, v = (
        on.rand(n, heads, 44, seed=heads, dtype=dtype_of(kernel))
        for n, heads in ((25, 4), (60, 2), (60, 2))
    )
    ends = {"cu_seqlens_q": on.cu_seqlens(lengths_q), "cu_seqlens_k": on.cu_seqlens(lengths_k)}
    attend_and_check(kernel, q, k, v, causal=True, sinks=on.rand(4, seed=5), **ends)


@each_kernel
def test_sequences_may_share_keys(kernel: str) -> None:
    """A sequence without queries stands between those whose keys overlap."""
    q = on.rand(30, 2, 64, seed=1, dtype=dtype_of(kernel))
    k, v = (on.rand(100, 2, 64, seed=seed, dtype=dtype_of(kernel)) for seed in (2, 3))
    ends = {"cu_seqlens_q": on.int32(0, 12, 12, 30), "cu_seqlens_k": on.int32(0, 70, 30, 100)}
    attend_and_check(kernel, q, k, v, causal=True, **ends)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn"])
def test_head_dimensions_of_8_bits(dtype: str) -> None:
    for kernel in KERNELS:
        if dtype not in on.dtypes_of(kernel, [dtype]):
            continue
        q, k, v = on.qkv(NQ, NK, 72, 24, dtype=dtype)
        attend_and_check(kernel, q, k, v)


@each_kernel
def test_masks_as_data_do_not_care_for_columns(kernel: str) -> None:
    if kernel not in on.kernels("attn_mask"):
        pytest.skip(f"{kernel} takes no masks as data")
    dtype = on.dtypes_of(kernel)[0 if kernel == "simt" else -1]
    q, k, v = on.qkv(NQ, NK, 36, 36, dtype=dtype)
    mask = on.rand(NQ, NK, seed=4) > 0
    attend_and_check(kernel, q, k, v, attn_mask=mask, alibi_slopes=on.tensor([0.1, 0.2]))


@pytest.mark.parametrize("kernel", on.kernels("kv_cache"))
def test_queries_beside_a_cache_may_have_odd_rows(kernel: str) -> None:
    """Nothing of the cache is copied, and the bits are those of queries that need no copy."""
    dtype = on.dtypes_of(kernel)[0]
    odd = on.rand(2, 3, 4, 65, seed=1, dtype=dtype)[..., 1:]
    k_cache, v_cache = (on.rand(2, NK, 2, 64, seed=seed, dtype=dtype) for seed in (2, 3))
    call = {"cache_seqlens": on.int32(NK, 33), "causal": True, "implementation": kernel}
    plan = archflash.explain(odd, k_cache, v_cache, **call, device="A100").plan
    assert plan is not None
    assert dict(plan.notes)["copies"].startswith("q (rows at no multiples of 16 bytes) into the ")
    out = archflash.attention_with_kvcache(odd, k_cache, v_cache, **call)
    expected = archflash.attention_with_kvcache(odd.contiguous(), k_cache, v_cache, **call)
    assert torch.equal(out, expected)


GRADIENTS = kernels_with_gradients(on)


@pytest.mark.parametrize("kernel", GRADIENTS)
def test_gradients_of_odd_calls(kernel: str) -> None:
    dtype = dtypes_with_gradients(on, kernel)[-1]
    tensors = inputs(on, NQ, NK, 44, 20, dtype)
    differentiate_and_check(on, kernel, *tensors, schedules=(0, 3), causal=True)
    dout, q, k, v = tensors = inputs(on, NQ, NK, 64, 64, dtype)
    dout = dout.mT.contiguous().mT  # a strided last dimension
    differentiate_and_check(on, kernel, dout, q, k, v, schedules=(1,), pad=3, add_to=2.0)
