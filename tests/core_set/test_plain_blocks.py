"""blackwell_consumer's loop for blocks that need no mask: it ends where scores become huge."""

from __future__ import annotations

import pytest

from ..replanned import plan_with
from .executors import executor

on = executor()

NAME = "blackwell_consumer"
# Kernels: (d, dv), rows, heads of q and of k, keys of a block, whether the call is causal.
KERNELS = {
    "d64_large": ((64, 64), 256, (4, 2), 64, False),
    "d64_medium": ((64, 64), 80, (4, 4), 64, True),
    "d64_small": ((64, 64), 64, (1, 1), 128, False),
    "d128_large": ((128, 128), 256, (2, 1), 64, False),
    "d256_pair": ((256, 256), 64, (2, 1), 64, False),
}
pytestmark = pytest.mark.skipif(NAME not in on.kernels(), reason=f"{NAME} has no code for this GPU")


@pytest.mark.parametrize("blocks_before", [0, 2])
@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_become_huge_from_block_to_block(kernel: str, blocks_before: int) -> None:
    """Blocks are visited from the last one on. Scores beyond 2^24 are rounded as their base is:
    without that, weights would overflow.
    """
    dims, rows, heads, block_keys, causal = KERNELS[kernel]
    keys = 6 * block_keys + (rows if causal else 0)
    q, k, v = on.qkv(rows, keys, *dims, dtype="bfloat16", heads=heads)
    first_row = rows // 2 + 5
    q[:, :, first_row, 0] = 1e12  # one row of a warp; the others are as always
    k[:, :, keys - blocks_before * block_keys :, 0] = 0
    k[:, :, :block_keys, 0] *= 1.5  # the base of the row rises again in the last block
    call = {"device": "H200", "implementation": NAME, "causal": causal}
    plan = plan_with({"sm_count": 1}, q, k, v, **call)
    assert plan.tile is not None
    assert plan.tile.name == kernel
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=[3], causal=causal)
