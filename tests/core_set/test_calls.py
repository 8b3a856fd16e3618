"""Calls that must agree with float64, as data: one row of CALLS for each thing to hold.

A row says what is asked for, not where it runs. test_features.py has the pairs of features, the
other files what takes more than one call or more than the error rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from .executors import executor

on = executor()


@dataclass(frozen=True)
class Call:
    """One call with contiguous inputs in the layout bhnd.

    Attributes:
        rows: of q and of k; a GPU gets `gpu_rows` where they are given.
        dims: head dimensions of q and of v.
        heads: of q and of k.
        size: what q and k are multiplied by.
        options: of the call; tensors are moved to where the call runs.
        gpu_rows: more rows, for a GPU.
    """

    rows: tuple[int, int]
    dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (2, 2)
    size: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    gpu_rows: tuple[int, int] | None = None


CALLS = {
    "softcap-1e3": Call((40, 129), options={"softcap": 1e3, "causal": True}),
    "softcap-1e9": Call((40, 129), options={"softcap": 1e9, "causal": True}),
    "small-scores": Call((40, 129), size=1e-4, options={"causal": True}, gpu_rows=(113, 129)),
    "large-scores": Call((40, 129), size=100.0, options={"causal": True}, gpu_rows=(113, 129)),
}


def made(case: Call, dtype: str) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    rows = on.pick(simulator=case.rows, gpu=case.gpu_rows or case.rows)
    q, k, v = on.qkv(*rows, *case.dims, dtype=dtype, heads=case.heads)
    options = {
        name: value.to(on.device) if isinstance(value, Tensor) else value
        for name, value in case.options.items()
    }
    return (q * case.size, k * case.size, v), options


@pytest.mark.parametrize(("kernel", "dtype"), on.kernels_and_dtypes())
@pytest.mark.parametrize("name", CALLS)
def test_a_call_agrees_with_float64(kernel: str, dtype: str, name: str) -> None:
    tensors, options = made(CALLS[name], dtype)
    on.attend_and_check(kernel, *tensors, **options)
