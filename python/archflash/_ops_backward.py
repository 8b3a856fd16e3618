"""The gradients of archflash.attention as a torch operator, what autograd knows of both operators,
and gradients of gradients.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _flops, _options, _sharding, _strides
from archflash._compute_gradients import by_plain_operations, compute, variable
from archflash._dispatch import forced
from archflash._eager import has_tangent
from archflash._gradients import (
    Gradients,
    Request,
    asks_for_deterministic,
    check_tensor,
    may_be_others,
    wants_deterministic,
)
from archflash._ops import library, refuse_tangents
from archflash._plain_tensors import plain
from archflash._schemas import by_name

library.define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor? dlse, {_options.SCHEMA}, str? implementation, bool mask_gradient, "
    "bool? deterministic, bool wide) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    options: dict[str, Any], implementation: str | None, mask_gradient: bool,
    deterministic: bool | None, wide: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dq, dk, dv, dsinks, dmask) of a call through the operator; dsinks is None without sinks, and
    dmask where it is not wanted. With `wide` dq, dk and dv are float32.
    """
    if _sharding.has_dtensor(dout, q, k, v, out, lse, dlse, *options.values()):
        _sharding.prepare(options, dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse)
    *gradients, dsinks, dmask = torch.ops.archflash.attention_backward(
        dout, q, k, v, out, lse, dlse,
        implementation=implementation, mask_gradient=mask_gradient, deterministic=deterministic,
        wide=wide, **_options.to_operator(options),
    )  # fmt: skip
    dsinks = None if options["sinks"] is None else dsinks
    return (*gradients, dsinks, dmask if mask_gradient else None)


def _request(
    given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Request, str | None, bool | None, bool]:
    """The arguments of archflash::attention_backward: the call, `implementation`, `deterministic`
    and `wide`.
    """
    arguments = by_name(torch.ops.archflash.attention_backward, *given, **named)
    implementation = arguments.pop("implementation")
    mask_gradient = arguments.pop("mask_gradient")
    deterministic, wide = arguments.pop("deterministic"), arguments.pop("wide")
    names = ("dout", "q", "k", "v", "out", "lse", "dlse")
    tensors = {name: arguments.pop(name) for name in names}
    options = _options.from_operator(arguments)
    request = Request(**tensors, options=options, mask_gradient=mask_gradient)
    return request, implementation, deterministic, wide


def backward_request(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    options: dict[str, Any], mask_gradient: bool = False,
) -> Request:  # fmt: skip
    """The call whose gradients are asked for, its tensors checked."""
    options = {name: plain(value) for name, value in options.items()}
    dout, q, k, v, out, lse, dlse = (plain(x) for x in (dout, q, k, v, out, lse, dlse))
    request = Request(dout, q, k, v, out, lse, dlse, options, mask_gradient)
    check_backward(request)
    dlse = None if dlse is None else dlse.contiguous()
    return dataclasses.replace(request, lse=lse.contiguous(), dlse=dlse)


def check_backward(request: Request) -> None:
    """Refuses wrong tensors of a call of `archflash.attention_backward`, plain or not."""
    _native.check_data(request.out, "out")
    problem = request.problem()  # checks q, k, v and out
    q, out, dlse = request.q, request.out, request.dlse
    if q.dtype.itemsize == 1:
        raise TypeError("q, k and v are float8, which have no gradients: convert them to bfloat16")
    check_tensor("dout", request.dout, q.device, out.shape, (out.dtype,))
    rows = (problem.heads_q, problem.nq)
    lse_shape = rows if problem.varlen else (problem.batch, *rows)
    check_tensor("lse", request.lse, q.device, lse_shape, (torch.float32,))
    if dlse is not None:
        check_tensor("dlse", dlse, q.device, lse_shape, (torch.float32,))
    mask = request.options["attn_mask"]
    if request.mask_gradient and (mask is None or not mask.is_floating_point()):
        kind = "None" if mask is None else str(mask.dtype)
        raise TypeError(f"mask_gradient=True, and attn_mask is {kind}: only a floating one has one")


