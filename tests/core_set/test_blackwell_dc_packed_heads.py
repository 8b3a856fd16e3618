"""Query heads that share a head of K, as rows of one tile: how they lie there changes nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import sim

from .checks import same_bits
from .executors import executor
from .pairs import all_pairs, row_id
from .test_blackwell_dc_split_keys import KERNELS, NAME

on = executor()

pytestmark = pytest.mark.skipif(
    NAME not in on.kernels("num_splits"), reason=f"{NAME} has no code for this GPU"
)

FACTORS: dict[str, list[Any]] = {
    "kernel": list(KERNELS),
    # Query heads, heads of K.
    "heads": [(4, 2), (4, 1), (16, 2), (6, 2), (5, 1)],
    "nq": [1, 7, 40],
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


def tile_of(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> native.TileChoice:
    plan = archflash.explain(q, k, v, implementation=NAME, return_lse=True, **call).plan
    assert plan is not None
    assert plan.tile is not None
    return plan.tile


def per_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same call with a head of k and v for each head of q, bhnd."""
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


@pytest.mark.parametrize("row", all_pairs(FACTORS), ids=row_id)
def test_every_pair_of_features_agrees_with_float64(row: dict[str, Any]) -> None:
    (d, dv), keys = KERNELS[row["kernel"]]
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
        call["max_seqlen_q"] = 50
        tensors = on.qkv(sum(lengths_q), sum(lengths_k), d, dv, dtype=dtype, heads=heads)
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in tensors)
    else:
        call["layout"] = row["layout"]
        q, k, v = on.qkv(row["nq"], nk, d, dv, dtype=dtype, batch=2, heads=heads)
        if row["layout"] == "bnhd":
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    tile = tile_of(q, k, v, **call)
    assert tile.name == row["kernel"]
    assert tile.packed_heads == heads[0] // heads[1]
    on.attend_and_check(NAME, q, k, v, **call)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_get_the_bits_that_they_get_in_tiles_of_their_own(kernel: str, splits: int) -> None:
    (d, dv), keys = KERNELS[kernel]
    q, k, v = on.qkv(9, 2 * keys + 1, d, dv, dtype="bfloat16", heads=(6, 2))
    call: dict[str, Any] = {"causal": True, "num_splits": splits}
    assert tile_of(q, k, v, **call).packed_heads == 3
    assert tile_of(*per_head(q, k, v), **call).packed_heads == 1
    together, together_lse = on.attend(NAME, q, k, v, **call)
    apart, apart_lse = on.attend(NAME, *per_head(q, k, v), **call)
    assert torch.equal(together, apart)
    assert torch.equal(together_lse, apart_lse)


@pytest.mark.parametrize("kernel", ["d128_few", "d192_few"])
def test_tiles_in_turn_in_one_cta_and_side_by_side_give_the_same_bits(kernel: str) -> None:
    (d, dv), keys = KERNELS[kernel]
    q, k, v = on.qkv(40, keys + 1, d, dv, dtype="bfloat16", heads=(10, 2))
    call: dict[str, Any] = {"causal": True}
    planned = archflash.explain(q, k, v, implementation=NAME, return_lse=True, **call).plan
    assert planned is not None
    one_sm = native.Device.from_dict(planned.device.to_dict() | {"sm_count": 1})
    plan = native.plan(NAME, planned.problem, one_sm)
    assert isinstance(plan, native.LaunchPlan)
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


def test_more_heads_than_a_tile_has_rows() -> None:
    for heads, packed in ((128, 128), (160, 32), (131, 1)):
        q, k, v = on.qkv(1, 70, 64, dtype="bfloat16", heads=(heads, 1))
        assert tile_of(q, k, v).packed_heads == packed
        on.attend_and_check(NAME, q, k, v, sinks=on.rand(heads, seed=3))


def test_a_head_that_q_repeats_has_tiles_of_its_own() -> None:
    q, k, v = on.qkv(3, 70, 64, dtype="bfloat16", heads=(1, 1))
    q = q.expand(-1, 4, -1, -1)
    assert tile_of(q, k, v).packed_heads == 1
    on.attend_and_check(NAME, q, k, v)


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_of_no_sequence_are_zero_in_every_head(splits: int) -> None:
    q, k, v = (on.rand(150, heads, 64, seed=heads, dtype="bfloat16") for heads in (6, 2, 2))
    k, v = (x.repeat(2, 1, 1) for x in (k, v))
    call: dict[str, Any] = {
        "cu_seqlens_q": on.int32(3, 9, 11), "cu_seqlens_k": on.int32(0, 200, 300),
        "max_seqlen_q": 6, "num_splits": splits, "sinks": on.rand(6, seed=5),
    }  # fmt: skip
    assert tile_of(q, k, v, **call).packed_heads == 3
    out, lse = on.attend_and_check(NAME, q, k, v, **call)
    for rows in (slice(3), slice(11, None)):
        assert torch.equal(out[rows], torch.zeros_like(out[rows]))
        assert torch.equal(lse[:, rows], call["sinks"][:, None].expand_as(lse[:, rows]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_in_a_row_spoils_that_row_of_its_head(value: float) -> None:
    # A tile has rows of three heads, and loads those of a fourth, of the other head of K.
    q, k, v = on.qkv(20, 140, 64, dtype="bfloat16", heads=(6, 2))
    clean, clean_lse = on.attend(NAME, q, k, v)
    q[0, 1, 7, 3] = q[0, 3, 0, 0] = value
    out, lse = on.attend(NAME, q, k, v)
    spoiled = torch.zeros(6, 20, dtype=torch.bool, device=on.device)
    spoiled[1, 7] = spoiled[3, 0] = True
    assert bool(out[0][spoiled].isnan().all())
    assert torch.equal(out[0][~spoiled], clean[0][~spoiled])
    assert torch.equal(lse[0][~spoiled], clean_lse[0][~spoiled])
