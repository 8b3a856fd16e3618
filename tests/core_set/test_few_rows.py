"""Keys split over CTAs, and query heads packed as rows of one tile: num_splits and the places of
rows change how a call is computed, never what it means.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from .checks import assert_close
from .executors import executor
from .few_rows import (
    FEW_ROWS,
    KERNELS,
    NAMES,
    kernel_for,
    kernels_of,
    launched,
    of_head_dim,
    of_shares,
    plan_of,
    rows_for,
    tile_of,
)
from .pairs import all_pairs, row_id

on = executor()

BLOCKS = 6
SPLITS = (1, 2, 5, 100)  # the last is more than there are blocks

every_kernel = pytest.mark.parametrize(("name", "kernel"), KERNELS)
every_name = pytest.mark.parametrize("name", NAMES)


# --- split keys ---


@pytest.mark.parametrize("splits", SPLITS)
@every_kernel
def test_shares_together_give_what_one_gives(name: str, kernel: str, splits: int) -> None:
    dims, keys = FEW_ROWS[name].kernels[kernel]
    word, dtype = ("f16", "float16") if splits % 2 else ("bf16", "bfloat16")
    nq = rows_for(name, kernel, 3)
    q, k, v = on.qkv(nq, (BLOCKS - 1) * keys + 9, *dims, dtype=dtype)
    call: dict[str, Any] = {"num_splits": splits, "causal": True}
    if name == "ampere":  # without sinks it has kernels of their own
        call["sinks"] = on.tensor([0.5, 1.0])
    plan = plan_of(name, q, k, v, **call)
    if splits > 1:
        assert kernels_of(plan) == launched(name, kernel, word, splits)
    elif kernel not in FEW_ROWS[name].only_if_it_pays:
        assert kernels_of(plan) == [f"{name}_attention_fwd_{word}_{kernel}"]
    # The first launch has a CTA for each share of each head.
    assert math.prod(plan.to_dict()["launches"][0]["grid"]) == 2 * min(splits, BLOCKS)
    on.attend_and_check(name, q, k, v, schedules=[splits], **call)


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


@pytest.mark.parametrize("case", CALLS)
@every_name
def test_every_share_sees_what_its_rows_see(name: str, case: str) -> None:
    number = list(CALLS).index(case)
    kernels = list(FEW_ROWS[name].kernels)
    # Decoding kernels are every second one, where there are some.
    kernels = [k for pair in itertools.zip_longest(kernels[:5], kernels[5:]) for k in pair if k]
    kernel = kernels[number % len(kernels)]
    dims, keys = FEW_ROWS[name].kernels[kernel]
    heads = (4, 2) if number % 2 else (2, 2)
    nq = rows_for(name, kernel, 40, heads[0] // heads[1])
    call = dict(CALLS[case])
    if call.get("sinks"):
        call["sinks"] = on.tensor([0.7, -30.0, 40.0, -math.inf][: heads[0]])
    if isinstance(call.get("q_offset"), list):
        call["q_offset"] = on.int32(*call["q_offset"])
    if call.get("q_offset") == -20:  # half of the rows see no key
        call["q_offset"] = -(nq // 2)
    q, k, v = on.qkv(nq, 5 * keys - 11, *dims, dtype="bfloat16", heads=heads)
    of_call = kernels_of(plan_of(name, q, k, v, num_splits=3, **call))
    assert of_call == launched(name, kernel, "bf16", 3)
    out, lse = on.attend_and_check(name, q, k, v, num_splits=3, schedules=[number], **call)
    if "no-key" in case or "no-row" in case:
        blind = slice(0, nq // 2 if "rows" in case else None)
        assert torch.equal(out[:, :, blind], torch.zeros_like(out[:, :, blind]))
        of_no_key = call.get("sinks", on.tensor([-math.inf] * heads[0]))
        assert torch.equal(lse[0, :, 0], of_no_key)


@pytest.mark.parametrize("d", [64, 256])
@every_name
def test_split_packed_sequences_of_all_lengths(name: str, d: int) -> None:
    kernel = of_head_dim(name, d)
    (d, dv), keys = FEW_ROWS[name].kernels[kernel]
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
    assert kernels_of(plan_of(name, q, k, v, **call))[0].endswith(kernel.removesuffix("_plain"))
    out, lse = on.survive(name, q, k, v, **call)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.equal(out[-4:], torch.zeros_like(out[-4:]))
    assert_close(out, lse, q, k, v, **call)


@every_name
def test_more_shares_than_a_warp_has_lanes(name: str) -> None:
    _, keys = FEW_ROWS[name].kernels[of_head_dim(name, 256)]
    q, k, v = on.qkv(1, 35 * keys - 7, 256, dtype="bfloat16", heads=(1, 1))
    k[:, :, keys : 2 * keys] *= 8  # one share has most of the weight
    plan = plan_of(name, q, k, v, num_splits=34)
    assert plan.to_dict()["launches"][0]["grid"] in ([34, 1, 1], [1, 1, 34])
    on.attend_and_check(name, q, k, v, num_splits=34)


# --- packed heads ---


def factors(name: str) -> dict[str, list[Any]]:
    return {
        "kernel": [k for k in FEW_ROWS[name].kernels if k not in FEW_ROWS[name].decoding],
        # Query heads, heads of K.
        "heads": [(4, 2), (4, 1), (16, 2), (6, 2), (5, 1)],
        # The last so many that the heads of one group need several tiles.
        "nq": [1, 7, 16 if FEW_ROWS[name].rows == 64 else 40],
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


@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param(name, row, id=f"{name}-{row_id(row)}")
        for name in NAMES
        for row in all_pairs(factors(name))
    ],
)
def test_heads_that_share_a_head_of_k_lie_in_one_tile(name: str, row: dict[str, Any]) -> None:
    (d, dv), keys = FEW_ROWS[name].kernels[row["kernel"]]
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
        # Behind the last sequence lie two rows of none.
        tensors = on.qkv(sum(lengths_q) + 2, sum(lengths_k), d, dv, dtype=dtype, heads=heads)
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in tensors)
    else:
        call["layout"] = row["layout"]
        q, k, v = on.qkv(row["nq"], nk, d, dv, dtype=dtype, batch=2, heads=heads)
        if row["layout"] == "bnhd":
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    tile = tile_of(name, q, k, v, **call)
    group = heads[0] // heads[1]
    most = call.get("max_seqlen_q", row["nq"])
    kernel = of_shares(name, kernel_for(name, row["kernel"], most, group), row["splits"])
    assert (tile.name, tile.packed_heads) == (kernel, group)
    number = row["nq"] + heads[0]
    on.attend_and_check(name, q, k, v, schedules=[number], **call)


def per_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same call with a head of k and v for each head of q, bhnd."""
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


