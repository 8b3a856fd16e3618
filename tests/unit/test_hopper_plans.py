"""Which of its kernels hopper plans for the shapes of the benchmark, how CTAs share the tiles out,
and how keys are split.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_cases import call, launch_of, plan_of, tile_of

import archflash
from archflash import _archflash as native
from archflash._api import find_device, make_problem

NAME = "hopper"


def hopper(device: str = "H200", **options: Any) -> native.LaunchPlan:
    return plan_of(call("bfloat16", **options), device, NAME)


def launch_of_attention(plan: native.LaunchPlan) -> dict[str, Any]:
    launches = plan.to_dict()["launches"]
    return dict(next(launch for launch in launches if "_attention_" in launch["kernel"]))


# Batch, heads of q and of k, rows, keys, head dimension, causal: the tile, and the heads of q whose
# tiles follow one another.
SHAPES = {
    (16, 16, 16, 8192, 8192, 128, False): ("d128_large", 4),
    (1, 40, 8, 2048, 2048, 128, True): ("d128_turns", 40),
    (1, 28, 4, 2048, 2048, 128, True): ("d128_turns", 28),
    (1, 64, 8, 4096, 4096, 128, True): ("d128_large", 32),
    (1, 32, 8, 16384, 16384, 128, True): ("d128_large", 8),
    (2, 16, 16, 4001, 4001, 128, True): ("d128_large", 32),
    (64, 64, 64, 1024, 1024, 64, False): ("d64_turns", 33),
    (4, 8, 8, 1024, 1024, 64, False): ("d64_turns", 32),
    (2, 2, 2, 512, 512, 64, False): ("d64_few", 4),
    (1, 12, 12, 512, 512, 64, True): ("d64_few", 12),
    (1, 12, 12, 2048, 2048, 64, True): ("d64_few", 12),
    (1, 12, 12, 4096, 4096, 64, True): ("d64_medium", 12),
    (8, 12, 12, 2048, 2048, 64, True): ("d64_medium", 32),
    (2, 16, 16, 4096, 77, 64, False): ("d64_turns", 8),
    (4, 16, 16, 2048, 2048, 96, True): ("d96_large", 64),
    (2, 16, 16, 4096, 4096, 256, True): ("d256_large", 4),
    # Tiles of these sizes fill the GPU unevenly; the tile was the fastest of all.
    (1, 12, 12, 2048, 2048, 64, False): ("d64_medium", 12),
    (1, 12, 12, 4096, 4096, 64, False): ("d64_medium", 6),
    (2, 12, 12, 1024, 1024, 64, False): ("d64_medium", 12),
    (2, 16, 16, 1024, 1024, 64, True): ("d64_medium", 32),
    (1, 32, 32, 1024, 1024, 96, False): ("d96_turns", 32),
    (1, 16, 16, 1536, 1536, 128, False): ("d128_turns", 16),
    (1, 16, 16, 2048, 2048, 128, False): ("d128_medium", 8),
    (1, 16, 16, 2048, 2048, 128, True): ("d128_medium", 16),
    (1, 8, 8, 384, 384, 128, False): ("d128_few", 8),
    (2, 8, 8, 1536, 1536, 128, False): ("d128_turns", 16),
    (4, 10, 10, 2048, 2048, 128, False): ("d128_medium", 8),
    # Tiles of few keys, whose starts and ends other warpgroups fill.
    (8, 32, 8, 512, 512, 128, True): ("d128_turns", 256),
    (1, 40, 40, 32760, 512, 128, False): ("d128_turns", 1),
    (2, 32, 8, 2048, 2048, 128, True): ("d128_turns", 64),
    (16, 16, 16, 256, 256, 128, True): ("d128_medium", 256),
    (2, 24, 24, 4096, 77, 128, False): ("d128_large", 6),
    (8, 20, 20, 1500, 1500, 64, False): ("d64_medium", 16),
    (16, 12, 12, 1024, 1024, 64, True): ("d64_medium", 64),
    (1, 40, 40, 1024, 1024, 128, False): ("d128_turns", 20),
    # Few tiles, whose rows are no multiples of 32 bytes.
    (2, 10, 10, 500, 640, 40, False): ("d64_medium", 20),
    (4, 4, 4, 1000, 1000, 72, True): ("d96_medium", 16),
    # A few keys behind the last whole block.
    (16, 16, 16, 577, 577, 64, False): ("d64_turns_tail", 43),
    (4, 16, 16, 577, 577, 64, False): ("d64_medium", 32),
    (8, 16, 16, 1025, 1025, 64, False): ("d64_medium_tail", 22),
    (8, 16, 16, 1601, 1601, 80, False): ("d80_turns_tail", 19),
    (16, 25, 25, 257, 257, 128, False): ("d128_large_tail", 58),
    (4, 16, 16, 4096, 4096, 128, False): ("d128_large", 6),  # too few of all
    # Short sequences.
    (64, 12, 12, 128, 128, 64, False): ("d64_short", 256),
    (64, 12, 12, 128, 128, 64, True): ("d64_short", 384),
    (1024, 3, 3, 49, 49, 32, False): ("d64_short", 512),
    (32, 16, 16, 257, 257, 64, False): ("d64_medium_tail", 64),
    (8, 8, 8, 100, 100, 32, False): ("d64_short", 64),
    (64, 12, 12, 197, 197, 64, False): ("d64_turns_tail", 128),
    (16, 12, 12, 256, 256, 64, False): ("d64_large", 96),
    (16, 20, 20, 196, 196, 64, False): ("d64_turns_tail", 107),
    (4, 8, 4, 256, 256, 256, True): ("d256_few", 32),
    (8, 8, 4, 256, 256, 256, True): ("d256_large", 64),
    (64, 16, 16, 64, 64, 80, False): ("d96_short", 342),
    (64, 8, 8, 64, 64, 128, False): ("d128_short", 256),
    (1, 16, 16, 64, 64, 128, False): ("d128_short", 16),
    (8, 16, 16, 114, 512, 64, False): ("d64_medium", 128),
    (8, 20, 20, 64, 1500, 64, False): ("d64_few", 40),
    # The first tile of a head has few rows.
    (12, 12, 12, 220, 640, 64, False): ("d64_medium", 48),
    (8, 18, 18, 400, 640, 64, False): ("d64_short", 72),
    (16, 16, 16, 512, 512, 64, False): ("d64_turns_tail", 64),
    # Tiles of few keys of 96 columns, of up to 80 columns, and 160 columns.
    (32, 16, 16, 256, 256, 72, False): ("d80_turns_tail", 128),
    (25, 16, 16, 196, 196, 80, False): ("d80_turns", 100),
    (8, 16, 16, 1024, 1024, 72, False): ("d80_turns", 32),
    (16, 16, 16, 576, 576, 72, False): ("d80_large", 43),
    (2, 16, 16, 4096, 4096, 72, False): ("d80_turns_tail", 8),
    (4, 16, 16, 512, 512, 160, True): ("d192_square", 64),
    (2, 8, 8, 256, 256, 160, False): ("d192_square_few", 16),
    (4, 8, 8, 64, 77, 160, False): ("d192_square", 32),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_measured_shapes_get_the_tile_that_was_the_fastest(shape: tuple[Any, ...]) -> None:
    b, hq, hkv, nq, nk, d, causal = shape
    plan = hopper(b=b, hq=hq, hkv=hkv, nq=nq, nk=nk, d=d, causal=causal)
    tile = tile_of(plan)
    assert (tile.name, tile.heads_per_group) == SHAPES[shape]
    assert tile.splits == 1


def packed(
    sequences: int, rows: int, hq: int, hkv: int, d: int, causal: bool = False, **hints: int
) -> dict[str, Any]:
    """Packed sequences with so many rows in all, of themselves."""
    q = torch.empty(rows, hq, d, dtype=torch.bfloat16, device="meta")
    k = torch.empty(rows, hkv, d, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    call = {"q": q, "k": k, "v": k, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    return {**call, "causal": causal, **hints}


# Sequences, the longest of them, their rows in all, heads of q and of k, head dimension, causal:
# the tile. It took at most 5% longer than the fastest (H200, 2026-11-30).
PACKED_SHAPES = {
    (37, 397, 8192, 16, 16, 72, False): "d80_heads",
    (63, 250, 8192, 16, 16, 72, False): "d80_heads",
    (120, 128, 8192, 16, 16, 72, False): "d128_short",  # rows that are no multiples of 32 bytes
    (76, 196, 8192, 16, 16, 80, False): "d96_short",
    (37, 397, 8192, 12, 12, 96, True): "d96_turns",
    (48, 134, 6432, 12, 12, 96, True): "d96_short",  # larger tiles leave some of five rounds empty
    (12, 2866, 16384, 16, 16, 72, False): "d80_turns",
    (64, 128, 8192, 12, 12, 64, False): "d64_short",
    (279, 54, 8192, 28, 4, 64, False): "d64_short",
    (160, 256, 8192, 12, 12, 64, False): "d64_short",  # one far longer than most
    (66, 3228, 16384, 12, 12, 64, False): "d64_medium",
    (13, 1363, 8192, 16, 16, 64, True): "d64_medium",
    (11, 186, 1024, 8, 8, 64, False): "d64_short",
    (279, 54, 8192, 32, 8, 128, True): "d128_short",
    (76, 196, 8192, 16, 16, 112, False): "d128_short",
    (37, 397, 8192, 32, 8, 128, True): "d128_heads",
    (128, 64, 8192, 14, 2, 256, False): "d256_short",
    (38, 196, 4096, 32, 8, 256, True): "d256_heads",
    (256, 64, 16384, 28, 4, 192, True): "d192_square_heads",
    (50, 2000, 8192, 8, 8, 256, False): "d256_large",
    (24, 580, 8192, 16, 16, 192, True): "d192_square_heads",
    (6, 1218, 4096, 8, 1, 80, False): "d96_large",  # few, but listed
    (745, 3000, 32768, 8, 1, 72, False): "d80_heads",
}


@pytest.mark.parametrize("shape", PACKED_SHAPES, ids=str)
def test_packed_sequences_get_a_tile_that_was_among_the_fastest(shape: Any) -> None:
    sequences, longest, *others = shape
    call = packed(sequences, *others, max_seqlen_q=longest, max_seqlen_k=longest)
    decision = archflash.explain(**call, device="H200", implementation=NAME)
    assert decision.plan is not None
    assert tile_of(decision.plan).name == PACKED_SHAPES[shape]


@pytest.mark.parametrize("heads", [(8, 1), (4, 4)])
def test_tiles_of_all_heads_have_as_many_rows_as_they_can_divide(heads: tuple[int, int]) -> None:
    """Behind 2^23 rows a quotient of the 192 rows of a tile might be one too large."""
    tiles = []
    for rows in (1 << 23, 40_000_000):
        call = packed(rows // 600, rows, *heads, 128, max_seqlen_q=2000, max_seqlen_k=2000)
        plan = archflash.explain(**call, device="H200", implementation=NAME).plan
        assert plan is not None
        tiles.append(tile_of(plan).name)
    assert tiles[0] == "d128_heads"
    assert not tiles[1].endswith("_heads")


def test_short_packed_sequences_have_tiles_of_all_heads_that_share_k() -> None:
    def tile(
        sequences: int, hq: int, hkv: int, d: int, **hints: int
    ) -> tuple[int, int, list[list[int]]]:
        call = packed(sequences, 8192, hq, hkv, d, causal=True, **hints)
        plan = archflash.explain(**call, device="H200", implementation=NAME).plan
        assert plan is not None
        found = tile_of(plan)
        assert found.name == f"d{d}_short"
        maps = plan.to_dict()["launches"][-1]["tensor_maps"]
        return found.packed_heads, found.block_q, [maps[i]["box"][1:3] for i in (0, 3)]

    assert tile(400, 28, 4, 128) == (7, 9, [[9, 7], [9, 7]])
    assert tile(280, 32, 8, 128) == (4, 16, [[16, 4], [16, 4]])
    assert tile(400, 16, 8, 64) == (2, 32, [[32, 2], [32, 2]])
    assert tile(400, 16, 16, 128) == (1, 64, [[64, 1], [16, 1]])
    assert tile(128, 64, 8, 128, max_seqlen_q=64, max_seqlen_k=64)[0] == 1  # tiles are full
    assert tile(60, 32, 8, 64)[0] == 4


def test_packed_sequences_known_to_have_one_tile_each_have_that_of_their_number() -> None:
    def tile(sequences: int, longest: int | None) -> native.TileChoice:
        hints = {} if longest is None else {"max_seqlen_q": longest, "max_seqlen_k": longest}
        call = packed(sequences, 6000, 12, 12, 64, **hints)
        plan = archflash.explain(**call, device="H200", implementation=NAME).plan
        assert plan is not None
        return tile_of(plan)

    assert (tile(200, 64).one_tile_each, tile(200, 64).tiles) == (True, 200 * 12)
    # Others have tiles that they may leave empty; of the last ones 240 rows belong to no sequence.
    for sequences, longest in ((200, 65), (200, None), (90, 64)):
        found = tile(sequences, longest)
        assert found.name == "d64_short"
        assert (found.one_tile_each, found.tiles) == (False, (94 + sequences) * 12)


def test_tiles_of_packed_sequences_are_listed_and_few_rows_may_have_a_kernel_of_their_own() -> None:
    def kernels(call: dict[str, Any]) -> list[str]:
        plan = archflash.explain(**call, device="H200", implementation=NAME).plan
        assert plan is not None
        return [launch["kernel"].replace("_bf16", "")[7:] for launch in plan.to_dict()["launches"]]

    def longest(rows: int) -> dict[str, int]:
        return {"max_seqlen_q": rows, "max_seqlen_k": rows}

    assert kernels(packed(37, 8192, 16, 16, 72, **longest(397))) == [
        "order_packed", "attention_fwd_d80_heads"
    ]  # fmt: skip
    few = packed(74, 8192, 16, 16, 72, causal=True, **longest(2335))
    assert kernels(few) == ["order_packed", "attention_fwd_d80_turns", "attention_fwd_d128_short"]
    # Where many heads share K, they fill long tiles.
    shared = packed(74, 8192, 28, 4, 128, causal=True, **longest(2335))
    assert kernels(shared) == ["order_packed", "attention_fwd_d128_heads"]
    # The tiles of the long ones would not fill the GPU; up to 64 columns short tiles serve all.
    of_23 = packed(23, 8192, 14, 2, 72, **longest(2400))
    assert kernels(of_23) == ["order_packed", "attention_fwd_d80_turns"]
    of_64 = packed(83, 8192, 12, 12, 64, **longest(2000))
    assert kernels(of_64) == ["order_packed", "attention_fwd_d64_short"]
    # Few rows of 256 columns have none, and one sequence needs no list.
    of_256 = packed(49, 8192, 25, 5, 256, **longest(2048))
    assert kernels(of_256) == ["order_packed", "attention_fwd_d256_large"]
    assert kernels(packed(1, 4096, 16, 16, 128, **longest(4096)))[0] != "order_packed"
    # Short sequences of similar lengths, and too many to compare each with all others.
    assert kernels(packed(76, 8192, 12, 12, 64, **longest(198)))[0] == "clear_counter"
    assert kernels(packed(3000, 99999, 12, 12, 64, **longest(2000)))[0] == "clear_counter"


def test_gradients_of_packed_sequences_of_which_one_is_far_longer_have_long_tiles() -> None:
    def kernel(**hints: int) -> str:
        call = packed(64, 8192, 12, 12, 64, **hints)
        plan = archflash.explain(**call, device="H200", implementation=NAME, backward=True).plan
        assert plan is not None
        return str(launch_of_attention(plan)["kernel"])

    for hints in ({}, {"max_seqlen_q": 512, "max_seqlen_k": 512}):
        assert kernel(**hints) == "hopper_attention_bwd_bf16_d64_short"
    assert kernel(max_seqlen_q=513, max_seqlen_k=513) == "hopper_attention_bwd_bf16_d64"


def test_one_cta_for_each_sm_counts_the_tiles_that_are_of_unequal_length() -> None:
    causal = hopper(b=2, hq=16, nq=4001, d=128, causal=True)
    clears, attention = causal.to_dict()["launches"]
    assert attention["grid"] == [132, 1, 1]
    assert clears["kernel"] == "hopper_clear_counter_bf16"
    assert clears["pointers"][0] == {"operand": "workspace", "offset": 0, "addend": 0}
    assert (causal.zeroed_bytes, causal.workspace_bytes) == (0, 4)
    equal = hopper(b=2, hq=16, nq=4224, d=128)
    assert launch_of(equal)["grid"] == [132, 1, 1]
    assert equal.workspace_bytes == 0
    short_ones = hopper(b=32, hq=16, nq=577, d=64)  # the first tile of a head has 65 of 256 rows
    assert (tile_of(short_ones).name, short_ones.workspace_bytes) == ("d64_turns_tail", 4)
    two_rounds = hopper(b=1, hq=12, nq=4096, d=64, causal=True)
    assert (launch_of(two_rounds)["grid"], tile_of(two_rounds).tiles) == ([132, 1, 1], 264)
    assert two_rounds.workspace_bytes == 0
    few = hopper(b=1, hq=12, nq=512, d=64, causal=True)  # two CTAs on an SM, one for each tile
    assert launch_of(few)["grid"] == [96, 1, 1]
    assert few.workspace_bytes == 0


def test_the_tiles_of_the_last_round_are_cut_where_their_parts_fit_into_it() -> None:
    def parts_of(plan: native.LaunchPlan) -> tuple[str, int, int, int]:
        tile = tile_of(plan)
        return tile.name, tile.tiles, tile.whole_tiles, tile.part_rows

    def parts(**shape: int) -> tuple[str, int, int, int]:
        return parts_of(hopper(**shape))

    # 44 tiles of 192 rows are left, so 132 parts.
    assert parts(b=2, hq=10, nq=4096, d=64) == ("d64_medium", 440, 396, 64)
    # 56 tiles of 256 rows, so 112 parts.
    assert parts(b=2, hq=10, nq=4096, nk=77, d=64) == ("d64_turns", 320, 264, 128)
    # 92 are too many.
    assert parts(b=8, hq=20, nq=1500, d=64) == ("d64_medium", 1280, 0, 0)
    # A counter fills the last round as well with the first tiles of heads, of 24 rows.
    assert parts(b=2, hq=40, nq=1560, d=128) == ("d128_large", 720, 0, 0)
    # So they are with 8 bits, but for four warpgroups, whose producer has no registers for it.
    eight_bits = call("float8_e4m3fn", b=2, hq=16, nq=4096, d=128)
    assert parts_of(plan_of(eight_bits, "H200", NAME)) == ("d128", 704, 660, 64)
    four = call("float8_e4m3fn", b=2, hq=10, nq=4096, d=64)
    assert parts_of(plan_of(four, "H200", NAME)) == ("d64", 320, 0, 0)
    cut = hopper(b=2, hq=10, nq=4096, d=64)
    assert cut.workspace_bytes == 0  # no counter beside them
    assert len(native.tile_times(cut)) == 396 + 3 * 44


@pytest.mark.parametrize(
    ("shape", "splits"), [((32, 8192), 1), ((128, 2048), 1), ((1, 131072), 33)], ids=str
)
def test_decoding_packs_heads_and_fills_the_gpu(shape: tuple[int, int], splits: int) -> None:
    batch, keys = shape
    plan = hopper(b=batch, hq=32, hkv=8, nq=1, nk=keys, d=128)
    tile = tile_of(plan)
    assert (tile.name, tile.packed_heads, tile.splits) == ("d128_few", 4, splits)
    assert plan.to_dict()["launches"][0]["grid"] == [8 * batch * splits, 1, 1]


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (96, 96), (192, 128), (160, 160), (256, 200)])
def test_a_tile_whose_keys_are_split_has_all_columns(d: int, dv: int, splits: int | None) -> None:
    tile = tile_of(hopper(b=1, hq=4, hkv=2, nq=5, nk=4100, d=d, dv=dv, num_splits=splits))
    assert tile.splits > 1
    assert tile.head_dim >= d
    assert tile.head_dim_v >= dv


@pytest.mark.parametrize("d", [64, 72, 80, 96, 128])
def test_keys_are_split_where_another_tile_would_be_faster(d: int) -> None:
    assert tile_of(hopper(b=2, hq=16, nq=4096, d=d, num_splits=3)).splits == 3


def test_only_descales_by_block_share_the_columns_of_v_out() -> None:
    def tile(d: int, dv: int, **options: Any) -> native.TileChoice:
        problem = call("float8_e4m3fn", b=1, hq=16, nq=4096, d=d, dv=dv, **options)
        return tile_of(plan_of(problem, "H200", NAME))

    for (d, dv), name, slices in (
        ((192, 128), "d192", 1),
        ((208, 128), "d256", 1),
        ((64, 144), "d256", 1),
        ((256, 256), "d256", 1),
    ):
        chosen = tile(d, dv)
        assert (chosen.name, chosen.v_slices) == (name, slices)
    q = torch.empty(1, 16, 4096, 256, dtype=torch.float8_e4m3fn, device="meta")
    by_block = torch.empty(1, 16, 64, device="meta")
    shared = plan_of(make_problem(q, q, q, v_descale=by_block), "H200", NAME)
    assert (tile_of(shared).name, tile_of(shared).v_slices) == ("d256_blocks", 2)
    even = native.makespan(shared)
    assert even.workers == 132
    assert even.ideal * 132 == 2 * 16 * 32 * (4096 + native.TILE_KEYS)


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((1, 16, 1024, 64, False), "d64_small"),
        ((1, 16, 2048, 64, True), "d64_small"),
        ((2, 12, 2048, 64, True), "d64"),
        ((64, 64, 1024, 64, False), "d64"),
        ((1, 16, 1024, 128, False), "d128_small"),
        ((1, 8, 4096, 128, True), "d128_small"),
        ((4, 16, 1024, 128, False), "d128"),
        ((16, 16, 8192, 128, False), "d128"),
        ((1, 16, 1024, 256, False), "d256_small"),
        ((1, 16, 2048, 256, True), "d256"),
        ((2, 16, 8192, 256, False), "d256"),
    ],
    ids=str,
)
def test_8_bit_calls_that_fill_few_sms_have_small_tiles(shape: Any, tile: str) -> None:
    b, hq, n, d, causal = shape
    problem = call("float8_e4m3fn", b=b, hq=hq, nq=n, d=d, causal=causal)
    assert tile_of(plan_of(problem, "H200", NAME)).name == tile


@pytest.mark.parametrize(
    ("shape", "transposed_before"),
    [
        ((16, 16, 16, 8192, 128, False), True),
        ((4, 32, 8, 8192, 128, True), True),
        ((1, 32, 8, 4096, 128, True), True),
        ((4, 16, 16, 1024, 128, False), False),
        ((1, 8, 8, 4096, 128, True), False),
        ((64, 64, 64, 1024, 64, False), False),
        ((1, 16, 16, 1024, 256, False), False),
        ((2, 16, 16, 4096, 256, True), True),
    ],
    ids=str,
)
def test_v_in_8_bits_is_transposed_first_where_many_rows_read_it(
    shape: Any, transposed_before: bool
) -> None:
    b, hq, hkv, n, d, causal = shape
    problem = call("float8_e4m3fn", b=b, hq=hq, hkv=hkv, nq=n, d=d, causal=causal)
    plan = plan_of(problem, "H200", NAME)
    kernels = [launch["kernel"] for launch in plan.to_dict()["launches"]]
    assert (kernels[0] == "hopper_transpose_v") == transposed_before
    assert len(kernels) == 1 + transposed_before


def test_the_kernel_that_transposes_v_also_clears_the_counter_of_tiles() -> None:
    """So that no memset stands between the two launches, which both start early."""
    problem = call("float8_e4m3fn", b=2, hq=16, hkv=16, nq=4096, d=256, causal=True)
    plan = plan_of(problem, "H200", NAME)
    assert plan.zeroed_bytes == 0
    first, last = plan.to_dict()["launches"]
    assert first["uses_pdl"]
    assert last["uses_pdl"]
    assert first["grid"][0] == 2 * 16 * (4096 // 128) * 2  # of 128 keys and 128 columns
    counters = [
        {x["offset"] for x in launch["pointers"] if x["operand"] == "workspace" and not x["addend"]}
        for launch in (first, last)
    ]
    assert counters[0] == counters[1] != set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "dv", "causal"), [(128, 128, False), (192, 128, True), (256, 256, False)]
)
def test_v_transposed_by_the_ctas_or_before_has_the_same_bits(
    d: int, dv: int, causal: bool
) -> None:
    """On the simulator: 32 heads that share V have it transposed first, 8 do not. Behind the
    last sequence are NaN; one descale of v is 0.
    """
    torch.manual_seed(0)
    ends = torch.tensor([0, 20, 20, 83, 150], dtype=torch.int32)

    def made(heads: int, width: int) -> torch.Tensor:
        x = torch.randn(160, heads, width)
        x[150:] = torch.nan
        return x.to(torch.float8_e4m3fn)

    q, k, v = made(32, d), made(1, d), made(1, dv)
    descale = torch.tensor([[0.5], [1.0], [0.0], [2.0]])
    options: dict[str, Any] = {
        "causal": causal,
        "cu_seqlens_q": ends,
        "cu_seqlens_k": ends,
        "v_descale": descale,
    }

    def launches(q: torch.Tensor) -> int:
        return len(plan_of(make_problem(q, k, v, **options), "H200", NAME).to_dict()["launches"])

    parts = [x.contiguous().view(torch.float8_e4m3fn) for x in q.view(torch.uint8).split(8, dim=1)]
    assert (launches(q), launches(parts[0])) == (2, 1)
    whole = archflash.attention(q, k, v, implementation=NAME, **options)
    for part, of_whole in ((parts[0], whole[:, :8]), (parts[-1], whole[:, -8:])):
        apart = archflash.attention(part, k, v, implementation=NAME, **options)
        assert torch.equal(of_whole, apart)
    assert whole.isfinite().all()
    assert (whole[20:83] == 0).all()
    assert (whole[:20] != 0).any(-1).all()


def test_columns_of_v_in_8_bits_have_a_limit() -> None:
    """Each of the packed sequences is filled up to 128 keys."""
    sequences = (1 << 24) + 1
    q = torch.empty(sequences, 1, 64, dtype=torch.float8_e4m3fn, device="meta")
    ends = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    problem = make_problem(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, out_dtype=torch.bfloat16)
    (reason,) = native.plan(NAME, problem, find_device("H200"))
    assert "V of 16777217 keys in 16777217 sequences with float8_e4m3fn" in reason
    assert "columns of up to 2147483647 keys" in reason


def test_every_tile_fits_an_h100() -> None:
    for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        for b in (1, 64):
            launch = launch_of_attention(hopper("H100", b=b, hq=16, nq=1024, d=d, dv=dv))
            assert launch["shared_bytes"] <= 227 * 1024


def test_tiles_end_with_their_sequence_so_that_the_short_one_sees_the_fewest_keys() -> None:
    plan = hopper(b=1, hq=64, hkv=8, nq=4096, nk=4096, d=128, causal=True)
    assert (tile_of(plan).block_q, tile_of(plan).row_step) == (192, 64)
    times = sorted({time for _, time in native.tile_times(plan)})
    keys = [time - native.TILE_KEYS for time in times]
    assert len(keys) == 22
    assert keys[0] == 80  # 64 rows: one block of keys
    assert keys[-1] == 52 * 80  # 192 rows, the last of which sees 4,096 keys


def test_tiles_are_counted_where_that_gains_more_than_clearing_the_counter_costs() -> None:
    def counts(**shape: Any) -> bool:
        return tile_of(hopper(**shape)).counts_tiles

    assert not counts(b=1, hq=12, hkv=12, nq=4096, nk=4096, d=64, causal=True)  # even
    assert counts(b=2, hq=16, hkv=16, nq=4001, nk=4001, d=128, causal=True)
    assert not counts(b=8, hq=16, hkv=16, nq=1024, nk=1024, d=64, causal=False)  # rounds
    assert counts(b=16, hq=16, hkv=16, nq=8192, nk=8192, d=128, causal=False)  # many of them
    assert counts(b=8, hq=16, hkv=16, nq=901, nk=901, d=64, causal=False)  # first tiles of 133 rows
    assert not counts(b=3, hq=16, hkv=16, nq=1370, nk=1370, d=128, causal=False)  # four full rounds
    # Long rounds of unequal tiles vary by more than the counter costs, short ones do not.
    assert counts(b=2, hq=32, hkv=8, nq=2048, nk=2048, d=128, causal=True)
    assert not counts(b=8, hq=32, hkv=8, nq=512, nk=512, d=128, causal=True)


def test_tiles_of_8_bits_are_counted_where_the_first_one_of_a_head_is_shorter() -> None:
    def counts(b: int, hq: int, n: int) -> bool:
        problem = call("float8_e4m3fn", b=b, hq=hq, hkv=hq, nq=n, d=128, causal=False)
        return tile_of(plan_of(problem, "H200", NAME)).counts_tiles

    assert counts(2, 40, 1560)
    assert counts(16, 16, 2048)
    assert not counts(1, 24, 4608)  # whole tiles
    assert not counts(2, 24, 1370)  # the memset takes longer than it gains


def early_starts(plan: native.LaunchPlan) -> list[bool]:
    return [launch["uses_pdl"] for launch in plan.to_dict()["launches"]]


def test_the_kernels_of_16_bit_calls_start_early() -> None:
    assert early_starts(hopper(b=16, hq=12, nq=256, d=128)) == [True]
    assert early_starts(hopper(b=2, hq=16, nq=4001, d=128, causal=True)) == [True, True]
    # Two CTAs on an SM: all places are filled, so that the CTAs cannot lie unevenly.
    full = hopper(b=1, hq=11, nq=200, nk=8192, d=64)
    assert (tile_of(full).name, launch_of_attention(full)["grid"]) == ("d64_few", [264, 1, 1])
    assert early_starts(full) == [True, True]


def test_ctas_that_would_lie_unevenly_on_the_sms_do_not_start_early() -> None:
    few = hopper(b=1, hq=12, nq=512, d=64, causal=True)  # 96 CTAs, two on an SM
    short = hopper(b=8, hq=24, nq=114, nk=512, d=64)  # 384 CTAs, four on an SM
    assert [tile_of(plan).name for plan in (few, short)] == ["d64_few", "d64_short"]
    assert early_starts(few) == early_starts(short) == [False]


def test_short_calls_start_early_wherever_their_ctas_lie() -> None:
    """8x12 128 D=64 took 6.2 us in place of 7.8, 4x16 64x512 9.0 of 10.6 (eager, H200)."""
    assert early_starts(hopper(b=8, hq=12, nq=128, d=64)) == [True]  # 192 CTAs, few keys
    one_each = hopper(b=4, hq=16, nq=64, nk=512, d=64)
    assert launch_of_attention(one_each)["grid"] == [64, 1, 1]
    assert early_starts(one_each) == [True]


def test_keys_are_split_only_where_the_slower_kernel_gains_by_it() -> None:
    """One and a half rounds of tiles of 128 rows took 94 us, two shares of the keys 137 (H200)."""
    tile = tile_of(hopper(b=4, hq=12, nq=512, nk=4096, d=128))
    assert (tile.name, tile.splits, tile.part_rows) == ("d128_medium", 1, 64)
    assert tile_of(hopper(b=1, hq=12, nq=512, nk=8192, d=128)).splits > 1


def test_up_to_seven_tiles_for_each_sm_go_longest_first_over_all_heads() -> None:
    def heads_at_a_time(heads: int) -> int:
        return tile_of(hopper(b=4, hq=heads, nq=2048, d=128, causal=True)).heads_per_group

    assert heads_at_a_time(20) == 4 * 20  # 6.7 tiles of 192 rows for each SM
    assert heads_at_a_time(24) == 16  # 8
