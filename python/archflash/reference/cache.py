"""The formula with a KV cache: for each sequence, with the keys that it has after the append."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from archflash import _bias
from archflash._packed_rows import unpack
from archflash.reference.formula import FP8, attention, baseline


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """The keywords of archflash.attention_with_kvcache that influence a result."""

    cache_seqlens: Tensor | None = None
    page_table: Tensor | None = None
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    leftpad_k: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = False
    qv: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    attention_chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    attn_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    key_ranges: Tensor | None = None
    key_indices: Tensor | None = None
    topk_lengths: Tensor | None = None
    physical_indices: bool = False
    packed_rows: str | None = None
    scale: float | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    num_splits: int | None = None
    batch_invariant: bool = False
    layout: str = "bnhd"

    @property
    def lengths(self) -> Tensor:
        """Rows of each sequence before the append."""
        assert self.cache_seqlens is not None
        return self.cache_seqlens

    def first(self, number: int) -> int:
        """The first row of a sequence that is no padding."""
        return 0 if self.leftpad_k is None else int(self.leftpad_k[number])

    def place(self, rows: Tensor, number: int, row: int) -> tuple[int, int] | None:
        """Where a row of a sequence lies in a cache ``(B, capacity, ...)`` or ``(pages, page_size,
        ...)``; None if that is outside of it.
        """
        size = rows.shape[1]
        if self.page_table is not None:
            if not 0 <= row < size * self.page_table.shape[1]:
                return None
            page, row = int(self.page_table[number, row // size]), row % size
        else:
            page = number if self.cache_batch_idx is None else int(self.cache_batch_idx[number])
        return (page, row) if 0 <= page < len(rows) and 0 <= row < size else None

    def masks(self, here: int | slice, nq: int, nk: int) -> dict[str, Tensor]:
        """The masks of a sequence of nq queries, its number or its packed rows, and nk keys."""
        device = self.lengths.device
        keep = torch.ones(1, 1, nq, nk, dtype=torch.bool, device=device)
        given = {}
        if self.attention_chunk is not None:
            place = torch.arange(nk - nq, nk, device=device) // self.attention_chunk
            of_key = torch.arange(nk, device=device) // self.attention_chunk
            keep = keep & (place[:, None] == of_key)
        of_sequence = {}
        for name in ("attn_mask", "key_ranges"):
            x = getattr(self, name)
            if x is None:
                continue
            if isinstance(here, int):
                of_sequence[name] = x if x.shape[0] == 1 else x[here : here + 1]
            else:
                of_sequence[name] = x if x.shape[2] == 1 else x[:, :, here]
        if "attn_mask" in of_sequence:
            mask = of_sequence["attn_mask"]
            columns = min(mask.shape[3], nk)
            last = mask[..., mask.shape[3] - columns :]
            heads = mask.shape[1]
            keep = keep.expand(1, heads, nq, nk).clone()
            keep[..., nk - columns :] &= last
        if "key_ranges" in of_sequence:
            given["key_ranges"] = of_sequence["key_ranges"]
        if self.attention_chunk is not None or self.attn_mask is not None:
            given["attn_mask"] = keep
        for name in ("key_indices", "topk_lengths"):
            x = getattr(self, name)
            if x is not None and isinstance(here, int):
                given[name] = x if x.shape[0] == 1 else x[here : here + 1]
        return given

    def rotated(self, x: Tensor, position: int) -> Tensor:
        """x ``(..., D)`` as the row of a position, in its own dtype after every step."""
        if self.rotary_cos is None or self.rotary_sin is None:
            return x
        at = min(max(position, 0), len(self.rotary_cos) - 1)
        cos, sin = self.rotary_cos[at].to(x.dtype), self.rotary_sin[at].to(x.dtype)
        half = len(cos)
        one = slice(0, 2 * half, 2) if self.rotary_interleaved else slice(0, half)
        other = slice(1, 2 * half, 2) if self.rotary_interleaved else slice(half, 2 * half)
        result = x.clone()
        result[..., one] = x[..., one] * cos - x[..., other] * sin
        result[..., other] = x[..., one] * sin + x[..., other] * cos
        return result


def attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, **call: Any
) -> tuple[Tensor, Tensor]:
    """archflash.attention_with_kvcache in float64.

    It reads lengths and page tables on the host, and changes no cache: `appended` gives the caches
    after the call.

    Args:
        q: ``(B, Nq, Hq, D)``, or ``(B, Hq, Nq, D)`` with layout "bhnd", or ``(Tq, Hq, D)`` with
            cu_seqlens_q.
        k_cache: ``(B, capacity, Hkv, D)`` or ``(pages, page_size, Hkv, D)``; or with layout "bhnd".
        v_cache: as k_cache, with Dv.
        **call: the other keywords of archflash.attention_with_kvcache that change the result.

    Returns:
        The pair of output and natural-log LSE in float64, shaped as those of the call.

    Raises:
        TypeError: for a keyword that archflash.attention_with_kvcache does not have.
    """

    def exact(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = attention(*tensors, **options)
        return result

    return _run_with_cache(exact, torch.float64, q, k_cache, v_cache, call)


def baseline_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, **call: Any) -> Tensor:
    """`attention_with_kvcache` in plain PyTorch operations at q's dtype: the yardstick of `check`.

    Args:
        q, k_cache, v_cache, **call: as for `attention_with_kvcache`.

    Returns:
        The output, in out_dtype or the dtype of q.
    """

    def rounded(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out = baseline(*tensors, **options)
        return out, out.new_zeros(out.shape[0], out.shape[2], out.shape[1])

    return _run_with_cache(rounded, q.dtype, q, k_cache, v_cache, call)[0]


def appended(k_cache: Tensor, v_cache: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    """The caches after a call of archflash.attention_with_kvcache.

    Rotations are computed in float64 and rounded once.

    Args:
        k_cache, v_cache, **call: as for `attention_with_kvcache`.

    Returns:
        New tensors like k_cache and v_cache.
    """
    asked = CacheOptions(**call)
    caches = k_cache.clone(), v_cache.clone()
    if asked.k_new is None or asked.v_new is None:
        return caches
    rows = tuple(x if asked.layout == "bnhd" else x.transpose(1, 2) for x in caches)
    new = tuple(
        x if asked.layout == "bnhd" else x.transpose(1, 2) for x in (asked.k_new, asked.v_new)
    )
    for number, length in enumerate(asked.lengths.tolist()):
        for i in range(new[0].shape[1]):
            place = asked.place(rows[0], number, length + i)
            if place is None:
                continue
            k_row = asked.rotated(new[0][number, i].double(), length - asked.first(number) + i)
            rows[0][place] = k_row.to(k_cache.dtype)
            rows[1][place] = new[1][number, i]
    return caches


def _as_one_sequence(
    asked: CacheOptions, q: Tensor, k_cache: Tensor, v_cache: Tensor, call: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """A call with physical indices as one whose sequences all are the whole cache."""
    swap = asked.layout == "bhnd"
    caches = [x.transpose(1, 2) if swap else x for x in (k_cache, v_cache)]
    caches = [x.flatten(0, 1)[None] for x in caches]
    lengths = torch.full((q.shape[0],), caches[0].shape[1], dtype=torch.int32, device=q.device)
    k_cache, v_cache = (x.transpose(1, 2) if swap else x for x in caches)
    as_sequence = {"cache_seqlens": lengths, "cache_batch_idx": torch.zeros_like(lengths)}
    return k_cache, v_cache, call | as_sequence | {"physical_indices": False}


def _run_with_cache(
    formula: Callable[..., tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    call: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Calls a formula of attention for each sequence with the keys that it has after the append."""
    asked = CacheOptions(**call)
    if asked.packed_rows is not None:
        of_16_bits = unpack(k_cache, asked.packed_rows)
        return _run_with_cache(formula, dtype, q, *of_16_bits, call | {"packed_rows": None})
    if asked.physical_indices:
        return _run_with_cache(
            formula, dtype, q, *_as_one_sequence(asked, q, k_cache, v_cache, call)
        )
    caches = appended(k_cache, v_cache, **call)
    if asked.layout == "bhnd":
        caches = (caches[0].transpose(1, 2), caches[1].transpose(1, 2))
    both = [x for x in (q, asked.qv) if x is not None]
    if asked.layout == "bhnd" and asked.cu_seqlens_q is None:
        both = [x.transpose(1, 2) for x in both]
    q = both[0]
    if asked.cu_seqlens_q is not None:
        ends = asked.cu_seqlens_q.tolist()
        rows = [slice(start, end) for start, end in itertools.pairwise(ends)]
        queries = [[x[r] for x in both] for r in rows]
    else:
        queries = [[x[number] for x in both] for number in range(len(q))]
    scale = asked.scale
    if scale is None and asked.qv is not None:
        scale = 1.0 / math.sqrt(sum(x.shape[-1] for x in both))
    out_dtype = asked.out_dtype or (torch.bfloat16 if q.dtype in FP8 else q.dtype)
    kind = torch.float64 if dtype == torch.float64 else out_dtype
    out = torch.zeros(*q.shape[:-1], v_cache.shape[-1], dtype=kind, device=q.device)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=kind, device=q.device)
    if asked.sinks is not None:
        lse[:] = asked.sinks.to(kind)
    added = 0 if asked.k_new is None else asked.k_new.shape[1 if asked.layout == "bnhd" else 2]
    size = caches[0].shape[1]
    capacity = size if asked.page_table is None else size * asked.page_table.shape[1]
    for number, length in enumerate(asked.lengths.tolist()):
        first = asked.first(number)
        places = [
            asked.place(caches[0], number, row)
            for row in range(first, max(first, min(length + added, capacity)))
        ]
        index = torch.tensor(places, dtype=torch.long, device=q.device).reshape(-1, 2)
        keys, values = (x[index[:, 0], index[:, 1]][None] for x in caches)
        x, *others = (y if dtype != torch.float64 else y.double() for y in queries[number])
        if asked.rotary_cos is not None:
            ordered = asked.attention_chunk is not None or asked.causal
            ordered = ordered or any(side is not None for side in _bias.sides_of(asked.window))
            turned = [
                asked.rotated(row, length - first + (i if ordered else 0))
                for i, row in enumerate(x)
            ]
            x = torch.stack(turned) if turned else x
        here = number if asked.cu_seqlens_q is None else rows[number]
        nq, nk = x.shape[0], keys.shape[1]
        masks = asked.masks(here, nq, nk)
        of_heads = {
            name: value[number : number + 1] if value is not None and value.ndim == 2 else value
            for name in ("q_descale", "k_descale", "v_descale", "alibi_slopes")
            for value in (getattr(asked, name),)
        }
        if others:  # the scores are those of both queries beside one another
            x = torch.cat([x, *others], -1)
            parts = [
                rows.double() * (1.0 if descale is None else descale.double().reshape(1, 1, -1, 1))
                for rows, descale in (
                    (keys, of_heads["k_descale"]),
                    (values, of_heads["v_descale"]),
                )
            ]
            keys, of_heads["k_descale"] = torch.cat(parts, -1), None
        of_sequence, of_lse = formula(
            x[None], keys, values, causal=asked.causal, window=asked.window,
            softcap=asked.softcap, sinks=asked.sinks, scale=scale, layout="bnhd",
            out_dtype=out_dtype, **of_heads, **masks,
        )  # fmt: skip
        out[here] = of_sequence[0]
        lse[here] = of_lse[0].transpose(0, 1)
    if asked.cu_seqlens_q is not None:
        return out, lse.transpose(0, 1)
    return (out.transpose(1, 2) if asked.layout == "bhnd" else out), lse.transpose(1, 2)
