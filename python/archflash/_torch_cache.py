"""The implementation `torch` of attention_with_kvcache, by PyTorch's own operations.

Lengths and page tables stay on the device, so the whole capacity of every sequence is computed and
a mask says which of it counts: right everywhere, and much slower than a kernel that stops at a
sequence's length. New rows are written into the caches first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from archflash import _autocast, _torch
from archflash._bias import sides_of
from archflash._packed_rows import unpack
from archflash._torch_masks import packed_rows
from archflash.masks import from_key_indices
from archflash.reference.formula import FP8


class _Rows(NamedTuple):
    """To which sequence each query row belongs, and its number there; ``(B, Nq)``, or ``(Tq,)`` for
    packed queries, whose rows past the last sequence have the number B.
    """

    sequence: Tensor
    row: Tensor
    owned: Tensor  # bool: whether the row belongs to a sequence
    lengths: Tensor  # (B,) queries of each sequence

    def of(self, numbers: Tensor) -> Tensor:
        """Of numbers ``(B,)`` that of each row's sequence; 0 past the last sequence."""
        return torch.cat([numbers, numbers.new_zeros(1)])[self.sequence]

    @property
    def clamped(self) -> Tensor:
        """The sequences, of which the last one also has the rows past it."""
        return self.sequence.clamp(max=max(self.lengths.shape[0] - 1, 0))


def orders_queries(
    causal: bool, window: tuple[int | None, int | None] | None, attention_chunk: int | None
) -> bool:
    """Whether the queries of a sequence have positions of their own, as a bounded mask needs them.
    Otherwise a rotary embedding rotates all of them by the first one.
    """
    bounded = any(side is not None for side in sides_of(window))
    return causal or bounded or attention_chunk is not None


