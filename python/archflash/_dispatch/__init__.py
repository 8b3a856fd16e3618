"""Decides which implementation serves a call, and says why the others do not. Deciding needs no
GPU, and nothing here launches a kernel.

`forcing` knows what is forced, `approximating` what may be approximate, `device` the GPU, `pytorch`
what PyTorch's own kernels do, `order` the order in which implementations are asked; `choosing` asks
them, and `explain` puts it into words. No module names a folder of kernels: each states its facts
in its `describe()` and its plans.

A call that the runtime's plan cache (src/runtime/call_path.cpp) does not know comes up from C++
into `choosing`: the last line here registers who is asked there.
"""

from __future__ import annotations

from archflash import _archflash as _native
from archflash._dispatch.approximating import (
    approximate,
    asked_for,
    steered,
    where_served,
    with_approximate,
)
from archflash._dispatch.choosing import (
    choose,
    decide,
    first_plan,
    order_of_kind,
    pytorch_drops_faster,
    select,
    why_torch,
)
from archflash._dispatch.device import (
    MINIMUM_DRIVER,
    device_of,
    driver_problem,
    query_device,
    simulated_device,
)
from archflash._dispatch.explain import (
    MASK_READ_FASTER,
    Decision,
    describe_device,
    describe_problem,
    kind_of,
    nearest,
    note_fallback,
    plan_facts,
)
from archflash._dispatch.forcing import check_name, force, forced
from archflash._dispatch.order import pytorch_reads_mask_faster
from archflash._dispatch.pytorch import fails as pytorch_fails

__all__ = [
    "MASK_READ_FASTER",
    "MINIMUM_DRIVER",
    "Decision",
    "approximate",
    "asked_for",
    "check_name",
    "choose",
    "decide",
    "describe_device",
    "describe_problem",
    "device_of",
    "driver_problem",
    "first_plan",
    "force",
    "forced",
    "kind_of",
    "nearest",
    "note_fallback",
    "plan_facts",
    "pytorch_drops_faster",
    "pytorch_fails",
    "pytorch_reads_mask_faster",
    "query_device",
    "select",
    "simulated_device",
    "steered",
    "where_served",
    "why_torch",
    "with_approximate",
]

_native.set_decide(decide, order_of_kind)
