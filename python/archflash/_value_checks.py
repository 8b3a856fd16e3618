"""Checks of the values of a call that lie on the device, for ARCHFLASH_CHECK=1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archflash import _key_lists, _options

# (name, values, which of them are wrong, what they must be)
_Check = tuple[str, Tensor, Tensor, str]


def captured(q: object) -> bool:
    """Whether a CUDA graph is captured, in which nothing can be checked."""
    return isinstance(q, Tensor) and q.is_cuda and torch.cuda.is_current_stream_capturing()


def is_readable(q: object) -> bool:
    """Whether values on q's device can be read: not of meta and fake tensors, nor what stands for
    tensors while a call is recorded.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(q, Tensor) and not (q.is_meta or isinstance(q, FakeTensor) or captured(q))


def check_call(q: Tensor, k: Tensor, values: tuple[Any, ...]) -> None:
    """Checks the lists or the packed sequences of a call without a cache, whose shapes agree.

    Args:
        values: its options.

    Raises:
        ValueError: a list names a key twice; sequences do not lie one behind the other in q or k,
            or one is longer than max_seqlen_q or max_seqlen_k.
    """
    options = dict(zip(_options.OF_ATTENTION, values, strict=True))
    if options["key_indices"] is not None:
        keys = k.shape[2 if options["layout"] == "bhnd" else 1]
        _key_lists.check(options["key_indices"], options["topk_lengths"], keys)
    if options["cu_seqlens_q"] is not None:
        of_q, of_k = (options[name].long() for name in ("cu_seqlens_q", "cu_seqlens_k"))
        asked = of_q.diff() > 0  # sequences without queries may share keys with others
        lengths = torch.where(asked, of_k.diff(), 0)
        _raise_first([
            *_of_sequences("cu_seqlens_q", of_q, q.shape[0], "total_q"),
            *_of_sequences("cu_seqlens_k", of_k, k.shape[0], "total_k", asked),
            *_of_longest("q", of_q.diff(), options["max_seqlen_q"]),
            *_of_longest("k", lengths, options["max_seqlen_k"]),
        ])  # fmt: skip


def _of_sequences(
    name: str, ends: Tensor, total: int, said: str, counts: Tensor | None = None
) -> list[_Check]:
    """Whether sequences lie one behind the other, of those that count."""
    words = f"from 0 to {said} = {total}, in ascending order"
    wrong = ends.diff() < 0
    if counts is not None:
        wrong &= counts
        words += " where a sequence has queries"
    wrong = torch.cat([ends[:1] < 0, wrong]) | (ends < 0) | (ends > total)
    return [(name, ends, wrong, words)]


def _of_longest(of: str, lengths: Tensor, longest: int | None) -> list[_Check]:
    if longest is None:
        return []
    words = f"at most max_seqlen_{of} = {longest}: pass the longest length or more, or leave it out"
    return [(f"the length of {of}'s sequence", lengths, lengths > longest, words)]


def check_cache(
    q: Tensor,
    k_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    k_new: Tensor | None,
    cache_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    rotary_cos: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    layout: str,
    ordered: bool,
) -> None:
    """Checks what lies on the device of a call with a cache, there.

    Args:
        q, ...: those of `attention_with_kvcache`, whose shapes agree.
        ordered: whether the queries have positions of their own: under causal or a bounded window.

    Raises:
        ValueError: a value is out of range: which one, what is allowed, what to do.
    """
    rows = 1 if layout == "bnhd" else 2
    caches, size = k_cache.shape[0], k_cache.shape[rows]
    capacity = size if page_table is None else page_table.shape[1] * size
    lengths = cache_seqlens.long()
    added = 0 if k_new is None else k_new.shape[rows]
    first = torch.zeros_like(lengths) if leftpad_k is None else leftpad_k.long()
    total = lengths + added
    if added > capacity:
        raise ValueError(
            f"k_new has {added} rows, but a sequence has room for {capacity}: "
            "append fewer at once, or give larger caches or more pages"
        )
    checks: list[_Check] = [
        (
            "cache_seqlens",
            lengths,
            (lengths < 0) | (total > capacity),
            f"from 0 to {capacity - added}: a sequence has room for {capacity} rows"
            + (f", of which this call appends {added}" if added else ""),
        )
    ]
    if leftpad_k is not None:
        wrong = (first < 0) | (first > lengths)
        checks.append(("leftpad_k", first, wrong, "from 0 to the sequence's length"))
    if cache_batch_idx is not None:
        index = cache_batch_idx.long()
        wrong = (index < 0) | (index >= caches)
        if added:  # two sequences would write to one place
            same = index == index[:, None]
            wrong = wrong | (same.sum(0) > 1)
        words = f"from 0 to {caches - 1}" + (", each once, as the call appends" if added else "")
        checks.append(("cache_batch_idx", index, wrong, words))
    if page_table is not None:
        pages = page_table.long()
        used = torch.arange(pages.shape[1], device=pages.device) * size < total[:, None]
        wrong = used & ((pages < 0) | (pages >= caches))
        checks.append(
            ("page_table", pages, wrong, f"from 0 to {caches - 1} where the sequence has rows")
        )
    if cu_seqlens_q is not None:
        ends = cu_seqlens_q.long()
        checks += _of_sequences("cu_seqlens_q", ends, q.shape[0], "total_q")
        checks += _of_longest("q", ends.diff(), max_seqlen_q)
    if rotary_cos is not None:
        rotated = torch.full_like(lengths, max(added, 1))
        if ordered and cu_seqlens_q is None:
            rotated = rotated.clamp(min=q.shape[rows])
        elif ordered and cu_seqlens_q is not None:
            rotated = torch.maximum(rotated, cu_seqlens_q.long().diff())
        last = lengths - first + rotated - 1
        wrong = last >= rotary_cos.shape[0]
        words = f"below {rotary_cos.shape[0]}, the rows of rotary_cos: make the tables longer"
        checks.append(("the last position to rotate", last, wrong, words))
    _raise_first(checks)


def _raise_first(checks: list[_Check]) -> None:
    """Raises the error of the first value that is wrong; one small result comes back."""
    checks = [row for row in checks if row[1].numel()]
    if not checks:
        return
    at = [wrong.flatten().int().argmax() for _, _, wrong, _ in checks]
    found = [
        torch.stack([wrong.any().long(), where, value.flatten()[where]])
        for (_, value, wrong, _), where in zip(checks, at, strict=True)
    ]
    for (name, value, _, allowed), (any_wrong, where, number) in zip(
        checks, torch.stack(found).tolist(), strict=True
    ):
        if any_wrong:
            place = ", ".join(str(i) for i in _unravelled(where, value.shape))
            raise ValueError(f"{name}[{place}] is {number}: it must be {allowed}")


def _unravelled(index: int, shape: torch.Size) -> tuple[int, ...]:
    places = []
    for size in reversed(shape):
        places.append(index % size)
        index //= size
    return tuple(reversed(places))
