"""The implementation `torch`: attention by PyTorch's own operations, on any device it serves.

It is the last one that dispatch tries, so it takes every call. It calls PyTorch's
scaled_dot_product_attention (SDPA) if that has the semantics of the call, alone or with a boolean
mask, and plain matrix products in float32 for softcap, sinks and the log-sum-exp. Nothing here
reads a tensor's values on the host.

The order of work: inputs become (B, H, N, D) views; then which keys each query sees; then scores
and output; then the caller's layout, dtype and stride order.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from archflash import _fused_kernels, _pytorch_faults
from archflash._archflash import MASK_BLOCK, SCALE_ROWS
from archflash._bias import sides_of
from archflash._dropout import kept
from archflash._eager import differentiates_twice, in_transform, is_eager, is_tracing
from archflash.masks import to_dense

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_MINUS_INF = -math.inf
_FAR = 1 << 60  # larger offsets have no other meaning, and could overflow

# Kept at import: code may put `archflash.scaled_dot_product_attention` in its place later.
PYTORCHS_SDPA = F.scaled_dot_product_attention

# Device types that have autocast. They are determined at import, because torch.compile cannot trace
# this query before torch 2.13.
AUTOCAST_DEVICES = tuple(
    name for name in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(name)
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    q_offset: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_ranges: Tensor | None = None,
    block_mask: Tensor | None = None,
    dropout_p: float | None = None,
    rng_state: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    layout: str = "bhnd",
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention by PyTorch operations; arguments as archflash.attention has checked them.

    Args:
        q: ``(B, Hq, Nq, D)``, or ``(B, Nq, Hq, D)`` with layout "bnhd", or ``(Tq, Hq, D)`` with
            cu_seqlens.
        k: ``(B, Hkv, Nk, D)``, ``(B, Nk, Hkv, D)`` or ``(Tk, Hkv, D)``.
        v: ``(B, Hkv, Nk, Dv)``, ``(B, Nk, Hkv, Dv)`` or ``(Tk, Hkv, Dv)``.
        causal: query i sees keys ``j <= i + q_offset``; off by default.
        window: ``(left, right)``, keys ``i + q_offset - left <= j <= i + q_offset + right``; None
            (either) is unbounded.
        softcap: scores become ``softcap * tanh(scale * q.k / softcap)``; None or 0 for none.
        sinks: ``(Hq,)``, one more logit per head in the denominator; None for none.
        scale: multiplies q.k; ``1 / sqrt(D)`` by default.
        q_offset: position of query 0 among the keys, an int or ``(B,)`` int32; ``Nk - Nq`` of each
            sequence by default.
        cu_seqlens_q: ``(B + 1,)`` int32, where each sequence starts in q; given together with
            cu_seqlens_k.
        cu_seqlens_k: ``(B + 1,)`` int32, where each sequence starts in k and v.
        attn_mask: broadcastable to ``(B, Hq, Nq, Nk)``; bool (True is seen) or floating point
            (added to the scores).
        alibi_slopes: float32 ``(Hq,)`` or ``(B, Hq)``: ``slope * |i + q_offset - j|`` is subtracted
            from the scores; None for none.
        key_ranges: int32 ``(B or 1, Hq or 1, Nq or 1, n, 2)``, the half-open ranges of keys that a
            query sees; None for all keys.
        block_mask: bool or int8 ``(B or 1, Hq or 1, ceil(Nq / 64), ceil(Nk / 64))``, 0 for blocks
            that are not seen; None for none such.
        dropout_p: the probability that a weight is dropped; None or 0 for none.
        rng_state: int64 ``(2,)``, seed and offset of which weights are; given with dropout_p.
        q_descale: float32; a stored number times its descale is the number that it stands for. One
            number, ``(Hq,)``, ``(B, Hq)`` or, for each 64 rows, ``(B, Hq, blocks)``, also with Hkv
            for Hq; None is 1.
        k_descale: as q_descale, with Hkv.
        v_descale: as q_descale, with Hkv.
        out_dtype: q's dtype by default, bfloat16 for FP8 inputs.
        layout: "bhnd" (default) or "bnhd"; ignored with cu_seqlens.
        out: written in place and returned, where given.
        return_lse: also return the log-sum-exp; off by default.

    Returns:
        The output, shaped like q with Dv for D and in q's stride order; with return_lse also the
        natural-log LSE, float32, ``(B, Hq, Nq)`` or ``(Hq, Tq)`` contiguous. A query that sees no
        key gives 0 and an LSE of -inf (the sink, if any).
    """
    if out_dtype is None:
        out_dtype = torch.bfloat16 if q.dtype in _FP8 else q.dtype
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    unscaled = q_descale is None and k_descale is None and v_descale is None
    packed = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        packed = _Packed(
            packed_rows(cu_seqlens_q, q.shape[0]), packed_rows(cu_seqlens_k, k.shape[0])
        )
    band = _Band.of(causal, window, q_offset, packed, q, k, layout)
    masks = _Masks(attn_mask, alibi_slopes, key_ranges, block_mask)
    drops = None
    if dropout_p and rng_state is not None:
        drops = _Drops(dropout_p, rng_state)
    plain = (
        _no_masks(masks)
        and not drops
        and sinks is None
        and not softcap
        and not return_lse
        and not packed
    )
    as_it_is = q.dtype == out_dtype and q.dtype not in _FP8 and unscaled
    if plain and as_it_is and not torch.compiler.is_compiling() and not _autocasts(q.device.type):
        # A plain call needs no mask and no conversion. Calling SDPA directly takes a fraction of
        # the host time of the general code below.
        is_causal = _top_left_causal(band)
        if (is_causal or _unbounded(band)) and 0 not in (*q.shape, *k.shape, *v.shape):
            q_bhnd, k_bhnd, v_bhnd = (_to_bhnd(x, layout, None) for x in (q, k, v))
            if is_causal:
                k_bhnd, v_bhnd = _seen_from_top_left(q_bhnd, k_bhnd, v_bhnd)
            result = _sdpa(q_bhnd, k_bhnd, v_bhnd, None, scale, is_causal=is_causal)
            result = _in_stride_order_of(q, _from_bhnd(result, layout, None))
            return result if out is None else out.copy_(result)

    inside = _inside_dtype(q.dtype, out_dtype, scaled=not unscaled)
    # The caller chooses the dtypes of a call, and autocast must not change them: it would compute
    # the float32 products below in 16 bits.
    with no_autocast(q.device.type):
        result, lse = _attention_bhnd(
            _dequantise(_to_bhnd(q, layout, packed), q_descale, packed and packed.q, inside),
            _dequantise(_to_bhnd(k, layout, packed), k_descale, packed and packed.k, inside),
            _dequantise(_to_bhnd(v, layout, packed), v_descale, packed and packed.k, inside),
            scale=scale,
            band=band,
            packed=packed,
            masks=masks,
            softcap=softcap,
            sinks=sinks,
            want_lse=return_lse,
            drops=drops,
        )
    result = _in_stride_order_of(q, _from_bhnd(result.to(out_dtype), layout, packed))
    if out is not None:
        result = out.copy_(result)
    if not return_lse or lse is None:
        return result
    lse = lse.to(torch.float32).contiguous()
    return result, lse[0] if packed else lse


