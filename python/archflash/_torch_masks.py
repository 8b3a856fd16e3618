"""Which keys a query sees, and what is added to its scores, as tensors: the masks of the
implementation `torch`.

A call says it in several ways: causal, window and q_offset make a band; packed sequences own their
keys; masks, ranges of keys, blocks and ALiBi are tensors. `Mask` is what is left of all of them,
in a form in which no row of softmax is empty.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from archflash import _sequences
from archflash._archflash import MASK_BLOCK
from archflash._bias import sides_of
from archflash._dropout import kept
from archflash._eager import is_exporting
from archflash._torch_kernels import mask_for_fused_kernels
from archflash.masks import to_dense

_MINUS_INF = -math.inf
_FAR = 1 << 60  # larger offsets have no other meaning, and could overflow


class PackedRows(NamedTuple):
    """To which sequence each row of a packed tensor belongs; all on the device."""

    cu_seqlens: Tensor  # (B + 1,)
    sequence: Tensor  # (T,) its sequence, B for rows past the last one
    row: Tensor  # (T,) its number within the sequence

    def of(self, queries: PackedRows) -> tuple[Tensor, Tensor]:
        """For each query row and row of this tensor: whether it is one of the keys of the query's
        sequence, and its number among them. Sequences may share keys: then cu_seqlens decreases.
        """
        first, end = (
            of_rows(x, queries)[:, None] for x in (self.cu_seqlens[:-1], self.cu_seqlens[1:])
        )
        position = torch.arange(len(self.row), device=self.row.device)
        return (position >= first) & (position < end), position - first


class Packed(NamedTuple):
    """Packed sequences. Whether there are any is asked by ``is None``: torch.compile cannot trace
    ``not packed`` in torch 2.9 and 2.10.
    """

    q: PackedRows
    k: PackedRows


def packed_rows(cu_seqlens: Tensor, total: int) -> PackedRows:
    # Positions are int64, so that adding an offset or a window limit does not overflow.
    cu_seqlens = cu_seqlens.long()
    position = torch.arange(total, device=cu_seqlens.device)
    sequence = _sequences.of_rows(position, cu_seqlens)
    return PackedRows(cu_seqlens, sequence, position - cu_seqlens[sequence])


def in_sequences(rows: PackedRows) -> Tensor:
    """Which rows belong to a sequence: bool ``(T,)``."""
    return (rows.sequence < rows.cu_seqlens.shape[0] - 1) & (rows.row >= 0)


def of_rows(per_sequence: Tensor, rows: PackedRows) -> Tensor:
    """Gives each row the value of its sequence: ``(B, ...)`` to ``(T, ...)``. Rows after the last
    sequence get 0.
    """
    padding = [0, 0] * (per_sequence.ndim - 1) + [0, 1]
    return F.pad(per_sequence, padding)[rows.sequence]


class Band(NamedTuple):
    """Keys ``offset - left <= j - i <= offset + right``; None is unbounded, causal a right of 0."""

    left: int | None
    right: int | None
    offset: int | Tensor  # a tensor has one element, or is (B,)

    @classmethod
    def of(
        cls,
        causal: bool,
        window: tuple[int | None, int | None] | None,
        q_offset: int | Tensor | None,
        packed: Packed | None,
        q: Tensor,
        k: Tensor,
        layout: str,
    ) -> Band:
        left, right = sides_of(window)
        if isinstance(q_offset, int):
            q_offset = max(-_FAR, min(q_offset, _FAR))
        if causal:
            right = 0 if right is None else min(right, 0)
        if packed is not None:
            if q_offset is None:
                q_offset = packed.k.cu_seqlens.diff() - packed.q.cu_seqlens.diff()
            return cls(left, right, q_offset)
        rows = 1 if layout == "bnhd" else 2
        nq, nk = q.shape[rows], k.shape[rows]
        if q_offset is None:
            q_offset = nk - nq
        if not isinstance(q_offset, Tensor):
            # A side that excludes no key is dropped, so that decoding one token needs no mask.
            # An exported program gets other sizes.
            known = not is_exporting() or (isinstance(nq, int) and isinstance(nk, int))
            if right is not None and known and q_offset + right >= nk - 1:
                right = None
            if left is not None and known and nq - 1 + q_offset - left <= 0:
                left = None
        return cls(left, right, q_offset)

    def contains(self, distance: Tensor) -> Tensor:
        """Whether a key is in the band, given ``distance = j - i - offset``."""
        inside = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            inside = inside & (distance >= -self.left)
        if self.right is not None:
            inside = inside & (distance <= self.right)
        return inside


# These are functions and not properties, because torch.compile before torch 2.7 cannot trace a
# property of a tuple that holds a tensor.
def unbounded(band: Band) -> bool:
    return band.left is None and band.right is None


def top_left_causal(band: Band) -> bool:
    """Whether SDPA's is_causal means the same as the band."""
    plain_offset = not isinstance(band.offset, Tensor) and band.offset == 0
    return band.left is None and band.right == 0 and plain_offset


