"""The order of a tensor's dimensions in memory: outputs and gradients nest as their inputs do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_MINUS_INF = -math.inf


def nesting(strides: Sequence[int]) -> list[int]:
    """The dimensions of a tensor with these strides from the outermost in memory to the innermost.

    The last dimension is always the innermost. A stride of 0 (expanded) says nothing about the
    order: such a dimension goes outermost. The output of a call nests as q does; plan_output() in
    src/runtime/reading/output.cpp follows the same rule for eager calls.
    """
    last = len(strides) - 1
    # While torch.compile traces, numbers that it does not know are ints, too, and cannot be sorted.
    if not torch.compiler.is_compiling() and all(isinstance(stride, int) for stride in strides):
        outer = sorted(range(last), key=lambda i: -strides[i] if strides[i] else _MINUS_INF)
        return [*outer, last]
    outer = []
    for i in range(last):
        place = i
        while place > 0 and _nests_inside(strides[outer[place - 1]], strides[i]):
            place -= 1
        outer.insert(place, i)
    return [*outer, last]


def _nests_inside(stride: Any, of: Any) -> bool:
    """Whether a dimension with a stride goes behind a later one with another: strides of a traced
    call. Where neither is known, dimensions nest in their order.
    """
    from torch.fx.experimental import symbolic_shapes

    def holds(comparison: Any) -> bool:
        if isinstance(comparison, bool):
            return comparison
        known: bool = symbolic_shapes.statically_known_true(comparison)
        return known if symbolic_shapes.free_unbacked_symbols(comparison) else bool(comparison)

    return not holds(stride == 0) and (holds(of == 0) or holds(stride < of))


def new_in_order(x: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """A dense tensor of a shape, whose dimensions nest as those of x do."""
    order = nesting(x.stride())
    new = x.new_empty([shape[i] for i in order], dtype=dtype or x.dtype)
    return new.permute(_inverse(order))


def in_stride_order_of(q: Tensor, result: Tensor) -> Tensor:
    """The result, dense, with its dimensions in memory in the order of q's."""
    if q.is_contiguous() and result.is_contiguous():
        return result
    order = nesting(q.stride())
    return result.permute(order).contiguous().permute(_inverse(order))


def _inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes another."""
    return [order.index(i) for i in range(len(order))]


def as_bhnd(x: Tensor, layout: str) -> Tensor:
    """A view (batch, heads, rows, dim) of a tensor in the layout, or of packed rows (rows, heads,
    dim), which are one batch then.
    """
    if x.ndim == 3:
        return x.transpose(0, 1)[None]
    return x.transpose(1, 2) if layout == "bnhd" else x


def without_data(x: Any) -> Any:
    """A tensor that has no numbers in place of one that has; any other value as it is."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
