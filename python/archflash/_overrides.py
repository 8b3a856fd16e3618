"""PyTorch's own attention served by archflash: enable(), disable() and enabled().

`torch.nn.functional.scaled_dot_product_attention` chooses one of PyTorch's operators for CUDA
tensors (flash, cuDNN or memory-efficient), `torch.nn.attention.varlen` calls flash's for packed
sequences or, from torch 2.15 on, cuDNN's, and FP8 attention has overloads of flash's.
While archflash is enabled, it stands in front of these operators: it serves a call with the kernel
that dispatch chooses, and hands every other call to PyTorch's own kernel. Code under torch.compile
calls the same operators.

`_forward_operators` has what the arguments of each operator mean and what it returns. The backward
operators are replaced as well (`_backward_operators`): each gets what a forward operator gave,
whether PyTorch's kernel did or archflash's. `_replacing` puts kernels in front of PyTorch's, and
`_stats` counts calls.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.nn.attention as _torch_attention

from archflash import _archflash as _native
from archflash import _backward_operators, _dispatch, _forward_operators
from archflash._eager import never_compiled
from archflash._forward_operators import Kernel, decline
from archflash._replacing import Replaced
from archflash._stats import declined

NAME = "archflash"  # in PyTorch's registry, beside "FA3" and "FA4"
ENABLE_VARIABLE = "ARCHFLASH_SDPA"

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


# --- on and off ---

# Newer versions of PyTorch have a registry of providers of flash attention, one of them active.
_HAS_REGISTRY = hasattr(_torch_attention, "restore_flash_attention_impl")
_replaced: Replaced | None = None  # where PyTorch has no registry

if _HAS_REGISTRY:
    _torch_attention.register_flash_attention_impl(NAME, register_fn=partial(Replaced, _OPERATORS))


def _active() -> str | None:
    """The provider that stands in front of PyTorch's kernels: NAME, another one, or None."""
    if _HAS_REGISTRY:
        return _torch_attention.current_flash_attention_impl()
    return None if _replaced is None else NAME


@never_compiled
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
    _replaced = None if name is None else Replaced(_OPERATORS)


def count_declined(reason: str) -> None:
    """Counts a call that is handed to PyTorch's own function on the way, unless archflash stands in
    front of its operators: they count it themselves.
    """
    if _active() is None:
        declined.add(reason)


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
