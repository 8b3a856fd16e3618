"""Tensors too large for the simulator: 64-bit offsets, many heads; the torch implementation; and
the memory that gradients need beside PyTorch's.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import archflash
from archflash import reference

from .gpu_cases import (
    DEVICE,
    DTYPES,
    NAN,
    assert_close,
    attend_and_check,
    inside_nan,
    kernel_dtypes,
    kernels,
    qkv,
    rand,
    same_bits,
)

pytestmark = pytest.mark.gpu

each_kernel_and_dtype = pytest.mark.parametrize(("kernel", "dtype"), kernel_dtypes())
GIB = 1 << 30


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


# Kernels choose a large tile when it fills the GPU: many heads, so that it does.
@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_tiles_for_a_full_gpu_meet_the_error_rule(kernel: str, d: int) -> None:
    for served, dtype in kernel_dtypes():
        if served == kernel:
            call = qkv(333, 301, d, dtype=dtype, batch=4, heads=(48, 8))
            attend_and_check(kernel, *call, window=(100, 20), softcap=9.0)


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


# --- the memory of a forward and a backward pass ---


def peak_of(call: Callable[[], Any]) -> int:
    """The most bytes that a call needs at a time beyond what is there before it."""
    call()  # loads kernels, whose code takes memory, and makes the handles of libraries
    gc.collect()  # tensors of other tests that were freed during the call would be taken off
    torch.cuda.synchronize()
    time.sleep(0.05)  # PyTorch's thread of backward passes lets go of its last tensors by itself
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peaks_of_pytorch(q: torch.Tensor, gradients_of: Callable[[Any], Any]) -> dict[str, int]:
    """Those of PyTorch's fused kernels that serve a call. Their memory-efficient kernel alone has
    right answers for more than 65,535 heads in all.
    """
    many = q.shape[0] * q.shape[1] > 65535
    backends = [SDPBackend.EFFICIENT_ATTENTION]
    backends += [] if many else [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    peaks = {}
    for backend in backends:
        with sdpa_kernel(backend), contextlib.suppress(RuntimeError):
            peaks[backend.name] = peak_of(
                lambda: gradients_of(torch.nn.functional.scaled_dot_product_attention)
            )
    return peaks


# Batch, heads, heads of k, rows, keys and head dimension: short rows of many sequences, rows beside
# the sizes of tiles, and head dimensions beside those of tiles.
SMALL = 2 << 20  # what an allocator may round up
MEMORY_SHAPES = (
    (4096, 6, 6, 49, 49, 32),
    (16384, 8, 8, 16, 16, 40),
    (32768, 12, 12, 1, 1, 64),
    (2048, 8, 8, 33, 33, 40),
    (1024, 8, 8, 129, 129, 128),
    (512, 8, 8, 77, 77, 192),
    (4096, 8, 8, 16, 16, 8),
    (2048, 8, 8, 300, 7, 64),
    (256, 16, 4, 100, 100, 128),
    (4, 16, 16, 4096, 4096, 40),
    (4, 16, 16, 4096, 4096, 128),
)


@pytest.mark.parametrize("shape", MEMORY_SHAPES, ids=str)
@pytest.mark.parametrize("kernel", ["hopper", "ampere", None])
def test_gradients_need_little_more_memory_than_pytorchs(
    kernel: str | None, shape: tuple[int, ...]
) -> None:
    if kernel is not None and kernel not in kernels():
        pytest.skip(f"{kernel} has no code for this GPU")
    batch, heads, heads_kv, nq, nk, d = shape
    if kernel is None and batch * heads > 65535:
        pytest.skip("PyTorch's own choice fails for so many heads")
    need_memory(24)
    q = rand(batch, heads, nq, d, seed=1, dtype="bfloat16").requires_grad_()
    k, v = (
        rand(batch, heads_kv, nk, d, seed=seed, dtype="bfloat16").requires_grad_()
        for seed in (2, 3)
    )
    dout = torch.ones_like(q)
    gqa: dict[str, Any] = {"enable_gqa": True} if heads != heads_kv else {}
    peers = peaks_of_pytorch(q, lambda f: torch.autograd.grad(f(q, k, v, **gqa), (q, k, v), dout))
    if not peers:
        pytest.skip("none of PyTorch's fused kernels serves this call")

    def attend() -> Any:
        out = archflash.attention(q, k, v, implementation=kernel)
        return torch.autograd.grad(out, (q, k, v), dout)

    assert peak_of(attend) <= 1.2 * min(peers.values()) + SMALL, peers
