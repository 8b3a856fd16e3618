"""Masks as data: key_ranges and block_mask for `archflash.attention`.

A mask of ranges says for each query which keys it sees, as the union of up to four half-open ranges
``[begin, end)``: an int32 tensor ``(batch or 1, heads or 1, nq or 1, n, 2)`` in place of a number
for each query and key. Kernels skip the blocks of keys that no query of a tile sees. The functions
here make such tensors on the device of their arguments, and read no values on the host unless they
say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from archflash import _archflash as _native
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
from archflash._errors import UnsupportedError

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

_DENSE_AT_ONCE = 1 << 21  # scores whose visibility is looked at together


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


def tree(
    parents: Sequence[int],
    past: int,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
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
                f"the parent of node {node} is {parent}: it must be -1 or a node before it"
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
    most = max((len(ranges) for ranges in rows), default=1)
    filled = [ranges + [(0, 0)] * (most - len(ranges)) for ranges in rows]
    made = torch.tensor(filled, dtype=torch.int32).reshape(1, 1, len(rows), most, 2)
    return made.to(device or "cpu")


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


def from_query_ranges(query_ranges: Tensor, nq: int) -> Tensor:
    """The key_ranges that say what ranges of queries say of each key: a mask that is given by its
    columns, as FlashMask gives it. Make it once, and use it in every layer.

    A mask by columns fits where no query sees its keys in more than four pieces. Of causal text
    give what is hidden beside that: a document's keys end with it, ``[0, end of the document)``,
    and add causal=True to the call. Rows ``start`` up to ``end`` that are hidden, as FlashMask has
    them, are the two ranges ``[0, start)`` and ``[end, nq)``.

    The largest number of pieces is read on the host, once. While a call is traced, as under
    torch.compile, it is checked on the device, and there are always four pieces.

    Args:
        query_ranges: int32 ``(batch or 1, heads or 1, nk, n, 2)``: key j is seen by the queries in
            the union of n half-open ranges, which may overlap, be empty or reach beyond nq.
        nq: number of queries.

    Returns:
        key_ranges, int32 ``(batch or 1, heads or 1, nq, pieces, 2)``.

    Raises:
        ValueError: query_ranges of another shape, or a query whose keys are in more than four
            pieces: pass `query_ranges_to_dense` as attn_mask, and `summarize_mask` of that.
        TypeError: query_ranges of another dtype.
        UnsupportedError: torch.jit.trace would keep the number of pieces as a constant.

    Example:
        >>> import archflash, torch
        >>> ends = torch.tensor([2, 2, 5, 5, 5], dtype=torch.int32)  # documents of 2 and 3 tokens
        >>> columns = torch.stack([torch.zeros_like(ends), ends], -1)[None, None, :, None]
        >>> archflash.masks.from_query_ranges(columns, 5)[0, 0, :, 0].tolist()
        [[0, 5], [0, 5], [2, 5], [2, 5], [2, 5]]
    """
    _check_query_ranges(query_ranges)
    if is_tracing():
        raise UnsupportedError(
            "the number of pieces is read on the host, and torch.jit.trace would keep it for other "
            "masks: make the ranges outside of the traced function, and pass them to it"
        )
    batch, heads, nk = query_ranges.shape[:3]

    def seen(first: int, last: int) -> Tensor:
        return _seen_by(query_ranges, torch.arange(first, last, device=query_ranges.device))

    made, most = _pieces(seen, (batch, heads, nq, nk), query_ranges.device)
    if _is_traced(query_ranges):  # no number can be read: empty pieces fill up the ranges
        torch._assert_async(
            most <= MOST_RANGES, "query_ranges let a query see keys in more than four pieces"
        )
        return made[:, :, :, :MOST_RANGES].contiguous()
    pieces = int(most)
    if pieces > MOST_RANGES:
        raise ValueError(
            f"query_ranges let a query see keys in {pieces} pieces: key_ranges have up to "
            f"{MOST_RANGES}; pass attn_mask=query_ranges_to_dense(query_ranges, nq), and "
            "block_mask=summarize_mask() of that"
        )
    return made[:, :, :, : max(pieces, 1)].contiguous()


def from_rows(
    seen: Callable[[int, int], Tensor],
    shape: tuple[int, int, int, int],
    device: torch.device | str,
) -> Tensor | None:
    """The key_ranges with the meaning of a mask that is computed for some of its rows at a time, so
    that it never exists as a whole. One number is read on the host.

    Args:
        seen: gives rows first up to last of the mask, bool ``(batch, heads, last - first, nk)``.
        shape: of the whole mask, (batch, heads, nq, nk).
        device: where it is computed.

    Returns:
        key_ranges, int32 ``(batch, heads, nq, pieces, 2)``; None if the keys of a query form more
        than four pieces.
    """
    made, most = _pieces(seen, shape, device)
    pieces = int(most)
    return None if pieces > MOST_RANGES else made[:, :, :, : max(pieces, 1)].contiguous()


def _pieces(
    seen: Callable[[int, int], Tensor],
    shape: tuple[int, int, int, int],
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """The pieces that the keys of each query form, int32 (batch, heads, nq, five, 2), of which the
    fifth means nothing, and how many they are at most. No value is read on the host.
    """
    batch, heads, nq, nk = shape
    # The place behind the last is for pieces that are too many.
    made = torch.zeros(batch, heads, nq, MOST_RANGES + 1, 2, dtype=torch.int32, device=device)
    most = torch.zeros((), dtype=torch.int32, device=device)
    rows_at_once = max(1, _DENSE_AT_ONCE // max(1, batch * heads * nk))
    for first in range(0, nq, rows_at_once):
        padded = torch.nn.functional.pad(seen(first, min(first + rows_at_once, nq)), (1, 1))
        edges = padded[..., 1:] != padded[..., :-1]  # (batch, heads, rows, nk + 1)
        # even where a piece begins, odd where it ends
        number = edges.cumsum(-1, dtype=torch.int32) - 1
        if number.numel():
            most = torch.maximum(most, number[..., -1].amax() + 1)
        number.clamp_(max=2 * MOST_RANGES).masked_fill_(~edges, 2 * MOST_RANGES + 1)
        place = number.long()
        key = torch.arange(nk + 1, dtype=torch.int32, device=device).expand_as(place)
        here = made[:, :, first : first + rows_at_once]
        here.copy_(here.flatten(3).scatter(-1, place, key).reshape(here.shape))
    return made, (most + 1) // 2


def from_flashmask(startend_row_indices: Tensor, nq: int, *, causal: bool) -> Tensor:
    """The key_ranges with the meaning of FlashMask's startend_row_indices, which say for each key
    which queries do not see it. Give the call the same `causal`.

    Args:
        startend_row_indices: int32 ``(batch or 1, heads or 1, nk, bounds)``. With causal, hidden
            are the queries from bound 0 on, or with two bounds those from bound 0 to bound 1.
            Without, of two bounds the queries from bound 0 on and those before bound 1; of four
            those from bound 0 to bound 1, and those from bound 2 to bound 3.
        nq: number of queries.
        causal: whether the mask is causal, too.

    Returns:
        key_ranges, int32 ``(batch or 1, heads or 1, nq, pieces, 2)``. As `from_query_ranges` it
        reads one number on the host.

    Raises:
        ValueError: a tensor of another shape, or a query whose keys are in more than four pieces.
        TypeError: a tensor of another dtype.
    """
    allowed = (1, 2) if causal else (2, 4)
    if startend_row_indices.ndim != 4 or startend_row_indices.shape[-1] not in allowed:
        raise ValueError(
            f"startend_row_indices has shape {tuple(startend_row_indices.shape)}: with causal="
            f"{causal} it must be (batch or 1, heads or 1, nk, {allowed[0]} or {allowed[1]})"
        )
    bounds = startend_row_indices.unbind(-1)
    first, last = torch.zeros_like(bounds[0]), torch.full_like(bounds[0], nq)
    if len(bounds) == 1:
        seen = [(first, bounds[0])]
    elif causal:
        seen = [(first, bounds[0]), (bounds[1], last)]
    elif len(bounds) == 2:
        seen = [(bounds[1], bounds[0])]
    else:  # those that neither hides, whichever of the two comes first and whether they overlap
        before, after = torch.minimum(bounds[0], bounds[2]), torch.maximum(bounds[1], bounds[3])
        seen = [(first, before), (bounds[3], bounds[0]), (bounds[1], bounds[2]), (after, last)]
    return from_query_ranges(torch.stack([torch.stack(pair, -1) for pair in seen], -2), nq)


def query_ranges_to_dense(query_ranges: Tensor, nq: int) -> Tensor:
    """The bool mask with the meaning of query_ranges, for attn_mask.

    Args:
        query_ranges: as `from_query_ranges` takes them.
        nq: number of queries.

    Returns:
        bool ``(batch or 1, heads or 1, nq, nk)``.

    Raises:
        ValueError: query_ranges of another shape.
        TypeError: query_ranges of another dtype.
    """
    _check_query_ranges(query_ranges)
    return _seen_by(query_ranges, torch.arange(nq, device=query_ranges.device))


def _is_traced(x: Tensor) -> bool:
    """Whether PyTorch traces a call with a tensor, so that no number of it can be read."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or not _native.all_plain(x)
    )


