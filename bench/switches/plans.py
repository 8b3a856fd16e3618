"""Plans of blackwell_dc that plan.cpp would not make: the same call with other CTAs."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from archflash import _archflash as native

if TYPE_CHECKING:
    import torch

CTA_ROWS = 256  # rows of a CTA, alone or in a pair, in the kernels that have a pair
TILES_OFFSET = 272  # byte offset of Params::tiles
BARRIER_BYTES = 12 * 8  # a pair's six stages have 12 barriers more than the three of a CTA alone
ALONE = ("d128", "d128_mufu", "d192")  # names of the tiles of CTAs alone that have a twin for pairs
PAIR = "_pair"  # how the names of the pairs' tiles and kernels end


def serves_pairs(plan: native.LaunchPlan) -> bool:
    """Whether the same call could be served by a pair of CTAs as well as by one."""
    sixteen_bit = plan.problem.dtype in ("float16", "bfloat16")
    tile = plan.tile
    if tile is None or tile.splits > 1 or not sixteen_bit:
        return False
    return tile.name.removesuffix(PAIR) in ALONE


def in_pairs(plan: native.LaunchPlan) -> native.LaunchPlan:
    """Plans a call for which serves_pairs() holds for the kernel of pairs of CTAs.

    Raises:
        RuntimeError: serves_pairs() does not hold.
    """
    return _with_ctas(plan, 2)


def alone(plan: native.LaunchPlan) -> native.LaunchPlan:
    """Plans a call for which serves_pairs() holds for the kernel of CTAs that work alone.

    Raises:
        RuntimeError: serves_pairs() does not hold.
    """
    return _with_ctas(plan, 1)


def alone_for_pairs(
    implementation: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> native.LaunchPlan | None:
    """The plan of a call for CTAs that work alone, if its own plan takes pairs; else None.

    Args:
        implementation: the one that is forced. Tensors on the CPU are planned for its home GPU.
        q, k, v: as for `archflash.attention`.
        options: the other arguments of `archflash.attention`.

    Raises:
        archflash.ForcedImplementationError: it does not serve the call.
    """
    import archflash

    home = (
        {} if q.device.type == "cuda" else {"device": native.describe(implementation).home_device}
    )
    planned = archflash.explain(q, k, v, implementation=implementation, **home, **options).plan
    if planned is None or planned.tile is None or planned.tile.cluster < 2:
        return None
    return alone(planned)


def splits_keys(plan: native.LaunchPlan) -> bool:
    """Whether a plan splits the keys of a tile over CTAs."""
    return plan.tile is not None and plan.tile.splits > 1


def unsplit(plan: native.LaunchPlan) -> native.LaunchPlan:
    """Plans the same call with num_splits=1.

    Raises:
        RuntimeError: the implementation has no plan for it.
    """
    problem = native.Problem.from_dict(plan.problem.to_dict() | {"num_splits": 1})
    made = native.plan(plan.implementation, problem, plan.device)
    if isinstance(made, list):
        raise RuntimeError("; ".join(made))
    return made


def as_many_as_fit(plan: native.LaunchPlan) -> native.LaunchPlan:
    """The plan with as many CTAs, or pairs of CTAs, as the device has room for.

    It is for a kernel without a dynamic walk, whose CTAs take several tiles each.
    """
    fields = plan.to_dict()
    launch = fields["launches"][0]
    cluster = fields["tile"]["cluster"]
    ctas = min(launch["grid"][0], cluster * max(plan.device.sm_count // cluster, 1))
    fields["tile"]["ctas"] = ctas
    launch["grid"] = [ctas, 1, 1]
    return native.LaunchPlan.unchecked_from_dict(fields)


def _image(kernel: str, dtype: str, ctas: int) -> str:
    kind = "fwd_103" if "_mufu" in kernel else "fwd_pair" if ctas == 2 else "fwd"
    return f"blackwell_dc/{kind}_{dtype}"


def _with_ctas(plan: native.LaunchPlan, ctas: int) -> native.LaunchPlan:
    fields = plan.to_dict()
    launch = fields["launches"][0]
    problem = plan.problem.to_dict()
    kernel: str = launch["kernel"]
    if not serves_pairs(plan):
        raise RuntimeError(f"{kernel} has no pairs")
    end = PAIR if ctas == 2 else ""
    per_sequence = 1 if problem["varlen"] else problem["batch"]
    surplus = problem["batch"] if problem["varlen"] else 0
    row_tiles = -(-problem["nq"] // (ctas * CTA_ROWS)) * per_sequence + surplus
    tiles = row_tiles * problem["heads_q"]
    params = bytearray.fromhex(launch["params"])
    struct.pack_into("<i", params, TILES_OFFSET, tiles)
    before = launch["cluster"][0]
    dtype = "f16" if problem["dtype"] == "float16" else "bf16"
    grid = ctas * tiles
    fields["tile"] |= {
        "name": fields["tile"]["name"].removesuffix(PAIR) + end,
        "block_q": ctas * CTA_ROWS,
        "cluster": ctas,
        "ctas": grid,
        "tiles": tiles,
    }
    launch |= {
        "kernel": kernel.removesuffix(PAIR) + end,
        "image": _image(kernel, dtype, ctas),
        "grid": [grid, 1, 1],
        "cluster": [ctas, 1, 1],
        "params": params.hex(),
        "shared_bytes": launch["shared_bytes"] + (ctas - before) * BARRIER_BYTES,
    }
    for tensor_map in launch["tensor_maps"]:
        if tensor_map["operand"] == "k":
            tensor_map["box"][1] = tensor_map["box"][1] * before // ctas
    return native.LaunchPlan.unchecked_from_dict(fields)