def _run_backward(*given: Any, **named: Any) -> tuple[Tensor, ...]:
    """The gradients on real tensors."""
    asked, implementation, deterministic, wide = _request(given, named)
    request = backward_request(
        asked.dout, asked.q, asked.k, asked.v, asked.out, asked.lse, asked.dlse, asked.options,
        asked.mask_gradient,
    )  # fmt: skip
    into = _new(request, wide)
    name = forced() if implementation is None else implementation
    compute(request, into, name, deterministic)
    return _results(request, into)


def _new(request: Request, wide: bool) -> Gradients:
    """Tensors for the gradients that the operator returns; those of float64 stay so."""
    inputs = (request.q, request.k, request.v)
    if not wide or request.q.dtype.itemsize > 2:
        return Gradients.like(request)
    targets = (_strides.new_in_order(x, x.shape, torch.float32) for x in inputs)
    return Gradients.like(request, tuple(targets))


def _results(request: Request, into: Gradients) -> tuple[Tensor, ...]:
    """What the operator returns: gradients that are not wanted are empty."""
    dsinks, dmask = into.dsinks, into.dmask
    dsinks = request.q.new_empty(0, dtype=torch.float32) if dsinks is None else dsinks
    if dmask is None:
        dmask = request.q.new_empty(0, dtype=torch.float32)
    else:
        dmask = dmask.reshape(request.options["attn_mask"].shape)
    return into.dq, into.dk, into.dv, dsinks, dmask


def _fake_backward(*given: Any, **named: Any) -> tuple[Tensor, ...]:
    request, _, _, wide = _request(given, named)
    return _results(request, _new(request, wide))


def _keep(ctx: Any, op: Any, inputs: tuple[Any, ...], *results: Tensor) -> None:
    """Saves the arguments of an operator for its backward pass, and the given of its results behind
    q, k and v, as the node of an eager call does: activation checkpointing compares what both save
    if a dispatch mode watches the forward pass alone.
    """
    arguments = by_name(op, *inputs)
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    ctx.names = tuple(tensors)
    ctx.others = {name: x for name, x in arguments.items() if name not in tensors}
    ctx.order = tuple(arguments)
    saved = tuple(tensors.values())
    ctx.save_for_backward(*saved[:3], *results, *saved[3:])
    ctx.set_materialize_grads(False)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _keep(ctx, torch.ops.archflash.attention, inputs, *output)
    ctx.deterministic = asks_for_deterministic()
    ctx.or_others = may_be_others()


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *given = ctx.saved_tensors
    arguments = ctx.others | dict(zip(ctx.names, (q, k, v, *given), strict=True))
    del arguments["needs_grad"]
    needed = {n for n, x in zip(ctx.order, ctx.needs_input_grad, strict=True) if x}
    if ctx.or_others and (ctx.deterministic or wants_deterministic()):
        arguments["implementation"] = None  # the kernel that was chosen may have none in order
    dout = torch.zeros_like(out) if dout is None else dout
    found = gradients(arguments, (out, lse), (dout, dlse), needed, ctx.deterministic)
    return tuple(found.get(name) for name in ctx.order)


