"""Checks of the values of a call with a KV cache that lie on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def check_values(
    q: Tensor,
    k_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    k_new: Tensor | None,
    cache_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    rotary_cos: Tensor | None,
    cu_seqlens_q: Tensor | None,
    layout: str,
    ordered: bool,
) -> None:
    """Checks what lies on the device, there; one small result comes back.

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
    # (name, values, which of them are wrong, what they must be)
    checks: list[tuple[str, Tensor, Tensor, str]] = [
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
        before = torch.cat([ends.new_zeros(1), ends[:-1]])
        wrong = (ends < before) | (ends > q.shape[0])
        words = f"from 0 to total_q = {q.shape[0]}, in ascending order"
        checks.append(("cu_seqlens_q", ends, wrong, words))
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
