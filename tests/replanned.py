"""Plans for GPUs that differ from known ones: with a single SM, small problems fill the GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import archflash
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


def plan_with(facts: dict[str, int], *tensors: Tensor, **call: Any) -> native.LaunchPlan:
    """The plan of a call, with its log-sum-exp, on a device with other facts."""
    planned = archflash.explain(*tensors, return_lse=True, **call).plan
    assert planned is not None
    return replanned(planned, **facts)
