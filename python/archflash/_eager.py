"""Who watches the calls of this thread: torch.compile, a dispatch mode, torch.jit.trace, a
transform of torch.func, or forward-mode autograd.

An eager call that nobody but autograd watches goes straight to the runtime, past PyTorch's
dispatcher. Each of these watchers would not see it: the functions of the package ask here before
they take that way.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from archflash._errors import UnsupportedError

_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_compiling = torch.compiler.is_compiling
_is_tracing = torch._C._is_tracing
_in_transform = torch._C._are_functorch_transforms_active
_KNOWS_EXPORTS = hasattr(torch.compiler, "_is_exporting_flag")


def is_eager() -> bool:
    """Whether nobody but autograd watches the calls of this thread."""
    return not (
        _is_compiling()
        or _dispatch_modes()
        or _is_tracing()
        or _in_transform()
        or forward_ad._current_level >= 0
    )


# torch.compile cannot trace what follows, and has its own way of doing each of these things.


def is_tracing() -> bool:
    """Whether torch.jit.trace records this call."""
    return not _is_compiling() and _is_tracing()


def is_exporting() -> bool:
    """Whether torch.export records this call. torch 2.6 does not tell, and in what torch.compile of
    other versions traces (2.11) torch.compiler.is_exporting() is always true.
    """
    return _KNOWS_EXPORTS and torch.compiler._is_exporting_flag


def _traced_in_transform() -> bool:
    """`_in_transform`, of a call that torch.compile traces."""
    return _in_transform()


def _traced_in_vmap() -> bool:
    """Whether vmap is among the transforms of a call that torch.compile traces."""
    kinds: Any = torch._C._functorch.TransformType
    return kinds.Vmap in _transforms()


def _traced_in_two_derivatives() -> bool:
    """Whether the transforms of a call that torch.compile traces take a derivative forward, or two
    backward.
    """
    kinds: Any = torch._C._functorch.TransformType
    found = _transforms()
    return kinds.Jvp in found or found.count(kinds.Grad) > 1


# torch.compile enters the transforms that it traces, calls these functions, and takes what they
# return for a constant: what torch._dynamo.assume_constant_result says.
for _function in (_traced_in_transform, _traced_in_vmap, _traced_in_two_derivatives):
    vars(_function)["_dynamo_marked_constant"] = True


def _transforms() -> list[Any]:
    """The kinds of the transforms that are active."""
    return [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]


def in_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp, ...) is active."""
    return _traced_in_transform() if _is_compiling() else _in_transform()


def has_tangent(x: object) -> bool:
    """Whether x is a tensor with a tangent of forward-mode autograd."""
    if _is_compiling() or forward_ad._current_level < 0 or not isinstance(x, Tensor):
        return False
    while torch._C._functorch.is_batchedtensor(x):  # PyTorch cannot unpack the dual of such a one
        x = torch._C._functorch.get_unwrapped(x)
    unpack: Any = forward_ad.unpack_dual
    return unpack(x).tangent is not None


def requires_gradient(x: Tensor) -> bool:
    """Whether x requires a gradient, also one that vmap hides."""
    if _is_compiling() or not _in_transform():
        return x.requires_grad
    return any(level.requires_grad for level in _levels(x))


def is_transformed(*given: Any) -> bool:
    """Whether a call with these arguments has to run in operations that torch.func's transforms and
    forward-mode autograd know: inside a transform, or if a tensor has a tangent.
    """
    return in_transform() or any(has_tangent(x) for x in given)


def _levels(x: Tensor) -> list[Tensor]:
    """x, and what transforms of torch.func have wrapped in it; the innermost last."""
    levels = [x]
    while torch._C._functorch.is_functorch_wrapped_tensor(levels[-1]):
        levels.append(torch._C._functorch.get_unwrapped(levels[-1]))
    return levels


def is_mapped(*given: Tensor) -> bool:
    """Whether vmap maps one of these tensors. PyTorch's rules for its fused kernels are wrong where
    there is a mask: one that is not mapped itself lacks a dimension, others lose their alignment.
    """
    if not in_transform():
        return False
    if _is_compiling():
        return _traced_in_vmap()
    mapped: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor
    return any(mapped(level) for x in given for level in _levels(x))


