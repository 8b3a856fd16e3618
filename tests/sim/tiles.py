"""Tiles of matrices in shared memory, as descriptors of wgmma and tcgen05 name them."""

from __future__ import annotations

import torch
from torch import Tensor


def place(
    k_major: bool, span: int, row: Tensor, k_byte: Tensor, e: int, lead: int, stride: int
) -> Tensor:
    """Offsets of elements from the tile's start, before swizzling; `row` along M or N, `k_byte`
    the element's byte along K; element size e. From the PTX manual's canonical layouts.
    """
    if k_major:
        if span == 0:
            return row % 8 * 16 + row // 8 * stride + k_byte // 16 * lead + k_byte % 16
        return row % 8 * span + row // 8 * stride + k_byte
    k = k_byte // e
    if span == 0:
        t = 16 // e
        return row % t * e + row // t * stride + k % 8 * 16 + k // 8 * lead
    per = span // e
    return row % per * e + row // per * lead + k % 8 * span + k // 8 * stride


def put(
    image: Tensor, start: int, matrix: Tensor, k_major: bool, span: int, lead: int, stride: int
) -> int:
    """Writes a (rows, k) matrix to the image; returns the start and the offsets of its descriptor,
    without smem's own place.
    """
    e = matrix.element_size()
    raw = matrix.contiguous().view(torch.uint8).reshape(matrix.shape[0], -1, e)
    rows, k_bytes = torch.arange(raw.shape[0])[:, None], torch.arange(raw.shape[1]) * e
    at = start + place(k_major, span, rows, k_bytes, e, lead, stride)
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[span]
    at = at ^ ((at >> 7) & mask) << 4
    image[at[..., None] + torch.arange(e)] = raw
    return start >> 4 | lead >> 4 << 16 | stride >> 4 << 32


def strides(k_major: bool, span: int, rows: int, e: int) -> tuple[int, int]:
    """(leading, stride) of a compact tile with 32 bytes of K."""
    if k_major:
        return (rows * 16, 128) if span == 0 else (16, 8 * span)
    k = 32 // e
    if span == 0:
        return rows // (16 // e) * 128, 128  # k groups behind all of the rows
    return k * span, 8 * span
