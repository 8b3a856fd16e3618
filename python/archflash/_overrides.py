"""PyTorch's own attention served by archflash: enable(), disable(), enabled() and stats().

`torch.nn.functional.scaled_dot_product_attention` chooses one of PyTorch's operators for CUDA
tensors (flash, cuDNN or memory-efficient), `torch.nn.attention.varlen` calls flash's for packed
sequences or, from torch 2.15 on, cuDNN's, and FP8 attention has overloads of flash's.
While archflash is enabled, it stands in front of these operators: it serves a call with the kernel
that dispatch chooses, and hands every other call to PyTorch's own kernel. Code under torch.compile
calls the same operators.

`_forward_operators` has what the arguments of each operator mean and what it returns. The backward
operators are replaced as well (`_backward_operators`): each gets what a forward operator gave,
whether PyTorch's kernel did or archflash's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.attention as _torch_attention
from torch import Tensor
from torch.torch_version import TorchVersion

from archflash import _archflash as _native
from archflash import (
    _backward_operators,
    _dispatch,
    _forward_operators,
    _mended_calls,
    _schemas,
    _sharding,
)
from archflash._forward_operators import Kernel, decline

NAME = "archflash"  # in PyTorch's registry, beside "FA3" and "FA4"
ENABLE_VARIABLE = "ARCHFLASH_SDPA"
_KEY = "CUDA"  # the dispatch key whose kernels are replaced; tests take "CPU"

# --- what was counted ---


@dataclass(frozen=True)
class Stats:
    """What became of the calls of PyTorch's attention operators while archflash was enabled.

    Attributes:
        served: the number of calls that each implementation served.
        declined: the number of calls that PyTorch's own kernels served, for each reason. Reasons
            that differ only in numbers count as one, under the first of them.
        approximated: the number of calls that kernels served approximately, for each word of
            `archflash.attention`'s option `approximate`. Those of archflash's own functions are
            among them.
    """

    served: dict[str, int]
    declined: dict[str, int]
    approximated: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        by_archflash, by_pytorch = sum(self.served.values()), sum(self.declined.values())
        lines = [f"{by_archflash} calls served by archflash, {by_pytorch} by PyTorch's own kernels"]
        for counts in (self.served, self.declined):
            for what, count in sorted(counts.items(), key=lambda item: -item[1]):
                lines.append(f"  {count:>9}  {what}")
        lines += [f"  {count:>9}  with approximate={x!r}" for x, count in self.approximated.items()]
        return "\n".join(lines)


_kind_of = lru_cache(_dispatch.kind_of)  # the reasons are few, and each is counted many times


class _Declined:
    """Counts of declined calls that several threads may add to. The runtime counts the others:
    those that were served, and those that it handed over without asking here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, list[Any]] = {}  # by kind of reason: the first one, the number

    def add(self, reason: str) -> None:
        with self._lock:
            self._add(reason, 1)

    def _add(self, reason: str, count: int) -> None:
        self._counts.setdefault(_kind_of(reason), [reason, 0])[1] += count

    def read(self, reset: bool) -> dict[str, int]:
        with self._lock:
            for reason, count in _native.operators_declined(True).items():
                self._add(reason, count)
            counts = dict(self._counts.values())
            if reset:
                self._counts.clear()
        return counts


_declined = _Declined()


def count_declined(reason: str) -> None:
    """Counts a call that is handed to PyTorch's own function on the way, unless archflash stands in
    front of its operators: they count it themselves.
    """
    if _active() is None:
        _declined.add(reason)


def stats(*, reset: bool = False) -> Stats:
    """Counts the calls of PyTorch's attention operators since archflash was first enabled.

    Calls of `archflash.attention` are among them only where that hands them on to PyTorch. Calls
    for which PyTorch uses none of its fused kernels are not. Calls with dropout that
    `archflash.scaled_dot_product_attention` hands to PyTorch's function are, enabled or not.

    Args:
        reset: start to count anew; off by default.

    Returns:
        A `Stats`: how many calls each implementation served, and for what reasons PyTorch served
        the others. Its str() is readable.

    Example:
        >>> import archflash
        >>> before = archflash.stats(reset=True)
        >>> print(archflash.stats())
        0 calls served by archflash, 0 by PyTorch's own kernels
    """
    served, approximated = _native.operators_served(reset), _native.calls_approximated(reset)
    return Stats(served, _declined.read(reset), approximated)


