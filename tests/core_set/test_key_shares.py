"""ampere's kernels for calls whose rows see all keys up to one: CTAs share out the keys of few row
tiles, and those of packed sequences find their tiles by the grid.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from archflash import _archflash as native

from ..replanned import plan_with
from .executors import executor

on = executor()

NAME = "ampere"
pytestmark = pytest.mark.skipif(NAME not in on.kernels(), reason=f"{NAME} has no code for this GPU")

DIMS = {"d32": (24, 32), "d64": (64, 56), "d96": (80, 96), "d128": (128, 104), "d256": (192, 256)}


def plan_of(*tensors: torch.Tensor, sms: int = 64, **call: Any) -> native.LaunchPlan:
    facts = {"sm_count": sms}
    return plan_with(facts, *tensors, device="H200", implementation=NAME, **call)


@pytest.mark.parametrize(
    ("rows", "keys", "heads", "call"),
    [
        (130, 450, (2, 1), {"causal": True}),  # more keys than rows; warps without rows
        (577, 577, (1, 1), {"causal": True}),  # the first tiles have one share
        (100, 520, (1, 1), {}),
        (70, 800, (2, 2), {"causal": True, "q_offset": 633}),  # keys that no row sees
    ],
)
@pytest.mark.parametrize("dims", DIMS)
def test_ctas_share_out_keys(
    dims: str, rows: int, keys: int, heads: tuple[int, int], call: dict[str, Any]
) -> None:
    d, dv = DIMS[dims]
    q, k, v = on.qkv(rows, keys, d, dv, dtype=("float16", "bfloat16")[rows % 2], heads=heads)
    if "q_offset" in call:
        v[:, :, rows + call["q_offset"] :] = math.nan
    plan = plan_of(q, k, v, **call)
    assert plan.tile is not None
    assert plan.tile.name.startswith(f"{dims}_shares")
    assert plan.tile.splits > 1
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=[rows % 3, 4], **call)


@pytest.mark.parametrize(
    ("name", "dims", "rows", "sms"),
    [
        ("d64_causal", (56, 64), 500, 1), ("d96_causal", (88, 80), 500, 1),
        ("d128_causal", (128, 120), 500, 1), ("d64_shares", (64, 64), 300, 4),
        ("d64_shares_three", (64, 40), 190, 2), ("d128_shares_groups", (128, 104), 120, 6),
    ],
)  # fmt: skip
def test_a_cta_has_all_keys_of_a_tile(
    name: str, dims: tuple[int, int], rows: int, sms: int
) -> None:
    """With many tiles, or one for each SM."""
    q, k, v = on.qkv(rows, rows, *dims, dtype="bfloat16", heads=(2, 2))
    plan = plan_of(q, k, v, sms=sms, causal=True)
    assert plan.tile is not None
    assert (plan.tile.name, plan.tile.splits) == (name, 1)
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=[2], causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "d", "dv", "lengths"),
    [
        ("d32_packed", 32, 24, ((70, 0, 1, 65), (129, 9, 0, 40))),
        ("d32_packed_large", 32, 32, ((150, 300), (30, 290))),
        ("d64_packed", 64, 56, ((70, 0, 1, 65), (129, 9, 0, 40))),
        ("d64_packed_large", 48, 64, ((500, 310), (30, 290))),
        ("d80_packed", 72, 80, ((70, 0, 1, 65), (129, 9, 0, 40))),
        ("d80_packed_large", 80, 72, ((500, 310), (30, 290))),
        ("d96_packed", 96, 88, ((70, 0, 1, 65), (129, 9, 0, 40))),
        ("d96_packed_large", 88, 96, ((500, 310), (30, 290))),
        ("d128_packed", 128, 104, ((70, 0, 1, 65), (129, 9, 0, 40))),
        ("d128_packed_large", 112, 128, ((150, 120), (30, 290))),
    ],
)
def test_the_grid_names_the_tiles_of_packed_sequences(
    name: str, d: int, dv: int, lengths: tuple[tuple[int, ...], tuple[int, ...]], causal: bool
) -> None:
    """Some have no rows or no keys, or fewer keys than rows; and there are rows of no sequence."""
    q_lengths, k_lengths = lengths
    if name == "d32_packed_large" and causal:
        q_lengths = (510, 400)
    spare = 70
    rows, keys = sum(q_lengths) + spare, sum(k_lengths)
    dtype = ("float16", "bfloat16")[causal]
    q = on.rand(rows, 2, d, seed=1, dtype=dtype)
    # Heads that share a head of k are packed into a tile where sequences have few rows.
    kv = 1 if name.endswith("_large") else 2
    k, v = on.rand(keys, kv, d, seed=2, dtype=dtype), on.rand(keys, kv, dv, seed=3, dtype=dtype)
    call: dict[str, Any] = {
        "cu_seqlens_q": on.cu_seqlens(q_lengths), "cu_seqlens_k": on.cu_seqlens(k_lengths),
        "max_seqlen_q": max(q_lengths), "max_seqlen_k": max(k_lengths), "causal": causal,
    }  # fmt: skip
    plan = plan_of(q, k, v, **call)
    assert plan.tile is not None
    assert plan.tile.name == name
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=[int(causal), 4], **call)
