"""Every length and head dimension: the edges of tiles, rows and columns."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from archflash import _registry

from .executors import executor

on = executor()

LENGTHS = (0, 1, 7, 59, 63, 64, 65, 113, 127, 129, 239, 799, 1023, 2048)
HEAD_DIMS = [(d, d) for d in (8, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)] + [
    (192, 128), (64, 128), (128, 64), (8, 256), (256, 8), (40, 160), (72, 32),
]  # fmt: skip


def length_cases() -> list[Any]:
    """(kernel, dtype, d, causal, nq, nk): on a GPU all pairs of lengths, the diagonal with both
    masks, and every fifth of them in 16 bits without tensor cores.
    """
    cases: list[tuple[Any, ...]] = []
    for kernel, dtype in on.kernels_and_dtypes():
        if on.name == "simulator":
            for nq, nk in ((5, 0), (1, 1), (1, 300), (300, 1), (129, 257)):
                cases.append((kernel, dtype, 64, nq > 100, nq, nk))
            continue
        every = dtype == "float32" or _registry.uses_tensor_cores(kernel)
        for number, (nq, nk) in enumerate(itertools.product(LENGTHS, LENGTHS)):
            for d in (64, 128):
                if every or nq == nk:
                    masks = (False, True) if nq == nk else ((number + d // 64) % 2 == 0,)
                elif number % 5 == (0 if dtype == "float16" else 2):
                    masks = (d == 64,)
                else:
                    continue
                cases += [(kernel, dtype, d, causal, nq, nk) for causal in masks]
    return [
        pytest.param(*case, id=f"{kernel}-{dtype}-d{d}-{'causal-' if causal else ''}q{nq}-k{nk}")
        for case in cases
        for kernel, dtype, d, causal, nq, nk in [case]
    ]


@pytest.mark.parametrize(("kernel", "dtype", "d", "causal", "nq", "nk"), length_cases())
def test_lengths_of_any_kind(
    kernel: str, dtype: str, d: int, causal: bool, nq: int, nk: int
) -> None:
    batch, heads = 1, (2, 2)
    if on.name == "gpu" and nq < 100:
        # Few rows are taken of more heads: the largest error of few elements says little.
        batch, heads = 2, (32, 8) if nq < 20 else (8, 2)
    case = on.qkv(nq, nk, d, dtype=dtype, batch=batch, heads=heads)
    on.attend_and_check(kernel, *case, causal=causal)


@pytest.mark.parametrize(
    ("kernel", "dtype", "d", "dv"),
    [
        pytest.param(*served, d, dv, id=f"{'-'.join(served)}-d{d}-dv{dv}")
        for served in on.kernels_and_dtypes()
        for d, dv in on.pick(simulator=[(8, 8), (8, 256), (256, 8)], gpu=HEAD_DIMS)
    ],
)
@pytest.mark.parametrize(
    ("nq", "nk"), on.pick(simulator=[(7, 65)], gpu=[(113, 239), (7, 65)]), ids=str
)
def test_head_dims_of_any_size(kernel: str, dtype: str, d: int, dv: int, nq: int, nk: int) -> None:
    on.attend_and_check(kernel, *on.qkv(nq, nk, d, dv, dtype=dtype), causal=True)
