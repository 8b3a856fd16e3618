"""Plans of blackwell_dc's pairs of CTAs for calls that are too small for them."""

from __future__ import annotations

import struct

from archflash import _archflash as native

ROWS, CTA_ROWS = 512, 256  # of a tile
TILES_OFFSET = 264  # of Params::tiles
HEAD_DIM = 128


def in_pairs(plan: native.LaunchPlan, pairs: int) -> native.LaunchPlan:
    """The same call in the kernel of pairs.

    Args:
        plan: of the kernel for head dim 128 that works alone.
        pairs: that share the tiles out.
    """
    fields = plan.to_dict()
    (launch,) = fields["launches"]
    problem = plan.problem.to_dict()
    assert launch["kernel"].endswith("_d128"), launch["kernel"]
    per_sequence = 1 if problem["varlen"] else problem["batch"]
    surplus = problem["batch"] if problem["varlen"] else 0
    tiles = (-(-problem["nq"] // ROWS) * per_sequence + surplus) * problem["heads_q"]
    params = bytearray.fromhex(launch["params"])
    struct.pack_into("<i", params, TILES_OFFSET, tiles)
    launch |= {
        "kernel": launch["kernel"] + "_pair",
        "image": "blackwell_dc/fwd_pair",
        "grid": [2 * min(pairs, tiles), 1, 1],
        "cluster": [2, 1, 1],
        "params": params.hex(),
        # Twelve more barriers than three stages have.
        "shared_bytes": launch["shared_bytes"] + 96,
    }
    for tensor_map in launch["tensor_maps"]:
        if tensor_map["operand"] == "k":
            tensor_map["box"][1] //= 2
    return native.LaunchPlan.from_dict(fields)
