"""Plans of blackwell_dc that plan.cpp would not make: the same call with other CTAs."""

from __future__ import annotations

import struct

from archflash import _archflash as native

CTA_ROWS = 256  # rows of a CTA, alone or in a pair, in the kernels that have a pair
TILES_OFFSET = 264  # byte offset of Params::tiles
BARRIER_BYTES = 12 * 8  # a pair's six stages have 12 barriers more than the three of a CTA alone
ALONE = ("d128", "d192")  # names of the tiles of CTAs alone that have a twin for pairs
PAIR = "_pair"  # how the names of the pairs' tiles and kernels end


def serves_pairs(plan: native.LaunchPlan) -> bool:
    """Whether the same call could be served by a pair of CTAs as well as by one."""
    sixteen_bit = plan.problem.dtype in ("float16", "bfloat16")
    tile = plan.tile
    if tile is None or tile.splits > 1 or not sixteen_bit:
        return False
    return tile.name.removesuffix(PAIR) in ALONE


def in_pairs(plan: native.LaunchPlan, pairs: int | None = None) -> native.LaunchPlan:
    """Plans a call for the kernel of pairs of CTAs.

    Args:
        plan: plan of a call for which serves_pairs() holds.
        pairs: how many pairs share out the tiles; None: as many as the device has room for.

    Raises:
        RuntimeError: serves_pairs() does not hold.
    """
    if pairs is None:
        pairs = max(plan.device.sm_count // 2, 1)
    return _with_ctas(plan, 2, pairs)


def alone(plan: native.LaunchPlan) -> native.LaunchPlan:
    """Plans a call for which serves_pairs() holds for the kernel of CTAs that work alone.

    Raises:
        RuntimeError: serves_pairs() does not hold.
    """
    return _with_ctas(plan, 1, plan.device.sm_count)


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


def one_tile_each(plan: native.LaunchPlan) -> native.LaunchPlan:
    """The plan's kernel with one CTA, or one pair of CTAs, for each row tile."""
    fields = plan.to_dict()
    launch = fields["launches"][0]
    ctas = fields["tile"]["cluster"] * fields["tile"]["tiles"] * fields["tile"]["splits"]
    fields["tile"]["ctas"] = ctas
    launch["grid"] = [ctas, 1, 1]
    return native.LaunchPlan.unchecked_from_dict(fields)


def _with_ctas(plan: native.LaunchPlan, ctas: int, groups: int) -> native.LaunchPlan:
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
    grid = ctas * min(groups, tiles)
    fields["tile"] |= {
        "name": fields["tile"]["name"].removesuffix(PAIR) + end,
        "block_q": ctas * CTA_ROWS,
        "cluster": ctas,
        "ctas": grid,
        "tiles": tiles,
    }
    launch |= {
        "kernel": kernel.removesuffix(PAIR) + end,
        "image": "blackwell_dc/fwd_pair" if ctas == 2 else f"blackwell_dc/fwd_{dtype}",
        "grid": [grid, 1, 1],
        "cluster": [ctas, 1, 1],
        "params": params.hex(),
        "shared_bytes": launch["shared_bytes"] + (ctas - before) * BARRIER_BYTES,
    }
    for tensor_map in launch["tensor_maps"]:
        if tensor_map["operand"] == "k":
            tensor_map["box"][1] = tensor_map["box"][1] * before // ctas
    return native.LaunchPlan.unchecked_from_dict(fields)