def _as_given(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function outside of autocast, which must not change the dtypes of a call."""

    @functools.wraps(function)
    def call(q: Tensor, *given: Any, **named: Any) -> Any:
        with _autocast.no_autocast(q.device.type):
            return function(q, *given, **named)

    return call


@_as_given
def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None, k_new: Tensor | None = None, v_new: Tensor | None = None,
    cache_batch_idx: Tensor | None = None, leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False, qv: Tensor | None = None, attention_chunk: int | None = None,
    cu_seqlens_q: Tensor | None = None, causal: bool = False,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None, key_ranges: Tensor | None = None,
    key_indices: Tensor | None = None, topk_lengths: Tensor | None = None,
    physical_indices: bool = False, packed_rows: str | None = None, scale: float | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, out_dtype: torch.dtype | None = None, layout: str = "bhnd",
    out: Tensor | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """`archflash.attention_with_kvcache` by PyTorch operations; arguments as they were checked."""
    if packed_rows is not None:
        k_cache, v_cache = unpack(k_cache, packed_rows)
    packed = cu_seqlens_q is not None
    rows = _rows_of(q, cu_seqlens_q, layout)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
    swap = layout == "bhnd"
    # Views (batch, rows, heads, dim) from here on.
    keys, values = (x.transpose(1, 2) if swap else x for x in (k_cache, v_cache))
    if physical_indices:
        # All queries see one sequence, which is the whole cache.
        batch = q.shape[0]
        size = keys.shape[0] * keys.shape[1]
        keys, values = (x.reshape(1, size, *x.shape[2:]) for x in (keys, values))
        cache_seqlens = torch.full((batch,), size, dtype=torch.int32, device=q.device)
        cache_batch_idx = torch.zeros_like(cache_seqlens)
    assert cache_seqlens is not None
    lengths = cache_seqlens.long()
    first = torch.zeros_like(lengths) if leftpad_k is None else leftpad_k.long()
    batch = lengths.shape[0]
    if page_table is not None:
        capacity = page_table.shape[1] * keys.shape[1] if keys.shape[0] else 0
        sequence_rows = None
    else:
        capacity = keys.shape[1] if keys.shape[0] else 0
        sequence_rows = (
            torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx
        ).long()

    added = 0
    if k_new is not None and v_new is not None:
        new = tuple(x.transpose(1, 2) if swap else x for x in (k_new, v_new))
        added = new[0].shape[1]
        position = lengths[:, None] + torch.arange(added, device=q.device)
        if rotary_cos is not None and rotary_sin is not None:
            tables = (rotary_cos, rotary_sin, rotary_interleaved)
            new = (_rotated(new[0], (position - first[:, None])[..., None], *tables), new[1])
            # Rows of a call without order among them all have the position of the first.
            ordered = orders_queries(causal, window, attention_chunk)
            at = rows.of((lengths - first).clamp(min=0)) + (rows.row if ordered else 0)
            at = at[:, None] if packed else at[:, None, :] if swap else at[:, :, None]
            q = torch.empty_like(q).copy_(_rotated(q, at, *tables))
        for cache, x in zip((keys, values), new, strict=True):
            append(cache, x, position, capacity, page_table, sequence_rows)

    total = (lengths + added).clamp(0, capacity)
    # The band is relative to the last query and the last key.
    offset = rows.of(total - rows.lengths) + rows.row
    key = torch.arange(capacity, device=q.device)
    distance = key - offset[..., None]  # (B, Nq, capacity) or (Tq, capacity)
    visible = _band(distance, causal, window)
    if attention_chunk is not None:
        start = offset - (offset - rows.of(first)).remainder(attention_chunk)
        visible &= (key >= start[..., None]) & (key < (start + attention_chunk)[..., None])
    kept = (key < total[:, None]) & (key >= first[:, None])  # (B, capacity)
    if packed:
        # All keys are those of one sequence, of which a row sees those of its own.
        own = torch.arange(batch, device=q.device) == rows.sequence[:, None]  # (Tq, B)
        visible = visible[:, None] & (own & rows.owned[:, None])[..., None] & kept
        visible = visible.flatten(1)[None, None]
    else:
        visible = (visible & kept[:, None])[:, None]
    if attn_mask is not None or key_ranges is not None:
        ends = total[rows.clamped], first[rows.clamped]
        masks = _masks(attn_mask, key_ranges, key, *ends)
        visible = visible & (masks.repeat(1, 1, 1, batch) if packed else masks)

    dense = tuple(_dense(cache, page_table, sequence_rows) for cache in (keys, values))
    if q.dtype in FP8 or dense[0].dtype in FP8:
        q = _scaled(q, q_descale, layout, rows.clamped if packed else None)
        dense = tuple(
            _scaled(x, descale, "bnhd", None)
            for x, descale in zip(dense, (k_descale, v_descale), strict=True)
        )
    if qv is not None:  # the scores are those of both queries beside one another
        if scale is None:
            scale = 1.0 / math.sqrt(q.shape[-1] + qv.shape[-1])
        q = torch.cat([q, qv], -1)
        dense = (torch.cat(dense, -1), dense[1])
    if packed:
        dense = tuple(x.flatten(0, 1)[None] for x in dense)
        q = q[None]
    q = q if swap and not packed else q.transpose(1, 2)  # (batch, heads, rows, dim)
    bias = None  # (B, heads, Nq, capacity), or for packed queries (1, heads, Tq, B * capacity)
    if key_indices is not None:
        bias = _of_lists(key_indices, topk_lengths, first, total, q.shape[2], capacity)
        if bias.shape[1] > 1:
            bias = bias.repeat_interleave(q.shape[1] // bias.shape[1], 1)
    elif alibi_slopes is not None:
        bias = _of_slopes(alibi_slopes, distance, rows.clamped if packed else None, batch)
    result = _torch.attention(
        q, *(x.transpose(1, 2) for x in dense),
        attn_mask=visible if bias is None else bias.masked_fill(~visible, -math.inf),
        softcap=softcap, sinks=sinks, scale=scale, out_dtype=out_dtype, return_lse=return_lse,
    )  # fmt: skip
    answer, lse = result if isinstance(result, tuple) else (result, None)
    if packed or not swap:
        answer = answer.transpose(1, 2)
    if packed:
        answer = answer[0]
    if out is not None:
        answer = out.copy_(answer)
    if lse is None:
        return answer
    return answer, lse[0] if packed else lse


def _band(distance: Tensor, causal: bool, window: tuple[int | None, int | None] | None) -> Tensor:
    """Which keys at a distance from a query its causal mask and window keep."""
    left, right = sides_of(window)
    if causal:
        right = 0
    kept = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        kept &= distance >= -left
    if right is not None:
        kept &= distance <= right
    return kept


def _of_slopes(slopes: Tensor, distance: Tensor, sequence: Tensor | None, batch: int) -> Tensor:
    """What ALiBi adds to scores. `sequence` has the sequence of each packed query."""
    away = distance.abs().float()
    slopes = slopes.expand(batch, -1)
    if sequence is None:
        return -slopes[:, :, None, None] * away[:, None]
    return -slopes[sequence].T[None, :, :, None] * away.repeat(1, batch)[None, None]


def _of_lists(
    key_indices: Tensor, topk_lengths: Tensor | None, first: Tensor, total: Tensor, nq: int,
    capacity: int,
) -> Tensor:  # fmt: skip
    """What lists of keys add to scores. Their positions are counted behind the padding, and end
    with the sequence.
    """
    first, last = (x[:, None, None, None] for x in (first, total - first))
    at = torch.where((key_indices >= 0) & (key_indices < last), key_indices + first, -1)
    return from_key_indices(at, nq, capacity, topk_lengths)


def _masks(
    attn_mask: Tensor | None, key_ranges: Tensor | None, key: Tensor, end: Tensor, first: Tensor
) -> Tensor:
    """What attn_mask and key_ranges keep.

    Args:
        key: ``(capacity,)``, 0, 1, and so on.
        end, first: the rows behind the last and before the first key of a query's sequence,
            ``(B, Nq)`` or ``(Tq,)``.

    Returns:
        bool ``(B or 1, heads or 1, Nq, capacity)``, ``(1, heads or 1, Tq, capacity)``.
    """
    end, first = (x if x.ndim == 2 else x[None] for x in (end, first))
    kept = torch.ones(1, 1, 1, key.shape[0], dtype=torch.bool, device=key.device)
    if key_ranges is not None:
        at = (key - first[..., None])[:, None, :, None]
        begins, ends = key_ranges[..., :1], key_ranges[..., 1:]
        kept = ((at >= begins) & (at < ends)).any(3)
    if attn_mask is not None:
        columns = attn_mask.shape[3]
        column = (key - end[..., None] + columns)[:, None]  # (B, 1, Nq, capacity)
        sizes = (attn_mask.shape[:3], column.shape[:3])
        shape = torch.broadcast_shapes(*sizes)  # type: ignore[no-untyped-call]
        at = column.clamp(0, columns - 1).expand(*shape, -1)
        of_key = attn_mask.expand(*shape, -1).gather(3, at)
        kept = kept & (of_key | (column < 0) | (column >= columns))
    return kept


def _rows_of(q: Tensor, cu_seqlens_q: Tensor | None, layout: str) -> _Rows:
    if cu_seqlens_q is None:
        batch, nq = q.shape[0], q.shape[2 if layout == "bhnd" else 1]
        sequence = torch.arange(batch, device=q.device)[:, None].expand(batch, nq)
        row = torch.arange(nq, device=q.device).expand(batch, nq)
        lengths = torch.full((batch,), nq, device=q.device)
        return _Rows(sequence, row, torch.ones_like(row, dtype=torch.bool), lengths)
    rows = packed_rows(cu_seqlens_q, q.shape[0])
    sequences = cu_seqlens_q.shape[0] - 1
    owned = (rows.sequence < sequences) & (rows.row >= 0)
    return _Rows(rows.sequence, rows.row, owned, cu_seqlens_q.long().diff())


def _rotated(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x with its first columns rotated; `position` has the shape of x without the last dimension,
    or one that broadcasts to it.
    """
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    at = position.clamp(0, cos.shape[0] - 1)
    cos, sin = (table.to(kind)[at] for table in (cos, sin))
    half = cos.shape[-1]
    rotating, rest = x[..., : 2 * half].to(kind), x[..., 2 * half :]
    pairs = (
        rotating.reshape(*rotating.shape[:-1], half, 2)
        if interleaved
        else rotating.reshape(*rotating.shape[:-1], 2, half).mT
    )
    one, other = pairs.unbind(-1)
    turned = torch.stack([one * cos - other * sin, one * sin + other * cos], -1)
    turned = (turned if interleaved else turned.mT).flatten(-2)
    if x.dtype in FP8:
        largest = torch.finfo(x.dtype).max
        turned = turned.clamp(-largest, largest)
    turned = turned.to(x.dtype)
    if rest.shape[-1] == 0:
        return turned
    if x.dtype in FP8:  # torch.cat does not take them on every device
        both = torch.cat([turned.view(torch.uint8), rest.view(torch.uint8)], -1)
        return both.view(x.dtype)
    return torch.cat([turned, rest], -1)


def append(
    cache: Tensor,  # (sequences or pages, rows, heads, dim)
    new: Tensor,  # (B, n_new, heads, dim)
    position: Tensor,  # (B, n_new)
    capacity: int,
    page_table: Tensor | None,
    sequence_rows: Tensor | None,
) -> None:
    """Writes new rows into a cache in place. A row whose place is outside the cache or the page
    table is written nowhere.
    """
    if new.numel() == 0 or cache.numel() == 0 or capacity == 0:
        return
    valid = (position >= 0) & (position < capacity)
    inside = position.clamp(0, capacity - 1)
    if page_table is None:
        assert sequence_rows is not None
        block, row = sequence_rows[:, None].expand_as(inside), inside
    else:
        size = cache.shape[1]
        block, row = page_table.long().gather(1, inside // size), inside % size
    valid = (valid & (block >= 0) & (block < cache.shape[0])).flatten()
    block, row = block.clamp(0, cache.shape[0] - 1).flatten(), row.flatten()
    cache, new = (x.view(torch.uint8) if x.dtype in FP8 else x for x in (cache, new))
    # Nothing on the host knows which rows are valid, so every row is written somewhere: the others
    # are written as a copy of the first valid one, or where there is none as what is there already.
    own = torch.arange(valid.shape[0], device=valid.device)
    source = torch.where(valid, own, valid.int().argmax())
    block, row, valid = block[source], row[source], valid[source]
    values = torch.where(valid[:, None, None], new.flatten(0, 1)[source], cache[block, row])
    cache.index_put_((block, row), values)


def _dense(cache: Tensor, page_table: Tensor | None, sequence_rows: Tensor | None) -> Tensor:
    """The caches of all sequences, ``(B, capacity, heads, dim)``. What lies behind a sequence's
    length may be any row.
    """
    bits = cache.view(torch.uint8) if cache.dtype in FP8 else cache
    if page_table is not None:
        batch, pages = page_table.shape
        if cache.shape[0] == 0:
            return cache.new_empty(batch, 0, *cache.shape[2:])
        at = page_table.long().clamp(0, cache.shape[0] - 1)
        dense = bits[at].reshape(batch, pages * cache.shape[1], *cache.shape[2:])
    else:
        assert sequence_rows is not None
        if cache.shape[0] == 0:
            return cache.new_empty(sequence_rows.shape[0], 0, *cache.shape[2:])
        dense = bits[sequence_rows.clamp(0, cache.shape[0] - 1)]
    return dense.view(cache.dtype)


def _scaled(x: Tensor, descale: Tensor | None, layout: str, sequence: Tensor | None) -> Tensor:
    """The numbers that stored ones stand for, in float32.

    Args:
        x: (batch, rows, heads, dim), (batch, heads, rows, dim) with layout "bhnd", or where
            `sequence` is given (tokens, heads, dim).
        descale: None, one number, (heads,) or (batch, heads), or with a divisor of the heads.
        layout: "bnhd" or "bhnd".
        sequence: the sequence of each token.
    """
    x = x.float()
    if descale is None:
        return x
    if descale.numel() == 1:
        return x * descale.reshape(())
    heads = x.shape[1 if sequence is not None or layout == "bhnd" else 2]
    if heads == 0:
        return x
    factor = descale.repeat_interleave(heads // descale.shape[-1], -1)
    if sequence is not None:
        return x * (factor if factor.ndim == 1 else factor[sequence])[..., None]
    factor = factor.reshape(-1, heads)
    return x * (factor[:, :, None, None] if layout == "bhnd" else factor[:, None, :, None])
