"""archflash.attention, its gradients and attention_with_kvcache as torch operators, and which calls
of any function go through an operator: those under torch.compile, torch.jit.trace and dispatch
modes, and those with fake tensors or subclasses.

Plain eager calls do not come here: they skip torch's dispatcher.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _flops, _options, _registry, _sharding, _torch, _torch_cache
from archflash._dispatch import (
    Decision,
    check_name,
    device_of,
    force,
    forced,
    note_fallback,
    select,
)
from archflash._eager import has_tangent, in_transform, is_tracing, is_transformed, untraced
from archflash._errors import ForcedImplementationError, UnsupportedError
from archflash._gradients import (
    FOLDERS,
    Gradients,
    Request,
    asks_for_deterministic,
    by_plain_operations,
    check_tensor,
    compute,
    variable,
)

library: Any = torch.library.Library("archflash", "DEF")  # type: ignore[no-untyped-call]
# Arguments may be given by position: autograd's registration takes no tensors by keyword only.
library.define(
    f"attention(Tensor q, Tensor k, Tensor v, {_options.SCHEMA}, str? implementation, "
    "bool needs_grad) -> (Tensor, Tensor)"
)
library.define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor? dlse, {_options.SCHEMA}, str? implementation, bool mask_gradient, "
    "bool? deterministic) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

library.define(
    "attention_with_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    f"{_options.CACHE_SCHEMA}, str? implementation) -> (Tensor, Tensor)"
)

# What the runtime is told of gradients (enum Grad in src/runtime/call.h).
_NO_GRADIENTS, _IF_REQUIRED, _GRADIENTS_NEEDED = 0, 1, 2
GRADIENTS = "gradients are needed here, and it has none: call it under torch.no_grad()"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: tuple[Any, ...],
    implementation: str | None,
) -> Any:
    """`archflash.attention` through the operator.

    Args:
        q, k, v: as for `archflash.attention`.
        values: the values of its options, in the order of `_options.OF_ATTENTION`.
        implementation: the forced implementation.
    """
    options = dict(zip(_options.OF_ATTENTION, values, strict=True))
    tensors = (q, k, v, *(options[name] for name in _options.DIFFERENTIABLE))
    needs_grad = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in tensors
    )
    transformed = is_transformed(*tensors)
    if is_tracing():
        if transformed:
            raise UnsupportedError(
                "torch.jit.trace records no transform of torch.func and no tangent: trace without "
                "them, and transform outside of the traced function"
            )
        return _recorded(q, k, v, options, implementation, needs_grad)
    compiling = is_symbolic(q, k, v, values)
    # The kernels that compute the gradients, if any do: a traced call has to name them.
    differentiable = implementation if needs_grad and implementation in FOLDERS else None
    name = implementation
    sharded = _sharding.has_dtensor(q, k, v)
    if sharded:
        _sharding.prepare(options)
    if not compiling:
        problem = _native.make_problem(
            q, k, v, values, _GRADIENTS_NEEDED if needs_grad else _NO_GRADIENTS
        )
        if implementation is not None:
            check_name(implementation)
        q, k, v = (resolved(x) for x in (q, k, v))
        out = options["out"]  # written, not read: make_problem() has refused a lazy one
        options = {name: resolved(value) for name, value in options.items()}
        options["out"] = out
        options = _options.with_python_numbers(options)
        name = forced() if implementation is None else implementation
        if needs_grad and not transformed and not sharded:
            differentiable = _who_differentiates(problem, q.device, name)
        elif transformed:
            _refuse_forced(implementation)
            if q.device.type == "cuda":
                note_fallback(f"torch.func and forward-mode autograd: {GRADIENTS}")
        by_torch = needs_grad and differentiable is None and not options["batch_invariant"]
        if by_torch and not transformed and _flops.are_counted():
            differentiable = _registry.TORCH  # through the operator, whose formula counts
    wants_lse = options["return_lse"]
    # Gradients of DTensors always go through the operators, which have strategies: PyTorch's own
    # operations may lack them. Each device then decides for the part that it has.
    by_operator = sharded and needs_grad and not transformed
    if differentiable is not None or by_operator:
        implementation = name if by_operator else differentiable
        options["return_lse"] = True  # the backward pass reads it

    def operator(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        results: tuple[Tensor, Tensor] = torch.ops.archflash.attention(
            *tensors,
            implementation=implementation,
            needs_grad=needs_grad,
            **_options.to_operator(options),
        )
        return results

    by_torch_operations = (needs_grad and differentiable is None and not by_operator) or transformed
    if by_torch_operations and options["batch_invariant"]:
        raise UnsupportedError(
            "batch_invariant=True, and no kernel of archflash computes the gradients of this call, "
            "which are needed: call it under torch.no_grad()"
        )
    if by_torch_operations:
        # No kernel differentiates the call, so PyTorch's own operations run, which autograd or the
        # transform can handle. While compiling, the operator is traced only for its checks; nothing
        # uses its result, and it is dropped from the graph.
        if compiling:
            with torch.no_grad():
                operator(q.detach(), k.detach(), v.detach())
        return _torch.attention(q, k, v, **_options.for_torch(options))
    results = operator(q, k, v)
    options["return_lse"] = wants_lse  # torch.compile of torch 2.6 cannot trace a union of dicts
    return _answer(results, options)


def _recorded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    implementation: str | None,
    needs_grad: bool,
) -> Any:
    """A call that torch.jit.trace records: one operator, whoever serves it where it runs, so that
    nothing but the arguments depends on the sizes seen here.
    """
    options = _options.traced(options)
    with untraced():
        _native.make_problem(q, k, v, tuple(options.values()), _IF_REQUIRED * needs_grad)
        if implementation is not None:
            check_name(implementation)
    # PyTorch checks a trace by another one without gradients, which has to record the same.
    results = torch.ops.archflash.attention(
        q, k, v,
        implementation=implementation, needs_grad=False,
        **_options.to_operator(options),
    )  # fmt: skip
    return _answer(results, options)


def _answer(results: tuple[Tensor, Tensor], options: dict[str, Any]) -> Any:
    """What a call returns, from what its operator returned."""
    result, lse = results
    out = options["out"]
    if out is not None:
        if is_tracing():
            pass  # the sizes are tensors here; copy_ compares them where the call runs
        elif out.shape != result.shape or out.dtype != result.dtype:
            raise ValueError(
                f"out is {out.dtype} {tuple(out.shape)}: it must be {result.dtype} "
                f"{tuple(result.shape)}"
            )
        result = out.copy_(result)
    return (result, lse) if options["return_lse"] else result


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    options: dict[str, Any],
    implementation: str | None,
    mask_gradient: bool,
    deterministic: bool | None,
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dsinks, dmask) of a call through the operator; dsinks is None without sinks, and
    dmask where it is not wanted.
    """
    if _sharding.has_dtensor(q, k, v):
        _sharding.prepare(options)
    *gradients, dsinks, dmask = torch.ops.archflash.attention_backward(
        dout, q, k, v, out, lse, dlse,
        implementation=implementation, mask_gradient=mask_gradient, deterministic=deterministic,
        **_options.to_operator(options),
    )  # fmt: skip
    dsinks = None if options["sinks"] is None else dsinks
    return (*gradients, dsinks, dmask if mask_gradient else None)


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    values: tuple[Any, ...],
    implementation: str | None,
) -> Any:
    """`archflash.attention_with_kvcache` through its operator, which writes the caches.

    Args:
        q, k_cache, v_cache: as for `archflash.attention_with_kvcache`.
        values: the values of all options, in the order of `_options.NAMES`.
        implementation: the forced implementation.
    """
    options = dict(zip(_options.NAMES, values, strict=True))
    if is_transformed(q, k_cache, v_cache, *options.values()):
        raise UnsupportedError(
            "attention_with_kvcache does not work inside functorch transforms such as vmap, "
            "nor with forward-mode autograd: call it outside of them"
        )
    if is_tracing():
        options = _options.traced(options)
        with untraced():
            given = tuple(options.values())
            _native.make_problem(q, k_cache, v_cache, given, _IF_REQUIRED * torch.is_grad_enabled())
            if implementation is not None:
                check_name(implementation)
    elif not is_symbolic(q, k_cache, v_cache, values):
        _native.make_problem(q, k_cache, v_cache, values, _IF_REQUIRED * torch.is_grad_enabled())
        if implementation is not None:
            check_name(implementation)
        q = resolved(q)
        out = options["out"]  # written, not read: make_problem() has refused a lazy one
        options = {name: resolved(value) for name, value in options.items()}
        options["out"] = out
        options = _options.with_python_numbers(options)

    def operator(q: Tensor, k_cache: Tensor, v_cache: Tensor, options: dict[str, Any]) -> Any:
        return torch.ops.archflash.attention_with_kvcache(
            q,
            k_cache,
            v_cache,
            implementation=implementation,
            **_options.to_operator(options, _options.OF_CACHE),
        )

    if _sharding.has_dtensor(q, k_cache, v_cache):
        _sharding.prepare(options)
        if options["k_new"] is not None:
            return _answer(_sharding.append(operator, q, k_cache, v_cache, options), options)
    return _answer(operator(q, k_cache, v_cache, options), options)


