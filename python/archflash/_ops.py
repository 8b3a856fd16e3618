"""archflash.attention as a torch operator: the way of a call under torch.compile, fake tensors,
subclasses and dispatch modes.

Plain eager calls do not come here: they skip torch's dispatcher.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from archflash import _archflash as _native
from archflash import _torch
from archflash._dispatch import check_name, forced, note_fallback
from archflash._errors import ForcedImplementationError

_library: Any = torch.library.Library("archflash", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, int? window_left, int? window_right, "
    "float? softcap, Tensor? sinks, float? scale, int? q_offset, Tensor? q_offset_tensor, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? attn_mask, Tensor? q_descale, "
    "Tensor? k_descale, Tensor? v_descale, ScalarType? out_dtype, str? approximate, "
    "int? num_splits, str layout, "
    "int? max_seqlen_q, int? max_seqlen_k, str? implementation, bool needs_grad, "
    "bool return_lse) -> (Tensor, Tensor)"
)

# The options of a call that autograd may want gradients of, beside q, k and v.
DIFFERENTIABLE = ("sinks", "attn_mask", "q_descale", "k_descale", "v_descale")
GRADIENTS = "gradients are needed and no kernel has a backward: call it under torch.no_grad()"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: tuple[int | None, int | None] | None,
    q_offset: int | Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    out: Tensor | None,
    implementation: str | None,
    return_lse: bool,
    **options: Any,
) -> Any:
    """`archflash.attention` through the operator; all arguments named, none of them optional."""
    compiling = torch.compiler.is_compiling()
    tensors = (q, k, v, *(options[name] for name in DIFFERENTIABLE))
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    transformed = not compiling and _in_transform()
    if not compiling:
        _native.make_problem(
            q, k, v, options["causal"], window, options["softcap"], options["sinks"],
            options["scale"], q_offset, options["cu_seqlens_q"], options["cu_seqlens_k"],
            max_seqlen_q, max_seqlen_k, options["attn_mask"], options["q_descale"],
            options["k_descale"], options["v_descale"], options["out_dtype"],
            options["approximate"], options["num_splits"], options["layout"], out, return_lse,
            int(needs_grad) * 2,
        )  # fmt: skip
        if implementation is not None:
            check_name(implementation)
        q, k, v = (resolved(x) for x in (q, k, v))
        options = {name: resolved(value) for name, value in options.items()}
        q_offset = _torch.python_number(resolved(q_offset))
        window = None if window is None else tuple(_torch.python_number(x) for x in window)
        for name in ("scale", "softcap", "num_splits"):
            options[name] = _torch.python_number(options[name])
        max_seqlen_q, max_seqlen_k = map(_torch.python_number, (max_seqlen_q, max_seqlen_k))
        if needs_grad or transformed:
            _refuse_forced(implementation)
            if q.device.type == "cuda":
                note_fallback(GRADIENTS)

    def operator(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        left, right = window if window is not None else (None, None)
        is_tensor = isinstance(q_offset, Tensor)
        results: tuple[Tensor, Tensor] = torch.ops.archflash.attention(
            *tensors,
            window_left=left,
            window_right=right,
            q_offset=None if is_tensor else q_offset,
            q_offset_tensor=q_offset if is_tensor else None,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            implementation=implementation,
            needs_grad=needs_grad,
            return_lse=return_lse,
            **options,
        )
        return results

    if needs_grad or transformed:
        # The operator has no backward: PyTorch's own operations run instead, and autograd or the
        # transform goes through them. While compiling the operator is traced for its checks only:
        # nothing uses its result, so that it is dropped from the graph.
        if compiling:
            with torch.no_grad():
                operator(q.detach(), k.detach(), v.detach())
        of_kernels = ("approximate", "num_splits")
        of_torch = {name: value for name, value in options.items() if name not in of_kernels}
        return _torch.attention(
            q, k, v, window=window, q_offset=q_offset, out=out, return_lse=return_lse, **of_torch
        )
    result, lse = operator(q, k, v)
    if out is not None:
        if out.shape != result.shape or out.dtype != result.dtype:
            raise ValueError(
                f"out is {out.dtype} {tuple(out.shape)}: it must be {result.dtype} "
                f"{tuple(result.shape)}"
            )
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def resolved(x: Any) -> Any:
    """A tensor whose memory holds its values: a copy of one with the negative bit and of a zero
    tensor; everything else as it is.
    """
    # A subclass has its own say first: it is resolved when it comes back as a plain tensor.
    if isinstance(x, Tensor) and _native.is_plain_tensor(x) and (x.is_neg() or x._is_zerotensor()):
        return x.clone()
    return x


def _in_transform() -> bool:
    """Whether a functorch transform (vmap, grad, jvp) or forward-mode autograd is at work."""
    return _functorch_stack() is not None or forward_ad._current_level >= 0


_functorch_stack = torch._C._functorch.peek_interpreter_stack


def _refuse_forced(implementation: str | None) -> None:
    name = forced() if implementation is None else implementation
    if name is not None and name != "torch":
        raise ForcedImplementationError(f"{name} is forced, but {GRADIENTS}")


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
    approximate: str | None,
    num_splits: int | None,
    layout: str,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    implementation: str | None,
    needs_grad: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """The operator on real tensors."""
    from archflash._api import attention as eager

    # A subclass that let the operator through has no more say: as itself it would come back here.
    q, k, v = (x.as_subclass(Tensor) for x in (q, k, v))
    result = eager(
        q,
        k,
        v,
        causal=causal,
        window=(window_left, window_right),
        softcap=softcap,
        sinks=_plain(sinks),
        scale=scale,
        q_offset=q_offset if q_offset_tensor is None else _plain(q_offset_tensor),
        cu_seqlens_q=_plain(cu_seqlens_q),
        cu_seqlens_k=_plain(cu_seqlens_k),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        attn_mask=_plain(attn_mask),
        q_descale=_plain(q_descale),
        k_descale=_plain(k_descale),
        v_descale=_plain(v_descale),
        out_dtype=out_dtype,
        approximate=approximate,
        num_splits=num_splits,
        layout=layout,
        implementation=implementation,
        return_lse=return_lse,
    )
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


def _plain(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.as_subclass(Tensor)


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
    approximate: str | None,
    num_splits: int | None,
    layout: str,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    implementation: str | None,
    needs_grad: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Shapes, strides and dtypes of what `_run` returns; refuses what needs no data to refuse."""
    if needs_grad:
        _refuse_forced(implementation)
    if all(isinstance(size, int) for x in (q, k, v) for size in x.shape):  # not symbolic ones
        _native.make_problem(
            q, k, v, causal, (window_left, window_right), softcap, sinks, scale,
            q_offset if q_offset_tensor is None else q_offset_tensor, cu_seqlens_q, cu_seqlens_k,
            max_seqlen_q, max_seqlen_k, attn_mask, q_descale, k_descale, v_descale, out_dtype,
            approximate, num_splits, layout, None, return_lse, 0,
        )  # fmt: skip
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
