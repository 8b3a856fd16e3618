"""Masks as data: key_ranges and block_mask for `archflash.attention`.

A mask of ranges says for each query which keys it sees, as the union of up to four half-open ranges
``[begin, end)``: an int32 tensor ``(batch or 1, heads or 1, nq or 1, n, 2)`` in place of a number
for each query and key. Kernels skip the blocks of keys that no query of a tile sees. The functions
here make such tensors on the device of their arguments, and read no values on the host unless they
say so.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from archflash._archflash import MASK_BLOCK, MOST_RANGES
from archflash._block_masks import (
    from_block_lists,
    from_blocks,
    from_bsr,
    from_chunks,
    from_flex,
    from_ragged_blocks,
    from_vertical_and_slash,
    sliding_tiles,
    summarize_mask,
    tile_order,
)
from archflash._eager import is_tracing
from archflash._mask_arguments import checked
from archflash._query_ranges import (
    from_flashmask,
    from_query_ranges,
    from_rows,
    query_ranges_to_dense,
)

__all__ = [
    "bidirectional_spans",
    "documents",
    "from_block_lists",
    "from_blocks",
    "from_bsr",
    "from_chunks",
    "from_flashmask",
    "from_flex",
    "from_key_indices",
    "from_query_ranges",
    "from_ragged_blocks",
    "from_rows",
    "from_vertical_and_slash",
    "prefix_lm",
    "query_ranges_to_dense",
    "sliding_tiles",
    "sliding_window_with_global",
    "summarize_mask",
    "tile_order",
    "to_dense",
    "tree",
]


@checked
def documents(ids: Tensor) -> Tensor:
    """Each query sees the keys of its own document. Add causal=True for text.

    Args:
        ids: which document each token belongs to, integers ``(n,)`` or ``(batch, n)``. Neighbouring
            tokens with equal numbers are one document.

    Returns:
        key_ranges, int32 ``(batch or 1, 1, n, 1, 2)``.

    Raises:
        ValueError: ids of another shape.

    Example:
        >>> import archflash, torch
        >>> archflash.masks.documents(torch.tensor([7, 7, 8]))[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [2, 3]]
    """
    if ids.ndim not in (1, 2):
        raise ValueError(f"ids has shape {tuple(ids.shape)}: it must be (n,) or (batch, n)")
    ids = ids if ids.ndim == 2 else ids[None]
    n = ids.shape[1]
    place = torch.arange(n, device=ids.device)
    before = ids.gather(1, (place - 1).clamp(min=0).expand_as(ids))
    starts = (ids != before) | (place == 0)
    number = starts.cumsum(1) - 1
    # Where each document starts, and behind the last one n. The last place is for other tokens.
    first = torch.full((ids.shape[0], n + 2), n, device=ids.device)
    first = first.scatter(1, torch.where(starts, number, n + 1), place.expand_as(number))
    return _ranges((first.gather(1, number), first.gather(1, number + 1)))


@checked
def prefix_lm(lengths: Tensor, nq: int, nk: int | None = None) -> Tensor:
    """Every query sees the first keys of its sequence, its prefix, and of the rest those up to its
    own position: causal attention with a bidirectional prefix. Do not add causal=True.

    Args:
        lengths: the length of each sequence's prefix, integers ``(batch,)``.
        nq: number of queries, which are the last ones of the sequence.
        nk: number of keys; default nq.

    Returns:
        key_ranges, int32 ``(batch, 1, nq, 1, 2)``.

    Raises:
        ValueError: lengths of another shape.
    """
    if lengths.ndim != 1:
        raise ValueError(f"lengths has shape {tuple(lengths.shape)}: it must be (batch,)")
    position = _positions(nq, nk, lengths.device)
    end = torch.maximum(lengths[:, None], position + 1)
    return _ranges((torch.zeros_like(end), end))


@checked
def bidirectional_spans(spans: Tensor, nq: int, nk: int | None = None) -> Tensor:
    """Causal attention in which the tokens of a span see each other, as those of an image do in
    text. Do not add causal=True.

    Args:
        spans: half-open ranges of positions, integers ``(m, 2)`` or ``(batch, m, 2)``. Spans must
            not overlap; empty ones fill up a batch.
        nq: number of queries, which are the last ones of the sequence.
        nk: number of keys; default nq.

    Returns:
        key_ranges, int32 ``(batch or 1, 1, nq, 1, 2)``.

    Raises:
        ValueError: spans of another shape.
    """
    if spans.ndim not in (2, 3) or spans.shape[-1] != 2:
        raise ValueError(
            f"spans has shape {tuple(spans.shape)}: it must be (m, 2) or (batch, m, 2)"
        )
    spans = spans if spans.ndim == 3 else spans[None]
    position = _positions(nq, nk, spans.device)
    begin, end = spans[:, :, 0, None], spans[:, :, 1, None]
    inside = (position >= begin) & (position < end)  # (batch, m, nq)
    seen = torch.where(inside, end, position + 1)
    seen = torch.cat([seen, (position + 1).expand(len(spans), 1, nq)], 1).amax(1)
    return _ranges((torch.zeros_like(seen), seen))


@checked
def sliding_window_with_global(
    nq: int,
    nk: int | None = None,
    *,
    left: int,
    global_keys: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """Causal attention in which a query sees its last keys, and the first keys of the sequence
    always. Do not add causal=True.

    Args:
        nq: number of queries, which are the last ones of the sequence.
        nk: number of keys; default nq.
        left: keys before its own position that a query sees, as window=(left, 0) has it.
        global_keys: keys at the start of the sequence that every query sees.
        device: where the result lies; default the CPU.

    Returns:
        key_ranges, int32 ``(1, 1, nq, 2, 2)``.

    Raises:
        ValueError: left or global_keys is negative.
    """
    for name, value in (("left", left), ("global_keys", global_keys)):
        if value < 0:
            raise ValueError(f"{name} is {value}: it must be >= 0")
    end = _positions(nq, nk, torch.device(device or "cpu"))[None] + 1
    return _ranges(
        (torch.zeros_like(end), end.clamp(max=global_keys)), ((end - 1 - left).clamp(min=0), end)
    )


@checked
def tree(parents: Iterable[int], past: int, *, device: torch.device | str | None = None) -> Tensor:
    """Each node of a tree of drafted tokens sees the keys before the tree, its ancestors and
    itself, as verifying them takes. Do not add causal=True.

    Args:
        parents: for each node the number of its parent, which comes before it; -1 for a root. In
            the order of a depth-first walk the ancestors of a node form few ranges.
        past: keys before the tree. Keys past to past + len(parents) are the nodes.
        device: where the result lies; default the CPU.

    Returns:
        key_ranges, int32 ``(1, 1, nodes, n, 2)``, with n as small as the tree allows.

    Raises:
        ValueError: a parent that does not come before its node, past is negative, or a node whose
            keys are more than four ranges: pass attn_mask for such a tree.
    """
    if past < 0:
        raise ValueError(f"past is {past}: it must be >= 0")
    seen: list[list[int]] = []  # of each node, itself and its ancestors in order
    rows: list[list[tuple[int, int]]] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"parents has {parent} for node {node}: it must be -1 or a node before it"
            )
        seen.append([*(seen[parent] if parent >= 0 else []), node])
        ranges = [(0, past)] if past else []
        for key in (past + x for x in seen[node]):
            if ranges and ranges[-1][1] == key:
                ranges[-1] = (ranges[-1][0], key + 1)
            else:
                ranges.append((key, key + 1))
        if len(ranges) > MOST_RANGES:
            raise ValueError(
                f"node {node} sees {len(ranges)} ranges of keys, and at most {MOST_RANGES} are "
                "possible: order the nodes depth-first, or pass attn_mask"
            )
        rows.append(ranges)
    most = max([1, *(len(ranges) for ranges in rows)])
    filled = [ranges + [(0, 0)] * (most - len(ranges)) for ranges in rows]
    made = torch.tensor(filled, dtype=torch.int32, device=device or "cpu")
    return made.reshape(1, 1, len(rows), most, 2)


@checked
def to_dense(key_ranges: Tensor, nk: int) -> Tensor:
    """The bool mask with the meaning of key_ranges, for tests and for other libraries.

    Args:
        key_ranges: int32 ``(batch or 1, heads or 1, nq or 1, n, 2)``.
        nk: number of keys.

    Returns:
        bool ``(batch or 1, heads or 1, nq or 1, nk)``, True where a query sees a key.

    Raises:
        ValueError: key_ranges of another shape.
    """
    if key_ranges.ndim != 5 or key_ranges.shape[-1] != 2:
        raise ValueError(
            f"key_ranges has shape {tuple(key_ranges.shape)}: it must be (batch or 1, heads or 1, "
            "nq or 1, n, 2)"
        )
    key = torch.arange(nk, device=key_ranges.device)
    if is_tracing():  # the number of ranges may be another where the traced call runs
        begin, end = (key_ranges[..., side, None] for side in range(2))
        return ((key >= begin) & (key < end)).any(3)
    dense = torch.zeros(*key_ranges.shape[:3], nk, dtype=torch.bool, device=key_ranges.device)
    for number in range(key_ranges.shape[3]):
        begin, end = (key_ranges[:, :, :, number, side, None] for side in range(2))
        dense = dense | ((key >= begin) & (key < end))
    return dense


@checked
def from_key_indices(
    key_indices: Tensor,
    nq: int,
    nk: int,
    topk_lengths: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The attn_mask that says what lists of keys say, with which every kernel for masks, and every
    gradient, serves them. It takes 4 * nq * nk bytes for each head of the lists.

    Args:
        key_indices: int32 ``(batch or 1, heads or 1, nq or ceil(nq / 64), n)``, positions of keys;
            others than 0 to nk - 1 stand for none.
        nq: queries.
        nk: keys.
        topk_lengths: int32, how many entries of each list count, shaped as key_indices without its
            last dimension, or 1 for any; default all.
        dtype: of the mask.

    Returns:
        ``(batch or 1, heads or 1, nq, nk)``: 0 for a key in the list, the logarithm of how
        often it is there if that is more than once, -inf for others.

    Raises:
        ValueError: key_indices of another shape.

    Example:
        >>> import archflash, torch
        >>> lists = torch.tensor([[[[2, -1, 0]]]], dtype=torch.int32)
        >>> archflash.masks.from_key_indices(lists, 1, 4)[0, 0, 0].tolist()
        [0.0, -inf, 0.0, -inf]
    """
    blocks = -(-nq // MASK_BLOCK)
    if key_indices.ndim != 4 or key_indices.shape[2] not in (nq, blocks):
        raise ValueError(
            f"key_indices has shape {tuple(key_indices.shape)}: it must be (batch or 1, heads or "
            f"1, {nq} or {blocks}, n)"
        )
    if topk_lengths is not None and not _fits(topk_lengths.shape, key_indices.shape[:-1]):
        raise ValueError(
            f"topk_lengths has shape {tuple(topk_lengths.shape)}: it must be "
            f"{tuple(key_indices.shape[:-1])}, or 1 for any of these"
        )
    if not dtype.is_floating_point:
        raise TypeError(f"dtype is {dtype}: it must be floating point")
    lists = key_indices.long()
    counts = (lists >= 0) & (lists < nk)
    if topk_lengths is not None:
        place = torch.arange(lists.shape[3], device=lists.device)
        counts = counts & (place < topk_lengths[..., None])
        lists = lists.expand(counts.shape)
    often = torch.zeros(*lists.shape[:3], nk + 1, device=lists.device, dtype=dtype)
    often.scatter_add_(3, torch.where(counts, lists, nk), torch.ones_like(lists, dtype=often.dtype))
    mask = often[..., :nk].log()
    if mask.shape[2] == nq:
        return mask
    return mask.repeat_interleave(MASK_BLOCK, 2)[:, :, :nq]


def _fits(shape: torch.Size, whole: torch.Size) -> bool:
    return len(shape) == len(whole) and all(x in (1, y) for x, y in zip(shape, whole, strict=True))


def _positions(nq: int, nk: int | None, device: torch.device) -> Tensor:
    """The position of each query among the keys."""
    return torch.arange(nq, device=device) + ((nq if nk is None else nk) - nq)


def _ranges(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """key_ranges of (begin, end) pairs ``(batch, nq)``."""
    made = torch.stack([torch.stack(pair, -1) for pair in pairs], -2)
    return made[:, None].to(torch.int32).contiguous()
