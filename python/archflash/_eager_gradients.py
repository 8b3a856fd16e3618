"""Who computes the gradients of eager calls, as the runtime asks it where it does not know."""

from __future__ import annotations

from archflash import _archflash as _native
from archflash import _dispatch, _proofs, _registry
from archflash._gradients import FOLDERS, PlanOf, first_with_plan, forced_plan


def decide(
    problem: _native.Problem, index: int, name: str | None, plan_of: PlanOf
) -> _native.LaunchPlan | None:
    """The plan for the gradients of an eager call; None if `torch` computes them. The runtime calls
    this when its cache misses, in training with changing lengths at nearly every step.

    Args:
        problem: the call.
        index: of the device of its tensors.
        name: the forced implementation; None for the best.
        plan_of: what the kernels answer.
    """
    device, obstacle = _dispatch.device_of(problem, index)
    if name is not None:
        _dispatch.check_name(name)
        if name == _registry.TORCH:
            return None
        device = device or _dispatch.simulated_device(name)
        return forced_plan(name, plan_of, problem, device, obstacle)
    if device is None or obstacle is not None:
        return None
    chosen, plan, unproved = first_with_plan(plan_of, device)
    if unproved:
        _proofs.note(unproved[0], device, chosen)
    return plan


def order(index: int, name: str | None) -> tuple[_native.Device, list[tuple[str, bool]]] | None:
    """Who is asked for the gradients of eager calls on a device, in this order, as `decide`
    asks them: those that have a backward pass and code for it. None: `decide` says it.

    Args:
        index: of the device of the tensors; negative on the CPU.
        name: the forced implementation; None for the best.
    """
    on_cuda = index >= 0
    if on_cuda and _dispatch.driver_problem() is not None:
        return None
    if name is not None:
        if name not in FOLDERS:
            return None
        device = _dispatch.query_device(index) if on_cuda else _dispatch.simulated_device(name)
        return device, [(name, False)]
    if not on_cuda:
        return None
    device = _dispatch.query_device(index)
    kernels = [kernel for kernel in FOLDERS if _native.has_code(kernel, device.capability)]
    why_not = {x: _proofs.why_not(x, device.capability, _proofs.BACKWARD) for x in kernels}
    proved = [kernel for kernel in kernels if why_not[kernel] is None]
    if kernels and why_not[kernels[0]] is not None:
        _proofs.note(kernels[0], device, next(iter(proved), _registry.TORCH), stacklevel=3)
    return device, [(kernel, False) for kernel in proved]


_native.set_decide_gradients(decide, order)
