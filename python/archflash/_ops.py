"""archflash.attention and attention_with_kvcache as torch operators, for the calls that torch's
dispatcher has to see: those under torch.compile, torch.jit.trace and dispatch modes, and those with
fake tensors or subclasses. Their gradients are in `_ops_backward`.

Plain eager calls do not come here, except for those that `torch` serves (`by_torch`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _flops, _options, _registry, _sharding, _strides, _torch, _torch_cache
from archflash._dispatch import (
    Decision,
    check_name,
    device_of,
    force,
    forced,
    note_fallback,
    select,
    with_approximate,
)
from archflash._eager import has_tangent, is_exporting, is_tracing, is_transformed, untraced
from archflash._errors import ForcedImplementationError, UnsupportedError
from archflash._gradients import FOLDERS, chosen_unless
from archflash._plain_tensors import has_symbols, is_symbolic, plain, resolved
from archflash._schemas import by_name

library: Any = torch.library.Library("archflash", "DEF")  # type: ignore[no-untyped-call]
# Arguments may be given by position: autograd's registration takes no tensors by keyword only.
library.define(
    f"attention(Tensor q, Tensor k, Tensor v, {_options.SCHEMA}, str? implementation, "
    "bool needs_grad) -> (Tensor, Tensor)"
)
library.define(
    "attention_with_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    f"{_options.CACHE_SCHEMA}, str? implementation) -> (Tensor, Tensor)"
)

# What the runtime is told of gradients (enum Grad in src/runtime/call.h).
_NO_GRADIENTS, _IF_REQUIRED, _GRADIENTS_NEEDED = 0, 1, 2
_NO_KERNEL = "gradients are needed here, and it has none: call it under torch.no_grad()"
_TRANSFORMED = "torch.func's transforms and forward-mode autograd need PyTorch's own operations"


def attention(
    q: Tensor, k: Tensor, v: Tensor, values: tuple[Any, ...], implementation: str | None
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
    sharded = _sharding.has_dtensor(q, k, v, *values)
    if sharded:
        _sharding.prepare(options, q=q, k=k, v=v)
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
            _refuse_forced(
                implementation, f"{_TRANSFORMED}: force none, or pass implementation='torch'"
            )
            if q.device.type == "cuda":
                note_fallback(_TRANSFORMED)
        by_torch = needs_grad and differentiable is None and not options["batch_invariant"]
        if by_torch and not transformed and _flops.are_counted():
            differentiable = _registry.TORCH  # through the operator, whose formula counts
    elif transformed and implementation not in (None, _registry.TORCH):
        raise ForcedImplementationError(f"{implementation} is forced, but {_TRANSFORMED}")
    wants_lse = options["return_lse"]
    # No other program has the operator.
    for_onnx = compiling and is_exporting() and torch.onnx.is_in_onnx_export()
    if compiling and needs_grad and is_exporting() and not for_onnx:
        # One operator is exported, as it is traced: who serves the call and computes its gradients
        # is decided where the program runs.
        options["return_lse"] = True  # the backward pass reads it
        needs_grad = False
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

    by_torch_operations = (
        (needs_grad and differentiable is None and not by_operator) or transformed or for_onnx
    )
    if for_onnx and options["batch_invariant"]:
        raise UnsupportedError(
            "batch_invariant=True, which no operators of ONNX promise: leave it out"
        )
    if by_torch_operations and options["batch_invariant"]:
        raise UnsupportedError(
            "batch_invariant=True, and no kernel of archflash computes the gradients of this call, "
            "which are needed: call it under torch.no_grad()"
        )
    if by_torch_operations:
        # No kernel differentiates the call, so PyTorch's own operations run, which autograd or the
        # transform can handle. While compiling, the operator is traced only for its checks; nothing
        # uses its result, and it is dropped from the graph.
        if compiling and not transformed:
            with torch.no_grad():
                operator(q.detach(), k.detach(), v.detach())
        return _torch.attention(q, k, v, **_options.for_torch(options))
    if compiling:
        results = operator(q, k, v)
    else:
        with chosen_unless(name):
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


def attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, values: tuple[Any, ...], implementation: str | None
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

    if _sharding.has_dtensor(q, k_cache, v_cache, *options.values()):
        _sharding.prepare(options, q=q, k_cache=k_cache, v_cache=v_cache)
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
    serve = _torch_cache.attention if _options.has_cache(given) else _torch.attention
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


def _refuse_forced(implementation: str | None, why: str) -> None:
    name = forced() if implementation is None else implementation
    if name is not None and name != "torch":
        raise ForcedImplementationError(f"{name} is forced, but {why}")


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


def _run(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """The operator on real tensors."""
    arguments = by_name(torch.ops.archflash.attention, *given, **named)
    q, k, v, implementation = (arguments.pop(x) for x in ("q", "k", "v", "implementation"))
    del arguments["needs_grad"]
    # A subclass whose dispatcher let the operator through becomes a plain tensor; otherwise it
    # would come back here.
    q, k, v = (plain(x) for x in (q, k, v))
    return _serve(q, k, v, _options.from_operator(arguments), implementation)


def _serve(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], implementation: str | None
) -> tuple[Tensor, Tensor]:
    values = with_approximate(tuple(plain(value) for value in options.values()))
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
    arguments = by_name(torch.ops.archflash.attention_with_kvcache, *given, **named)
    q, k_cache, v_cache = (arguments.pop(x) for x in ("q", "k_cache", "v_cache"))
    implementation = arguments.pop("implementation")
    refuse_tangents(q, k_cache, v_cache, *arguments.values())
    return _serve(
        plain(q),
        k_cache.as_subclass(Tensor),
        v_cache.as_subclass(Tensor),
        _options.from_operator(arguments),
        implementation,
    )


def refuse_tangents(*given: Any) -> None:
    """Refuses the tangents of forward-mode autograd, which an operator would drop."""
    if any(map(has_tangent, given)):
        raise UnsupportedError(
            "a tensor has a tangent of forward-mode autograd, which archflash's operators do not "
            "have: call archflash.attention itself, or pass detach() of the tensor"
        )


library.impl("attention", _run, "CompositeExplicitAutograd")
library.impl("attention_with_kvcache", _run_with_kvcache, "CompositeExplicitAutograd")


def _fake(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Tensors with the shapes, strides and dtypes that `_run` returns. Raises the errors that do
    not depend on data.
    """
    arguments = by_name(torch.ops.archflash.attention, *given, **named)
    q, k, v, implementation = (arguments.pop(x) for x in ("q", "k", "v", "implementation"))
    needs_grad = arguments.pop("needs_grad")
    options = _options.from_operator(arguments)
    if needs_grad and implementation not in FOLDERS:
        if (name := forced()) in FOLDERS:
            raise ForcedImplementationError(
                f"{name} is forced, but a traced call whose gradients are needed has to name it: "
                f"pass implementation={name!r}"
            )
        _refuse_forced(implementation, _NO_KERNEL)
    return _planned(q, k, v, options)


def _fake_with_kvcache(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Tensors with the shapes, strides and dtypes that `_run_with_kvcache` returns."""
    arguments = by_name(torch.ops.archflash.attention_with_kvcache, *given, **named)
    q, k_cache, v_cache = (arguments.pop(x) for x in ("q", "k_cache", "v_cache"))
    del arguments["implementation"]
    return _planned(q, k_cache, v_cache, _options.from_operator(arguments))


def _planned(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Tensors like those that a call returns. Raises the errors that do not depend on data."""
    if not has_symbols(q, k, v, *options.values()):
        _native.make_problem(q, k, v, tuple(options.values()), _NO_GRADIENTS)
    as_wide = options["qv"] if options.get("packed_rows") else v  # packed rows are bytes
    shape = [*q.shape[:-1], as_wide.shape[-1]]
    dtype = options["out_dtype"] or (torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)
    out = _strides.new_in_order(q, shape, dtype)
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