# --- who serves a call ---


_device_of = _dispatch.device_of
_forced = _dispatch.forced


def _decide(problem: _native.Problem, index: int, forced: str | None) -> _native.LaunchPlan | str:
    """The plan that serves a problem of PyTorch's operators, or the reason why PyTorch's own kernel
    does. The runtime asks this once for each problem.

    The decision is made for the problem without the log-sum-exp, which PyTorch's fused kernels give
    at no cost, although they do not give it to a caller of SDPA.
    """
    sizes = (problem.heads_q, problem.heads_kv, problem.nq, problem.nk, problem.d, problem.dv)
    if 0 in sizes or (problem.batch == 0 and not problem.varlen):
        return "a tensor without elements"
    device, obstacle = _device_of(problem, index)
    without_lse = _with_lse(problem, False)
    plan, refusals = _dispatch.choose(without_lse, device, forced, obstacle)
    if plan is None:
        if forced is not None:
            return f"{forced} is forced"
        return _why_pytorch(problem, device, obstacle, refusals)
    if forced is None and _dispatch.pytorch_reads_mask_faster(without_lse, plan):
        return _dispatch.MASK_READ_FASTER
    if not problem.want_lse:
        return plan
    answer = _native.plan(plan.implementation, _with_lse(plan.problem, True), plan.device)
    return f"{plan.implementation}: {answer[0]}" if isinstance(answer, list) else answer


def _why_pytorch(
    problem: _native.Problem,
    device: _native.Device | None,
    obstacle: str | None,
    refusals: dict[str, list[str]],
) -> str:
    """Why PyTorch's own kernel serves a problem, with the reasons of the kernels that cannot."""
    if device is None or obstacle is not None:
        return obstacle or "tensors on the CPU"
    if not refusals:
        return _dispatch.why_torch(problem, device)
    kernel, reasons = _dispatch.nearest(refusals, problem, device)
    return f"{kernel}: {reasons[0]}"


def _with_lse(problem: _native.Problem, want: bool) -> _native.Problem:
    return _native.Problem.from_dict(problem.to_dict() | {"want_lse": int(want)})


_native.set_decide_operator(lambda *problem: _decide(*problem))


def _gradients_of(operator: str) -> Kernel:
    """The function that serves a backward operator. A forced implementation without a backward pass
    leaves the gradients to PyTorch.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        forced = _forced()
        served = _backward_operators.serve(operator, args, kwargs, forced, _why_pytorch)
        if isinstance(served, str) and (forced is None or _native.has_backward(forced)):
            return decline(served)
        return served

    return kernel


_OPERATORS: dict[str, Kernel] = {
    **_forward_operators.OPERATORS,
    **{operator: _gradients_of(operator) for operator in _backward_operators.OPERATORS},
}


# --- PyTorch's own kernels ---


class _Inside(threading.local):
    """Whether this thread is inside a kernel of PyTorch's. Some of them call other operators of the
    list, and that must not count as a call.
    """

    pytorch = False


_inside = _Inside()


def _original(operator: str) -> Kernel | None:
    """PyTorch's own kernel, which takes a set of dispatch keys before its arguments; None if there
    is none, or no way to call it while it is replaced.
    """
    name = f"aten::{operator}"
    if not (
        _schemas.find(operator) is not None
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY)
    ):
        return None
    if hasattr(torch.library, "get_kernel"):
        kernel: Kernel = torch.library.get_kernel(name, _KEY).call_boxed
        return kernel
    return _BY_OTHER_OPERATORS.get(operator)


def _flash_by_its_part(
    keys: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    nq, nk = query.shape[2], key.shape[2]
    out, lse, *rest = torch.ops.aten._flash_attention_forward(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, None, nq, nk,
        dropout_p, is_causal, return_debug_mask, scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse, None, None, nq, nk, *rest


def _efficient_by_its_part(
    keys: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    out, lse, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_bias,
        None, None, None, None, dropout_p, int(is_causal), compute_log_sumexp, scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse, seed, offset


# Versions of PyTorch without torch.library.get_kernel cannot call a kernel that is replaced. Two
# operators only transpose and call another one there, which is not replaced; the others keep
# PyTorch's kernel.
_BY_OTHER_OPERATORS: dict[str, Kernel] = {
    "_scaled_dot_product_flash_attention": _flash_by_its_part,
    "_scaled_dot_product_efficient_attention": _efficient_by_its_part,
}


def _replacement(operator: str, serve: Kernel, original: Kernel) -> Kernel:
    """The kernel that stands before PyTorch's own one, the original."""
    # Asking the dispatcher for the keys of each call takes time, and no kernel on CUDA reads them.
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _inside.pytorch:
            return original(keys, *args, **kwargs)
        result = serve(*args, **kwargs)
        if type(result) is not str:
            return result
        _declined.add(result)
        mended = _mended_calls.Call(operator, args, kwargs)
        if not mended.differs:  # else the runtime asks again for each call of the kind
            _native.note_declined(result)
        _inside.pytorch = True
        _native.note_inside_pytorch(True)
        try:
            return mended.results(original(keys, *mended.args, **mended.kwargs))
        finally:
            _inside.pytorch = False
            _native.note_inside_pytorch(False)

    return kernel