def by_torch(q: Tensor, k: Tensor, v: Tensor, values: Sequence[Any], name: str | None) -> Any:
    """Serves an eager call that the runtime leaves to the implementation `torch`.

    Args:
        q, k, v, values: the call.
        name: the forced implementation, or None.
    """
    given = _options.given_to_torch(values)
    serve = _torch_cache.attention if "cache_seqlens" in given else _torch.attention
    if name is None:
        return serve(q, k, v, **given)
    with force(name):  # PyTorch's own kernels even where archflash.enable() put others before them
        return serve(q, k, v, **given)


def pytorchs_call(q: Tensor, k: Tensor, v: Tensor, values: Sequence[Any], name: str | None) -> Any:
    """`_torch.pytorchs_call` of an eager call that the runtime leaves to `torch`, whether it has an
    `out` or not; None where there is none.

    Args:
        q, k, v, values, name: as for `by_torch`.
    """
    given = _options.given_to_torch(values)
    given.pop("out", None)
    if name is not None or not _OF_PYTORCHS_CALL.issuperset(given):
        return None
    return _torch.pytorchs_call(q, k, v, **given)


_OF_PYTORCHS_CALL = frozenset(("causal", "scale", "layout"))
_native.set_decide_pytorchs(pytorchs_call)


def resolved(x: Any) -> Any:
    """A tensor whose memory holds its values: a copy if x has the negative bit or is a zero tensor,
    otherwise x itself.
    """
    # A subclass is handled by its own dispatcher first, and resolved when it comes back as a plain
    # tensor.
    if isinstance(x, Tensor) and _native.is_plain_tensor(x) and (x.is_neg() or x._is_zerotensor()):
        return x.clone()
    return x


