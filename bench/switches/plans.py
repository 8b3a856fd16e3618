"""Plans of blackwell_dc that plan.cpp would not make: the same call by other CTAs."""

from __future__ import annotations

import struct

from archflash import _archflash as native

CTA_ROWS = 256  # of a tile of the kernels that have pairs, and of each CTA of a pair
TILES_OFFSET = 264  # of Params::tiles
BARRIER_BYTES = 12 * 8  # that a pair's six stages have more than the three of a CTA alone
ALONE = ("_d128", "_d192")  # ends of names of kernels that have pairs,
PAIR = "_pair"  # whose names end so


def serves_pairs(plan: native.LaunchPlan) -> bool:
    """Whether the same call could be served by a pair of CTAs as well as by one."""
    launches = plan.to_dict()["launches"]
    sixteen_bit = plan.problem.dtype in ("float16", "bfloat16")
    return sixteen_bit and len(launches) == 1 and launches[0]["kernel"].endswith((*ALONE, PAIR))


def in_pairs(plan: native.LaunchPlan, pairs: int | None = None) -> native.LaunchPlan:
    """A call in the kernel of pairs of CTAs.

    Args:
        plan: of a call that serves_pairs().
        pairs: that share the tiles out; None: as many as the device has room for.

    Raises:
        RuntimeError: it does not serves_pairs().
    """
    if pairs is None:
        pairs = max(plan.device.sm_count // 2, 1)
    return _with_ctas(plan, 2, pairs)


def alone(plan: native.LaunchPlan) -> native.LaunchPlan:
    """A call that serves_pairs() in the kernel of CTAs that work alone.

    Raises:
        RuntimeError: it does not.
    """
    return _with_ctas(plan, 1, plan.device.sm_count)


def splits_keys(plan: native.LaunchPlan) -> bool:
    """Whether keys are split over CTAs."""
    return plan.workspace_bytes > 0


def unsplit(plan: native.LaunchPlan) -> native.LaunchPlan:
    """The call that says num_splits=1.

    Raises:
        RuntimeError: there is no plan for it.
    """
    problem = native.Problem.from_dict(plan.problem.to_dict() | {"num_splits": 1})
    made = native.plan(plan.implementation, problem, plan.device)
    if isinstance(made, list):
        raise RuntimeError("; ".join(made))
    return made


def one_tile_each(plan: native.LaunchPlan) -> native.LaunchPlan:
    """The same kernel with a CTA, or a pair of them, for each row tile."""
    fields = plan.to_dict()
    launch = fields["launches"][0]
    (tiles,) = struct.unpack_from("<i", bytes.fromhex(launch["params"]), TILES_OFFSET)
    launch["grid"] = [launch["cluster"][0] * tiles, 1, 1]
    return native.LaunchPlan.unchecked_from_dict(fields)


def _with_ctas(plan: native.LaunchPlan, ctas: int, groups: int) -> native.LaunchPlan:
    fields = plan.to_dict()
    launch = fields["launches"][0]
    problem = plan.problem.to_dict()
    name: str = launch["kernel"]
    if not serves_pairs(plan):
        raise RuntimeError(f"{name} has no pairs")
    per_sequence = 1 if problem["varlen"] else problem["batch"]
    surplus = problem["batch"] if problem["varlen"] else 0
    row_tiles = -(-problem["nq"] // (ctas * CTA_ROWS)) * per_sequence + surplus
    tiles = row_tiles * problem["heads_q"]
    params = bytearray.fromhex(launch["params"])
    struct.pack_into("<i", params, TILES_OFFSET, tiles)
    before = launch["cluster"][0]
    dtype = "f16" if problem["dtype"] == "float16" else "bf16"
    launch |= {
        "kernel": name.removesuffix(PAIR) + (PAIR if ctas == 2 else ""),
        "image": "blackwell_dc/fwd_pair" if ctas == 2 else f"blackwell_dc/fwd_{dtype}",
        "grid": [ctas * min(groups, tiles), 1, 1],
        "cluster": [ctas, 1, 1],
        "params": params.hex(),
        "shared_bytes": launch["shared_bytes"] + (ctas - before) * BARRIER_BYTES,
    }
    for tensor_map in launch["tensor_maps"]:
        if tensor_map["operand"] == "k":
            tensor_map["box"][1] = tensor_map["box"][1] * before // ctas
    return native.LaunchPlan.unchecked_from_dict(fields)