# Operators whose calls the runtime serves, or hands to PyTorch's own kernel, without Python where
# it knows one like it.
_IN_RUNTIME = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_flash_attention_forward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_flash_attention_backward",
)
_OLDEST_FOR_RUNTIME = (2, 11)  # the oldest version of PyTorch with which this was tried
_LETTERS = {
    "Tensor": "T", "float": "f", "bool": "b", "int": "i", "SymInt": "i", "Optional[Tensor]": "t",
    "Optional[float]": "g", "Optional[int]": "j", "Optional[SymInt]": "j",
}  # fmt: skip


def _handle_functions() -> tuple[Kernel, Kernel] | None:
    """The two private functions of PyTorch with which the runtime makes a Python tensor of a
    handle, and handles of Python tensors; None if this PyTorch lacks one.
    """
    core = getattr(torch._C, "_aoti", None)
    tensor_of = getattr(core, "alloc_tensor_by_stealing_from_void_ptr", None)
    handles_of = getattr(core, "unsafe_alloc_void_ptrs_from_tensors", None)
    return None if tensor_of is None or handles_of is None else (tensor_of, handles_of)


def _runtime_serves() -> bool:
    """Whether the runtime can stand in front of PyTorch's operators itself. Where it cannot, the
    functions in Python serve every call.
    """
    new = bool(TorchVersion(torch.__version__) >= _OLDEST_FOR_RUNTIME)  # type: ignore[operator]
    return new and _native.has_torch_functions() and _handle_functions() is not None


def _install_in_runtime(operator: str, kernel: Kernel) -> None:
    """Lets the runtime serve an operator, and `kernel` what the runtime does not know. Nothing
    happens where the operator takes arguments of a kind that the runtime does not read.
    """
    arguments = getattr(torch.ops.aten, operator).default._schema.arguments
    letters = [_LETTERS.get(str(argument.real_type)) for argument in arguments]
    functions = _handle_functions()
    if None in letters or functions is None:
        return
    positional = sum(not argument.kwarg_only for argument in arguments)
    names = [argument.name for argument in arguments[positional:]]

    def by_python(*given: Any) -> Any:
        return kernel(*given[:positional], **dict(zip(names, given[positional:], strict=True)))

    types = "".join(str(letter) for letter in letters)
    _native.install_operator(operator, types, _KEY, by_python, _dispatch.steered, *functions)


class _Replaced:
    """PyTorch's operators while archflash stands in front of them, until remove()."""

    def __init__(self) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            self._install()
        except BaseException:
            self.remove()
            raise

    def _install(self) -> None:
        _forward_operators.flash_shapes()  # asks PyTorch, outside of any call
        _sharding.register_if_loaded()  # PyTorch's operator for the CPU has no strategy
        kernels = {
            operator: _replacement(operator, serve, original)
            for operator, serve in _OPERATORS.items()
            if (original := _original(operator)) is not None
        }
        with warnings.catch_warnings():
            # PyTorch warns that a kernel of its own is replaced, which is what was asked for. It
            # does so once: the runtime's kernels come afterwards, in front of these.
            warnings.simplefilter("ignore", UserWarning)
            for operator, kernel in kernels.items():
                self._library.impl(operator, kernel, _KEY)
        if _runtime_serves():
            for operator in _IN_RUNTIME:
                if operator in kernels:
                    _install_in_runtime(operator, kernels[operator])

    def remove(self) -> None:
        _native.remove_operators()
        self._library._destroy()


