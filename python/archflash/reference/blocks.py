"""What the options of a call mean, and the call cut into blocks: some queries of one head with all
keys of their sequence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from archflash import _bias, _dropout

_BLOCK_ELEMENTS = 1 << 24  # scores held at once: 128 MiB in float64
SCALE_ROWS = 64  # rows that share a descale given per block
SCALED_NUMBERS = 32  # numbers that share a block scale
_MASK_BLOCK = 64  # rows and keys of a block of block_mask


@dataclasses.dataclass(frozen=True)
class Options:
    """The keywords of archflash.attention that influence a result."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    q_offset: int | Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    attn_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    key_ranges: Tensor | None = None
    block_mask: Tensor | None = None
    key_indices: Tensor | None = None
    topk_lengths: Tensor | None = None
    dropout_p: float | None = None
    rng_state: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    layout: str = "bhnd"


@dataclasses.dataclass(frozen=True)
class Block:
    """Some queries of one head, with all keys of their sequence."""

    q: Tensor  # (rows, D)
    k: Tensor  # (Nk, D)
    v: Tensor  # (Nk, Dv)
    visible: Tensor  # bool (rows, Nk)
    bias: Tensor | None  # (rows, Nk)
    factors: Tensor | None  # of dropout (rows, Nk)
    sink: Tensor | None  # one number
    scale: float
    softcap: float | None


def by_head(call: Options, x: Tensor) -> Tensor:
    """A tensor of the call as (B, H, N, columns); packed sequences have a B of 1."""
    if call.cu_seqlens_q is not None:
        return x.transpose(0, 1)[None]
    return x.transpose(1, 2) if call.layout == "bnhd" else x