def differentiates_twice(*given: Tensor | None) -> bool:
    """Whether derivatives of these tensors are wanted that PyTorch's fused kernels lack: tangents,
    or gradients of gradients in transforms of torch.func. Autograd alone does not tell beforehand.
    """
    if _is_compiling():
        return _traced_in_two_derivatives()
    if not _in_transform():
        return forward_ad._current_level >= 0 and any(map(has_tangent, given))
    keys = _transforms()
    kinds = torch._C._functorch.TransformType
    if kinds.Jvp in keys or forward_ad._current_level >= 0:
        return True
    outside = any(x is not None and _levels(x)[-1].requires_grad for x in given)
    return keys.count(kinds.Grad) + outside > 1


def refuse_derivatives(what: str, **given: Any) -> None:
    """Refuses tensors whose derivative a function does not have and would drop.

    Args:
        what: the function.
        given: its arguments by name.

    Raises:
        UnsupportedError: one of them requires a gradient while gradients are enabled, or has a
            tangent.
    """
    for name, x in given.items():
        if not isinstance(x, Tensor):
            continue
        if requires_gradient(x) and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{name} requires a gradient, and {what} has no derivative: call it under "
                f"torch.no_grad(), or pass {name}.detach()"
            )
        if has_tangent(x):
            raise UnsupportedError(
                f"{name} has a tangent of forward-mode autograd, and {what} has no derivative: "
                f"pass {name}.detach()"
            )


def stands_for_tensor(x: object) -> bool:
    """Whether x is no tensor and overrides functions that are called with it, as the proxies of
    torch.fx.symbolic_trace do.
    """
    return not isinstance(x, Tensor) and hasattr(type(x), "__torch_function__")


def overridden(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """What such objects make of a call: torch.fx records it. NotImplemented if there are none.

    Args:
        given: all arguments by name.
    """
    flat = [y for x in given.values() for y in (x if isinstance(x, (list, tuple)) else [x])]
    if not (objects := tuple(x for x in flat if stands_for_tensor(x))):
        return NotImplemented
    defaults = inspect.signature(function).parameters
    named = {name: x for name, x in given.items() if x is not defaults[name].default}
    return torch.overrides.handle_torch_function(function, objects, **named)


def recorded(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`overridden` of a call that is given as it was made."""
    objects = tuple(x for x in (*args, *kwargs.values()) if stands_for_tensor(x))
    if not objects:
        return NotImplemented
    return torch.overrides.handle_torch_function(function, objects, *args, **kwargs)


def give_code(wrapper: Any, function: Callable[..., Any]) -> None:
    """Gives what a decorator has made of a function a code object of its own. torch.compile stops
    compiling one that it has compiled too often, and all that a decorator makes share theirs.
    """
    assert isinstance(wrapper, FunctionType)
    wrapper.__code__ = wrapper.__code__.replace(co_name=function.__name__)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_compiled(function: _Function) -> _Function:
    """The function, which torch.compile calls and does not look into: what it makes of methods of
    the runtime's objects is wrong. torch._dynamo, which takes a second, is not imported for that.
    """

    disabled: list[_Function] = []

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        dynamo: Any = sys.modules.get("torch._dynamo")
        if dynamo is not None and not disabled:
            disabled.append(dynamo.disable(function))
        return (disabled[0] if disabled else function)(*given, **named)

    vars(call)["_torchdynamo_disable"] = True  # what torch._dynamo.disable sets
    give_code(call, function)
    return cast(_Function, call)


class _WithoutGradient(torch.autograd.Function):
    """Gives tensors on, and raises UnsupportedError where their gradients are asked for."""

    @staticmethod
    def forward(ctx: Any, what: str, count: int, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.what = what
        return given[:count]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(f"a gradient of {ctx.what} is needed, and it has none")


def without_gradient(what: str, result: Any, *inputs: Any) -> Any:
    """A tensor, or a pair of them, that was computed under torch.no_grad(). If an input requires a
    gradient, so does the result: a backward pass through it raises, and loses nothing in silence.

    Args:
        what: what has no gradient.
    """
    wanted = [x for x in inputs if isinstance(x, Tensor) and requires_gradient(x)]
    if not wanted or not torch.is_grad_enabled() or _is_compiling():
        return result
    results = result if isinstance(result, tuple) else (result,)
    apply: Any = _WithoutGradient.apply
    linked = apply(what, len(results), *results, *wanted)
    return linked if isinstance(result, tuple) else linked[0]


def unrecorded(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns. torch.jit.trace does not record what it does."""
    if not is_tracing():
        return function(*arguments)
    with untraced():
        return function(*arguments)


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Inside, torch.jit.trace records nothing, and the sizes of tensors are plain numbers."""
    state: Any = torch._C._get_tracing_state()
    set_state: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
    set_state(None)
    try:
        yield
    finally:
        set_state(state)
