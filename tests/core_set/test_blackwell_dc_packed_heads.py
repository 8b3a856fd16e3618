"""blackwell_dc's packed heads beyond test_few_rows.py: several tiles of a CTA, what is read, and
rows of no sequence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archflash import sim

from ..replanned import replanned
from .checks import same_bits
from .executors import executor
from .few_rows import FEW_ROWS, plan_of, tile_of

on = executor()

NAME = "blackwell_dc"
KERNELS = FEW_ROWS[NAME].kernels

pytestmark = pytest.mark.skipif(
    NAME not in on.kernels("num_splits"), reason=f"{NAME} has no code for this GPU"
)


@pytest.mark.parametrize("kernel", ["d128_few", "d192_few"])
def test_tiles_in_turn_in_one_cta_and_side_by_side_give_the_same_bits(kernel: str) -> None:
    (d, dv), keys = KERNELS[kernel]
    q, k, v = on.qkv(40, keys + 1, d, dv, dtype="bfloat16", heads=(10, 2))
    call: dict[str, Any] = {"causal": True}
    plan = replanned(plan_of(NAME, q, k, v, **call), sm_count=1)
    assert plan.tile is not None
    # Of each head of K three tiles of 16 query rows, of 5 heads each.
    assert (plan.tile.packed_heads, plan.tile.block_q, plan.tile.tiles) == (5, 16, 6)
    assert plan.to_dict()["launches"][0]["grid"] == [plan.tile.tiles, 1, 1]
    out, lse = on.attend_and_check(NAME, q, k, v, schedules=[2], **call)
    in_turn, in_turn_lse = on.attend(NAME, q, k, v, plan=plan, schedules=range(4), **call)
    assert same_bits(in_turn, out)
    assert same_bits(in_turn_lse, lse)


@pytest.mark.skipif(on.name != "simulator", reason="only the simulator counts instructions")
def test_k_and_v_are_read_once_for_all_heads_of_a_group() -> None:
    def copies(heads: int) -> int:
        q, k, v = on.qkv(4, 300, 128, dtype="bfloat16", heads=(heads, 1))
        run = sim.run(q, k, v, implementation=NAME, race_check=False)
        loads = {n for name, n in run.report.opcodes.items() if ".global.tile.mbarrier" in name}
        return sum(loads)

    assert copies(8) == copies(1) > 0


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_of_no_sequence_are_zero_in_every_head(splits: int) -> None:
    q, k, v = (on.rand(150, heads, 64, seed=heads, dtype="bfloat16") for heads in (6, 2, 2))
    k, v = (x.repeat(2, 1, 1) for x in (k, v))
    call: dict[str, Any] = {
        "cu_seqlens_q": on.int32(3, 9, 11), "cu_seqlens_k": on.int32(0, 200, 300),
        "max_seqlen_q": 6, "num_splits": splits, "sinks": on.rand(6, seed=5),
    }  # fmt: skip
    assert tile_of(NAME, q, k, v, **call).packed_heads == 3
    out, lse = on.attend_and_check(NAME, q, k, v, **call)
    for rows in (slice(3), slice(11, None)):
        assert torch.equal(out[rows], torch.zeros_like(out[rows]))
        assert torch.equal(lse[:, rows], call["sinks"][:, None].expand_as(lse[:, rows]))
