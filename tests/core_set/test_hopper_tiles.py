"""hopper's kernels for many rows, whose CTAs go from tile to tile; its split keys and packed
heads. Masks at either end of a tile's keys, packed sequences, shares with few keys or none, in
every schedule.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native

from ..sim.schedules import SEEDS
from .checks import assert_close
from .executors import executor
from .pairs import all_pairs, row_id

on = executor()

NAME = "hopper"
# The kernels for many rows: (d, dv), rows and keys of a tile.
LARGE = {
    "d64_large": ((64, 64), 256, 64),
    "d64_medium": ((64, 64), 192, 96),
    "d96_large": ((96, 96), 192, 96),
    "d128_large": ((128, 128), 192, 80),
    "d192_large": ((192, 128), 192, 80),
    "d256_large": ((256, 256), 128, 80),
}
# Those for few rows: (d, dv) and keys of a tile, which has 64 rows.
FEW = {
    "d64_few": ((64, 64), 128),
    "d96_few": ((96, 96), 64),
    "d128_few": ((128, 128), 64),
    "d192_few": ((192, 128), 64),
    "d256_few": ((256, 256), 64),
}

pytestmark = pytest.mark.skipif(NAME not in on.kernels(), reason=f"{NAME} has no code for this GPU")
every_large = pytest.mark.parametrize("kernel", LARGE)
every_few = pytest.mark.parametrize("kernel", FEW)


def plan_on(sms: int, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> native.LaunchPlan:
    """A plan for an H200 with so many SMs."""
    planned = archflash.explain(
        q, k, v, device="H200", implementation=NAME, return_lse=True, **call
    ).plan
    assert planned is not None
    device = native.Device.from_dict(planned.device.to_dict() | {"sm_count": sms})
    plan = native.plan(NAME, planned.problem, device)
    assert isinstance(plan, native.LaunchPlan)
    return plan


def kernels_of(plan: native.LaunchPlan) -> list[str]:
    return [launch["kernel"] for launch in plan.to_dict()["launches"]]


def check_every_schedule(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> tuple[Tensor, Tensor]:
    """Runs a call in one CTA, which is planned as for a GPU with one SM."""
    plan = plan_on(1, q, k, v, **call)
    assert [name.endswith(kernel) for name in kernels_of(plan)] == [True]
    assert plan.to_dict()["launches"][0]["grid"] == [1, 1, 1]
    return on.attend_and_check(NAME, q, k, v, plan=plan, schedules=range(SEEDS), **call)


def heads_for(kernel: str) -> tuple[int, int]:
    """So many that the kernel is chosen: fewer tiles go to d64_medium, more to d64_large."""
    return (2, 1) if kernel == "d64_medium" else (4, 2)


# --- from tile to tile ---


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@every_large
def test_a_cta_goes_from_tile_to_tile(kernel: str, causal: bool) -> None:
    if kernel == "d64_medium" and not causal:
        pytest.skip("tiles of equal length go to d64_large")
    dims, rows, keys = LARGE[kernel]
    nq = 130 if kernel == "d64_medium" else rows + 70
    q, k, v = on.qkv(nq, 4 * keys + 9, *dims, dtype="bfloat16", heads=heads_for(kernel))
    check_every_schedule(kernel, q, k, v, causal=causal)


@every_large
def test_packed_sequences_with_and_without_keys_follow_each_other(kernel: str) -> None:
    (d, dv), rows, keys = LARGE[kernel]
    q_lengths = (rows, 0, 130, 2 * rows + 3, 1)
    k_lengths = (keys + 3, 7, 0, 3 * keys - 1, 1)
    heads, heads_kv = 4, 2
    if kernel == "d64_medium":  # for few tiles
        q_lengths, k_lengths, heads, heads_kv = (150,), (3 * keys - 1,), 1, 1
    shapes = (
        (sum(q_lengths) + 2, heads, d),
        (sum(k_lengths) + 5, heads_kv, d),
        (sum(k_lengths) + 5, heads_kv, dv),
    )
    q, k, v = (on.rand(*shape, seed=i, dtype="bfloat16") for i, shape in enumerate(shapes))
    k[-5:], v[-5:] = torch.nan, torch.nan  # rows that no sequence has
    ends = {"cu_seqlens_q": on.cu_seqlens(q_lengths), "cu_seqlens_k": on.cu_seqlens(k_lengths)}
    call: dict[str, Any] = {"causal": True, **ends}
    out, _ = check_every_schedule(kernel, q, k, v, **call)
    assert torch.equal(out[-2:], torch.zeros_like(out[-2:]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@every_large
def test_blocks_are_masked_at_either_end_of_the_rows_of_a_warpgroup(
    kernel: str, dtype: str
) -> None:
    """A window whose blocks some warpgroups of a tile do not see; some rows see no key."""
    dims, rows, keys = LARGE[kernel]
    nq = 130 if kernel == "d64_medium" else rows + 9
    q, k, v = on.qkv(nq, 8 * keys - 3, *dims, dtype=dtype, heads=heads_for(kernel))
    call = {"window": (40, 25), "q_offset": on.int32(-30), "sinks": on.rand(q.shape[1], seed=3)}
    check_every_schedule(kernel, q, k, v, **call)


@every_large
def test_capped_and_huge_scores(kernel: str) -> None:
    dims, rows, keys = LARGE[kernel]
    nq = 130 if kernel == "d64_medium" else rows + 9
    q, k, v = on.qkv(nq, 3 * keys - 3, *dims, dtype="bfloat16", heads=heads_for(kernel))
    check_every_schedule(kernel, q, k, v, softcap=3.0, causal=True)
    q, k = q * 1e3, k * 1e3
    plan = plan_on(1, q, k, v, causal=True)
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=[1], causal=True)


def test_ctas_that_share_the_tiles_out_give_the_bits_of_one() -> None:
    q, k, v = on.qkv(700, 400, 128, dtype="bfloat16", heads=(4, 2))
    outs = []
    for sms in (1, 2, 3):
        plan = plan_on(sms, q, k, v, causal=True)
        assert plan.to_dict()["launches"][0]["grid"] == [sms, 1, 1]
        assert plan.zeroed_bytes == 4
        outs.append(on.attend(NAME, q, k, v, plan=plan, schedules=[sms], causal=True))
    assert_close(*outs[2], q, k, v, causal=True)
    for out, lse in outs:
        assert torch.equal(out, outs[0][0])
        assert torch.equal(lse, outs[0][1])


# --- split keys ---


@pytest.mark.parametrize("splits", [1, 2, 5, 100])
@every_few
def test_shares_together_give_what_one_gives(kernel: str, splits: int) -> None:
    blocks = 6  # the last number of shares is more
    dims, keys = FEW[kernel]
    word, dtype = ("f16", "float16") if splits % 2 else ("bf16", "bfloat16")
    q, k, v = on.qkv(3, (blocks - 1) * keys + 9, *dims, dtype=dtype)
    call: dict[str, Any] = {"num_splits": splits, "causal": True}
    plan = plan_on(132, q, k, v, **call)
    expected = [f"{NAME}_attention_fwd_{word}_{kernel}", f"{NAME}_combine_{word}"]
    assert kernels_of(plan) == (expected if splits > 1 else expected[:1])
    assert plan.to_dict()["launches"][0]["grid"][0] == 2 * min(splits, blocks)
    on.attend_and_check(NAME, q, k, v, schedules=[splits], **call)


# Each call leaves some shares with few keys or none, and its rows end in different blocks.
CALLS: dict[str, dict[str, Any]] = {
    "causal-from-the-start": {"causal": True, "q_offset": 250},
    "window": {"window": (150, 20)},
    "window-in-one-block": {"window": (3, 0), "q_offset": 130},
    "q_offset-tensor": {"causal": True, "q_offset": [300]},
    "rows-that-see-no-key": {"causal": True, "q_offset": -20},
    "rows-that-see-no-key-but-a-sink": {"causal": True, "q_offset": -20, "sinks": True},
    "no-row-sees-a-key": {"window": (2, 2), "q_offset": 5000, "sinks": True},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 3.0, "causal": True},
    "negative-scale": {"scale": -0.3},
}


@pytest.mark.parametrize("name", CALLS)
def test_every_share_sees_what_its_rows_see(name: str) -> None:
    number = list(CALLS).index(name)
    dims, keys = FEW[list(FEW)[number % len(FEW)]]
    heads = (4, 2) if number % 2 else (2, 2)
    call = dict(CALLS[name])
    if call.get("sinks"):
        call["sinks"] = on.tensor([0.7, -30.0, 40.0, -math.inf][: heads[0]])
    if isinstance(call.get("q_offset"), list):
        call["q_offset"] = on.int32(*call["q_offset"])
    q, k, v = on.qkv(40, 5 * keys - 11, *dims, dtype="bfloat16", heads=heads)
    assert len(kernels_of(plan_on(132, q, k, v, num_splits=3, **call))) == 2
    on.attend_and_check(NAME, q, k, v, num_splits=3, schedules=[number], **call)


@pytest.mark.parametrize("kernel", ["d64_few", "d256_few"])
def test_split_packed_sequences_of_all_lengths(kernel: str) -> None:
    (d, dv), keys = FEW[kernel]
    q_lengths = (1, 0, 5, 1, 130, 2)
    k_lengths = (4 * keys + 3, 70, 0, 7, 3 * keys, 2 * keys)
    # Two rows lie before all sequences, four behind them.
    ends = [
        on.int32(2, *(2 + end for end in itertools.accumulate(lengths)))
        for lengths in (q_lengths, k_lengths)
    ]
    total_q, total_k = sum(q_lengths) + 6, sum(k_lengths) + 6
    shapes = ((total_q, 2, d), (total_k, 1, d), (total_k, 1, dv))
    q, k, v = (on.rand(*shape, seed=i, dtype="bfloat16") for i, shape in enumerate(shapes))
    for x in (k, v):
        x[:2], x[-4:] = math.nan, math.nan
    call: dict[str, Any] = {"causal": True, "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    call |= {"sinks": on.tensor([0.5, 3.0]), "num_splits": 3, "max_seqlen_q": 1}  # a wrong hint
    assert kernels_of(plan_on(132, q, k, v, **call))[0].endswith(kernel)
    out, lse = on.survive(NAME, q, k, v, **call)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.equal(out[-4:], torch.zeros_like(out[-4:]))
    assert_close(out, lse, q, k, v, **call)


def test_more_shares_than_a_warp_has_lanes() -> None:
    q, k, v = on.qkv(1, 35 * 64 - 7, 256, dtype="bfloat16", heads=(1, 1))
    k[:, :, 64:128] *= 8  # one share has most of the weight
    on.attend_and_check(NAME, q, k, v, num_splits=34)


# --- packed heads ---

PACKED: dict[str, list[Any]] = {
    "kernel": list(FEW),
    # Query heads, heads of K.
    "heads": [(4, 2), (4, 1), (16, 2), (6, 2), (5, 1)],
    "nq": [1, 7, 16],
    "layout": ["bhnd", "bnhd", "packed"],
    "options": [
        {},
        {"causal": True},
        {"causal": True, "q_offset": -4},
        {"window": (150, 3)},
        {"softcap": 3.0},
    ],
    "sinks": [False, True],
    "splits": [1, 3],
    "dtype": ["bfloat16", "float16"],
}


@pytest.mark.parametrize("row", all_pairs(PACKED), ids=row_id)
def test_heads_that_share_a_head_of_k_lie_in_one_tile(row: dict[str, Any]) -> None:
    (d, dv), keys = FEW[row["kernel"]]
    heads, dtype = row["heads"], row["dtype"]
    call = dict(row["options"])
    if row["splits"] > 1:
        call["num_splits"] = row["splits"]
    if row["sinks"]:
        call["sinks"] = on.rand(heads[0], seed=9)
    nk = 2 * keys + 9
    if row["layout"] == "packed":
        lengths_q, lengths_k = (row["nq"], 0, 3, 50), (nk, 9, 0, 70)
        call |= {"cu_seqlens_q": on.cu_seqlens(lengths_q), "cu_seqlens_k": on.cu_seqlens(lengths_k)}
        tensors = on.qkv(sum(lengths_q) + 2, sum(lengths_k), d, dv, dtype=dtype, heads=heads)
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in tensors)
    else:
        call["layout"] = row["layout"]
        q, k, v = on.qkv(row["nq"], nk, d, dv, dtype=dtype, batch=2, heads=heads)
        if row["layout"] == "bnhd":
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    tile = plan_on(132, q, k, v, **call).tile
    assert tile is not None
    assert (tile.name, tile.packed_heads) == (row["kernel"], heads[0] // heads[1])
    number = row["nq"] + heads[0]
    on.attend_and_check(NAME, q, k, v, schedules=[number], **call)


@pytest.mark.parametrize("splits", [1, 2])
@every_few
def test_packed_rows_get_the_bits_that_they_get_in_tiles_of_their_own(
    kernel: str, splits: int
) -> None:
    (d, dv), keys = FEW[kernel]
    q, k, v = on.qkv(9, 2 * keys + 1, d, dv, dtype="bfloat16", heads=(6, 2))
    call: dict[str, Any] = {"causal": True, "num_splits": splits}
    together = on.attend(NAME, q, k, v, schedules=[splits], **call)
    k, v = (x.repeat_interleave(3, 1) for x in (k, v))
    apart = on.attend(NAME, q, k, v, schedules=[splits], **call)
    for mine, other in zip(together, apart, strict=True):
        assert torch.equal(mine, other)


def test_a_head_that_q_repeats_has_tiles_of_its_own() -> None:
    q, k, v = on.qkv(3, 70, 64, dtype="bfloat16", heads=(1, 1))
    q = q.expand(-1, 4, -1, -1)
    tile = plan_on(132, q, k, v).tile
    assert tile is not None
    assert tile.packed_heads == 1
    on.attend_and_check(NAME, q, k, v)


def test_nan_in_a_row_spoils_that_row_of_its_head() -> None:
    # A tile has rows of three heads, and loads those of a fourth, of the other head of K.
    q, k, v = on.qkv(20, 140, 64, dtype="bfloat16", heads=(6, 2))
    clean, clean_lse = on.attend(NAME, q, k, v)
    q[0, 1, 7, 3] = q[0, 3, 0, 0] = math.nan
    out, lse = on.attend(NAME, q, k, v)
    spoiled = torch.zeros(6, 20, dtype=torch.bool, device=on.device)
    spoiled[1, 7] = spoiled[3, 0] = True
    assert bool(out[0][spoiled].isnan().all())
    assert torch.equal(out[0][~spoiled], clean[0][~spoiled])
    assert torch.equal(lse[0][~spoiled], clean_lse[0][~spoiled])
