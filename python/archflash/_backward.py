"""archflash.attention_backward: the gradients of a call, from what the call gave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import (
    _bias,
    _compute_gradients,
    _dispatch,
    _gradients,
    _key_lists,
    _ops_backward,
    _options,
)
from archflash._eager import is_eager, overridden, refuse_derivatives, stands_for_tensor, unrecorded
from archflash._errors import UnsupportedError
from archflash._plain_tensors import goes_through_operator, is_symbolic
from archflash._value_checks import check_call, is_readable

_always_check = _key_lists.ALWAYS_CHECK


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    accumulate: bool = False,
    deterministic: bool | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    q_offset: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_ranges: Tensor | None = None,
    block_mask: Tensor | None = None,
    key_indices: Tensor | None = None,
    topk_lengths: Tensor | None = None,
    dropout_p: float | None = None,
    rng_state: Tensor | None = None,
    mask_gradient: bool = False,
    layout: str = "bhnd",
    implementation: str | None = None,
) -> tuple[Tensor, ...]:
    """Computes the gradients of one call of `archflash.attention` with respect to q, k and v.

    `archflash.attention` is differentiable by itself, any number of times. This function, whose
    results have no gradients, is for code that keeps the tensors of a call itself, such as context
    parallelism, where each device has a part of the keys: the gradients of the parts are added up
    with accumulate=True, and out and lse are those of all parts together. The gradient of the sinks
    is that of all parts in each call: take it from one.

    Args:
        dout: the gradient of the output, shaped like it, in its dtype. As every tensor of the call
            and every gradient, it may have any strides: kernels copy those whose rows are not
            contiguous and 16-byte aligned, and explain says so.
        q, k, v: as the call got them: float32, float16, bfloat16 or float64.
        out: the output of the call, in q's dtype.
        lse: the log-sum-exp that the call returned with return_lse=True, float32 ``(batch, heads_q,
            nq)``, or ``(heads_q, total_q)`` with cu_seqlens.
        dlse: the gradient of the log-sum-exp, float32, shaped like lse; default 0.
        dq, dk, dv: tensors that the gradients are written to, shaped like q, k and v, in q's dtype
            or float32. They must not overlap any other tensor of the call in memory. Default: new
            tensors in the dtypes and stride orders of q, k and v.
        accumulate: adds the gradients to what dq, dk and dv hold, which must be given then.
        deterministic: whether the same inputs must always give the same bits, whoever computes the
            gradients. Otherwise the CTAs of a kernel may add to dq in any order. Default:
            torch.are_deterministic_algorithms_enabled().
        causal, ..., layout: the options of the call, as it got them. For alibi_slopes there is no
            gradient. With dropout_p rng_state must be given to both.
        mask_gradient: also returns the gradient of attn_mask, which must be floating.
        implementation: forces one by name, "ampere" or "torch"; overrides `archflash.force` and
            ARCHFLASH_FORCE_IMPLEMENTATION.

    Returns:
        (dq, dk, dv); with sinks (dq, dk, dv, dsinks), where dsinks is float32 ``(heads_q,)``; with
        mask_gradient dmask follows, float32, shaped like attn_mask. Where a query does not see a
        key, neither reaches the other's gradient. Rows of packed tensors that belong to no sequence
        have the gradient 0.

    Raises:
        ValueError: shapes that disagree, accumulate without dq, dk and dv, or any that
            `archflash.attention` raises.
        TypeError: a tensor of the wrong dtype, on another device, or no tensor.
        UnsupportedError: no kernel computes these gradients and ARCHFLASH_FALLBACK=error; or a
            tensor requires a gradient while gradients are enabled, or has a tangent.
        ForcedImplementationError: the forced implementation cannot compute them.

    Example:
        >>> import archflash, torch
        >>> q, k, v = (torch.randn(2, 4, 7, 16) for _ in range(3))
        >>> out, lse = archflash.attention(q, k, v, return_lse=True)
        >>> dq, dk, dv = archflash.attention_backward(torch.ones_like(out), q, k, v, out, lse)
        >>> dk.shape
        torch.Size([2, 4, 7, 16])
    """
    if stands_for_tensor(q):
        return overridden(attention_backward, locals())  # type: ignore[no-any-return]
    if attn_mask is not None and _bias.is_causal_bias(attn_mask):
        causal, q_offset, attn_mask = _bias.resolve(
            attn_mask, q, k, causal, window, q_offset, cu_seqlens_q, layout
        )
    if not isinstance(accumulate, bool):
        raise TypeError(f"accumulate is {_native.given(accumulate)}: it must be a bool")
    if not isinstance(mask_gradient, bool):
        raise TypeError(f"mask_gradient is {_native.given(mask_gradient)}: it must be a bool")
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(
            f"deterministic is {_native.given(deterministic)}: it must be a bool or None"
        )
    given, tensors = (dq, dk, dv), (dout, q, k, v, out, lse, dlse)
    # In the order of the table of options, src/common/options.inc.
    values = (
        causal, window, softcap, sinks, scale, q_offset, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, attn_mask, alibi_slopes, key_ranges, block_mask, key_indices, topk_lengths,
        dropout_p, rng_state, None, None, None, None, None, None, False, layout, None, False,
    )  # fmt: skip
    if is_eager():
        if _always_check and is_readable(q):
            _native.make_problem(q, k, v, values, 0)  # refuses wrong shapes
            check_call(q, k, values)
        name = _dispatch.forced() if implementation is None else implementation
        asked = _gradients.wants_deterministic() if deterministic is None else deterministic
        results: Any = _native.attention_backward(
            *tensors, values, name, *given, accumulate, mask_gradient, asked,
            torch.is_grad_enabled(),
        )  # fmt: skip
        if results is not NotImplemented:
            new_dq, new_dk, new_dv, dsinks, dmask = results
            if dsinks is None and dmask is None:
                return new_dq, new_dk, new_dv
            return tuple(x for x in results if x is not None)
    options = _options.complete(dict(zip(_options.OF_ATTENTION, values, strict=True)))
    differentiable = {name: options[name] for name in _options.DIFFERENTIABLE}
    refuse_derivatives(
        "attention_backward", dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse,
        **differentiable,
    )  # fmt: skip
    if goes_through_operator(*tensors, *given, *options.values()):
        if not is_symbolic(*tensors, *options.values()):
            request = _gradients.Request(*tensors, options, mask_gradient)
            _ops_backward.check_backward(request)
            for of_gradient, x, of in zip(("dq", "dk", "dv"), given, (q, k, v), strict=True):
                _check_given(of_gradient, x, of, accumulate)
        unrecorded(_refuse_for_operator, (q, k, v), given)
        wide = any(x is not None and x.dtype != q.dtype for x in given)
        with torch.no_grad():
            found = _ops_backward.attention_backward(
                *tensors, options, implementation, mask_gradient, deterministic, wide
            )
            results = _into_given(found, given, accumulate, q.dtype)
    else:
        request = _ops_backward.backward_request(*tensors, options, mask_gradient)
        _options.with_python_numbers(request.options)
        into = _targets(request, given, accumulate)
        name = _dispatch.forced() if implementation is None else implementation
        with torch.no_grad():
            _compute_gradients.compute(request, into, name, deterministic)
        dmask = None if into.dmask is None else into.dmask.reshape(options["attn_mask"].shape)
        results = (into.dq, into.dk, into.dv, into.dsinks, dmask)
    return tuple(x for x in results if x is not None)


def _targets(
    request: _gradients.Request, given: tuple[Tensor | None, ...], accumulate: bool
) -> _gradients.Gradients:
    """The tensors that the gradients are written to: those given, and new ones for the rest."""
    named = zip(("dq", "dk", "dv"), given, (request.q, request.k, request.v), strict=True)
    places = {
        x.data_ptr(): name
        for name, x in (
            ("dout", request.dout), ("q", request.q), ("k", request.k), ("v", request.v),
            ("out", request.out),
        )
    }  # fmt: skip
    for name, x, of in named:
        _check_given(name, x, of, accumulate)
        if x is None or not (place := x.data_ptr()):  # one without elements or without memory
            continue
        if other := places.get(place):
            raise ValueError(
                f"{name} begins where {other} does, which is read or written as well: pass a "
                "tensor with memory of its own"
            )
        places[place] = name
    return _gradients.Gradients.like(request, given, accumulate)


def _check_given(name: str, x: Tensor | None, of: Tensor, accumulate: bool) -> None:
    """Refuses what the gradient of a tensor cannot be written to."""
    if x is None:
        if accumulate:
            raise ValueError(f"accumulate=True, but {name} is None: pass the tensor to add to")
        return
    _gradients.check_tensor(name, x, of.device, of.shape, (of.dtype, torch.float32))
    if any(size > 1 and step == 0 for size, step in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(f"{name} has strides {tuple(x.stride())}: its elements overlap")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient: pass its detach()")


def _refuse_for_operator(inputs: tuple[Tensor, ...], given: tuple[Tensor | None, ...]) -> None:
    """Refuses what the operator cannot be told."""
    for name, x, of in zip(("dq", "dk", "dv"), given, inputs, strict=True):
        if x is not None and (x.dtype not in (of.dtype, torch.float32) or x.shape != of.shape):
            raise UnsupportedError(
                f"{name} is {x.dtype} {tuple(x.shape)}: it must be {of.dtype} or float32, and "
                f"{tuple(of.shape)} as {name[1]}"
            )


def _into_given(
    found: tuple[Tensor | None, ...],
    given: tuple[Tensor | None, ...],
    accumulate: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """What the operator returned, in the given tensors where there are any, else in a dtype."""
    *gradients, dsinks, dmask = found
    results: list[Tensor | None] = []
    for x, target in zip(gradients, given, strict=True):
        assert x is not None
        if target is None:
            if accumulate:
                raise ValueError("accumulate=True needs dq, dk and dv: pass the tensors to add to")
            results.append(x.to(dtype))
        else:
            results.append(target.add_(x) if accumulate else target.copy_(x))
    return (*results, dsinks, dmask)
