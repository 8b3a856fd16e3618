"""hopper's kernels for many rows, whose CTAs go from tile to tile: masks at either end of a tile's
keys, and packed sequences, in every schedule. Those for few rows are in test_few_rows.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import _archflash as native

from ..replanned import plan_with
from ..sim.schedules import SEEDS
from .checks import assert_close
from .executors import executor

on = executor()

NAME = "hopper"
# The kernels for many rows: (d, dv), rows and keys of a tile, and the KB of shared memory that it
# needs: a GPU that gives a CTA no more has none of the larger ones.
LARGE = {
    "d64_large": ((64, 64), 256, 64, 113),
    "d64_medium": ((64, 64), 192, 128, 145),
    "d64_turns": ((64, 64), 256, 96, 137),
    "d80_large": ((80, 80), 192, 96, 145),
    "d80_turns": ((72, 72), 256, 80, 187),
    "d96_large": ((96, 96), 192, 96, 145),
    "d96_medium": ((96, 96), 128, 128, 193),
    "d96_turns": ((96, 96), 256, 64, 169),
    "d128_large": ((128, 128), 192, 80, 217),
    "d128_medium": ((128, 128), 128, 128, 193),
    "d128_turns": ((128, 128), 192, 128, 225),
    "d192_large": ((192, 128), 192, 80, 173),
    "d192_medium": ((192, 128), 128, 128, 209),
    "d192_square": ((192, 192), 128, 96, 193),
    "d256_large": ((256, 256), 128, 80, 225),
}
pytestmark = pytest.mark.skipif(NAME not in on.kernels(), reason=f"{NAME} has no code for this GPU")
every_large = pytest.mark.parametrize("kernel", LARGE)


def rows_of(kernel: str) -> int:
    """Query rows for which a GPU with one SM gets the kernel: the last of two tiles is short, so
    that tiles of 192 and 256 rows are moved by a step. d96_medium is for GPUs with an SM for about
    each tile.
    """
    rows = LARGE[kernel][1]
    if kernel == "d96_turns":
        return 2 * rows - 110
    return (3 if kernel == "d96_medium" else 2) * rows - (60 if rows == 128 else 70)


# The tiles of LARGE that a GPU with one SM gets for packed sequences and windows, too. The code for
# these is the same in the others.
every_uneven = pytest.mark.parametrize(
    "kernel",
    [
        name
        for name in LARGE
        if name not in ("d64_large", "d64_turns", "d96_turns", "d192_medium")
        and not name.startswith("d80")
    ],
)


def plan_on(
    sms: int, q: Tensor, k: Tensor, v: Tensor, shared: int = 227, **call: Any
) -> native.LaunchPlan:
    """A plan for an H200 with so many SMs, which gives a CTA so many KB of shared memory."""
    facts = {"sm_count": sms, "shared_per_block": shared * 1024}
    return plan_with(facts, q, k, v, device="H200", implementation=NAME, **call)


def check(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, schedules: range | None = None, **call: Any
) -> tuple[Tensor, Tensor]:
    """Runs a call in one CTA, which is planned as for a GPU with one SM; or in six."""
    sms = 6 if kernel == "d96_medium" and "cu_seqlens_q" not in call else 1
    plan = plan_on(sms, q, k, v, LARGE[kernel][3], **call)
    *clears, launch = plan.to_dict()["launches"]  # a counter of tiles
    assert len(clears) <= 1
    assert launch["kernel"].endswith(kernel)
    assert launch["grid"] == [sms, 1, 1]
    return on.attend_and_check(NAME, q, k, v, plan=plan, schedules=schedules, **call)


def check_every_schedule(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> tuple[Tensor, Tensor]:
    return check(kernel, q, k, v, range(SEEDS), **call)


# --- from tile to tile ---


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@every_large
def test_a_cta_goes_from_tile_to_tile(kernel: str, causal: bool) -> None:
    dims, _, keys, _ = LARGE[kernel]
    # A number of keys for which the plan takes the kernel.
    nk = {
        "d64_turns": 8 * keys - 9, "d128_turns": 4 * keys - 9,
        "d96_turns": 4 * keys - 3, "d96_medium": 3 * keys - 3,
        "d64_medium": 4 * keys + 40, "d128_large": 4 * keys + 40, "d80_turns": 4 * keys + 40,
    }.get(kernel, 4 * keys + 9)  # fmt: skip
    heads = (4, 2) if kernel == "d96_medium" else (2, 1)  # two tiles for a CTA, or four
    q, k, v = on.qkv(rows_of(kernel), nk, *dims, dtype="bfloat16", heads=heads)
    # Where a number of splits is asked for, sequences do not count as short.
    splits = 1 if kernel == "d64_large" else None
    check_every_schedule(kernel, q, k, v, causal=causal, num_splits=splits)


@every_uneven
def test_packed_sequences_with_and_without_keys_follow_each_other(kernel: str) -> None:
    (d, dv), rows, keys, _ = LARGE[kernel]
    # The mean length decides on the tile.
    q_lengths = (rows, 0, 130, (4 if kernel == "d64_medium" else 2) * rows + 3, 1)
    k_lengths = (keys + 3, 7, 0, 3 * keys - 1, 1)
    heads, heads_kv = 2, 1
    shapes = (
        (sum(q_lengths) + 2, heads, d),
        (sum(k_lengths) + 5, heads_kv, d),
        (sum(k_lengths) + 5, heads_kv, dv),
    )
    q, k, v = (on.rand(*shape, seed=i, dtype="bfloat16") for i, shape in enumerate(shapes))
    k[-5:], v[-5:] = torch.nan, torch.nan  # rows that no sequence has
    ends = {"cu_seqlens_q": on.cu_seqlens(q_lengths), "cu_seqlens_k": on.cu_seqlens(k_lengths)}
    # Where a number of splits is asked for, sequences do not count as short.
    call: dict[str, Any] = {"causal": True, **ends, "num_splits": 1}
    out, _ = check_every_schedule(kernel, q, k, v, **call)
    assert torch.equal(out[-2:], torch.zeros_like(out[-2:]))


@every_uneven
def test_blocks_are_masked_at_either_end_of_the_rows_of_a_warpgroup(kernel: str) -> None:
    """A window whose blocks some warpgroups of a tile do not see; some rows see no key."""
    dims, _, keys, _ = LARGE[kernel]
    q, k, v = on.qkv(rows_of(kernel), 8 * keys - 3, *dims, dtype="bfloat16", heads=(4, 2))
    call = {"window": (40, 25), "q_offset": on.int32(-30), "sinks": on.rand(q.shape[1], seed=3)}
    # Where a number of splits is asked for, sequences do not count as short.
    check(kernel, q, k, v, num_splits=1, **call)


@every_uneven
def test_capped_and_huge_scores(kernel: str) -> None:
    dims, _, keys, _ = LARGE[kernel]
    q, k, v = on.qkv(rows_of(kernel), 3 * keys - 3, *dims, dtype="bfloat16", heads=(4, 2))
    check(kernel, q, k, v, softcap=3.0, causal=True)
    q, k = q * 1e3, k * 1e3
    plan = plan_on(1, q, k, v, LARGE[kernel][3], causal=True)
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=[1], causal=True)


@every_uneven
def test_a_softcap_of_small_scores_and_of_large_ones_in_other_warps(kernel: str) -> None:
    dims, _, keys, _ = LARGE[kernel]
    rows = rows_of(kernel)
    q, k, v = on.qkv(rows, 3 * keys - 3, *dims, dtype="bfloat16", heads=(4, 2))
    q[:, :, : rows // 3] *= 0.05
    check(kernel, q, k, v, softcap=3.0)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("nk", [40, 190, 300])
def test_a_warpgroup_sees_half_of_its_first_block(nk: int, causal: bool) -> None:
    kernel = "d128_medium"
    q, k, v = on.qkv(rows_of(kernel), nk, 128, 128, dtype="bfloat16", heads=(4, 2))
    check(kernel, q, k, v, causal=causal)


# Kernels that multiply a few keys behind the last whole block alone: d, query rows for which a GPU
# with one SM gets the kernel, the keys of a block, how many blocks, and the most keys of a tail.
TAILS = {
    "d64_short_tail": (64, 100, 64, 2, 16),
    "d64_medium_tail": (40, 180, 128, 4, 32),
    "d64_turns_tail": (64, 500, 96, 2, 32),
    "d80_turns_tail": (72, 500, 80, 2, 32),
    "d128_large_tail": (128, 700, 80, 5, 32),
}


@pytest.mark.parametrize("keys", ["one key", "all keys"])
@pytest.mark.parametrize("kernel", TAILS)
def test_few_keys_behind_the_last_whole_block(kernel: str, keys: str) -> None:
    d, rows, block, blocks, most = TAILS[kernel]
    nk = blocks * block + (1 if keys == "one key" else most)
    q, k, v = on.qkv(rows, nk, d, dtype="bfloat16", heads=(2, 1))
    if keys == "one key":
        k[:, :, -1] *= 40  # its scores are the largest, and others are rescaled by them
    else:
        q *= 1e3  # scores that are scaled alone
    plan = plan_on(1, q, k, v)
    assert plan.to_dict()["launches"][-1]["kernel"].endswith(kernel)
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=range(SEEDS))


@pytest.mark.parametrize(
    ("kernel", "call"),
    [
        ("d64_short_tail", {"causal": True}),
        ("d64_turns_tail", {"softcap": 3.0}),
        ("d80_turns_tail", {"window": (30, 30)}),
    ],
)
def test_other_calls_have_no_tail(kernel: str, call: dict[str, Any]) -> None:
    d, rows, block, blocks, most = TAILS[kernel]
    for nk, given in ((blocks * block + 1, call), (blocks * block + most + 1, {}), (most, {})):
        q, k, v = on.qkv(rows, nk, d, dtype="bfloat16", heads=(2, 1))
        (*_, launch) = plan_on(1, q, k, v, **given).to_dict()["launches"]
        assert not launch["kernel"].endswith("_tail")


@pytest.mark.parametrize("counted", [False, True], ids=["in rounds", "by a counter"])
def test_ctas_that_share_the_tiles_out_give_the_bits_of_one(counted: bool) -> None:
    rows = 700 if counted else 768  # tiles of equal length are not counted
    q, k, v = on.qkv(rows, 400, 128, dtype="bfloat16", heads=(4, 2))
    call: dict[str, Any] = {"causal": counted}
    if counted:  # unequal tiles, of packed sequences, whose lengths no plan knows
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        call |= {"cu_seqlens_q": on.cu_seqlens((700,)), "cu_seqlens_k": on.cu_seqlens((400,))}
    outs = []
    for sms in (1, 2, 3):
        plan = plan_on(sms, q, k, v, **call)
        assert plan.to_dict()["launches"][-1]["grid"] == [sms, 1, 1]
        assert len(plan.to_dict()["launches"]) == (2 if counted else 1)
        outs.append(on.attend(NAME, q, k, v, plan=plan, schedules=[sms], **call))
    assert_close(*outs[2], q, k, v, **call)
    for out, lse in outs:
        assert torch.equal(out, outs[0][0])
        assert torch.equal(lse, outs[0][1])


@pytest.mark.parametrize(
    ("d", "dtype", "call"),
    [
        (64, "bfloat16", {}),
        (40, "float16", {"causal": True}),
        (80, "float16", {}),
        (96, "bfloat16", {"causal": True}),
        (128, "float16", {"causal": True}),
        (112, "bfloat16", {"window": (40, 9), "softcap": 3.0}),
        (192, "float16", {"causal": True}),
        (256, "bfloat16", {"softcap": 3.0}),
    ],
    ids=str,
)
def test_ctas_of_short_packed_sequences_share_an_sm(
    d: int, dtype: str, call: dict[str, Any]
) -> None:
    """Sequences without rows, without keys, of whole tiles and a row more; NaN behind the last."""
    q_lengths, k_lengths = (65, 0, 128, 5, 30, 100), (70, 9, 64, 0, 129, 40)
    totals = (sum(q_lengths) + 3, sum(k_lengths) + 5, sum(k_lengths) + 5)
    q, k, v = (
        on.rand(total, heads, d, seed=heads, dtype=dtype)
        for total, heads in zip(totals, (6, 3, 3), strict=True)
    )
    k[-5:], v[-5:] = torch.nan, torch.nan
    call |= {"cu_seqlens_q": on.cu_seqlens(q_lengths), "cu_seqlens_k": on.cu_seqlens(k_lengths)}
    sizes = ((64, 4, 49), (96, 3, 73), (128, 2, 98), (256, 1, 194))
    columns, ctas, shared = next(x for x in sizes if d <= x[0])
    plan = plan_on(1, q, k, v, shared, **call)
    launch = plan.to_dict()["launches"][-1]
    assert launch["kernel"].endswith(f"d{columns}_short")
    assert launch["grid"] == [ctas, 1, 1]
    out, _ = on.attend_and_check(NAME, q, k, v, plan=plan, **call)
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))


@pytest.mark.parametrize(
    ("d", "dtype", "heads_kv", "call"),
    [
        (64, "bfloat16", 6, {"causal": True}),
        (80, "float16", 6, {}),
        (128, "bfloat16", 6, {"window": (20, 9)}),
        (64, "float16", 3, {"causal": True}),  # of two heads
        (256, "float16", 6, {}),
    ],
    ids=str,
)
def test_packed_sequences_of_one_tile_are_not_searched_for(
    d: int, dtype: str, heads_kv: int, call: dict[str, Any]
) -> None:
    """More tiles than CTAs take twice; rows of no sequence before the first and behind the last."""
    most = 64 * heads_kv // 6
    q_lengths, k_lengths = (most, 0, 1, 30, most - 1, 17), (70, 9, 64, 0, 130, 17)
    q, k, v = (
        on.rand(sum(lengths) + 7, heads, d, seed=heads, dtype=dtype)
        for lengths, heads in ((q_lengths, 6), (k_lengths, heads_kv), (k_lengths, heads_kv))
    )
    k[:2], v[:2], k[-5:], v[-5:] = torch.nan, torch.nan, torch.nan, torch.nan
    call |= {
        "cu_seqlens_q": on.cu_seqlens(q_lengths) + 4, "cu_seqlens_k": on.cu_seqlens(k_lengths) + 2,
        "max_seqlen_q": most, "max_seqlen_k": 130,
    }  # fmt: skip
    plan = plan_on(1, q, k, v, **call)
    tile = plan.tile
    assert tile is not None
    assert tile.name.endswith("_short")
    assert (tile.one_tile_each, tile.tiles) == (True, 6 * heads_kv)
    out, _ = on.attend_and_check(NAME, q, k, v, plan=plan, schedules=range(SEEDS), **call)
    assert torch.equal(out[:4], torch.zeros_like(out[:4]))
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))


@pytest.mark.parametrize(
    ("d", "dtype", "heads", "rows", "call"),
    [
        (64, "bfloat16", (14, 2), 9, {"causal": True}),
        (72, "float16", (6, 2), 21, {}),
        (96, "bfloat16", (4, 2), 32, {"window": (9, 3)}),
        (128, "float16", (5, 1), 12, {"softcap": 3.0}),
        (128, "bfloat16", (40, 2), 3, {"causal": True}),
        (256, "bfloat16", (7, 1), 9, {"causal": True}),
    ],
    ids=str,
)
def test_heads_that_share_k_fill_the_tiles_of_short_packed_sequences(
    d: int, dtype: str, heads: tuple[int, int], rows: int, call: dict[str, Any]
) -> None:
    """Sequences of whole tiles, a row more, without rows or keys; rows of no sequence around."""
    q_lengths, k_lengths = (rows, 0, rows + 1, 1, 5, 3 * rows), (70, 9, rows, 0, 30, 5)
    q, k, v = (
        on.rand(sum(lengths) + 7, heads, d, seed=heads, dtype=dtype)
        for lengths, heads in ((q_lengths, heads[0]), (k_lengths, heads[1]), (k_lengths, heads[1]))
    )
    k[:2], v[:2], k[-5:], v[-5:] = torch.nan, torch.nan, torch.nan, torch.nan
    call |= {
        "cu_seqlens_q": on.cu_seqlens(q_lengths) + 4, "cu_seqlens_k": on.cu_seqlens(k_lengths) + 2,
        "sinks": on.rand(heads[0], seed=9),
    }  # fmt: skip
    plan = plan_on(1, q, k, v, 194 if d == 256 else 98, **call)
    tile = plan.tile
    assert tile is not None
    assert tile.name.endswith("_short")
    assert (tile.packed_heads, tile.block_q) == (heads[0] // heads[1], rows)
    out, _ = on.attend_and_check(NAME, q, k, v, plan=plan, schedules=range(SEEDS), **call)
    assert torch.equal(out[:4], torch.zeros_like(out[:4]))
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))


@pytest.mark.parametrize(
    ("kernel", "dims", "dtype", "heads", "rows", "call"),
    [
        ("d80_heads", (72, 72), "bfloat16", (14, 2), 36, {"causal": True}),
        ("d80_heads", (80, 80), "float16", (40, 1), 32, {}),  # of eight heads
        ("d96_heads", (88, 96), "bfloat16", (6, 1), 40, {"causal": True}),
        ("d128_heads", (128, 128), "float16", (14, 2), 27, {}),
        ("d192_heads", (192, 128), "float16", (5, 1), 36, {"window": (40, 9)}),
        ("d192_square_heads", (160, 152), "bfloat16", (7, 1), 18, {"softcap": 3.0}),
        ("d256_heads", (256, 256), "float16", (6, 2), 42, {"causal": True}),
        ("d256_heads", (200, 256), "bfloat16", (2, 2), 128, {}),
    ],
    ids=str,
)
def test_warpgroups_have_rows_of_all_heads_that_share_k(
    kernel: str,
    dims: tuple[int, int],
    dtype: str,
    heads: tuple[int, int],
    rows: int,
    call: dict[str, Any],
) -> None:
    """Sequences of whole tiles, a row more, for one warpgroup, without rows or keys; rows of no
    sequence around.
    """
    q_lengths, k_lengths = (rows, 0, rows + 1, 5, 3 * rows - 1), (170, 9, rows, 0, 130)
    q, k, v = (
        on.rand(sum(lengths) + 7, heads, d, seed=heads, dtype=dtype)
        for lengths, heads, d in (
            (q_lengths, heads[0], dims[0]), (k_lengths, heads[1], dims[0]),
            (k_lengths, heads[1], dims[1]),
        )
    )  # fmt: skip
    k[:2], v[:2], k[-5:], v[-5:] = torch.nan, torch.nan, torch.nan, torch.nan
    call |= {
        "cu_seqlens_q": on.cu_seqlens(q_lengths) + 4, "cu_seqlens_k": on.cu_seqlens(k_lengths) + 2,
        "sinks": on.rand(heads[0], seed=9),
    }  # fmt: skip
    plan = plan_on(1, q, k, v, **call)
    tile = plan.tile
    assert tile is not None
    assert (tile.name, tile.block_q) == (kernel, rows)
    out, _ = on.attend_and_check(NAME, q, k, v, plan=plan, schedules=range(SEEDS), **call)
    assert torch.equal(out[:4], torch.zeros_like(out[:4]))
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))


@pytest.mark.parametrize(
    ("dtype", "call"),
    [
        ("bfloat16", {}),
        ("float16", {"causal": True}),
        ("bfloat16", {"window": (40, 9), "softcap": 3.0}),
    ],
    ids=["full", "causal", "window"],
)
def test_ctas_of_short_sequences_share_an_sm(dtype: str, call: dict[str, Any]) -> None:
    q, k, v = on.qkv(100, 150, 64, dtype=dtype, heads=(6, 3))
    plan = plan_on(1, q, k, v, **call)
    (launch,) = plan.to_dict()["launches"]
    assert launch["kernel"].endswith("d64_short")
    assert launch["grid"] == [4, 1, 1]  # for twelve tiles
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=range(SEEDS), **call)


@pytest.mark.parametrize("heads", [3, 7])
def test_earlier_tiles_of_a_cta_never_decide_bits(heads: int) -> None:
    """Sequences of the same numbers, whose tiles have rows of a warpgroup that belong to no head.
    Behind the rows of each but the last are those of the next.
    """
    count, nq, nk = 13, 24, 400
    sizes = ((nq, heads), (nk, 1), (nk, 1))
    one = [on.rand(n, h, 64, seed=20 + h, dtype="float16") for n, h in sizes]
    one[2] = 30 * one[2].flip(0)  # so that outputs are large beside queries
    call: dict[str, Any] = {
        "cu_seqlens_q": on.cu_seqlens([nq] * count), "cu_seqlens_k": on.cu_seqlens([nk] * count),
        "max_seqlen_q": nq, "max_seqlen_k": nk,
    }  # fmt: skip
    tensors = [x.repeat(count, 1, 1) for x in one]
    plan = plan_on(1, *tensors, **call)
    assert plan.to_dict()["launches"][-1]["kernel"].endswith("d64_short")
    out, _ = on.attend_and_check(NAME, *tensors, plan=plan, schedules=range(1), **call)
    first, *others = out.unflatten(0, (count, nq))[:-1]
    assert all(torch.equal(x, first) for x in others)