def pytorchs_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bhnd",
) -> Callable[[Tensor, Tensor, Tensor, bool], Any] | None:
    """A function for eager calls like this one that are one call of PyTorch's SDPA and no more;
    None if this one is not. Calls that are alike have the same shapes, strides, dtype, device and
    options, addresses that are multiples of the same number up to 16, and gradients if it has.

    Args:
        q, k, v, causal, scale, layout: as for `attention`.

    Returns:
        A function of (q, k, v, rows_first); rows_first says that their layout is "bnhd".
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    band = _Band.of(causal, None, None, None, q, k, layout)
    is_causal = _top_left_causal(band)
    seen = is_causal or _unbounded(band)
    if not seen or not scale > 0 or q.dtype in _FP8 or 0 in (*q.shape, *k.shape, *v.shape):
        return None
    device_type = q.device.type
    q, k, v = (_to_bhnd(x, layout, None) for x in (q, k, v))
    if is_causal and k.shape[2] > q.shape[2]:
        return None  # keys that no query sees have to be left out
    if device_type == "cuda" and any(_readable_by_fused_kernels(x) is not x for x in (q, k, v)):
        return None
    if _failing(q, k, v, None, is_causal, False):
        return None
    enable_gqa = q.shape[1] != k.shape[1]

    def call(q: Tensor, k: Tensor, v: Tensor, rows_first: bool) -> Any:
        if _autocasts(device_type) or not is_eager():
            return attention(
                q, k, v, causal=causal, scale=scale, layout="bnhd" if rows_first else "bhnd"
            )
        given = q
        if rows_first:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = PYTORCHS_SDPA(q, k, v, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        if out.requires_grad:
            _let_differentiate_twice(out)
        return _in_stride_order_of(given, out.transpose(1, 2) if rows_first else out)

    return call


# --- inputs and outputs ---


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


class _Packed(NamedTuple):
    q: PackedRows
    k: PackedRows


def packed_rows(cu_seqlens: Tensor, total: int) -> PackedRows:
    # Positions are int64, so that adding an offset or a window limit does not overflow.
    cu_seqlens = cu_seqlens.long()
    position = torch.arange(total, device=cu_seqlens.device)
    # The number of a row's sequence is the number of sequences that end at or before it. This skips
    # empty sequences, which own no row.
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), position, right=True)
    return PackedRows(cu_seqlens, sequence, position - cu_seqlens[sequence])


def of_rows(per_sequence: Tensor, rows: PackedRows) -> Tensor:
    """Gives each row the value of its sequence: ``(B, ...)`` to ``(T, ...)``. Rows after the last
    sequence get 0.
    """
    padding = [0, 0] * (per_sequence.ndim - 1) + [0, 1]
    return F.pad(per_sequence, padding)[rows.sequence]


def _inside_dtype(dtype: torch.dtype, out_dtype: torch.dtype, *, scaled: bool) -> torch.dtype:
    """The dtype of SDPA's inputs. It has 16 bits only if neither inputs nor output have more."""
    if dtype == torch.float64 or (dtype == out_dtype and not scaled):
        return dtype
    return torch.float32