@pytest.mark.parametrize(
    ("name", "kernel", "splits"),
    [
        (name, kernel, splits)
        for name, kernel in KERNELS
        for splits in (1, 2)
        # Without a split rows of their own go to another kernel.
        if splits > 1 or kernel not in FEW_ROWS[name].only_if_it_pays
    ],
)
def test_packed_rows_get_the_bits_that_they_get_in_tiles_of_their_own(
    name: str, kernel: str, splits: int
) -> None:
    (d, dv), keys = FEW_ROWS[name].kernels[kernel]
    nq = rows_for(name, kernel, 17 if FEW_ROWS[name].decoding else 9, 3)
    # Short sequences of a head's own go to another kernel.
    q, k, v = on.qkv(nq, 3 * keys + 1, d, dv, dtype="bfloat16", heads=(6, 2))
    # The shares of a tile are equal parts of the keys that it sees, and packed heads have less rows
    # in a tile.
    call: dict[str, Any] = {"causal": nq <= 16, "num_splits": splits}
    if name == "ampere":  # without sinks it has kernels of their own
        call["sinks"] = on.rand(6, seed=9)
    tile, of_one = tile_of(name, q, k, v, **call), tile_of(name, *per_head(q, k, v), **call)
    assert (tile.name, tile.packed_heads) == (of_shares(name, kernel, splits), 3)
    assert (of_one.name, of_one.packed_heads) == (of_shares(name, kernel, splits), 1)
    together = on.attend(name, q, k, v, schedules=[splits], **call)
    apart = on.attend(name, *per_head(q, k, v), schedules=[splits], **call)
    for mine, other in zip(together, apart, strict=True):
        assert torch.equal(mine, other)


@every_name
def test_a_head_that_q_repeats_is_packed_unless_a_tensor_map_reads_it(name: str) -> None:
    q, k, v = on.qkv(3, 70, 64, dtype="bfloat16", heads=(1, 1))
    q = q.expand(-1, 4, -1, -1)
    assert tile_of(name, q, k, v).packed_heads == (1 if FEW_ROWS[name].by_tensor_map else 4)
    on.attend_and_check(name, q, k, v)


@every_name
def test_more_heads_than_a_tile_has_rows(name: str) -> None:
    rows = FEW_ROWS[name].rows
    for heads, packed in ((rows, rows), (rows + 32, 32), (rows + 3, 1)):
        q, k, v = on.qkv(1, 70, 64, dtype="bfloat16", heads=(heads, 1))
        assert tile_of(name, q, k, v).packed_heads == packed
        on.attend_and_check(name, q, k, v, sinks=on.rand(heads, seed=3))


# An infinite score makes hopper round all scores of its warp before their base is subtracted: rows
# beside it may get other bits.
@pytest.mark.parametrize(
    ("name", "value"),
    [(n, x) for n in NAMES for x in (math.nan, math.inf) if (n, x) != ("hopper", math.inf)],
)
def test_what_is_not_finite_in_a_row_spoils_that_row_of_its_head(name: str, value: float) -> None:
    # A tile has rows of three heads, and loads those of a fourth, of the other head of K.
    q, k, v = on.qkv(20, 140, 64, dtype="bfloat16", heads=(6, 2))
    clean, clean_lse = on.attend(name, q, k, v)
    q[0, 1, 7, 3] = q[0, 3, 0, 0] = value
    out, lse = on.attend(name, q, k, v)
    spoiled = torch.zeros(6, 20, dtype=torch.bool, device=on.device)
    spoiled[1, 7] = spoiled[3, 0] = True
    assert bool(out[0][spoiled].isnan().all())
    assert torch.equal(out[0][~spoiled], clean[0][~spoiled])
    assert torch.equal(lse[0][~spoiled], clean_lse[0][~spoiled])
