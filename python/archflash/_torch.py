"""The implementation `torch`: attention by PyTorch's own operations, on any device it serves.

It is the last one that dispatch tries, so it takes every call. It calls PyTorch's
scaled_dot_product_attention (SDPA) if that has the semantics of the call, alone or with a boolean
mask, and plain matrix products in float32 for softcap, sinks and the log-sum-exp. Nothing here
reads a tensor's values on the host.

The order of work: inputs become (B, H, N, D) views; then which keys each query sees; then scores
and output; then the caller's layout, dtype and stride order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from archflash import _autocast, _key_lists, _torch_kernels
from archflash._archflash import SCALE_ROWS, SCALED_NUMBERS
from archflash._eager import differentiates_twice, in_transform, is_eager, is_mapped
from archflash._strides import in_stride_order_of
from archflash._torch_kernels import (
    differentiates,
    failing_kernels,
    let_read_gradients,
    mask_for_fused_kernels,
    mask_in_float32,
    pytorchs_sdpa,
    readable_by_fused_kernels,
    without_repeats,
)
from archflash._torch_masks import (
    Band,
    Drops,
    Mask,
    MaskTensors,
    Packed,
    PackedRows,
    alibi,
    any_of,
    in_blocks,
    in_ranges,
    in_sequences,
    largest_of_rows,
    nan_where,
    no_masks,
    of_rows,
    packed_rows,
    seen_from_top_left,
    sees_non_finite,
    top_left_causal,
    unbounded,
    visible_keys,
)
from archflash._torch_plain import (
    let_differentiate_twice,
    plain_operations,
    sdpa_by_plain_operations,
)
from archflash.reference.formula import FP8

_MINUS_INF = -math.inf


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, scale: float | None = None, q_offset: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    attn_mask: Tensor | None = None, alibi_slopes: Tensor | None = None,
    key_ranges: Tensor | None = None, block_mask: Tensor | None = None,
    key_indices: Tensor | None = None, topk_lengths: Tensor | None = None,
    dropout_p: float | None = None, rng_state: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, out_dtype: torch.dtype | None = None, layout: str = "bhnd",
    out: Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention by PyTorch operations.

    Args:
        q, k, v, causal, ..., return_lse: the tensors and options of `archflash.attention`, which
            has checked them; dropout_p comes with rng_state.

    Returns:
        The output, shaped like q with Dv for D and in q's stride order; with return_lse also the
        natural-log LSE, float32, ``(B, Hq, Nq)`` or ``(Hq, Tq)`` contiguous. A query that sees no
        key gives 0 and an LSE of -inf (the sink, if any).
    """
    if out_dtype is None:
        out_dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    unscaled = q_descale is None and k_descale is None and v_descale is None
    if key_indices is not None:
        attn_mask = _key_lists.as_mask(key_indices, topk_lengths, q, k, layout)
    if q.dtype != torch.float64:  # what float32 does not hold would be infinite in it
        if softcap and softcap > torch.finfo(torch.float32).max:
            softcap = None  # it changes no score
        if attn_mask is not None and attn_mask.dtype == torch.float64:
            attn_mask = mask_in_float32(attn_mask)
    packed = rows = keys = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        rows = packed_rows(cu_seqlens_q, q.shape[0])
        keys = packed_rows(cu_seqlens_k, k.shape[0])
        packed = Packed(rows, keys)
    band = Band.of(causal, window, q_offset, packed, q, k, layout)
    masks = MaskTensors(attn_mask, alibi_slopes, key_ranges, block_mask)
    drops = None
    if dropout_p and rng_state is not None:
        drops = Drops(dropout_p, rng_state)
    plain = (
        no_masks(masks)
        and drops is None
        and sinks is None
        and not softcap
        and not return_lse
        and packed is None
    )
    as_it_is = q.dtype == out_dtype and q.dtype not in FP8 and unscaled
    if (
        plain
        and as_it_is
        and not torch.compiler.is_compiling()
        and not _autocast.may_be_on(q.device.type)
    ):
        # A plain call needs no mask and no conversion. Calling SDPA directly takes a fraction of
        # the host time of the general code below.
        is_causal = top_left_causal(band)
        if (is_causal or unbounded(band)) and 0 not in (*q.shape, *k.shape, *v.shape):
            q_bhnd, k_bhnd, v_bhnd = (_to_bhnd(x, layout, None) for x in (q, k, v))
            if is_causal:
                k_bhnd, v_bhnd = seen_from_top_left(q_bhnd, k_bhnd, v_bhnd)
            result = _sdpa(q_bhnd, k_bhnd, v_bhnd, None, scale, is_causal=is_causal)
            result = in_stride_order_of(q, _from_bhnd(result, layout, None))
            return result if out is None else out.copy_(result)

    inside = _inside_dtype(q.dtype, out_dtype, scaled=not unscaled)
    # The caller chooses the dtypes of a call, and autocast must not change them: it would compute
    # the float32 products below in 16 bits.
    with _autocast.no_autocast(q.device.type):
        result, lse = _attention_bhnd(
            _dequantise(_to_bhnd(q, layout, packed), q_descale, rows, inside, layout),
            _dequantise(_to_bhnd(k, layout, packed), k_descale, keys, inside, layout),
            _dequantise(_to_bhnd(v, layout, packed), v_descale, keys, inside, layout, along=-2),
            scale=scale, band=band, packed=packed, masks=masks, softcap=softcap, sinks=sinks,
            want_lse=return_lse, drops=drops,
        )  # fmt: skip
    result = in_stride_order_of(q, _from_bhnd(result.to(out_dtype), layout, packed))
    if out is not None:
        result = out.copy_(result)
    if not return_lse or lse is None:
        return result
    lse = lse.to(torch.float32).contiguous()
    return result, lse if packed is None else lse[0]


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
    band = Band.of(causal, None, None, None, q, k, layout)
    is_causal = top_left_causal(band)
    seen = is_causal or unbounded(band)
    if not seen or not scale > 0 or q.dtype in FP8 or 0 in (*q.shape, *k.shape, *v.shape):
        return None
    device_type = q.device.type
    q, k, v = (_to_bhnd(x, layout, None) for x in (q, k, v))
    if is_causal and k.shape[2] > q.shape[2]:
        return None  # keys that no query sees have to be left out
    if device_type == "cuda" and any(readable_by_fused_kernels(x) is not x for x in (q, k, v)):
        return None
    if device_type == "cuda" and without_repeats(q, v) is not q:
        return None
    if failing_kernels(q, k, v, None, is_causal, False):
        return None
    enable_gqa = q.shape[1] != k.shape[1]

    def call(q: Tensor, k: Tensor, v: Tensor, rows_first: bool) -> Any:
        if _autocast.may_be_on(device_type) or not is_eager():
            return attention(
                q, k, v, causal=causal, scale=scale, layout="bnhd" if rows_first else "bhnd"
            )
        given = q
        if rows_first:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = _torch_kernels.PYTORCHS_SDPA(
            q, k, v, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if out.requires_grad:
            let_read_gradients(out, q, k, v, None, is_causal)
            let_differentiate_twice(out)
        return in_stride_order_of(given, out.transpose(1, 2) if rows_first else out)

    return call


# --- inputs and outputs ---


def _inside_dtype(dtype: torch.dtype, out_dtype: torch.dtype, *, scaled: bool) -> torch.dtype:
    """The dtype of SDPA's inputs. It has 16 bits only if neither inputs nor output have more."""
    if dtype == torch.float64 or (dtype == out_dtype and not scaled):
        return dtype
    return torch.float32


def _to_bhnd(x: Tensor, layout: str, packed: Packed | None) -> Tensor:
    if packed is not None:
        return x.transpose(0, 1)[None]
    return x.transpose(1, 2) if layout == "bnhd" else x


def _from_bhnd(x: Tensor, layout: str, packed: Packed | None) -> Tensor:
    if packed is not None:
        return x[0].transpose(0, 1)
    return x.transpose(1, 2) if layout == "bnhd" else x


def _dequantise(
    x: Tensor,
    descale: Tensor | None,
    rows: PackedRows | None,
    dtype: torch.dtype,
    layout: str,
    along: int = -1,
) -> Tensor:
    """``(B, H, N, D)`` in the given dtype, times its descale. Block scales lie along `along`."""
    x = x.to(dtype)
    if descale is None:
        return x
    if descale.ndim == 4:
        scales = _to_bhnd(descale, layout, None).to(dtype).repeat_interleave(SCALED_NUMBERS, along)
        return x * scales.narrow(along, 0, x.shape[along])
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


# --- scores and output ---


def _attention_bhnd(
    q: Tensor,  # (B, Hq, Nq, D)
    k: Tensor,  # (B, Hkv, Nk, D)
    v: Tensor,  # (B, Hkv, Nk, Dv)
    *,
    scale: float,
    band: Band,
    packed: Packed | None,
    masks: MaskTensors,
    softcap: float | None,
    sinks: Tensor | None,
    want_lse: bool,
    drops: Drops | None,
) -> tuple[Tensor, Tensor | None]:
    empty = 0 in (*q.shape, *k.shape, *v.shape)
    # SDPA takes only a bias of the inputs' dtype, and rounding a float32 bias to 16 bits would lose
    # accuracy.
    attn_mask = masks.attn_mask
    foreign_bias = attn_mask is not None and attn_mask.dtype not in (torch.bool, q.dtype)
    plain = bool(softcap) or sinks is not None or want_lse or empty or foreign_bias
    plain = plain or masks.alibi_slopes is not None or drops is not None
    if not plain and packed is None and no_masks(masks) and top_left_causal(band):
        return _sdpa(q, *seen_from_top_left(q, k, v), None, scale, is_causal=True), None

    visible = visible_keys(q, k, band, packed)
    if packed is not None and differentiates(q, k, v, *([] if sinks is None else [sinks])):
        # Rows of no sequence may hold NaN, which times their gradient of 0 would reach every key.
        q = torch.where(in_sequences(packed.q)[:, None], q, 0.0)
    nq, nk = q.shape[2], k.shape[2]
    alone = visible is None and masks.key_ranges is None and masks.block_mask is None
    if attn_mask is not None and alone and not plain:
        return _with_dense_mask(q, k, v, attn_mask[(None,) * (4 - attn_mask.ndim)], scale), None
    if masks.key_ranges is not None:
        visible = in_ranges(visible, masks.key_ranges, nk)
    if masks.block_mask is not None:
        visible = in_blocks(visible, masks.block_mask, nq, nk)
    bias = None
    if masks.alibi_slopes is not None:
        bias = alibi(masks.alibi_slopes, q, k, band, packed)
    mask = Mask.of(visible, attn_mask, bias)
    # A masked product is 0 * x, which is NaN for a non-finite x: keys that a query does not see
    # (the tail of a cache, a neighbouring sequence) would reach it. So under a mask the products
    # run on finite values, and the queries that do see a non-finite key get their NaN afterwards.
    safe_k, safe_v = (x.nan_to_num(0.0, 0.0, 0.0) if mask else x for x in (k, v))
    lse = None
    if plain:
        need_lse = want_lse or sinks is not None
        inside = q.dtype if q.dtype == torch.float64 else torch.float32
        factors = drops.factors(q, k, packed, inside) if drops is not None else None
        out, lse = plain_operations(
            q, safe_k, safe_v, mask,
            scale=scale, softcap=softcap, factors=factors, want_lse=need_lse,
        )  # fmt: skip
    else:
        sdpa_mask = mask.for_sdpa(q.shape[2], k.shape[2]) if mask else None
        out = _sdpa(q, safe_k, safe_v, sdpa_mask, scale, is_causal=False)
    lse_unseen: float | Tensor = _MINUS_INF
    if sinks is not None and lse is not None:
        # A sink of -inf has no share, and no gradient, also in rows that see no key.
        sink = torch.where(sinks == _MINUS_INF, _MINUS_INF, sinks.to(lse.dtype))[:, None]
        # The share of the denominator that belongs to keys: exp(lse) / (exp(lse) + exp(sink)).
        out = out * torch.sigmoid(lse - sink)[..., None]
        lse = torch.logaddexp(lse, sink)
        lse_unseen = sink
    if mask:
        bad_k, bad_v = sees_non_finite(mask.real, k, v, q.shape[1])
        out = torch.where(mask.seen, out, 0.0) + nan_where(bad_k | bad_v, out.dtype)
        if lse is not None:
            lse = torch.where(mask.seen[..., 0], lse, lse_unseen)
            lse = lse + nan_where(bad_k[..., 0], lse.dtype)
    return out, lse


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
    finite = torch.maximum(largest_of_rows(k), largest_of_rows(v)) < math.inf  # (B, Hkv, Nk)
    safe_k, safe_v = (torch.where(finite[..., None], x, 0.0) for x in (k, v))
    bad = ~finite
    if q.shape[1] != k.shape[1]:
        bad = bad.repeat_interleave(q.shape[1] // k.shape[1], 1)
    seen = None
    if differentiates(q, k, v, attn_mask):
        # The gradients of a row without keys would be NaN times 0: it sees all of them instead.
        seen = visible.any(-1, keepdim=True)
        mask = mask | ~seen if mask.dtype == torch.bool else torch.where(seen, mask, 0.0)
    if mask.device.type == "cuda" and mask.dtype != torch.bool:
        mask = readable_by_fused_kernels(mask_for_fused_kernels(mask, nk))
    out = _sdpa(q, safe_k, safe_v, mask.expand(-1, -1, nq, nk), scale, is_causal=False)
    visible = visible.expand(-1, -1, -1, nk)
    if seen is None:
        rows = any_of(visible, torch.stack([torch.ones_like(bad), bad], -1))
        seen, spoiled = rows[..., :1], rows[..., 1:]
    else:
        spoiled = any_of(visible, bad[..., None])
    return torch.where(seen, out, 0.0) + nan_where(spoiled, out.dtype)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, is_causal: bool
) -> Tensor:
    mapped = mask is not None and q.device.type == "cuda" and is_mapped(q, k, v, mask)
    if mapped or differentiates_twice(q, k, v, mask):
        return sdpa_by_plain_operations(q, k, v, mask, scale, is_causal=is_causal)
    if q.device.type == "cuda":
        q, k, v = (readable_by_fused_kernels(x) for x in (q, k, v))
    # A branch makes a bool of symbolic sizes, too, and PyTorch takes no other.
    groups = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    out = pytorchs_sdpa(q, k, v, mask, is_causal=is_causal, scale=scale, **groups)
    if out.requires_grad and not torch.compiler.is_compiling() and not in_transform():
        let_differentiate_twice(out)
    return out