def seen_from_top_left(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values, bhnd, that any query sees where the first one sees the first key: SDPA
    would multiply the others by 0, which is NaN if they are not finite.
    """
    nq, nk = q.shape[2], k.shape[2]
    return (k, v) if nk <= nq else (k[:, :, :nq], v[:, :, :nq])


def visible_keys(q: Tensor, k: Tensor, band: Band, packed: Packed | None) -> Tensor | None:
    """Which keys band and packed sequences let each query see: bool, broadcastable to
    ``(B, Hq, Nq, Nk)``; None if every query sees every key.
    """
    if packed is not None:
        rows, keys = packed
        own, row_of_key = keys.of(rows)
        visible = own & in_sequences(rows)[:, None]
        if not unbounded(band):
            first = rows.row + (
                of_rows(band.offset, rows) if isinstance(band.offset, Tensor) else band.offset
            )
            visible = visible & band.contains(row_of_key - first[:, None])
        return visible[None, None]
    if unbounded(band) and k.shape[2] > 0:
        return None
    row = torch.arange(q.shape[2], device=q.device)[:, None]
    key = torch.arange(k.shape[2], device=q.device)
    offset = band.offset[:, None, None, None] if isinstance(band.offset, Tensor) else band.offset
    visible = band.contains(key - row - offset)
    return visible if visible.ndim == 4 else visible[None, None]


class MaskTensors(NamedTuple):
    """The masks of a call that are tensors, as they were given."""

    attn_mask: Tensor | None
    alibi_slopes: Tensor | None
    key_ranges: Tensor | None
    block_mask: Tensor | None


class Drops(NamedTuple):
    """Which weights are dropped."""

    p: float
    state: Tensor

    def factors(self, q: Tensor, k: Tensor, packed: Packed | None, dtype: torch.dtype) -> Tensor:
        """What each weight is multiplied by, 0 or 1 / (1 - p): ``(B, Hq, Nq, Nk)``."""
        head = torch.arange(q.shape[1], device=q.device)[:, None, None]
        if packed is not None:
            sequence = packed.q.sequence[:, None]
            query, key = packed.q.row[:, None], packed.k.of(packed.q)[1]
        else:
            sequence = torch.arange(q.shape[0], device=q.device)[:, None, None, None]
            query = torch.arange(q.shape[2], device=q.device)[:, None]
            key = torch.arange(k.shape[2], device=q.device)
        keep = kept(sequence * q.shape[1] + head, query, key, self.p, self.state)
        factors = keep.to(dtype) / (1 - self.p)
        return factors if factors.ndim == 4 else factors[None]


def no_masks(masks: MaskTensors) -> bool:
    return all(mask is None for mask in masks)


def in_ranges(visible: Tensor | None, key_ranges: Tensor, nk: int) -> Tensor:
    dense = to_dense(key_ranges, nk)
    return dense if visible is None else visible & dense


def in_blocks(visible: Tensor | None, block_mask: Tensor, nq: int, nk: int) -> Tensor:
    seen = (block_mask != 0).repeat_interleave(MASK_BLOCK, 2)[:, :, :nq]
    seen = seen.repeat_interleave(MASK_BLOCK, 3)[..., :nk]
    return seen if visible is None else visible & seen


def alibi(slopes: Tensor, q: Tensor, k: Tensor, band: Band, packed: Packed | None) -> Tensor:
    """What ALiBi adds to the scores: ``(B or 1, Hq, Nq, Nk)``, float64 for such q, else float32."""
    slopes = slopes.double() if q.dtype == torch.float64 else slopes
    if packed is not None:
        rows, keys = packed
        offset = of_rows(band.offset, rows) if isinstance(band.offset, Tensor) else band.offset
        distance = (rows.row + offset)[:, None] - keys.of(rows)[1]
        of_row = slopes if slopes.ndim == 1 else of_rows(slopes, rows)  # (Hq,) or (Tq, Hq)
        by_head = of_row.expand(len(rows.row), -1).t()[:, :, None]
        return -(by_head * distance.abs())[None]
    offset = band.offset[:, None, None, None] if isinstance(band.offset, Tensor) else band.offset
    row = torch.arange(q.shape[2], device=q.device)[:, None]
    distance = row + offset - torch.arange(k.shape[2], device=q.device)
    bias = -(slopes[..., None, None] * distance.abs())
    return bias if bias.ndim == 4 else bias[None]


class Mask(NamedTuple):
    """Which keys every query sees, and a form of it for softmax, in which no row is empty."""

    real: Tensor  # bool, broadcastable to (B, Hq, Nq, Nk)
    visible: Tensor  # bool; a row that sees no key is all True, and its result is replaced later
    seen: Tensor  # bool (..., Nq, 1): whether the row sees any key
    bias: Tensor | None  # a floating attn_mask with 0 for -inf, whose keys are not visible

    @classmethod
    def of(
        cls, visible: Tensor | None, attn_mask: Tensor | None, bias: Tensor | None
    ) -> Mask | None:
        """`bias` is added to the scores, too."""
        if attn_mask is not None:
            given = attn_mask[(None,) * (4 - attn_mask.ndim)]
            if given.dtype != torch.bool:
                excluded = given == _MINUS_INF
                added = torch.where(excluded, 0.0, given)
                bias = added if bias is None else bias + added
                given = ~excluded
            visible = given if visible is None else visible & given
        if visible is None:
            if bias is None:
                return None
            visible = torch.ones_like(bias, dtype=torch.bool)
        seen = visible.any(-1, keepdim=True)
        return cls(visible, visible | ~seen, seen, bias)

    def for_sdpa(self, nq: int, nk: int) -> Tensor:
        mask = self.visible
        if self.bias is not None:
            mask = mask_for_fused_kernels(torch.where(mask, self.bias, _MINUS_INF), nk)
        return mask.expand(-1, -1, nq, nk)


def largest_of_rows(x: Tensor) -> Tensor:
    """The largest magnitude of each row; NaN where there is one."""
    largest: Tensor = torch.linalg.vector_norm(x.detach(), math.inf, -1)
    return largest


def any_of(visible: Tensor, of_key: Tensor) -> Tensor:
    """Whether a query sees a key of which something is true, for each of x things.

    Args:
        visible: bool ``(B or 1, H or 1, Nq or 1, Nk)``.
        of_key: bool ``(B, H, Nk, x)``.

    Returns:
        Bool ``(B, H, Nq or 1, x)``.
    """
    # einsum does not expand the mask's dimensions of size 1; a broadcast matmul would copy the mask
    # for each head. A sum of ones in 16 bits may be rounded, but never to 0.
    dtype = torch.float32 if visible.device.type == "cpu" else torch.bfloat16
    return torch.einsum("bhqk,bhkx->bhqx", visible.to(dtype), of_key.to(dtype)) > 0


def sees_non_finite(visible: Tensor, k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Whether each query sees a non-finite k, and whether it sees a non-finite v: two bool tensors
    ``(..., Nq, 1)``.
    """
    bad = torch.stack([~x.isfinite().all(-1) for x in (k, v)], -1)  # (B, Hkv, Nk, 2)
    hits = any_of(visible, bad.repeat_interleave(heads // max(k.shape[1], 1), 1))
    return hits[..., :1], hits[..., 1:]


def nan_where(spoiled: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(spoiled, dtype=dtype).masked_fill(spoiled, math.nan)