def as_given(call: Options, x: Tensor) -> Tensor:
    """The way back from `by_head`."""
    if call.cu_seqlens_q is not None:
        return x[0].transpose(0, 1)
    return x.transpose(1, 2) if call.layout == "bnhd" else x


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a block lies in tensors (B, H, N, columns)."""

    batch: int
    head: int
    kv_head: int
    rows: slice  # of q
    keys: slice  # of k and v


def blocks(
    call: Options, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype
) -> Iterator[tuple[Place, Block]]:
    """The blocks of a call whose tensors are (B, H, N, columns), their numbers in `dtype`."""
    scale = 1 / math.sqrt(q.shape[-1]) if call.scale is None else call.scale
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    mask = None
    if call.attn_mask is not None:
        mask = call.attn_mask
        if _bias.is_causal_bias(mask):
            _bias.check_lengths(mask, q.shape[2], k.shape[2])
            mask = _bias.as_mask(mask, q.device)
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    q_descale, k_descale, v_descale = (
        by_head(call, x) if x is not None and x.ndim == 4 else x
        for x in (call.q_descale, call.k_descale, call.v_descale)
    )
    for number, batch, q_rows, k_rows in _sequences(call, q, k):
        nq, nk = q_rows.stop - q_rows.start, k_rows.stop - k_rows.start
        offset = nk - nq
        if call.q_offset is not None:
            offset = (
                int(call.q_offset[number]) if isinstance(call.q_offset, Tensor) else call.q_offset
            )
        for head in range(q.shape[1]):
            head_k = _values(
                k[batch, head // group, k_rows], k_descale, number, head // group, dtype
            )
            head_v = _values(
                v[batch, head // group, k_rows], v_descale, number, head // group, dtype, -2
            )
            if q_descale is not None and q_descale.numel() > 1:
                per_head = q_descale.shape[min(q_descale.ndim - 1, 1)] == q.shape[1]
            else:
                per_head = True
            q_head = head if per_head else head // group
            head_q = _values(q[batch, head, q_rows], q_descale, number, q_head, dtype)
            step = max(1, _BLOCK_ELEMENTS // max(1, nk))
            for start in range(0, nq, step):
                rows = torch.arange(start, min(start + step, nq), device=q.device)
                visible = _visible(call, rows + offset, nk)
                bias = None
                if mask is not None:
                    given = mask[batch, head, q_rows, k_rows][rows]
                    if given.dtype == torch.bool:
                        visible = visible & given
                    else:
                        visible = visible & (given != -math.inf)
                        bias = given.to(dtype)
                visible = visible & _unhidden(call, batch, head, rows, nk)
                if call.key_indices is not None:
                    often = _listed(call, batch, head // group, rows, nq, nk)
                    visible = visible & (often > 0)
                    bias = often.double().log().to(dtype)  # a key that is named twice counts twice
                if call.alibi_slopes is not None:
                    of_distance = _alibi(call.alibi_slopes, number, head, rows + offset, nk)
                    bias = of_distance.to(dtype) if bias is None else bias + of_distance.to(dtype)
                block = Block(
                    q=head_q[rows], k=head_k, v=head_v, visible=visible, bias=bias,
                    factors=_dropout_factors(call, number * q.shape[1] + head, rows, nk, dtype),
                    sink=None if call.sinks is None else call.sinks[head].to(dtype), scale=scale,
                    softcap=call.softcap,
                )  # fmt: skip
                first = q_rows.start + start
                here = slice(first, first + len(rows))
                yield Place(batch, head, head // group, here, k_rows), block


def _sequences(call: Options, q: Tensor, k: Tensor) -> Iterator[tuple[int, int, slice, slice]]:
    """Number, batch index, query rows and key rows of each sequence."""
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        for batch in range(q.shape[0]):
            yield batch, batch, slice(0, q.shape[2]), slice(0, k.shape[2])
        return
    q_ends, k_ends = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    for number in range(len(q_ends) - 1):
        q_rows = slice(q_ends[number], q_ends[number + 1])
        yield number, 0, q_rows, slice(k_ends[number], k_ends[number + 1])


def _values(
    x: Tensor, descale: Tensor | None, number: int, head: int, dtype: torch.dtype, dim: int = -1
) -> Tensor:
    """The numbers that a stored (N, D) slice stands for, in `dtype`. Block scales lie along
    `dim`.
    """
    if descale is None:
        return x.to(dtype)
    if descale.ndim == 4:
        return dequantize_mxfp8(x, descale[number, head], dim).to(dtype)
    if descale.ndim == 3:
        factor = descale[number, head].repeat_interleave(SCALE_ROWS)[: len(x), None]
    elif descale.ndim == 2:
        factor = descale[number, head]
    elif descale.numel() == 1:
        factor = descale.reshape(())
    else:
        factor = descale[head]
    return (x.double() * factor.double()).to(dtype)


def dequantize_mxfp8(values: Tensor, scales: Tensor, dim: int = -1) -> Tensor:
    """The numbers that `archflash.quantize_mxfp8` has made of others, in float64.

    Args:
        values: float8_e4m3fn or float8_e5m2.
        scales: float8_e8m0fnu, shaped as values, with a 32nd of its size along `dim`.
        dim: the dimension along which 32 numbers share a scale.

    Returns:
        float64, shaped as values.
    """
    by_number = scales.double().repeat_interleave(SCALED_NUMBERS, dim)
    return values.double() * by_number.narrow(dim, 0, values.shape[dim])


def _visible(call: Options, position: Tensor, nk: int) -> Tensor:
    """Bool (rows, Nk): which keys the queries at these positions among the keys may see."""
    distance = torch.arange(nk, device=position.device) - position[:, None]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if call.causal:
        visible &= distance <= 0
    left, right = _bias.sides_of(call.window)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible


def _unhidden(call: Options, batch: int, head: int, rows: Tensor, nk: int) -> Tensor:
    """Bool (rows, Nk): which keys key_ranges and block_mask let these rows of a head see."""

    def of_head(x: Tensor) -> Tensor:
        return x[batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]

    key = torch.arange(nk, device=rows.device)
    seen = torch.ones(len(rows), nk, dtype=torch.bool, device=rows.device)
    if call.key_ranges is not None:
        ranges = of_head(call.key_ranges)  # (Nq or 1, n, 2)
        ranges = ranges.expand(max(int(rows.max()) + 1, len(ranges)), -1, -1)[rows]
        begin, end = ranges[:, :, 0, None], ranges[:, :, 1, None]
        seen &= ((key >= begin) & (key < end)).any(1)
    if call.block_mask is not None:
        blocks = of_head(call.block_mask) != 0
        seen &= blocks[rows // _MASK_BLOCK][:, key // _MASK_BLOCK]
    return seen


def _listed(call: Options, batch: int, kv_head: int, rows: Tensor, nq: int, nk: int) -> Tensor:
    """How often the lists of these rows name each key: (rows, Nk)."""

    def of_head(x: Tensor) -> Tensor:
        return x[batch if x.shape[0] > 1 else 0, kv_head if x.shape[1] > 1 else 0]

    assert call.key_indices is not None
    lists = of_head(call.key_indices)
    number = rows if len(lists) == nq else rows // _MASK_BLOCK
    entries = lists[number].long()
    counts = (entries >= 0) & (entries < nk)
    if call.topk_lengths is not None:
        lengths = of_head(call.topk_lengths)
        place = torch.arange(entries.shape[1], device=rows.device)
        counts &= place < lengths[number if len(lengths) > 1 else 0].reshape(-1, 1)
    often = torch.zeros(len(rows), nk + 1, device=rows.device)
    return often.scatter_add_(1, torch.where(counts, entries, nk), counts.float())[:, :nk]


def _dropout_factors(
    call: Options, batch_head: int, rows: Tensor, nk: int, dtype: torch.dtype
) -> Tensor | None:
    """What dropout multiplies the weights of these queries by, 0 or 1 / (1 - p): (rows, Nk)."""
    if not call.dropout_p or call.rng_state is None:
        return None
    key = torch.arange(nk, device=rows.device)
    number = torch.tensor(batch_head, device=rows.device)
    keep = _dropout.kept(number, rows[:, None], key, call.dropout_p, call.rng_state)
    return keep.to(dtype) / (1 - call.dropout_p)


def _alibi(slopes: Tensor, number: int, head: int, position: Tensor, nk: int) -> Tensor:
    """What ALiBi adds to the scores of the queries at these positions: (rows, Nk), float64."""
    slope = slopes[head] if slopes.ndim == 1 else slopes[number, head]
    key = torch.arange(nk, device=position.device)
    return -slope.double() * (position[:, None] - key).abs()


def seen_keys(batch: int, nq: int, nk: int, call: dict[str, Any]) -> list[tuple[int, int]]:
    """For each batch, the first key that some query sees by causal and window, and the one behind
    the last. Packed sequences are one batch, of which all keys count.
    """
    if call.get("cu_seqlens_k") is not None:
        return [(0, min(int(call["cu_seqlens_k"][-1]), nk))]
    left, right = _bias.sides_of(call.get("window"))
    if call.get("causal"):
        right = 0 if right is None else min(right, 0)
    offset = call.get("q_offset")
    if offset is None:
        offset = nk - nq
    offsets = offset.tolist() if isinstance(offset, Tensor) else [offset] * batch
    found = []
    for start in offsets:
        begin = 0 if left is None else min(max(start - left, 0), nk)
        end = nk if right is None else min(max(nq + start + right, 0), nk)
        found.append((begin, max(begin, end)))
    return found
