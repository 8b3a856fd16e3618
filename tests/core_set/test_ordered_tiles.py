"""hopper's calls with a table of blocks: the last row tiles are taken in the order of their work,
which a launch before them finds. Tables with more, such as a softcap, go to other kernels than
tables alone (test_tables_of_blocks.py). Plans are made for a GPU with few SMs, so that there are
several rounds of tiles.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import _archflash as native

from ..replanned import plan_with
from .executors import executor

on = executor()

NAME = "hopper"
pytestmark = pytest.mark.skipif(NAME not in on.kernels(), reason=f"{NAME} has no code for this GPU")


def plan_on(sms: int, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> native.LaunchPlan:
    facts = {"sm_count": sms}
    return plan_with(facts, q, k, v, device="H200", implementation=NAME, **call)


def kernels(plan: native.LaunchPlan) -> list[str]:
    return [launch["kernel"] for launch in plan.to_dict()["launches"]]


def table_of(heads: int, rows: int, keys: int) -> Tensor:
    """Noise of which row blocks see more and more, a row of blocks that sees nothing, and some full
    blocks.
    """
    likely = torch.linspace(-0.8, 0.8, rows, device=on.device)[:, None]
    table = (on.rand(1, heads, rows, keys, seed=7) < likely).to(torch.int8)
    table[:, :, 1] = 0
    table[:, :, :, 1] *= 2
    return table


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [448, 512])  # key blocks that are counted one by one, and by fours
def test_a_table_of_blocks_agrees_with_float64_in_any_order_of_tiles(keys: int, dim: int) -> None:
    dtype = ("float16", "bfloat16")[dim == 128]
    q, k, v = on.qkv(300, keys, dim, dtype=dtype, heads=(2, 1))
    table = table_of(2, 5, keys // 64)
    call: dict[str, Any] = {"block_mask": table, "softcap": 5.0}
    plan = plan_on(1, q, k, v, **call)
    first, last = kernels(plan)
    assert "_order_tiles_" in first
    assert last.endswith(f"_d{dim}_masked")
    schedules = range(4) if dim == 128 else range(1)
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=schedules, **call)


@pytest.mark.parametrize("heads", [1, 2])
def test_tiles_before_the_last_two_rounds_keep_their_order(heads: int) -> None:
    q, k, v = on.qkv(330, 200, 64, dtype="bfloat16", batch=2, heads=(2, 2))
    table = table_of(heads, 6, 4)
    mask = on.rand(1, 1, 330, 200, seed=8) > -0.5
    for call in (
        {"block_mask": table, "softcap": 5.0},
        {"block_mask": table.clamp(max=1), "attn_mask": mask},
    ):
        plan = plan_on(2, q, k, v, **call)  # 24 tiles for four CTAs, of which eight are ordered
        assert "_order_tiles_" in kernels(plan)[0]
        on.attend_and_check(NAME, q, k, v, plan=plan, schedules=range(1), **call)


@pytest.mark.parametrize("dim", [64, 128])
def test_the_last_two_rounds_of_tables_alone_are_ordered(dim: int) -> None:
    streams = 4 if dim == 64 else 3  # each takes tiles of its own
    q, k, v = on.qkv(64 * (2 * streams + 3), 200, dim, dtype="bfloat16")
    table = table_of(2, 2 * streams + 3, 4)
    plan = plan_on(1, q, k, v, block_mask=table)
    first, last = kernels(plan)
    assert "_order_tiles_" in first
    assert last.endswith(f"_d{dim}_table")
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=range(2), block_mask=table)


def test_which_calls_order_their_tiles() -> None:
    q, k, v = on.qkv(330, 200, 128, dtype="bfloat16")
    table = table_of(1, 6, 4)
    call: dict[str, Any] = {"block_mask": table, "softcap": 5.0}
    assert len(kernels(plan_on(1, q, k, v, **call))) == 2
    assert len(kernels(plan_on(6, q, k, v, **call))) == 1  # a CTA for each
    # Under a causal mask the last rows come first.
    assert len(kernels(plan_on(1, q, k, v, causal=True, **call))) == 1
    slopes = torch.ones(2, device=on.device)
    first, _ = kernels(plan_on(1, q, k, v, alibi_slopes=slopes))
    assert "_clear_counter_" in first