def goes_through_operator(*arguments: Any) -> bool:
    """Whether a call goes through torch's dispatcher: while PyTorch traces or transforms it, or if
    an argument is no plain tensor (a subclass, a fake tensor), whose own dispatcher finds the real
    ones. Arguments that are no tensors do not matter.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or is_tracing()
        or in_transform()
        or not _native.all_plain(*arguments)
    )


def is_symbolic(*values: Any) -> bool:
    """Whether a call is traced without numbers: while PyTorch compiles it, or where a number or the
    size of a tensor is symbolic.
    """
    return torch.compiler.is_compiling() or has_symbols(*values)


def has_symbols(*values: Any) -> bool:

    def symbolic(x: Any) -> bool:
        if isinstance(x, Tensor):
            return not x.is_nested and any(not isinstance(size, int) for size in x.shape)
        if isinstance(x, (tuple, list)):
            return any(symbolic(part) for part in x)
        return isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))

    return symbolic(values)


def _refuse_forced(implementation: str | None) -> None:
    name = forced() if implementation is None else implementation
    if name is not None and name != "torch":
        raise ForcedImplementationError(f"{name} is forced, but {GRADIENTS}")


def _who_differentiates(
    problem: _native.Problem, device: torch.device, name: str | None
) -> str | None:
    """The kernels that serve a call which needs gradients; None if `torch` does.

    Raises:
        ForcedImplementationError: the forced kernels, `name`, cannot.
    """
    here, obstacle = device_of(problem, device.index)
    decision = _selected(problem, here, name, obstacle) if here else select(problem, here, name)
    return None if decision.plan is None else str(decision.chosen)


@functools.lru_cache(maxsize=256)
def _selected(
    problem: _native.Problem, device: _native.Device, name: str | None, obstacle: str | None
) -> Decision:
    return select(problem, device, name, obstacle)


def _by_name(op: Any, *given: Any, **named: Any) -> dict[str, Any]:
    """The arguments of an operator by name, however they came."""
    names = [argument.name for argument in op.default._schema.arguments]
    return dict(zip(names, given, strict=False)) | named


def _run(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """The operator on real tensors."""
    arguments = _by_name(torch.ops.archflash.attention, *given, **named)
    q, k, v, implementation = (arguments.pop(x) for x in ("q", "k", "v", "implementation"))
    del arguments["needs_grad"]
    # A subclass whose dispatcher let the operator through becomes a plain tensor; otherwise it
    # would come back here.
    q, k, v = (plain(x) for x in (q, k, v))
    return _serve(q, k, v, _options.from_operator(arguments), implementation)


def _serve(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], implementation: str | None
) -> tuple[Tensor, Tensor]:
    values = tuple(plain(value) for value in options.values())
    name = forced() if implementation is None else implementation
    grad = _IF_REQUIRED if torch.is_grad_enabled() else _NO_GRADIENTS
    result: Any = _native.attention(q, k, v, values, grad, name)
    if result is None or result is NotImplemented:
        result = by_torch(q, k, v, values, name)
    return result if options["return_lse"] else (result, q.new_empty(0, dtype=torch.float32))


def _run_with_kvcache(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """The operator of a call with a cache on real tensors. The caches are written in place, so that
    no copy of them is made.
    """
    arguments = _by_name(torch.ops.archflash.attention_with_kvcache, *given, **named)
    q, k_cache, v_cache = (arguments.pop(x) for x in ("q", "k_cache", "v_cache"))
    implementation = arguments.pop("implementation")
    _refuse_tangents(q, k_cache, v_cache, *arguments.values())
    return _serve(
        plain(q),
        k_cache.as_subclass(Tensor),
        v_cache.as_subclass(Tensor),
        _options.from_operator(arguments),
        implementation,
    )


def _refuse_tangents(*given: Any) -> None:
    """Refuses the tangents of forward-mode autograd, which an operator would drop."""
    if any(map(has_tangent, given)):
        raise UnsupportedError(
            "a tensor has a tangent of forward-mode autograd, which archflash's operators do not "
            "have: call archflash.attention itself, or pass detach() of the tensor"
        )


def plain(x: Any) -> Any:
    """A plain tensor whose memory holds its values, for a tensor; everything else as it is."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:  # sparse ones are refused later
        return x
    return resolved(x.as_subclass(Tensor))


