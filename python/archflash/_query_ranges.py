"""key_ranges made of masks that are given by their columns or computed a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash._archflash import MOST_RANGES
from archflash._eager import is_tracing
from archflash._errors import UnsupportedError
from archflash._mask_arguments import checked

_DENSE_AT_ONCE = 1 << 21  # scores whose visibility is looked at together


@checked
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
    # Where no number can be read, empty pieces fill up the ranges.
    if query_ranges.is_meta or _is_traced(query_ranges):
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


@checked
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
    if startend_row_indices.dtype != torch.int32:
        raise TypeError(
            f"startend_row_indices has dtype {startend_row_indices.dtype}: it must be torch.int32"
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


def from_rows(
    seen: Callable[[int, int], Tensor], shape: tuple[int, int, int, int], device: torch.device | str
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


@checked
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


def _pieces(
    seen: Callable[[int, int], Tensor], shape: tuple[int, int, int, int], device: torch.device | str
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
