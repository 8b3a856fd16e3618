"""Which of its kernels blackwell_dc plans, their grid and boxes, what plans say."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from plan_cases import call, kernels_built, launch_of, maps_of, packed_call, plan_of, tile_of

from archflash import _archflash as native
from archflash._api import find_device, make_problem
from archflash._dispatch import plan_facts

NAME = "blackwell_dc"
DTYPES = {"float16": "f16", "bfloat16": "bf16"}
DEVICES = ("B200", "B300", "Jetson Thor")
# The head dimensions whose kernels are others on 10.3.
ON_10_3 = (64, 96, 128)
SHARED_LIMIT = 227 * 1024
B64, B128 = 2, 3  # swizzles
TILES_OFFSET = 272  # of Params::tiles
SPLITS_OFFSET = 304  # of Params::partials.splits
# (d, dv) that a kernel is for: query rows and keys of its tile.
TILES = {
    (64, 64): (256, 128),
    (96, 96): (256, 128),
    (128, 128): (256, 128),
    (192, 128): (256, 128),
    (256, 256): (128, 64),
}

every_device = pytest.mark.parametrize("device", DEVICES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_head_dim = pytest.mark.parametrize("dims", TILES, ids=str)


def launches_of(plan: native.LaunchPlan) -> list[dict[str, Any]]:
    return list(plan.to_dict()["launches"])


def splits_of(plan: native.LaunchPlan) -> int:
    """Shares of the keys of a tile that a plan makes; one: no second kernel, no workspace."""
    first, *others = launches_of(plan)
    splits = tile_of(plan).splits
    (told,) = struct.unpack_from("<i", bytes.fromhex(first["params"]), SPLITS_OFFSET)
    assert told == splits
    assert [row["kernel"].rpartition("_")[0] for row in others] == [
        f"{NAME}_combine" for _ in range(splits > 1)
    ]
    assert (plan.workspace_bytes > 0) == (splits > 1)
    said = dict(plan.notes).get("splits", "none")
    assert said.startswith("none" if splits == 1 else f"{splits} shares")
    return int(splits)


def dc_plan(problem: native.Problem, device: str = "B200") -> native.LaunchPlan:
    return plan_of(problem, device, NAME)


@pytest.mark.parametrize(
    ("dims", "serving"),
    [
        ((8, 8), 64),
        ((64, 72), 96),
        ((72, 64), 96),
        ((96, 104), 128),
        ((136, 128), 192),
        ((192, 136), 256),
        ((128, 192), 256),
        ((8, 256), 256),
    ],
    ids=str,
)
@every_dtype
@every_device
def test_the_smallest_kernel_that_holds_both_head_dims_serves(
    device: str, dtype: str, dims: tuple[int, int], serving: int
) -> None:
    # Under a mask so few tiles are no pairs'.
    problem = call(dtype, nq=300, d=dims[0], dv=dims[1], causal=True)
    launch = launch_of(dc_plan(problem, device))
    mufu = device == "B300" and serving in ON_10_3
    end = "_mufu" if mufu else ""
    assert launch["kernel"] == f"{NAME}_attention_fwd_{DTYPES[dtype]}_d{serving}{end}"
    assert launch["image"] == f"{NAME}/fwd_" + "103_" * mufu + DTYPES[dtype]
    assert launch["block"] == [512, 1, 1]


@every_dtype
def test_every_kernel_that_was_built_is_chosen_somewhere(dtype: str) -> None:
    built = kernels_built(f"{NAME}/fwd_{DTYPES[dtype]}")
    plans = [
        dc_plan(call(dtype, nq=nq, d=d, dv=dv, **options))
        for d, dv in TILES
        for nq, options in ((128, {}), (256, {}), (1, {"nk": 300, "num_splits": 2}))
    ]
    planned = {str(launch["kernel"]) for plan in plans for launch in launches_of(plan)}
    assert planned == built


@every_head_dim
@every_device
def test_the_grid_has_a_cta_for_each_tile(device: str, dims: tuple[int, int]) -> None:
    rows, keys = TILES[dims]
    for batch in (1, 64):
        problem = call("float16", b=batch, nq=1000, nk=300, d=dims[0], dv=dims[1], causal=True)
        plan = dc_plan(problem, device)
        tiles = batch * 4 * -(-1000 // rows)
        assert tile_of(plan).tiles == tiles
        launch = launch_of(plan)
        assert launch["grid"] == [tiles, 1, 1]
        assert launch["shared_bytes"] <= SHARED_LIMIT
        (told,) = struct.unpack_from("<i", bytes.fromhex(launch["params"]), TILES_OFFSET)
        assert told == tiles
        assert (tile_of(plan).block_q, tile_of(plan).block_k) == (rows, keys)


@every_head_dim
@every_dtype
def test_maps_describe_the_tensors_and_boxes_the_tiles(dtype: str, dims: tuple[int, int]) -> None:
    d, dv = dims
    keys = TILES[dims][1]
    plan = dc_plan(call(dtype, b=3, hq=8, hkv=2, nq=1000, nk=777, d=d, dv=dv, causal=True))
    maps = maps_of(plan)
    assert set(maps) == {"q", "k", "v", "out"}
    for operand, columns, length, heads, box in (
        ("q", d, 1000, 8, 128),
        ("k", d, 777, 2, keys),
        ("v", dv, 777, 2, keys),
        ("out", dv, 1000, 8, 128),
    ):
        slab, swizzle = (64, B128) if columns % 64 == 0 else (32, B64)
        spec = maps[operand]
        row = 2 * columns
        assert spec["dims"] == [columns, length, heads, 3]
        assert spec["strides"] == [row, row * length, row * length * heads]
        assert spec["box"] == [slab, box, 1, 1]
        assert (spec["dtype"], spec["swizzle"]) == (dtype, swizzle)
        assert spec["offset"] % 64 == 0


def test_too_little_shared_memory_is_a_reason() -> None:
    facts = find_device("B200").to_dict()
    small = native.Device.from_dict(facts | {"name": "small", "shared_per_block": 100 * 1024})
    (reason,) = native.plan(NAME, call("float16", d=128), small)
    assert reason.startswith("shared memory: small gives a CTA 102400 bytes and blackwell_dc needs")
    assert reason.endswith("use another GPU or use implementation='torch'")


def test_the_plan_shows_roles_registers_stages_and_barriers() -> None:
    notes: dict[str, Any] = dict(dc_plan(call("bfloat16", nq=4096, d=128, causal=True)).notes)
    assert notes["warps"] == "8 softmax, 4 correction, 1 each for products, loads and stores"
    assert notes["registers"] == "192 softmax, 80 correction, 48 others (setmaxnreg)"
    assert notes["stages"] == "3 that K and V share, 40 barriers"
    assert dict(dc_plan(call("bfloat16", d=256)).notes)["warps"].startswith("4 softmax")
    large = tile_of(dc_plan(call("bfloat16", nq=300, d=192, dv=128, causal=True)))
    assert (large.k_stages, large.v_stages) == (2, 1)


# --- 10.3 ---


@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e4m3fn"])
def test_10_3_computes_no_exponential_by_polynomial_where_that_bounds(dtype: str) -> None:
    fp8 = dtype == "float8_e4m3fn"
    for d in (64, 96, 128, 192, 256):
        for nq in (300, 8192):
            problem = call(dtype, nq=nq, nk=8192, b=16, hq=16, d=d, dv=d if d != 192 else 128)
            said = {name: dict(dc_plan(problem, name).notes) for name in ("B200", "B300")}
            assert said["B300"]["exponentials"] == "0 of 128 by polynomial"
            others = fp8 or d in ON_10_3
            assert ("10.3" in said["B300"].get("variant", "")) == others
            assert (said["B200"]["exponentials"] != "0 of 128 by polynomial") == others
            assert said["B200"]["stages"] == said["B300"]["stages"]


# --- few query rows, and split keys ---


@every_head_dim
@every_device
def test_128_rows_and_fewer_take_one_tile_of_128(device: str, dims: tuple[int, int]) -> None:
    d, dv = dims
    for nq in (1, 128, 129):
        plan = dc_plan(call("float16", nq=nq, nk=300, d=d, dv=dv), device)
        launch = launch_of(plan)
        one_tile = nq <= 128 or d == 256
        assert str(launch["kernel"]).endswith("_few") == (nq <= 128 and d != 256)
        assert tile_of(plan).block_q == (128 if one_tile else 256)
        assert launch["shared_bytes"] <= SHARED_LIMIT
        assert launch["grid"] == [tile_of(plan).tiles, 1, 1]


@pytest.mark.parametrize(
    ("longest", "rows"), [(None, 256), (128, 128), (129, 256), (0, 128)], ids=str
)
def test_packed_sequences_are_short_where_max_seqlen_says_so(
    longest: int | None, rows: int
) -> None:
    options = {} if longest is None else {"max_seqlen_q": longest}
    plan = dc_plan(packed_call("float16", rows=777, sequences=5, **options))
    assert tile_of(plan).block_q == rows
    assert tile_of(plan).tiles == 4 * (-(-777 // rows) + 5)
    few = dc_plan(packed_call("float16", rows=100, sequences=5))  # no longer than all together
    assert tile_of(few).block_q == 128


def decoding(nk: int, *, b: int = 1, hq: int = 8, **options: Any) -> native.Problem:
    return call("float16", b=b, hq=hq, nq=1, nk=nk, d=128, **options)


@pytest.mark.parametrize(
    ("b", "nk", "splits"),
    [
        (1, 1023, 1),  # no share has fewer than 512 keys
        (1, 2048, 4),
        (1, 4096, 8),
        (1, 8192, 16),
        (1, 32768, 18),  # as many as 148 SMs take at once
        (1, 1 << 20, 37),  # two rounds of fewer keys
        (4, 32768, 9),  # 32 tiles: 288 shares in two rounds
        (19, 32768, 2),  # 152 tiles: three rounds of halves are shorter than two of all
        (19, 1024, 1),
    ],
)
def test_the_plan_splits_so_that_the_sms_are_filled(b: int, nk: int, splits: int) -> None:
    plan = dc_plan(decoding(nk, b=b))
    assert splits_of(plan) == splits
    assert "asked" not in dict(plan.notes).get("splits", "")


def test_two_tiles_in_flight_give_way_to_a_split_for_a_quarter_of_the_time_only() -> None:
    # 96 tiles of 256 rows: one round; 2 x 192 tiles of half as many keys win 9% in the model.
    assert splits_of(dc_plan(call("bfloat16", b=1, hq=32, nq=768, nk=4096, d=128))) == 1
    assert splits_of(dc_plan(call("bfloat16", b=1, hq=8, nq=768, nk=32768, d=128))) > 1


def test_keys_that_no_row_sees_are_not_counted() -> None:
    assert splits_of(dc_plan(decoding(32768, window=(4095, 0)))) == 8
    assert splits_of(dc_plan(decoding(32768, causal=True, q_offset=1999))) == 4
    # How far a tensor's offsets go is not known.
    assert splits_of(dc_plan(decoding(4096, causal=True, offsets=True))) == 8
    assert splits_of(dc_plan(decoding(4096, causal=True, q_offset=-(1 << 40)))) == 1
    assert splits_of(dc_plan(decoding(4096, window=(0, 0), q_offset=1 << 40))) == 1
    assert splits_of(dc_plan(decoding(0))) == 1


def test_packed_keys_are_counted_by_max_seqlen_or_on_average() -> None:
    def problem(**options: Any) -> native.Problem:
        q = torch.empty(3, 8, 128, dtype=torch.float16, device="meta")
        k = torch.empty(3 * 4096, 8, 128, dtype=torch.float16, device="meta")
        ends = torch.empty(4, dtype=torch.int32, device="meta")
        return make_problem(
            q, k, k, cu_seqlens_q=ends, cu_seqlens_k=ends, **options
        ).as_if_on_cuda()

    assert splits_of(dc_plan(problem())) == 4  # of 32 tiles at most
    assert splits_of(dc_plan(problem(max_seqlen_k=2048))) == 4
    assert splits_of(dc_plan(problem(max_seqlen_k=1 << 40))) == 4
    assert splits_of(dc_plan(problem(max_seqlen_k=1000))) == 1


def test_long_keys_of_few_tiles_are_split_however_many_rows_they_have() -> None:
    plan = dc_plan(call("bfloat16", b=1, hq=4, nq=512, nk=65536, d=128, causal=True))
    assert splits_of(plan) == 9
    assert tile_of(plan).tiles == 16
    assert tile_of(plan).name == "d128_few"
    filling = dc_plan(call("bfloat16", b=1, hq=32, nq=4096, nk=65536, d=128, causal=True))
    assert tile_of(filling).name == "d128_pair"


@every_head_dim
@every_dtype
def test_num_splits_says_how_many_at_most(dtype: str, dims: tuple[int, int]) -> None:
    keys = TILES[dims][1]
    for nq in (1, 300):
        for asked, splits in ((1, 1), (2, 2), (5, 5), (7, 6), (1000, 6)):
            problem = call(
                dtype, nq=nq, nk=5 * keys + 1, d=dims[0], dv=dims[1], num_splits=asked, b=1
            )
            plan = dc_plan(problem)
            assert splits_of(plan) == splits
            first = launches_of(plan)[0]
            if splits > 1:
                tiles = 4 * -(-nq // 128)
                assert first["grid"] == [tiles * splits, 1, 1]
                (told,) = struct.unpack_from("<i", bytes.fromhex(first["params"]), TILES_OFFSET)
                assert told == tiles * splits
                assert "as asked for" in dict(plan.notes)["splits"]
    assert splits_of(dc_plan(decoding(1 << 20, num_splits=1))) == 1
    assert splits_of(dc_plan(decoding(0, num_splits=4))) == 1


def test_the_workspace_holds_every_share_of_every_row() -> None:
    rows, splits, dv = 3 * 8 * 5, 4, 72
    plan = dc_plan(call("float16", b=3, hq=8, nq=5, nk=1000, d=64, dv=dv, num_splits=splits))
    ends = splits * rows * 8  # a base and a sum
    start = -(-ends // 256) * 256
    assert plan.workspace_bytes == start + splits * rows * dv * 4
    first, second = launches_of(plan)
    for launch, splits_offset in ((first, SPLITS_OFFSET), (second, TILES_OFFSET + 24)):
        slots = [row for row in launch["pointers"] if row["operand"] == "workspace"]
        places = [(row["addend"], row["offset"]) for row in slots]
        assert places == [(0, splits_offset - 16), (start, splits_offset - 24)]
        (told,) = struct.unpack_from("<i", bytes.fromhex(launch["params"]), splits_offset)
        assert told == splits
    assert (second["kernel"], second["image"]) == (f"{NAME}_combine_f16", first["image"])
    assert (second["grid"], second["block"]) == ([rows // 4, 1, 1], [128, 1, 1])
    assert second["shared_bytes"] == 0
    assert second["tensor_maps"] == []
    again = native.LaunchPlan.from_dict(plan.to_dict())
    assert again.to_dict() == plan.to_dict()
    assert dict(again.notes) == dict(plan.notes)


def test_too_many_shares_are_refused_before_a_launch() -> None:
    problem = call("float16", b=1 << 16, hq=128, nq=1, nk=1 << 20, d=64, num_splits=1000)
    (reason,) = native.plan(NAME, problem, find_device("B200"))
    assert reason.startswith("grid of 8388608000 CTAs: CUDA takes up to 2147483647; split")


# --- packed heads ---

PACKED_OFFSET = 312  # of Params::packed_heads


def packed_heads_of(plan: native.LaunchPlan) -> int:
    """Heads in a tile: what plan, parameters, boxes and notes say agrees."""
    tile, first = tile_of(plan), launches_of(plan)[0]
    heads, row_bits = struct.unpack_from("<2i", bytes.fromhex(first["params"]), PACKED_OFFSET)
    maps = {row["operand"]: row for row in first["tensor_maps"]}
    assert heads == tile.packed_heads
    assert 1 << row_bits == 128 // (1 << (heads - 1).bit_length())
    if heads > 1:
        assert tile.block_q == 1 << row_bits
        assert maps["q"]["box"][1:] == [1 << row_bits, 128 >> row_bits, 1]
        assert maps["out"]["box"][1:] == [1 << row_bits, heads, 1]
    said = f"{heads} heads that share K and V x {tile.block_q} query rows x "
    assert dict(plan.notes)["tile"].startswith(said) == (heads > 1)
    return int(heads)


def grouped(group: int, *, nq: int = 1, hkv: int = 8, **options: Any) -> native.Problem:
    options = {"b": 2, "nk": 300, "d": 128} | options
    return call("float16", hq=group * hkv, hkv=hkv, nq=nq, **options)


@pytest.mark.parametrize(
    ("group", "packed"),
    [(1, 1), (2, 2), (3, 3), (8, 8), (71, 71), (128, 128), (129, 1), (130, 2), (192, 64)],
    ids=str,
)
def test_heads_that_share_keys_are_packed(group: int, packed: int) -> None:
    plan = dc_plan(grouped(group))
    assert packed_heads_of(plan) == packed
    assert tile_of(plan).tiles == 2 * 8 * group // packed


@pytest.mark.parametrize(
    ("nq", "packed", "tiles"),
    [(16, 8, 1), (17, 8, 2), (96, 8, 6), (97, 1, 8), (128, 1, 8)],
    ids=str,
)
def test_heads_are_packed_where_that_saves_a_quarter_of_the_tiles(
    nq: int, packed: int, tiles: int
) -> None:
    plan = dc_plan(grouped(8, nq=nq))
    assert packed_heads_of(plan) == packed
    assert tile_of(plan).tiles == 2 * 8 * tiles


def test_above_128_rows_heads_are_packed_where_the_model_expects_less_time() -> None:
    # One round of 136 packed tiles; or of 128 CTAs with two tiles of 128 rows each, half empty.
    assert packed_heads_of(dc_plan(grouped(8, nq=272, b=1))) == 8
    assert packed_heads_of(dc_plan(grouped(8, nq=304, b=1))) == 1  # 152 tiles: two rounds
    assert packed_heads_of(dc_plan(grouped(8, nq=4096, b=1))) == 1


@every_head_dim
@every_dtype
def test_packed_heads_and_shares_of_the_keys_multiply(dtype: str, dims: tuple[int, int]) -> None:
    d, dv = dims
    problem = call(dtype, b=1, hq=32, hkv=4, nq=1, nk=8192, d=d, dv=dv)
    plan = dc_plan(problem)
    assert packed_heads_of(plan) == 8
    assert tile_of(plan).tiles == 4
    assert splits_of(plan) == 16  # as many as one head of q for each head of K gets
    few = dc_plan(call(dtype, b=1, hq=4, nq=1, nk=8192, d=d, dv=dv))
    assert splits_of(few) == 16


def test_packed_sequences_pack_heads_by_max_seqlen() -> None:
    def problem(**options: Any) -> native.Problem:
        q = torch.empty(300, 8, 64, dtype=torch.float16, device="meta")
        ends = torch.empty(101, dtype=torch.int32, device="meta")
        k = q[:, :2]
        return make_problem(
            q, k, k, cu_seqlens_q=ends, cu_seqlens_k=ends, **options
        ).as_if_on_cuda()

    assert packed_heads_of(dc_plan(problem(max_seqlen_q=129))) == 1
    plan = dc_plan(problem(max_seqlen_q=3))
    assert packed_heads_of(plan) == 4
    assert tile_of(plan).tiles == 2 * (-(-300 // 32) + 100)


def test_heads_that_a_tensor_map_cannot_tell_apart_are_not_packed() -> None:
    q = torch.empty(2, 1, 5, 64, dtype=torch.float16, device="meta").expand(-1, 8, -1, -1)
    k = torch.empty(2, 2, 5, 64, dtype=torch.float16, device="meta")
    assert packed_heads_of(dc_plan(make_problem(q, k, k).as_if_on_cuda())) == 1


# --- pairs of CTAs ---

LONG = {"nq": 8192, "d": 128, "b": 2, "hq": 16}


def in_pairs(plan: native.LaunchPlan) -> bool:
    launch = launch_of(plan)
    pair = tile_of(plan).cluster == 2
    assert str(launch["kernel"]).endswith("_pair") == pair
    assert launch["cluster"] == [1 + pair, 1, 1]
    assert dict(plan.notes)["products"].startswith("2 CTAs" if pair else "1 CTA:")
    return pair


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)], ids=str)
@every_dtype
@every_device
def test_long_calls_multiply_in_pairs(device: str, dtype: str, dims: tuple[int, int]) -> None:
    plan = dc_plan(call(dtype, **(LONG | {"d": dims[0], "dv": dims[1]})), device)
    assert in_pairs(plan)
    launch = launch_of(plan)
    mufu = device == "B300" and dims[0] in ON_10_3
    assert launch["image"] == f"{NAME}/fwd_{'103' if mufu else 'pair'}_{DTYPES[dtype]}"
    assert launch["kernel"] in kernels_built(launch["image"])
    assert len(kernels_built(f"{NAME}/fwd_pair_{DTYPES[dtype]}")) == 2
    ctas = 2 * tile_of(plan).tiles
    assert launch["grid"] == [ctas, 1, 1]
    assert launch["shared_bytes"] <= SHARED_LIMIT
    assert tile_of(plan).tiles == 2 * 16 * 8192 // 512
    maps = maps_of(plan)
    # A CTA brings half of a block's keys, all columns, and of all its keys half of the columns.
    assert [maps[name]["box"] for name in ("q", "k", "v", "out")] == [
        [64, rows, 1, 1] for rows in (128, 64, 128, 128)
    ]
    notes = dict(plan.notes)
    assert (tile_of(plan).block_q, tile_of(plan).block_k) == (512, 128)
    stages = "6 that K and V share" if dims[0] == 128 else "4 of K, 2 of V"
    assert notes["stages"] == f"{stages}, half a block each, 52 barriers"
    assert notes["CTAs"].endswith(" SMs, in pairs")
    (said,) = (text for name, text in plan_facts(plan) if name == "launch")
    name = f"_d{dims[0]}{'_mufu' if mufu else ''}_pair"
    assert f"{name}, grid {ctas} in clusters of 2, block 512," in said


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"d": 104, "dv": 8}, True),
        ({"d": 96}, False),
        ({"d": 192, "dv": 136}, False),
        # Without a mask, from 257 rows on.
        ({"nq": 256}, False),
        ({"nq": 257}, True),
        ({"nq": 300, "nk": 100}, True),
        ({"b": 1, "hq": 1, "nq": 257}, True),
        # Two tiles of 512 rows for three of 256: a third more, where they fill the GPU.
        ({"b": 10, "hq": 74, "nq": 600}, False),
        ({"b": 10, "hq": 74, "nq": 1000}, True),
        ({"b": 1, "hq": 74, "nq": 600}, True),  # two rounds of either
        ({"nq": 4096, "q_offset": 3}, True),
        # With a mask, where it costs less than a sixteenth.
        ({"causal": True}, True),
        ({"d": 136, "dv": 8, "causal": True}, True),
        ({"nq": 4096, "nk": 4096, "causal": True}, True),
        ({"nq": 2048, "nk": 2048, "causal": True}, False),
        ({"nq": 2048, "nk": 8192, "causal": True}, True),  # rows see seven eighths of the keys
        ({"window": (3000, 0)}, False),
        ({"window": (2100, 2100)}, True),
        ({"window": (None, 2**59)}, True),
        ({"b": 1, "hq": 4, "causal": True}, False),  # 64 tiles for 74 pairs
        ({"b": 1, "hq": 17, "nq": 4352, "nk": 4352, "causal": True}, False),
    ],
    ids=str,
)
def test_pairs_serve_where_a_model_says_that_they_pay(
    changes: dict[str, Any], expected: bool
) -> None:
    assert in_pairs(dc_plan(call("bfloat16", **(LONG | changes)))) == expected


def test_a_gpu_of_one_sm_has_no_pairs() -> None:
    facts = find_device("B200").to_dict() | {"sm_count": 1}
    plan = native.plan(NAME, call("float16", **LONG), native.Device.from_dict(facts))
    assert isinstance(plan, native.LaunchPlan)
    assert not in_pairs(plan)


def test_packed_sequences_that_are_long_on_average_multiply_in_pairs() -> None:
    for sequences, expected in ((10, True), (50, False)):
        problem = packed_call("bfloat16", rows=50_000, sequences=sequences, d=128)
        assert in_pairs(dc_plan(problem)) == expected


# --- e4m3 ---

E4M3 = "float8_e4m3fn"
FP8_TILES = {
    (64, 64): (256, 128),
    (128, 128): (256, 128),
    (192, 128): (256, 128),
    (256, 256): (128, 128),
}
# After the tensor maps: of q, k and v an address and strides of batch, head and block; query heads
# that share a descale of q; out_dtype.
FP8_TAIL = struct.Struct("<" + "4q" * 3 + "qi")
OUT_DTYPES = {"float16": 1, "bfloat16": 2}


def fp8_tail(plan: native.LaunchPlan) -> tuple[int, ...]:
    launch = launch_of(plan)
    end = max(spec["offset"] for spec in launch["tensor_maps"]) + 128
    return FP8_TAIL.unpack_from(bytes.fromhex(launch["params"]), end)


@pytest.mark.parametrize(
    ("dims", "serving"),
    [((16, 16), 64), ((96, 96), 128), ((64, 80), 128), ((144, 128), 192), ((192, 144), 256)],
    ids=str,
)
@every_device
def test_the_smallest_e4m3_kernel_that_holds_both_head_dims_serves(
    device: str, dims: tuple[int, int], serving: int
) -> None:
    launch = launch_of(dc_plan(call(E4M3, nq=9000, d=dims[0], dv=dims[1]), device))
    mufu = device == "B300"
    assert launch["kernel"] == f"{NAME}_attention_fwd_e4m3_d{serving}{'_mufu' * mufu}"
    assert launch["image"] == f"{NAME}/fwd_{'103_' * mufu}e4m3"
    assert launch["shared_bytes"] <= SHARED_LIMIT


@pytest.mark.parametrize("dims", FP8_TILES, ids=str)
def test_boxes_of_e4m3_tiles_count_bytes_and_those_of_the_output_16_bits(
    dims: tuple[int, int],
) -> None:
    (d, dv), (rows, keys) = dims, FP8_TILES[dims]
    plan = dc_plan(call(E4M3, b=3, hq=8, hkv=2, nq=1000, nk=777, d=d, dv=dv))
    assert (tile_of(plan).block_q, tile_of(plan).block_k) == (rows, keys)
    maps = maps_of(plan)
    for operand, columns, dtype, size, box in (
        ("q", d, E4M3, 1, 128),
        ("k", d, E4M3, 1, keys),
        ("v", dv, E4M3, 1, keys),
        ("out", dv, "bfloat16", 2, 128),
    ):
        span, swizzle = (128, B128) if columns * size % 128 == 0 else (64, B64)
        spec = maps[operand]
        assert spec["dims"][0] == columns
        assert spec["strides"][0] == columns * size
        assert spec["box"] == [span // size, box, 1, 1]
        assert (spec["dtype"], spec["swizzle"]) == (dtype, swizzle)


def test_descales_become_addresses_and_strides() -> None:
    q, k = (
        torch.empty(3, h, n, 64, dtype=torch.float8_e4m3fn, device="meta")
        for h, n in ((4, 100), (2, 300))
    )
    given = {
        "q_descale": torch.empty(3, 4, 2, device="meta"),
        "k_descale": torch.empty(3, 2, device="meta"),
        "v_descale": torch.empty(2, device="meta"),
    }
    for options, strides, names, out_dtype in (
        (
            given | {"out_dtype": torch.float16},
            (0, 8, 2, 1, 0, 2, 1, 0, 0, 0, 1, 0, 1),
            ["q", "k", "v"],
            "float16",
        ),
        ({}, (0,) * 12 + (1,), [], "bfloat16"),
    ):
        plan = dc_plan(make_problem(q, k, k, **options).as_if_on_cuda())
        assert fp8_tail(plan) == (*strides, OUT_DTYPES[out_dtype])
        slots = {s["operand"]: s["offset"] for s in launch_of(plan)["pointers"]}
        assert [name for name in "qkv" if f"{name}_descale" in slots] == names
        first = max(spec["offset"] for spec in launch_of(plan)["tensor_maps"]) + 128
        for i, name in enumerate(names):
            assert slots[f"{name}_descale"] == first + 32 * i


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"d": 270},
            "head_dim 272 (270 and columns of zeros): blackwell_dc takes multiples of 16 up to 256",
        ),
        (
            {"out_dtype": torch.float32},
            "out_dtype float32: blackwell_dc writes float16 or bfloat16",
        ),
    ],
    ids=["d", "out_dtype"],
)
def test_what_fp8_cannot_do_is_said(options: dict[str, Any], reason: str) -> None:
    answer = native.plan(NAME, call(E4M3, **options), find_device("B200"))
    assert isinstance(answer, list)
    assert any(said.startswith(reason) for said in answer)


def test_e5m2_goes_to_ada() -> None:
    (reason, *_) = native.plan(NAME, call("float8_e5m2"), find_device("B200"))
    assert reason.startswith("dtype float8_e5m2: blackwell_dc takes float16, bfloat16 and ")
