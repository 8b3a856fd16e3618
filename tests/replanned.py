"""Plans for GPUs that differ from known ones: with a single SM, small problems fill the GPU."""

from __future__ import annotations

from archflash import _archflash as native


def replanned(plan: native.LaunchPlan, **facts: int) -> native.LaunchPlan:
    """The plan of the same implementation for the same problem on a device with other facts.

    Args:
        plan: a plan for the device as it is.
        facts: fields of the device, such as sm_count.
    """
    device = native.Device.from_dict(plan.device.to_dict() | facts)
    made = native.plan(plan.implementation, plan.problem, device)
    assert isinstance(made, native.LaunchPlan), made
    return made