# --- on and off ---

# Newer versions of PyTorch have a registry of providers of flash attention, one of them active.
_HAS_REGISTRY = hasattr(_torch_attention, "restore_flash_attention_impl")
_replaced: _Replaced | None = None  # where PyTorch has no registry

if _HAS_REGISTRY:
    _torch_attention.register_flash_attention_impl(NAME, register_fn=_Replaced)


def _active() -> str | None:
    """The provider that stands in front of PyTorch's kernels: NAME, another one, or None."""
    if _HAS_REGISTRY:
        return _torch_attention.current_flash_attention_impl()
    return None if _replaced is None else NAME


def _activate(name: str | None) -> None:
    global _replaced
    if name == _active():
        return
    if _HAS_REGISTRY:
        if name is None:
            _torch_attention.restore_flash_attention_impl()
        else:
            _torch_attention.activate_flash_attention_impl(name)
        return
    if _replaced is not None:
        _replaced.remove()
    _replaced = None if name is None else _Replaced()


def enable() -> None:
    """Lets archflash serve PyTorch's own attention: calls of
    `torch.nn.functional.scaled_dot_product_attention` and `torch.nn.attention.varlen` with CUDA
    tensors, in this process, compiled code included; and PyTorch's prototype for FP8,
    `_scaled_dot_product_attention_quantized`.

    A call that no kernel of archflash serves, or that PyTorch is expected to serve faster, goes to
    PyTorch's own kernel; `archflash.stats()` has the numbers and the reasons. is_causal keeps
    PyTorch's meaning. With `archflash.force` a call that the forced implementation cannot serve
    raises.

    In PyTorch's registry of providers the name is "archflash":
    ``torch.nn.attention.activate_flash_attention_impl("archflash")`` is the same. One provider is
    active at a time, so enable() replaces another one ("FA3", "FA4"). With ARCHFLASH_SDPA=1 in the
    environment archflash is enabled as soon as torch is imported.

    Example:
        >>> import archflash
        >>> archflash.enable()
        >>> archflash.disable()
    """
    _activate(NAME)


def disable() -> None:
    """Gives PyTorch its own attention kernels back. Nothing happens if archflash is not enabled."""
    if _active() == NAME:
        _activate(None)


def environment_without() -> dict[str, str]:
    """The environment for a process in which PyTorch's kernels are PyTorch's, and nothing is forced
    that is not asked for.
    """
    asking = _dispatch.approximating.APPROXIMATE_VARIABLE
    ours = (ENABLE_VARIABLE, _dispatch.forcing.FORCE_VARIABLE, asking)
    return {name: value for name, value in os.environ.items() if name not in ours}


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Lets archflash serve PyTorch's own attention inside a `with` block, as `enable` does. At its
    end, what was active before is active again: PyTorch's own kernels, or another provider.

    The effect is on the whole process, not on this thread alone.

    Example:
        >>> import archflash, torch
        >>> q = torch.randn(1, 2, 5, 8)
        >>> with archflash.enabled():
        ...     torch.nn.functional.scaled_dot_product_attention(q, q, q).shape
        torch.Size([1, 2, 5, 8])
    """
    before = _active()
    enable()
    try:
        yield
    finally:
        _activate(before)


def enable_if_asked() -> None:
    """Enables archflash if ARCHFLASH_SDPA is 1.

    Raises:
        ValueError: it is something else than 0, 1 or nothing.
    """
    asked = os.environ.get(ENABLE_VARIABLE, "")
    if asked not in ("", "0", "1"):
        raise ValueError(
            f"{ENABLE_VARIABLE} is {asked!r}: it must be 1, for archflash to serve "
            "scaled_dot_product_attention, or 0"
        )
    if asked == "1":
        enable()
