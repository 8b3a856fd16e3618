"""Strides and offsets of tensors that loads of 16 bytes cannot read, and some that they can."""

from __future__ import annotations

import torch
from torch import Tensor

READABLE = ("dense", "bnhd", "one batch", "one head", "one row", "row of 16 bytes more")
UNREADABLE = (
    "offset", "offset of 8 bytes", "row", "row of 8 bytes more", "head", "batch", "transposed",
    "every other", "one value", "offset, one head", "offset, one row", "offset and row",
)  # fmt: skip


def strides_of(name: str, shape: tuple[int, ...], eight: int) -> tuple[tuple[int, ...], int]:
    """Strides in elements, and how many elements behind a 16-byte boundary the tensor starts."""
    _, h, n, d = shape
    more = {
        "row": 1,
        "offset and row": 1,
        "row of 8 bytes more": eight,
        "row of 16 bytes more": 2 * eight,
    }
    row = d + more.get(name, 0)
    head = n * row + (name == "head")
    strides = [h * head + (name == "batch"), head, row, 1]
    if name == "bnhd":
        strides = [n * h * d, d, h * d, 1]
    elif name == "transposed":
        strides = [h * n * d, n * d, 1, n]
    elif name == "every other":
        strides = [2 * s for s in strides]
    for dimension, what in enumerate(("one batch", "one head", "one row", "one value")):
        if what in name:
            strides[dimension] = 0
    start = eight if name == "offset of 8 bytes" else int(name.startswith("offset"))
    return tuple(strides), start


def laid_out(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> Tensor:
    """Standard normal numbers with the strides and the offset of that name."""
    size = torch.empty(0, dtype=dtype).element_size()
    strides, start = strides_of(name, shape, 8 // size)
    span = start + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randn(span + 16 // size, generator=generator).to(device, dtype)
    return buffer.as_strided(shape, strides, -buffer.data_ptr() % 16 // size + start)