def gradients(
    arguments: dict[str, Any],
    results: tuple[Tensor, Tensor],
    given: tuple[Tensor, Tensor | None],
    needed: set[str],
    deterministic: bool,
) -> dict[str, Tensor]:
    """The gradients of a call through the operators, which autograd and transforms know.

    Args:
        arguments: those of archflash::attention, but for needs_grad.
        results: what it gave.
        given: the gradients of both.
        needed: the arguments whose gradients are wanted.
        deterministic: whether they must always have the same bits, whatever PyTorch's setting is.

    Returns:
        Those that are not 0 by name, and possibly others.
    """
    (out, lse), (dout, dlse) = results, given
    arguments = dict(arguments)
    implementation = arguments.pop("implementation")
    q, k, v = (arguments.pop(x) for x in ("q", "k", "v"))
    tensors = (x for x in (q, k, v, out, lse, *arguments.values()) if isinstance(x, Tensor))
    if not needed.issubset(_OF_KERNELS) or any(map(has_tangent, (dout, dlse, *tensors))):
        # Kernels give the gradients of these arguments alone, and no tangents.
        request = Request(dout, q, k, v, out, lse, dlse, _options.from_operator(arguments))
        return by_plain_operations(request, sorted(needed), torch.is_grad_enabled())
    if not arguments["return_lse"]:  # a call that was traced where no gradients were needed
        with torch.no_grad():
            arguments["return_lse"] = True
            out, lse = torch.ops.archflash.attention(
                q, k, v, implementation=implementation, needs_grad=False, **arguments
            )
    mask = arguments["attn_mask"]
    mask_gradient = mask is not None and mask.is_floating_point() and "attn_mask" in needed
    dq, dk, dv, dsinks, dmask = torch.ops.archflash.attention_backward(
        dout, q, k, v, out, lse, dlse, implementation=implementation, mask_gradient=mask_gradient,
        deterministic=deterministic or None, wide=False, **arguments,
    )  # fmt: skip
    found = {"q": dq, "k": dk, "v": dv}
    if arguments["sinks"] is not None:
        found["sinks"] = dsinks.to(arguments["sinks"].dtype)
    if mask_gradient:
        found["attn_mask"] = dmask.to(mask.dtype)
    return found


# The arguments whose gradients archflash::attention_backward gives.
_OF_KERNELS = ("q", "k", "v", "sinks", "attn_mask")


def _keep_for_second_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _keep(ctx, torch.ops.archflash.attention_backward, inputs)


def _second_backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of gradients: the first ones once more, by operations that autograd differentiates.
    `out` and `lse` are what the call gave, so that nothing but its arguments matters.
    """
    arguments = ctx.others | dict(zip(ctx.names, ctx.saved_tensors, strict=True))
    needed = dict(zip(ctx.order, ctx.needs_input_grad, strict=True))
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        asked = {
            name: variable(arguments[name])
            for name in ("dout", "dlse", *_OF_KERNELS)
            if needed[name]
        }
        request, *_ = _request((), arguments | asked)
        weights = {n: x for n, x in zip(_OF_KERNELS, given, strict=True) if x is not None}
        first = by_plain_operations(request, tuple(weights), create_graph=True)
        first = {name: x for name, x in first.items() if x.requires_grad}
        if not first or not asked:
            return (None,) * len(ctx.order)
        second = torch.autograd.grad(
            list(first.values()),
            list(asked.values()),
            [weights[name].to(x.dtype).reshape(x.shape) for name, x in first.items()],
            create_graph=create_graph,
            allow_unused=True,
        )
    found = dict(zip(asked, second, strict=True))
    return tuple(found.get(name) for name in ctx.order)


library.impl("attention_backward", _run_backward, "CompositeExplicitAutograd")
torch.library.register_fake("archflash::attention_backward", _fake_backward, lib=library)


class _Derivatives:
    """The library, as `torch.library.register_autograd` uses it: its kernels refuse tangents. The
    functions of the package do not let these get here, but a traced module may, and no kernel below
    those for autograd sees the tangents of torch.func.jvp.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(library, name)

    @staticmethod
    def impl(name: str, kernel: Any, key: str, **more: Any) -> None:
        def checked(keyset: Any, *args: Any, **named: Any) -> Any:
            refuse_tangents(*args, *named.values())
            return kernel(keyset, *args, **named)

        library.impl(name, checked, key, **more)


_derivatives: Any = _Derivatives()
torch.library.register_autograd(
    "archflash::attention", _backward, setup_context=_keep_for_backward, lib=_derivatives
)
torch.library.register_autograd(
    "archflash::attention_backward",
    _second_backward,
    setup_context=_keep_for_second_backward,
    lib=_derivatives,
)
_flops.register()
