"""Copies of a tensor that lie differently in memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MEMORY = ("dense", "transposed", "inside_nan", "expanded")


def lay_out(x: Tensor, memory: str, heads_dim: int) -> Tensor:
    """The values of x, or fewer of them seen more often, as one of MEMORY says."""
    if memory == "transposed":
        return transposed(x)
    if memory == "inside_nan":
        return inside_nan(x)
    if memory == "expanded":
        return one_head_for_all(x, heads_dim)
    return x


def transposed(x: Tensor) -> Tensor:
    """A copy whose rows and heads are swapped in memory."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def inside_nan(x: Tensor) -> Tensor:
    """A copy that is a slice of a larger tensor, which is NaN everywhere else."""
    around = torch.full(
        (*x.shape[:-3], x.shape[-3] + 2, x.shape[-2] + 9, x.shape[-1] + 16),
        math.nan,
        dtype=x.dtype,
        device=x.device,
    )
    view = around[..., 1:-1, 2:-7, 8:-8]
    return view.copy_(x)


def one_head_for_all(x: Tensor, heads_dim: int) -> Tensor:
    """The first head (and the first batch) seen as all of them: strides of 0."""
    first = x.narrow(heads_dim, 0, 1)
    return (first[:1] if x.ndim == 4 else first).expand_as(x)