def _autocasts(device_type: str) -> bool:
    """Whether autocast may be active for tensors of a device type."""
    return device_type not in AUTOCAST_DEVICES or torch.is_autocast_enabled(device_type)


def no_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast casts nothing on a kind of device."""
    if device_type in AUTOCAST_DEVICES and (
        torch.compiler.is_compiling() or torch.is_autocast_enabled(device_type)
    ):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _to_bhnd(x: Tensor, layout: str, packed: _Packed | None) -> Tensor:
    if packed:
        return x.transpose(0, 1)[None]
    return x.transpose(1, 2) if layout == "bnhd" else x


def _from_bhnd(x: Tensor, layout: str, packed: _Packed | None) -> Tensor:
    if packed:
        return x[0].transpose(0, 1)
    return x.transpose(1, 2) if layout == "bnhd" else x


def _dequantise(
    x: Tensor, descale: Tensor | None, rows: PackedRows | None, dtype: torch.dtype
) -> Tensor:
    """``(B, H, N, D)`` in the given dtype, times its descale."""
    x = x.to(dtype)
    if descale is None:
        return x
    heads = x.shape[1]
    if descale.numel() > 1 and descale.shape[min(descale.ndim - 1, 1)] != heads:
        group = heads // descale.shape[min(descale.ndim - 1, 1)]  # heads that share a descale
        descale = descale.repeat_interleave(group, min(descale.ndim - 1, 1))
    if descale.ndim < 2:
        return x * descale.reshape(1, -1, 1, 1)
    if descale.ndim == 3:
        return x * descale.repeat_interleave(SCALE_ROWS, 2)[:, :, : x.shape[2], None]
    if rows is None:
        return x * descale[:, :, None, None]
    return x * of_rows(descale, rows).t()[None, :, :, None]


def nesting(strides: Sequence[int]) -> list[int]:
    """The dimensions of a tensor with these strides from the outermost in memory to the innermost.

    The last dimension is always the innermost. A stride of 0 (expanded) says nothing about the
    order: such a dimension goes outermost. The output of a call nests as q does; plan_output() in
    src/runtime/reading/output.cpp follows the same rule for eager calls.
    """
    last = len(strides) - 1
    if all(isinstance(stride, int) for stride in strides):
        outer = sorted(range(last), key=lambda i: -strides[i] if strides[i] else _MINUS_INF)
        return [*outer, last]
    outer = []
    for i in range(last):
        place = i
        while place > 0 and _nests_inside(strides[outer[place - 1]], strides[i]):
            place -= 1
        outer.insert(place, i)
    return [*outer, last]


def _nests_inside(stride: Any, of: Any) -> bool:
    """Whether a dimension with a stride goes behind a later one with another: strides of a traced
    call. Where neither is known, dimensions nest in their order.
    """
    from torch.fx.experimental import symbolic_shapes

    def holds(comparison: Any) -> bool:
        if isinstance(comparison, bool):
            return comparison
        known: bool = symbolic_shapes.statically_known_true(comparison)
        return known if symbolic_shapes.free_unbacked_symbols(comparison) else bool(comparison)

    return not holds(stride == 0) and (holds(of == 0) or holds(stride < of))


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes another."""
    return [order.index(i) for i in range(len(order))]


def _in_stride_order_of(q: Tensor, result: Tensor) -> Tensor:
    """The result, dense, with its dimensions in memory in the order of q's."""
    if q.is_contiguous() and result.is_contiguous():
        return result
    order = nesting(q.stride())
    return result.permute(order).contiguous().permute(inverse(order))


# --- what a query may see ---


class _Band(NamedTuple):
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
        packed: _Packed | None,
        q: Tensor,
        k: Tensor,
        layout: str,
    ) -> _Band:
        left, right = sides_of(window)
        if isinstance(q_offset, int):
            q_offset = max(-_FAR, min(q_offset, _FAR))
        if causal:
            right = 0 if right is None else min(right, 0)
        if packed:
            if q_offset is None:
                q_offset = packed.k.cu_seqlens.diff() - packed.q.cu_seqlens.diff()
            return cls(left, right, q_offset)
        rows = 1 if layout == "bnhd" else 2
        nq, nk = q.shape[rows], k.shape[rows]
        if q_offset is None:
            q_offset = nk - nq
        if not isinstance(q_offset, Tensor):
            # A side that excludes no key is dropped, so that decoding one token needs no mask.
            if right is not None and q_offset + right >= nk - 1:
                right = None
            if left is not None and nq - 1 + q_offset - left <= 0:
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
def _unbounded(band: _Band) -> bool:
    return band.left is None and band.right is None


def _top_left_causal(band: _Band) -> bool:
    """Whether SDPA's is_causal means the same as the band."""
    plain_offset = not isinstance(band.offset, Tensor) and band.offset == 0
    return band.left is None and band.right == 0 and plain_offset


