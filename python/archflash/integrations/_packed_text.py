"""Rows of text as packed sequences: documents that share a row, and rows without their padding."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from archflash import _sequences, masks
from archflash._api import attention
from archflash.integrations._model_mask import (
    Packed,
    Seen,
    both_masks,
    both_ranges,
    documents,
    is_traced,
    ranges_of_documents,
)

# --- documents in rows of text ---


class Lengths(NamedTuple):
    """The options of `archflash.attention` that say where packed sequences begin."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class _Restarts(NamedTuple):
    """What was found in a tensor of position_ids, and its version then."""

    of: weakref.ref[Tensor]
    version: int
    found: tuple[Tensor, Packed] | None


_last_restarts: _Restarts | None = None  # every layer of a model asks for the same


def may_restart(position_ids: Tensor, seen: Seen, nq: int, nk: int) -> bool:
    """Whether position_ids can tell documents apart: those of text, and no mask tells more."""
    of_text = position_ids.ndim == 2 and position_ids.shape[1] == nq
    as_rule = seen.values is None and seen.padding is None and seen.ranges is None
    return of_text and 1 < nq <= nk and as_rule and (seen.rule.causal or nq == nk)


def in_documents_of_positions(
    position_ids: Tensor, seen: Seen, past: int, batch: int, nk: int, unread: bool
) -> Seen:
    """What a mask sees, limited to documents where position_ids are those of several. The queries
    stand behind `past` keys. Where no value can be read, `unread` says whether there may be many.
    """
    nq = position_ids.shape[1]
    if is_traced(position_ids.device, position_ids):
        if not unread:
            return seen
        ranges = ranges_of_documents(_starts(position_ids))
        return seen._replace(ranges=_behind_past(ranges, past, nq, nk))
    found = _restarts(position_ids)
    if found is None:
        return seen
    ranges, packed = found
    if seen.values is None and nq == nk and past == 0 and position_ids.shape[0] == batch:
        return seen._replace(ranges=ranges, packed=packed)
    return seen._replace(ranges=_behind_past(ranges, past, nq, nk))


def _starts(position_ids: Tensor) -> Tensor:
    starts = position_ids == position_ids.amin(1, keepdim=True)
    first = torch.arange(position_ids.shape[1], device=position_ids.device) == 0
    return starts | first


def _restarts(position_ids: Tensor) -> tuple[Tensor, Packed] | None:
    """The documents of position_ids, None if each row is one. The host waits for the device, once
    for all layers: transformers' FlashAttention-2 does so in each.
    """
    global _last_restarts
    remembers = not position_ids.is_inference()  # such a tensor does not tell when it is changed
    last = _last_restarts
    same = remembers and last is not None and last.of() is position_ids
    if same and last is not None and last.version == position_ids._version:
        return last.found
    starts = _starts(position_ids)
    found = documents(starts) if bool(starts[:, 1:].any()) else None
    if remembers:
        _last_restarts = _Restarts(weakref.ref(position_ids), position_ids._version, found)
    return found


def _behind_past(ranges: Tensor, past: int, nq: int, nk: int) -> Tensor:
    """key_ranges (batch, 1, queries, 1, 2) of queries that stand behind `past` keys. The first
    document continues what is there."""
    if past == 0 and nq == nk:
        return ranges
    begin, end = ranges.unbind(-1)
    begin = torch.where(begin > 0, begin + past, 0)
    end = torch.where(end < nq, end + past, nk)
    return torch.stack([begin, end], -1).to(torch.int32)


def in_documents_of_lengths(
    seen: Seen,
    given: tuple[Tensor | None, Tensor | None, Any, Any],
    query: Tensor,
    nk: int,
    bias: Tensor | None,
) -> tuple[Seen, Lengths | None]:
    """What is seen inside of documents of given lengths, whose longest need not be known. The
    lengths say it alone where the mask is a rule, and then they are returned, too.
    """
    cu_seqlens_q, cu_seqlens_k, longest_q, longest_k = given
    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing = "cu_seq_lens_q" if cu_seqlens_q is None else "cu_seq_lens_k"
        raise ValueError(f"{missing} is missing: give both, or none")
    lengths = Lengths(
        cu_seqlens_q.to(query.device, torch.int32),
        cu_seqlens_k.to(query.device, torch.int32),
        longest_q if isinstance(longest_q, int) else None,
        longest_k if isinstance(longest_k, int) else None,
    )
    as_rule = seen.values is None and seen.padding is None and bias is None
    if as_rule and (seen.ranges is None or seen.packed is not None):
        return seen, lengths
    # What else the mask hides goes by rows and keys, so the documents must do so, too.
    nq = query.shape[2]
    if nq != nk:
        raise ValueError(
            f"cu_seq_lens_q beside a mask or a bias, for {nq} queries and {nk} keys: as "
            "many of both are needed; leave the mask or the bias out"
        )
    return _inside(seen, _ranges_of_lengths(lengths, query.shape[0], nq), nk), None


