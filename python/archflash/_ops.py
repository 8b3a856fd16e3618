"""archflash.attention as a torch operator: the way of a call under torch.compile, fake tensors,
subclasses and dispatch modes.

Plain eager calls do not come here: they skip torch's dispatcher.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from archflash import _torch
from archflash._errors import ForcedImplementationError

_library: Any = torch.library.Library("archflash", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, int? window_left, int? window_right, "
    "float? softcap, Tensor? sinks, float? scale, int? q_offset, Tensor? q_offset_tensor, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? attn_mask, Tensor? q_descale, "
    "Tensor? k_descale, Tensor? v_descale, ScalarType? out_dtype, str layout, "
    "str? implementation, bool return_lse) -> (Tensor, Tensor)"
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: tuple[int | None, int | None] | None,
    q_offset: int | Tensor | None,
    out: Tensor | None,
    implementation: str | None,
    return_lse: bool,
    **options: Any,
) -> Any:
    """`archflash.attention` through the operator; arguments already named, none of them
    optional.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        # The operator has no backward: PyTorch's own operations are traced instead, and
        # differentiated by autograd.
        if implementation not in (None, "torch"):
            raise ForcedImplementationError(
                f"{implementation} is forced, but gradients are needed and it has no backward: "
                "call it under torch.no_grad()"
            )
        return _torch.attention(
            q, k, v, window=window, q_offset=q_offset, out=out, return_lse=return_lse, **options
        )
    left, right = window if window is not None else (None, None)
    is_tensor = isinstance(q_offset, Tensor)
    result, lse = torch.ops.archflash.attention(
        q,
        k,
        v,
        window_left=left,
        window_right=right,
        q_offset=None if is_tensor else q_offset,
        q_offset_tensor=q_offset if is_tensor else None,
        implementation=implementation,
        return_lse=return_lse,
        **options,
    )
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    q_offset: int | None,
    q_offset_tensor: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    attn_mask: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    out_dtype: torch.dtype | None,
    layout: str,
    implementation: str | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """The operator on real tensors."""
    from archflash._api import attention as eager

    # A subclass that let the operator through has no more say: as itself it would come back here.
    result = eager(
        q.as_subclass(Tensor),
        k.as_subclass(Tensor),
        v.as_subclass(Tensor),
        causal=causal,
        window=(window_left, window_right),
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        q_offset=q_offset if q_offset_tensor is None else q_offset_tensor,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        attn_mask=attn_mask,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out_dtype=out_dtype,
        layout=layout,
        implementation=implementation,
        return_lse=return_lse,
    )
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


_library.impl("attention", _run, "CompositeExplicitAutograd")


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    q_offset: int | None,
    q_offset_tensor: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    attn_mask: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    out_dtype: torch.dtype | None,
    layout: str,
    implementation: str | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Shapes, strides and dtypes of what `_run` returns."""
    strides = q.stride()[:-1]
    # The output's dimensions nest as q's do; one of stride 0 (expanded) goes outermost.
    order = sorted(range(len(strides)), key=lambda i: -strides[i] if strides[i] else -math.inf)
    shape = [*q.shape[:-1], v.shape[-1]]
    dtype = out_dtype or (torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)
    nested = q.new_empty([*(shape[i] for i in order), shape[-1]], dtype=dtype)
    out = nested.permute([*(order.index(i) for i in range(len(order))), len(order)])
    if not return_lse:
        lse_shape: tuple[int, ...] = (0,)
    elif cu_seqlens_q is not None:
        lse_shape = (q.shape[1], q.shape[0])
    elif layout == "bhnd":
        lse_shape = (q.shape[0], q.shape[1], q.shape[2])
    else:
        lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(lse_shape, dtype=torch.float32)


torch.library.register_fake("archflash::attention", _fake, lib=_library)
