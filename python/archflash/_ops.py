"""archflash.attention and attention_with_kvcache as torch operators. Calls under torch.compile,
with fake tensors or subclasses, and under dispatch modes go through them.

Plain eager calls do not come here: they skip torch's dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from archflash import _archflash as _native
from archflash import _options, _torch, _torch_cache
from archflash._dispatch import check_name, forced, note_fallback
from archflash._errors import ForcedImplementationError, UnsupportedError

_library: Any = torch.library.Library("archflash", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    f"attention(Tensor q, Tensor k, Tensor v, *, {_options.SCHEMA}, str? implementation, "
    "bool needs_grad) -> (Tensor, Tensor)"
)

_library.define(
    "attention_with_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, *, "
    f"{_options.CACHE_SCHEMA}, str? implementation) -> (Tensor, Tensor)"
)

# What the runtime is told of gradients (enum Grad in src/runtime/call.h).
_NO_GRADIENTS, _IF_REQUIRED, _GRADIENTS_NEEDED = 0, 1, 2
GRADIENTS = "gradients are needed and no kernel has a backward: call it under torch.no_grad()"


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
    _options.refuse_unbuilt(options)
    compiling = torch.compiler.is_compiling()
    tensors = (q, k, v, *(options[name] for name in _options.DIFFERENTIABLE))
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    transformed = not compiling and _in_transform()
    if not compiling:
        _native.make_problem(q, k, v, values, _GRADIENTS_NEEDED if needs_grad else _NO_GRADIENTS)
        if implementation is not None:
            check_name(implementation)
        q, k, v = (resolved(x) for x in (q, k, v))
        out = options["out"]  # written, not read: make_problem() has refused a lazy one
        options = {name: resolved(value) for name, value in options.items()}
        options["out"] = out
        options = _options.with_python_numbers(options)
        if needs_grad or transformed:
            _refuse_forced(implementation)
            if q.device.type == "cuda":
                note_fallback(GRADIENTS)

    def operator(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        results: tuple[Tensor, Tensor] = torch.ops.archflash.attention(
            *tensors,
            implementation=implementation,
            needs_grad=needs_grad,
            **_options.to_operator(options),
        )
        return results

    if (needs_grad or transformed) and options["batch_invariant"]:
        raise UnsupportedError(f"batch_invariant=True, but {GRADIENTS}")
    if needs_grad or transformed:
        # The operator has no backward, so PyTorch's own operations run, which autograd or the
        # transform can handle. While compiling, the operator is traced only for its checks; nothing
        # uses its result, and it is dropped from the graph.
        if compiling:
            with torch.no_grad():
                operator(q.detach(), k.detach(), v.detach())
        return _torch.attention(q, k, v, **_options.for_torch(options))
    return _answer(operator(q, k, v), options)


def _answer(results: tuple[Tensor, Tensor], options: dict[str, Any]) -> Any:
    """What a call returns, from what its operator returned."""
    result, lse = results
    out = options["out"]
    if out is not None:
        if out.shape != result.shape or out.dtype != result.dtype:
            raise ValueError(
                f"out is {out.dtype} {tuple(out.shape)}: it must be {result.dtype} "
                f"{tuple(result.shape)}"
            )
        result = out.copy_(result)
    return (result, lse) if options["return_lse"] else result


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
    _options.refuse_unbuilt(options)
    if not torch.compiler.is_compiling():
        if _in_transform():
            raise UnsupportedError(
                "attention_with_kvcache does not work inside functorch transforms such as vmap, "
                "nor with forward-mode autograd: call it outside of them"
            )
        _native.make_problem(q, k_cache, v_cache, values, _IF_REQUIRED * torch.is_grad_enabled())
        if implementation is not None:
            check_name(implementation)
        q = resolved(q)
        out = options["out"]  # written, not read: make_problem() has refused a lazy one
        options = {name: resolved(value) for name, value in options.items()}
        options["out"] = out
        options = _options.with_python_numbers(options)
    return _answer(
        torch.ops.archflash.attention_with_kvcache(
            q,
            k_cache,
            v_cache,
            implementation=implementation,
            **_options.to_operator(options, _options.OF_CACHE),
        ),
        options,
    )


def by_torch(q: Tensor, k: Tensor, v: Tensor, values: tuple[Any, ...]) -> Any:
    """Serves an eager call that the runtime leaves to the implementation `torch`."""
    given = _options.given_to_torch(values)
    serve = _torch_cache.attention if "cache_seqlens" in given else _torch.attention
    return serve(q, k, v, **given)


def resolved(x: Any) -> Any:
    """A tensor whose memory holds its values: a copy if x has the negative bit or is a zero tensor,
    otherwise x itself.
    """
    # A subclass is handled by its own dispatcher first, and resolved when it comes back as a plain
    # tensor.
    if isinstance(x, Tensor) and _native.is_plain_tensor(x) and (x.is_neg() or x._is_zerotensor()):
        return x.clone()
    return x


def _in_transform() -> bool:
    """Whether a functorch transform (vmap, grad, jvp) or forward-mode autograd is active."""
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
    *,
    implementation: str | None,
    needs_grad: bool,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """The operator on real tensors."""
    # A subclass whose dispatcher let the operator through becomes a plain tensor; otherwise it
    # would come back here.
    q, k, v = (_plain(x) for x in (q, k, v))
    return _serve(q, k, v, _options.from_operator(arguments), implementation)


def _serve(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], implementation: str | None
) -> tuple[Tensor, Tensor]:
    values = tuple(_plain(value) for value in options.values())
    name = forced() if implementation is None else implementation
    grad = _IF_REQUIRED if torch.is_grad_enabled() else _NO_GRADIENTS
    result: Any = _native.attention(q, k, v, values, grad, name)
    if result is None or result is NotImplemented:
        result = by_torch(q, k, v, values)
    return result if options["return_lse"] else (result, q.new_empty(0, dtype=torch.float32))


def _run_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    implementation: str | None,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """The operator of a call with a cache on real tensors. The caches are written in place, so that
    no copy of them is made.
    """
    return _serve(
        _plain(q),
        k_cache.as_subclass(Tensor),
        v_cache.as_subclass(Tensor),
        _options.from_operator(arguments),
        implementation,
    )


def _plain(x: Any) -> Any:
    """A plain tensor whose memory holds its values, for a tensor; everything else as it is."""
    return resolved(x.as_subclass(Tensor)) if isinstance(x, Tensor) else x


_library.impl("attention", _run, "CompositeExplicitAutograd")
_library.impl("attention_with_kvcache", _run_with_kvcache, "CompositeExplicitAutograd")


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    implementation: str | None,
    needs_grad: bool,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Tensors with the shapes, strides and dtypes that `_run` returns. Raises the errors that do
    not depend on data.
    """
    options = _options.from_operator(arguments)
    if needs_grad:
        _refuse_forced(implementation)
    return _planned(q, k, v, options)


def _fake_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    implementation: str | None,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Tensors with the shapes, strides and dtypes that `_run_with_kvcache` returns."""
    return _planned(q, k_cache, v_cache, _options.from_operator(arguments))


def _planned(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Tensors like those that a call returns. Raises the errors that do not depend on data."""
    if all(isinstance(size, int) for x in (q, k, v) for size in x.shape):  # not symbolic ones
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


torch.library.register_fake("archflash::attention", _fake, lib=_library)
torch.library.register_fake("archflash::attention_with_kvcache", _fake_with_kvcache, lib=_library)