def _seen_from_top_left(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values, bhnd, that any query sees where the first one sees the first key: SDPA
    would multiply the others by 0, which is NaN if they are not finite.
    """
    nq, nk = q.shape[2], k.shape[2]
    return (k, v) if nk <= nq else (k[:, :, :nq], v[:, :, :nq])


def _visible_keys(q: Tensor, k: Tensor, band: _Band, packed: _Packed | None) -> Tensor | None:
    """Which keys band and packed sequences let each query see: bool, broadcastable to
    ``(B, Hq, Nq, Nk)``; None if every query sees every key.
    """
    if packed:
        rows, keys = packed
        sequences = rows.cu_seqlens.shape[0] - 1
        owned = (rows.sequence < sequences) & (rows.row >= 0)
        own, row_of_key = keys.of(rows)
        visible = own & owned[:, None]
        if not _unbounded(band):
            first = rows.row + (
                of_rows(band.offset, rows) if isinstance(band.offset, Tensor) else band.offset
            )
            visible = visible & band.contains(row_of_key - first[:, None])
        return visible[None, None]
    if _unbounded(band) and k.shape[2] > 0:
        return None
    row = torch.arange(q.shape[2], device=q.device)[:, None]
    key = torch.arange(k.shape[2], device=q.device)
    offset = band.offset[:, None, None, None] if isinstance(band.offset, Tensor) else band.offset
    visible = band.contains(key - row - offset)
    return visible if visible.ndim == 4 else visible[None, None]


class _Masks(NamedTuple):
    """The masks of a call that are tensors, as they were given."""

    attn_mask: Tensor | None
    alibi_slopes: Tensor | None
    key_ranges: Tensor | None
    block_mask: Tensor | None


class _Drops(NamedTuple):
    """Which weights are dropped."""

    p: float
    state: Tensor

    def factors(self, q: Tensor, k: Tensor, packed: _Packed | None, dtype: torch.dtype) -> Tensor:
        """What each weight is multiplied by, 0 or 1 / (1 - p): ``(B, Hq, Nq, Nk)``."""
        head = torch.arange(q.shape[1], device=q.device)[:, None, None]
        if packed:
            sequence = packed.q.sequence[:, None]
            query, key = packed.q.row[:, None], packed.k.of(packed.q)[1]
        else:
            sequence = torch.arange(q.shape[0], device=q.device)[:, None, None, None]
            query = torch.arange(q.shape[2], device=q.device)[:, None]
            key = torch.arange(k.shape[2], device=q.device)
        keep = kept(sequence * q.shape[1] + head, query, key, self.p, self.state)
        factors = keep.to(dtype) / (1 - self.p)
        return factors if factors.ndim == 4 else factors[None]


def _no_masks(masks: _Masks) -> bool:
    return all(mask is None for mask in masks)


def _in_ranges(visible: Tensor | None, key_ranges: Tensor, nk: int) -> Tensor:
    dense = to_dense(key_ranges, nk)
    return dense if visible is None else visible & dense


def _in_blocks(visible: Tensor | None, block_mask: Tensor, nq: int, nk: int) -> Tensor:
    seen = (block_mask != 0).repeat_interleave(MASK_BLOCK, 2)[:, :, :nq]
    seen = seen.repeat_interleave(MASK_BLOCK, 3)[..., :nk]
    return seen if visible is None else visible & seen


def _alibi(slopes: Tensor, q: Tensor, k: Tensor, band: _Band, packed: _Packed | None) -> Tensor:
    """What ALiBi adds to the scores: ``(B or 1, Hq, Nq, Nk)``, float64 for such q, else float32."""
    slopes = slopes.double() if q.dtype == torch.float64 else slopes
    if packed:
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


class _Mask(NamedTuple):
    """Which keys every query sees, and a form of it for softmax, in which no row is empty."""

    real: Tensor  # bool, broadcastable to (B, Hq, Nq, Nk)
    visible: Tensor  # bool; a row that sees no key is all True, and its result is replaced later
    seen: Tensor  # bool (..., Nq, 1): whether the row sees any key
    bias: Tensor | None  # a floating attn_mask with 0 for -inf, whose keys are not visible

    @classmethod
    def of(
        cls, visible: Tensor | None, attn_mask: Tensor | None, bias: Tensor | None
    ) -> _Mask | None:
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


# --- scores and output ---


def _attention_bhnd(
    q: Tensor,  # (B, Hq, Nq, D)
    k: Tensor,  # (B, Hkv, Nk, D)
    v: Tensor,  # (B, Hkv, Nk, Dv)
    *,
    scale: float,
    band: _Band,
    packed: _Packed | None,
    masks: _Masks,
    softcap: float | None,
    sinks: Tensor | None,
    want_lse: bool,
    drops: _Drops | None,
) -> tuple[Tensor, Tensor | None]:
    empty = 0 in (*q.shape, *k.shape, *v.shape)
    # SDPA takes only a bias of the inputs' dtype, and rounding a float32 bias to 16 bits would lose
    # accuracy.
    attn_mask = masks.attn_mask
    foreign_bias = attn_mask is not None and attn_mask.dtype not in (torch.bool, q.dtype)
    plain = bool(softcap) or sinks is not None or want_lse or empty or foreign_bias
    plain = plain or masks.alibi_slopes is not None or drops is not None
    if not plain and not packed and _no_masks(masks) and _top_left_causal(band):
        return _sdpa(q, *_seen_from_top_left(q, k, v), None, scale, is_causal=True), None

    visible = _visible_keys(q, k, band, packed)
    nq, nk = q.shape[2], k.shape[2]
    alone = visible is None and masks.key_ranges is None and masks.block_mask is None
    if attn_mask is not None and alone and not plain:
        return _with_dense_mask(q, k, v, attn_mask[(None,) * (4 - attn_mask.ndim)], scale), None
    if masks.key_ranges is not None:
        visible = _in_ranges(visible, masks.key_ranges, nk)
    if masks.block_mask is not None:
        visible = _in_blocks(visible, masks.block_mask, nq, nk)
    bias = None
    if masks.alibi_slopes is not None:
        bias = _alibi(masks.alibi_slopes, q, k, band, packed)
    mask = _Mask.of(visible, attn_mask, bias)
    # A masked product is 0 * x, which is NaN for a non-finite x: keys that a query does not see
    # (the tail of a cache, a neighbouring sequence) would reach it. So under a mask the products
    # run on finite values, and the queries that do see a non-finite key get their NaN afterwards.
    safe_k, safe_v = (x.nan_to_num(0.0, 0.0, 0.0) if mask else x for x in (k, v))
    lse = None
    if plain:
        need_lse = want_lse or sinks is not None
        inside = q.dtype if q.dtype == torch.float64 else torch.float32
        factors = drops.factors(q, k, packed, inside) if drops else None
        out, lse = _plain(
            q, safe_k, safe_v, mask,
            scale=scale, softcap=softcap, factors=factors, want_lse=need_lse,
        )  # fmt: skip
    else:
        sdpa_mask = mask.for_sdpa(q.shape[2], k.shape[2]) if mask else None
        out = _sdpa(q, safe_k, safe_v, sdpa_mask, scale, is_causal=False)
    lse_unseen: float | Tensor = _MINUS_INF
    if sinks is not None and lse is not None:
        sink = sinks.to(lse.dtype)[:, None]
        # The share of the denominator that belongs to keys: exp(lse) / (exp(lse) + exp(sink)).
        out = out * torch.sigmoid(lse - sink)[..., None]
        lse = torch.logaddexp(lse, sink)
        lse_unseen = sink
    if mask:
        bad_k, bad_v = _sees_non_finite(mask.real, k, v, q.shape[1])
        out = torch.where(mask.seen, out, 0.0) + _nan_where(bad_k | bad_v, out.dtype)
        if lse is not None:
            lse = torch.where(mask.seen[..., 0], lse, lse_unseen)
            lse = lse + _nan_where(bad_k[..., 0], lse.dtype)
    return out, lse


def _differentiates(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _with_dense_mask(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, scale: float) -> Tensor:
    """SDPA with an attn_mask of four dimensions and nothing else. The mask may be as large as all
    scores, so it is handed on as it is, and read by few other operations.

    As in `_attention_bhnd`, the products run on finite keys and values, the result of a row that
    sees no key is 0, and that of one that sees a key which is not finite is NaN. One product of the
    mask with what is to be known of each key tells which rows these are.
    """
    nq, nk = q.shape[2], k.shape[2]
    mask = attn_mask
    visible = attn_mask if attn_mask.dtype == torch.bool else attn_mask != _MINUS_INF
    finite = torch.maximum(_largest_of_rows(k), _largest_of_rows(v)) < math.inf  # (B, Hkv, Nk)
    safe_k, safe_v = (torch.where(finite[..., None], x, 0.0) for x in (k, v))
    bad = ~finite
    if q.shape[1] != k.shape[1]:
        bad = bad.repeat_interleave(q.shape[1] // k.shape[1], 1)
    seen = None
    if _differentiates(q, k, v, attn_mask):
        # The gradients of a row without keys would be NaN times 0: it sees all of them instead.
        seen = visible.any(-1, keepdim=True)
        mask = mask | ~seen if mask.dtype == torch.bool else torch.where(seen, mask, 0.0)
    if mask.device.type == "cuda" and mask.dtype != torch.bool:
        mask = _readable_by_fused_kernels(mask_for_fused_kernels(mask, nk))
    out = _sdpa(q, safe_k, safe_v, mask.expand(-1, -1, nq, nk), scale, is_causal=False)
    visible = visible.expand(-1, -1, -1, nk)
    if seen is None:
        rows = _any_of(visible, torch.stack([torch.ones_like(bad), bad], -1))
        seen, spoiled = rows[..., :1], rows[..., 1:]
    else:
        spoiled = _any_of(visible, bad[..., None])
    return torch.where(seen, out, 0.0) + _nan_where(spoiled, out.dtype)


def _largest_of_rows(x: Tensor) -> Tensor:
    """The largest magnitude of each row; NaN where there is one."""
    largest: Tensor = torch.linalg.vector_norm(x.detach(), math.inf, -1)
    return largest


def _any_of(visible: Tensor, of_key: Tensor) -> Tensor:
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


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, is_causal: bool
) -> Tensor:
    if differentiates_twice(q, k, v, mask):
        return _sdpa_by_plain_operations(q, k, v, mask, scale, is_causal=is_causal)
    if q.device.type == "cuda":
        q, k, v = (_readable_by_fused_kernels(x) for x in (q, k, v))
    out = pytorchs_sdpa(
        q,
        k,
        v,
        mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=bool(q.shape[1] != k.shape[1]),  # of symbolic sizes PyTorch takes no other
    )
    if out.requires_grad and not torch.compiler.is_compiling() and not in_transform():
        _let_differentiate_twice(out)
    return out


def _sdpa_by_plain_operations(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, is_causal: bool
) -> Tensor:
    """What `_sdpa` gives, by operations that have derivatives of every kind."""
    visible = None
    if is_causal:
        visible = _visible_keys(q, k, _Band(None, 0, 0), None)
    masks = None if mask is None and visible is None else _Mask.of(visible, mask, None)
    out, _ = _plain(q, k, v, masks, scale=scale, softcap=None, factors=None, want_lse=False)
    return out.to(q.dtype)


_FUSED = "ScaledDotProduct"  # how autograd's nodes of PyTorch's fused kernels are called


def _let_differentiate_twice(out: Tensor) -> None:
    """Makes gradients of gradients possible of what PyTorch's SDPA returned.

    Its fused kernels have first gradients only. Where their gradients are to be differentiated
    (create_graph=True), they are replaced by those of plain operations.
    """
    node = out.grad_fn
    while node is not None and not node.name().startswith(_FUSED):
        # Columns that SDPA has appended are cut off behind the kernel.
        if not node.name().startswith("Slice"):
            return  # SDPA by plain operations
        node = node.next_functions[0][0]
    if node is not None:
        node.register_hook(_differentiable_gradients)


def _differentiable_gradients(
    found: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """A hook of the backward pass of one of PyTorch's fused kernels.

    Args:
        found: the gradients of q, k, v and maybe a mask, by the kernel.
        given: that of the output, and more.
    """
    if not torch.is_grad_enabled() or given[0] is None:
        return None
    node: Any = torch._C._current_autograd_node()
    try:
        mask = getattr(node, "_saved_attn_bias", getattr(node, "_saved_attn_mask", None))
        inputs = [node._saved_query, node._saved_key, node._saved_value, mask]
    except RuntimeError as error:
        if type(error).__name__ != "CheckpointError":
            raise
        # Activation checkpointing gives a tensor once, and the kernel had it. PyTorch raises if the
        # kernel's gradients are differentiated.
        return None
    wanted = [i for i, x in enumerate(found) if x is not None]
    # Where one tensor is several inputs, each of them has a gradient of its own.
    for i in wanted:
        inputs[i] = inputs[i].view_as(inputs[i])
    q, k, v, mask = inputs
    scale, is_causal = node._saved_scale, node._saved_is_causal
    out = _sdpa_by_plain_operations(q, k, v, mask, scale, is_causal=is_causal)
    leaves = [inputs[i] for i in wanted]
    gradients = torch.autograd.grad(out, leaves, given[0], create_graph=True)
    of_input = dict(zip(wanted, gradients, strict=True))
    return tuple(of_input.get(i) for i in range(len(found)))


def pytorchs_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's scaled_dot_product_attention without those of its kernels that fail at the call."""
    if scale is not None and not scale > 0:
        factor, scale = positive_scale(scale)
        query = query * factor
    traced = is_tracing()  # by torch.jit.trace, which must not record what one shape needs
    if not traced and type(attn_mask) is Tensor and _has_fused_kernels(query):
        nk = key.shape[-2]
        if attn_mask.is_floating_point():
            attn_mask = mask_for_fused_kernels(attn_mask, nk, query.dtype)
            if attn_mask.requires_grad and torch.is_grad_enabled():
                query = _with_gradient(query, key, value)
        if query.ndim == 4 and _differentiates(query, key, value, attn_mask):
            more = hidden_keys_for_cudnn(query, key)
            if (
                more > 0
                and _gpu(query.device.index).cudnn_first
                and _on(SDPBackend.CUDNN_ATTENTION)
            ):
                key, value, attn_mask = with_hidden_keys(key, value, attn_mask, more)
    failing = {}
    if not traced:
        failing = _failing(query, key, value, attn_mask, is_causal, dropout_p != 0.0)
    with _others(failing) if failing else _NOTHING:
        return PYTORCHS_SDPA(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )


_NOTHING = contextlib.nullcontext()


def _has_fused_kernels(query: Tensor) -> bool:
    # A fake tensor may be on a CUDA device that is not there.
    return query.is_cuda and not query.is_nested and _has_cuda()


_has_cuda = functools.cache(torch.cuda.is_available)


def hidden_keys_for_cudnn(query: Tensor, key: Tensor) -> int:
    """How many keys that a mask hides have to follow key for the gradients of PyTorch's cuDNN
    kernel to be right (`_pytorch_faults.hidden_keys`).
    """
    if not _has_fused_kernels(query):
        return 0
    gpu = _gpu(query.device.index)
    nq, nk = query.shape[2], key.shape[2]
    return _pytorch_faults.hidden_keys((gpu.major, gpu.minor), gpu.cudnn, nq, nk)


def hidden_keys(capability: tuple[int, int], nq: int, nk: int) -> int:
    """`hidden_keys_for_cudnn` of numbers of queries and keys."""
    return _pytorch_faults.hidden_keys(capability, _fused_kernels.cudnn_version(), nq, nk)


def with_hidden_keys(
    key: Tensor, value: Tensor, mask: Tensor, more: int
) -> tuple[Tensor, Tensor, Tensor]:
    """key, value and the mask with more keys, none of which a query sees."""
    hidden: float | bool = False if mask.dtype == torch.bool else _MINUS_INF
    mask = _changed_rows(mask, key.shape[2], lambda rows: F.pad(rows, (0, more), value=hidden))
    return F.pad(key, (0, 0, 0, more)), F.pad(value, (0, 0, 0, more)), mask


def positive_scale(scale: float) -> tuple[float, float]:
    """A factor for q and a scale for the product, which is positive: PyTorch's kernels need one
    (`_pytorch_faults`). Both together are the given scale.
    """
    return (0.0, 1.0) if scale == 0 else (-1.0, -scale)


def mask_for_fused_kernels(mask: Tensor, nk: int, dtype: torch.dtype | None = None) -> Tensor:
    """An added mask as PyTorch's fused CUDA kernels read it: a number for each key in neighbouring
    elements from an aligned address on, in the dtype of q if that is given. cuDNN's takes any other
    for such a one.
    """
    if dtype is not None and mask.dtype != dtype:
        # The least finite number of a dtype has no neighbour below it but -inf in another.
        least = torch.finfo(dtype).min
        mask = torch.where(mask == _MINUS_INF, mask, mask.clamp(min=least)).to(dtype)
    dense = mask.shape[-1] == nk and (mask.stride(-1) == 1 or nk == 1)
    if dense and _address(mask) % _LOAD_BYTES == 0:
        return mask
    return _changed_rows(mask, nk, lambda rows: rows.clone(memory_format=torch.contiguous_format))


def _changed_rows(mask: Tensor, nk: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A mask with a number for each key, of which a function made each row anew; rows that are
    repeated by a stride of 0 are made once.
    """
    outer = mask.shape[:-1]
    repeated = zip(outer, mask.stride()[:-1], strict=True)
    once = mask[tuple(slice(0, 1) if n > 1 and not step else slice(None) for n, step in repeated)]
    return change(once.expand(*once.shape[:-1], nk)).expand(*outer, -1)


def _with_gradient(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query, or the same with a gradient if none of the three has one. PyTorch before 2.13 keeps no
    log-sum-exp then, which its memory-efficient kernel needs for the gradient of a mask.
    """
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return query
    if torch.compiler.is_compiling() or in_transform():
        return query  # where nothing can require a gradient later
    return query.detach().requires_grad_()


_BACKENDS = {
    _pytorch_faults.CUDNN: SDPBackend.CUDNN_ATTENTION,
    _pytorch_faults.FLASH: SDPBackend.FLASH_ATTENTION,
    _pytorch_faults.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}


def _failing(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout: bool,
) -> dict[str, str]:
    """The kernels of PyTorch that fail at a call of its function."""
    if not _has_fused_kernels(query) or query.ndim != 4:
        return {}
    # torch.compile does not trace what is kept between calls.
    find = _failing_of.__wrapped__ if torch.compiler.is_compiling() else _failing_of
    gradients = _differentiates(query, key, value)
    shapes = (*query.shape, key.shape[2], value.shape[3])
    return find(query.device.index, *shapes, mask is not None, is_causal, gradients, dropout)


@functools.lru_cache(maxsize=1024)
def _failing_of(
    device: int,
    batch: int,
    heads: int,
    nq: int,
    d: int,
    nk: int,
    dv: int,
    masked: bool,
    causal: bool,
    gradients: bool,
    dropout: bool,
) -> dict[str, str]:
    gpu = _gpu(device)
    return _fused_kernels.faults(
        capability=(gpu.major, gpu.minor), batch=batch, heads=heads, nq=nq, nk=nk, d=d, dv=dv,
        causal=causal, masked=masked, gradients=gradients, dropout=dropout, cudnn=gpu.cudnn,
    )  # fmt: skip


def _others(failing: dict[str, str]) -> contextlib.AbstractContextManager[None]:
    """A context in which PyTorch's function chooses none of these kernels."""
    kept = [backend for name, backend in _BACKENDS.items() if name not in failing and _on(backend)]
    context: contextlib.AbstractContextManager[None] = sdpa_kernel([*kept, SDPBackend.MATH])
    return context


class _Gpu(NamedTuple):
    """What PyTorch's choice of a kernel depends on, beside the call.

    Attributes:
        major, minor: compute capability of the GPU.
        cudnn: version of cuDNN.
        cudnn_first: whether PyTorch asks its cuDNN kernel before its others.
    """

    major: int
    minor: int
    cudnn: int
    cudnn_first: bool


def _ask_gpu(device: int) -> tuple[int, int, int, bool]:
    major, minor = torch.cuda.get_device_capability(device)
    first = _fused_kernels.cudnn_comes_first((major, minor))
    return major, minor, _fused_kernels.cudnn_version(), first


# torch.compile takes what it returns as a constant. PyTorch's function that says so loads dynamo.
_ask_gpu._dynamo_marked_constant = True  # type: ignore[attr-defined]
_asked_gpu = functools.cache(_ask_gpu)


def _gpu(device: int) -> _Gpu:
    # torch.compile does not trace what is kept between calls.
    return _Gpu(*(_ask_gpu(device) if torch.compiler.is_compiling() else _asked_gpu(device)))


def _on(backend: SDPBackend) -> bool:
    """Whether one of PyTorch's kernels is allowed at present, as by its sdpa_kernel."""
    if backend == SDPBackend.CUDNN_ATTENTION:
        return torch._C._get_cudnn_sdp_enabled()
    if backend == SDPBackend.FLASH_ATTENTION:
        return torch._C._get_flash_sdp_enabled()
    return torch._C._get_mem_efficient_sdp_enabled()


_LOAD_BYTES = 16  # bytes that PyTorch's fused CUDA kernels load at a time


def _readable_by_fused_kernels(x: Tensor) -> Tensor:
    """A tensor as it is, or a dense copy where PyTorch's fused CUDA kernels could not read it.

    Their loads of 16 bytes fault if an address is not a multiple of 16, but PyTorch chooses them
    without looking at the tensor's address and at most of its strides. So a tensor is copied if its
    address, or a stride times the size of an element, is not a multiple of 16 bytes. It is also
    copied if its last dimension is not dense, because PyTorch would not use the fused kernels. It
    is not copied if the bytes of a row are not a multiple of 16: PyTorch then pads the rows, which
    copies them, or uses plain operations, which read any tensor. float64 has plain operations only.
    The same holds for a mask that is added; of a bool one PyTorch makes a mask that is added.
    """
    size, width = x.element_size(), x.shape[-1]
    if x.dtype == torch.float64 or width * size % _LOAD_BYTES:
        return x
    *strides, innermost = x.stride()
    aligned = innermost == 1 and all(stride * size % _LOAD_BYTES == 0 for stride in strides)
    if aligned and _address(x) % _LOAD_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def aligned_for_fused_kernels(x: Tensor) -> Tensor:
    """A tensor as it is, or a dense copy of one whose rows have a width that is a multiple of 16
    bytes, but do not start at such multiples.
    """
    size = x.element_size()
    steps = [step for n, step in zip(x.shape, x.stride(), strict=True) if n > 1 and step > 1]
    if x.shape[-1] * size % _LOAD_BYTES or x.stride(-1) != 1:
        return x
    if all(step * size % _LOAD_BYTES == 0 for step in steps) and _address(x) % _LOAD_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _address(x: Tensor) -> int:
    if torch.compiler.is_compiling():
        # A compiled graph serves tensors at any address and cannot ask for it. Inductor itself
        # copies a tensor at an unaligned address; other backends leave that to the caller.
        return 0
    try:
        return x.data_ptr()
    except RuntimeError:  # inside transforms such as vmap a tensor has no address
        return 1


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: _Mask | None,
    *,
    scale: float,
    softcap: float | None,
    factors: Tensor | None,
    want_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output and LSE (without sinks) by plain operations in float32, or in float64 for float64."""
    if q.dtype != torch.float64:
        q, k, v = q.float(), k.float(), v.float()
    b, hq, nq, _ = q.shape
    hkv, nk = k.shape[1:3]

    def by_kv_head(x: Tensor) -> Tensor:
        """Stacks the query heads that share a key head, so that k and v are never repeated."""
        return x.reshape(b, hkv, hq // max(hkv, 1) * nq, x.shape[-1])

    scores = (by_kv_head(q) @ k.transpose(-1, -2)).view(b, hq, nq, nk) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask:
        if mask.bias is not None:
            scores = scores + mask.bias.to(scores.dtype)
        scores = torch.where(mask.visible, scores, _MINUS_INF)
    lse = None
    if differentiates_twice(scores):
        # PyTorch's rule for the tangent of softmax cannot itself be differentiated by autograd.
        top = scores.detach().amax(-1, keepdim=True)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        weights = weights / total
        lse = (top + total.log())[..., 0]
    else:
        weights = torch.softmax(scores, -1)
        lse = torch.logsumexp(scores, -1) if want_lse else None
    if factors is not None:  # of dropout
        weights = weights * factors
    out = (by_kv_head(weights) @ v).view(b, hq, nq, v.shape[-1])
    return out, lse


def _sees_non_finite(visible: Tensor, k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Whether each query sees a non-finite k, and whether it sees a non-finite v: two bool tensors
    ``(..., Nq, 1)``.
    """
    bad = torch.stack([~x.isfinite().all(-1) for x in (k, v)], -1)  # (B, Hkv, Nk, 2)
    hits = _any_of(visible, bad.repeat_interleave(heads // max(k.shape[1], 1), 1))
    return hits[..., :1], hits[..., 1:]


def _nan_where(spoiled: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(spoiled, dtype=dtype).masked_fill(spoiled, math.nan)