def _check_query_ranges(query_ranges: Tensor) -> None:
    if query_ranges.ndim != 5 or query_ranges.shape[-1] != 2:
        raise ValueError(
            f"query_ranges has shape {tuple(query_ranges.shape)}: it must be (batch or 1, heads or "
            "1, nk, n, 2)"
        )
    if query_ranges.dtype != torch.int32:
        raise TypeError(f"query_ranges has dtype {query_ranges.dtype}: it must be torch.int32")


def _seen_by(query_ranges: Tensor, rows: Tensor) -> Tensor:
    """Which keys these queries see: bool (batch, heads, rows, nk)."""
    seen = torch.zeros((), dtype=torch.bool, device=rows.device)
    for begin, end in (x.unbind(-1) for x in query_ranges.unbind(3)):
        row = rows[:, None]
        seen = seen | ((row >= begin[:, :, None]) & (row < end[:, :, None]))
    return seen.expand(*query_ranges.shape[:2], len(rows), query_ranges.shape[2])


def from_key_indices(
    key_indices: Tensor, nq: int, nk: int, topk_lengths: Tensor | None = None
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

    Returns:
        float32 ``(batch or 1, heads or 1, nq, nk)``: 0 for a key in the list, the logarithm of how
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
    lists = key_indices.long()
    counts = (lists >= 0) & (lists < nk)
    if topk_lengths is not None:
        place = torch.arange(lists.shape[3], device=lists.device)
        counts = counts & (place < topk_lengths[..., None])
        lists = lists.expand(counts.shape)
    often = torch.zeros(*lists.shape[:3], nk + 1, device=lists.device)
    often.scatter_add_(3, torch.where(counts, lists, nk), torch.ones_like(lists, dtype=often.dtype))
    mask = often[..., :nk].log()
    if mask.shape[2] == nq:
        return mask
    return mask.repeat_interleave(MASK_BLOCK, 2)[:, :, :nq]


def _positions(nq: int, nk: int | None, device: torch.device) -> Tensor:
    """The position of each query among the keys."""
    return torch.arange(nq, device=device) + ((nq if nk is None else nk) - nq)


def _ranges(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """key_ranges of (begin, end) pairs ``(batch, nq)``."""
    made = torch.stack([torch.stack(pair, -1) for pair in pairs], -2)
    return made[:, None].to(torch.int32).contiguous()