def _inside(seen: Seen, documents: Tensor, nk: int) -> Seen:
    """What is seen, inside of documents. Ranges that are too many become values."""
    ranges = documents if seen.ranges is None else both_ranges(seen.ranges, documents)
    if ranges is not None:
        return seen._replace(ranges=ranges, packed=None)
    assert seen.ranges is not None
    values = both_masks(masks.to_dense(seen.ranges, nk), seen.values)
    return seen._replace(values=values, ranges=documents, packed=None)


def _ranges_of_lengths(lengths: Lengths, batch: int, n: int) -> Tensor:
    """The keys of each query's document as key_ranges (batch, 1, n, 1, 2), of rows of n tokens."""
    cu_seqlens_q, cu_seqlens_k = lengths[:2]
    rows = torch.arange(batch * n, dtype=torch.int32, device=cu_seqlens_q.device)
    document = _sequences.of_rows(rows, cu_seqlens_q)
    ends_k = F.pad(cu_seqlens_k[1:], (0, 1))  # rows behind the last document see no key
    first_of_row = rows // n * n
    sides = [
        (side[document] - first_of_row).clamp(0, n).view(batch, 1, n, 1)
        for side in (cu_seqlens_k, ends_k)
    ]
    return torch.stack(sides, -1).to(torch.int32)


def of_lengths(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, options: dict[str, Any]
) -> Tensor:
    """The attention of packed sequences; (batch, queries, heads, dv)."""
    batch, _, nq, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    options = options | lengths._asdict()
    options.pop("q_offset", None)  # causal and window align to the end of each sequence
    out: Tensor = attention(q, k, v, **options)
    return out.view(batch, nq, *out.shape[1:])


# --- padding ---


def packs(query: Tensor, key: Tensor, seen: Seen, options: dict[str, Any]) -> bool:
    """Whether the rows that are no padding are packed, so that a kernel serves them. Packing copies
    them, which does not pay for one query. It keeps the order of positions, which is all that a
    causal rule needs, but not their distances where there is padding between rows.
    """
    nq, nk = query.shape[2], key.shape[2]
    if not _a_kernel_may_serve(query) or nq == 1 or is_traced(query.device, query):
        return False
    if _by_position(options) and (nq != nk or "q_offset" in options):
        return False
    in_one_piece = seen.ranges is not None and seen.ranges.shape[3] == 1
    return "window" not in options or in_one_piece


def _by_position(options: dict[str, Any]) -> bool:
    """Whether a query's position counts, so that queries are packed like keys."""
    return options["causal"] or "window" in options


def _a_kernel_may_serve(query: Tensor) -> bool:
    return query.is_cuda


def _rows_kept(mask: Any) -> tuple[Tensor, Tensor]:
    """The rows of a batch that are no padding, and where each sequence of them ends. It is read on
    the host, for the first layer."""
    content = mask._content
    if content.rows_kept is None:
        padding = content.seen.padding
        lengths = padding.sum(-1, dtype=torch.int32)
        ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        content.rows_kept = (padding.flatten().nonzero().flatten(), ends)
    rows: tuple[Tensor, Tensor] = content.rows_kept
    return rows


def without_padding(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
) -> Tensor:
    """The attention of the rows that are no padding, packed; (batch, queries, heads, dv), with 0 in
    rows of padding where queries are keys.
    """
    batch, heads, nq, _ = query.shape
    kept, ends_k = _rows_kept(mask)
    k, v = (x.transpose(1, 2).flatten(0, 1).index_select(0, kept) for x in (key, value))
    q = query.transpose(1, 2).flatten(0, 1)
    packs_queries = _by_position(options)
    if packs_queries:
        q, ends_q = q.index_select(0, kept), ends_k
    else:
        ends_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * nq
    options = options | {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    del options["key_ranges"]
    out: Tensor = attention(q, k, v, **options)
    if packs_queries:
        rows = out.new_zeros(batch * nq, heads, out.shape[-1])
        out = rows.index_copy(0, kept, out)
    return out.view(batch, nq, heads, out.shape[-1])
