"""Plans in which one CTA of blackwell_dc, or one pair of them, has all tiles of rows."""

from __future__ import annotations

from typing import Any

from bench.switches.plans import in_pairs
from torch import Tensor

from archflash import _archflash as native

from ..replanned import plan_with

NAME = "blackwell_dc"
# (d, dv), rows and keys of a tile.
CONFIGS = {
    "d64": ((64, 64), 256, 128),
    "d96": ((96, 96), 256, 128),
    "d128": ((128, 128), 256, 128),
    "d128_pair": ((128, 128), 512, 128),
    "d192": ((192, 128), 256, 128),
    "d192_pair": ((192, 128), 512, 128),
    "d256": ((256, 256), 128, 64),
}
FP8_CONFIGS = {
    "d64": ((64, 64), 256, 128),
    "d128": ((128, 128), 256, 128),
    "d192": ((192, 128), 256, 128),
    "d256": ((256, 256), 128, 128),
}


def one_after_another(
    config: str, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> native.LaunchPlan:
    """A plan for a GPU with room for one CTA, or one pair of them, which has all row tiles."""
    device = "B300" if "_mufu" in config else "B200"
    plan = plan_with({"sm_count": 1}, q, k, v, device=device, implementation=NAME, **call)
    pair = config.endswith("_pair")
    if pair:
        plan = in_pairs(plan)
    assert plan.tile is not None
    assert plan.to_dict()["launches"][0]["grid"] == [plan.tile.tiles * (1 + pair), 1, 1]
    return plan
