"""Every length and head dimension: the edges of tiles, rows and columns."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gpu_cases import LENGTHS, attend_and_check, kernel_dtypes, kernels, qkv

import archflash
from archflash import _registry

pytestmark = pytest.mark.gpu

HEAD_DIMS = [(d, d) for d in (8, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)] + [
    (192, 128), (64, 128), (128, 64), (8, 256), (256, 8), (40, 160), (72, 32),
]  # fmt: skip


def length_cases() -> list[Any]:
    """All pairs of lengths, the diagonal with both masks; in 16 bits without tensor cores every
    fifth.
    """
    cases = []
    for kernel, dtype in kernel_dtypes():
        every = dtype == "float32" or _registry.uses_tensor_cores(kernel)
        for number, (nq, nk) in enumerate(itertools.product(LENGTHS, LENGTHS)):
            for d in (64, 128):
                if every or nq == nk:
                    masks = (False, True) if nq == nk else ((number + d // 64) % 2 == 0,)
                elif number % 5 == (0 if dtype == "float16" else 2):
                    masks = (d == 64,)
                else:
                    continue
                for causal in masks:
                    word = "causal-" if causal else ""
                    name = f"{kernel}-{dtype}-d{d}-{word}q{nq}-k{nk}"
                    cases.append(pytest.param(kernel, dtype, d, causal, nq, nk, id=name))
    return cases


@pytest.mark.parametrize(("kernel", "dtype", "d", "causal", "nq", "nk"), length_cases())
def test_lengths_of_any_parity_meet_the_error_rule(
    kernel: str, dtype: str, d: int, causal: bool, nq: int, nk: int
) -> None:
    # Few rows are taken of more heads: the largest error of few elements says little.
    batch, heads = (2, (32, 8)) if nq < 20 else (2, (8, 2)) if nq < 100 else (1, (2, 2))
    case = qkv(nq, nk, d, dtype=dtype, batch=batch, heads=heads)
    attend_and_check(kernel, *case, causal=causal)


@pytest.mark.parametrize(
    ("kernel", "dtype", "d", "dv"),
    [
        pytest.param(*served, d, dv, id=f"{'-'.join(served)}-d{d}-dv{dv}")
        for served in kernel_dtypes()
        for d, dv in HEAD_DIMS
    ],
)
@pytest.mark.parametrize(("nq", "nk"), [(113, 239), (7, 65)], ids=["q113-k239", "q7-k65"])
def test_head_dims_meet_the_error_rule(
    kernel: str, dtype: str, d: int, dv: int, nq: int, nk: int
) -> None:
    attend_and_check(kernel, *qkv(nq, nk, d, dv, dtype=dtype), causal=True)


# Kernels choose a large tile when it fills the GPU: many heads, so that it does.
@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_tiles_for_a_full_gpu_meet_the_error_rule(kernel: str, d: int) -> None:
    for served, dtype in kernel_dtypes():
        if served == kernel:
            call = qkv(333, 301, d, dtype=dtype, batch=4, heads=(48, 8))
            attend_and_check(kernel, *call, window=(100, 20), softcap=9.0)


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize(("batch", "heads"), [(0, 2), (2, 0)])
def test_no_batch_or_no_heads_gives_an_empty_output(kernel: str, batch: int, heads: int) -> None:
    for served, dtype in kernel_dtypes():
        if served == kernel:
            q, k, v = qkv(5, 7, dtype=dtype, batch=batch, heads=(heads, heads))
            out, lse = archflash.attention(q, k, v, implementation=kernel, return_lse=True)
            assert (out.shape, lse.shape) == ((batch, heads, 5, 64), (batch, heads, 5))
            assert (out.dtype, lse.dtype) == (q.dtype, torch.float32)