library.impl("attention", _run, "CompositeExplicitAutograd")
library.impl("attention_with_kvcache", _run_with_kvcache, "CompositeExplicitAutograd")


def _fake(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Tensors with the shapes, strides and dtypes that `_run` returns. Raises the errors that do
    not depend on data.
    """
    arguments = _by_name(torch.ops.archflash.attention, *given, **named)
    q, k, v, implementation = (arguments.pop(x) for x in ("q", "k", "v", "implementation"))
    needs_grad = arguments.pop("needs_grad")
    options = _options.from_operator(arguments)
    if needs_grad and implementation not in FOLDERS:
        if (name := forced()) in FOLDERS:
            raise ForcedImplementationError(
                f"{name} is forced, but a traced call whose gradients are needed has to name it: "
                f"pass implementation={name!r}"
            )
        _refuse_forced(implementation)
    return _planned(q, k, v, options)


def _fake_with_kvcache(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Tensors with the shapes, strides and dtypes that `_run_with_kvcache` returns."""
    arguments = _by_name(torch.ops.archflash.attention_with_kvcache, *given, **named)
    q, k_cache, v_cache = (arguments.pop(x) for x in ("q", "k_cache", "v_cache"))
    del arguments["implementation"]
    return _planned(q, k_cache, v_cache, _options.from_operator(arguments))


def _planned(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Tensors like those that a call returns. Raises the errors that do not depend on data."""
    if not has_symbols(q, k, v, *options.values()):
        _native.make_problem(q, k, v, tuple(options.values()), _NO_GRADIENTS)
    shape = [*q.shape[:-1], v.shape[-1]]
    dtype = options["out_dtype"] or (torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)
    order = _torch.nesting(q.stride())
    out = q.new_empty([shape[i] for i in order], dtype=dtype).permute(_torch.inverse(order))
    if not options["return_lse"]:
        lse_shape: tuple[int, ...] = (0,)
    elif options["cu_seqlens_q"] is not None:
        lse_shape = (q.shape[1], q.shape[0])
    elif options["layout"] == "bhnd":
        lse_shape = (q.shape[0], q.shape[1], q.shape[2])
    else:
        lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(lse_shape, dtype=torch.float32)


torch.library.register_fake("archflash::attention", _fake, lib=library)
torch.library.register_fake("archflash::attention_with_kvcache", _fake_with_kvcache, lib=library)


# --- gradients ---


def _request(
    given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Request, str | None, bool | None]:
    """The arguments of archflash::attention_backward: the call, `implementation` and
    `deterministic`.
    """
    arguments = _by_name(torch.ops.archflash.attention_backward, *given, **named)
    implementation = arguments.pop("implementation")
    mask_gradient = arguments.pop("mask_gradient")
    deterministic = arguments.pop("deterministic")
    names = ("dout", "q", "k", "v", "out", "lse", "dlse")
    tensors = {name: arguments.pop(name) for name in names}
    options = _options.from_operator(arguments)
    request = Request(**tensors, options=options, mask_gradient=mask_gradient)
    return request, implementation, deterministic


def backward_request(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    options: dict[str, Any],
    mask_gradient: bool = False,
) -> Request:
    """The call whose gradients are asked for, its tensors checked."""
    options = {name: plain(value) for name, value in options.items()}
    dout, q, k, v, out, lse, dlse = (plain(x) for x in (dout, q, k, v, out, lse, dlse))
    request = Request(dout, q, k, v, out, lse, dlse, options, mask_gradient)
    check_backward(request)
    dlse = None if dlse is None else dlse.contiguous()
    return dataclasses.replace(request, lse=lse.contiguous(), dlse=dlse)


def check_backward(request: Request) -> None:
    """Refuses wrong tensors of a call of `archflash.attention_backward`, plain or not."""
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
    asked, implementation, deterministic = _request(given, named)
    request = backward_request(
        asked.dout, asked.q, asked.k, asked.v, asked.out, asked.lse, asked.dlse, asked.options,
        asked.mask_gradient,
    )  # fmt: skip
    into = Gradients.like(request)
    name = forced() if implementation is None else implementation
    compute(request, into, name, deterministic)
    return _results(request, into)


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
    request, *_ = _request(given, named)
    return _results(request, Gradients.like(request))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    arguments = _by_name(torch.ops.archflash.attention, *inputs)
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    ctx.names = tuple(tensors)
    ctx.others = {name: x for name, x in arguments.items() if name not in tensors}
    ctx.order = tuple(arguments)
    ctx.deterministic = asks_for_deterministic()
    ctx.save_for_backward(*output, *tensors.values())
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    out, lse, *saved = ctx.saved_tensors
    arguments = ctx.others | dict(zip(ctx.names, saved, strict=True))
    del arguments["needs_grad"]
    needed = {n for n, x in zip(ctx.order, ctx.needs_input_grad, strict=True) if x}
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
        deterministic=deterministic or None, **arguments,
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
    arguments = _by_name(torch.ops.archflash.attention_backward, *inputs)
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    ctx.names = tuple(tensors)
    ctx.others = {name: x for name, x in arguments.items() if name not in tensors}
    ctx.order = tuple(arguments)
    ctx.save_for_backward(*tensors.values())
    ctx.set_materialize_grads(False)


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
            _refuse_tangents(*args, *named.values())
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
