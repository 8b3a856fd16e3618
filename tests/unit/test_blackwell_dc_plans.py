"""Which of its kernels blackwell_dc plans, their grid and boxes, what plans say."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from plan_cases import call, kernels_built, launch_of, maps_of, packed_call, plan_of, row_tiles

from archflash import _archflash as native
from archflash._api import find_device
from archflash._dispatch import plan_facts

NAME = "blackwell_dc"
DTYPES = {"float16": "f16", "bfloat16": "bf16"}
DEVICES = ("B200", "B300")
SHARED_LIMIT = 227 * 1024
B64, B128 = 2, 3  # swizzles
TILES_OFFSET = 264  # of Params::tiles
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
    launch = launch_of(dc_plan(call(dtype, nq=300, d=dims[0], dv=dims[1]), device))
    assert launch["kernel"] == f"{NAME}_attention_fwd_{DTYPES[dtype]}_d{serving}"
    assert launch["image"] == f"{NAME}/fwd_{DTYPES[dtype]}"
    assert launch["block"] == [512, 1, 1]


@every_dtype
def test_every_kernel_that_was_built_is_chosen_somewhere(dtype: str) -> None:
    built = kernels_built(f"{NAME}/fwd_{DTYPES[dtype]}")
    plans = [dc_plan(call(dtype, d=d, dv=dv)) for d, dv in TILES]
    assert {str(launch_of(plan)["kernel"]) for plan in plans} == built


@every_head_dim
@every_device
def test_one_cta_per_sm_goes_from_tile_to_tile(device: str, dims: tuple[int, int]) -> None:
    rows, keys = TILES[dims]
    for batch, options in ((1, {}), (64, {"causal": True})):
        problem = call("float16", b=batch, nq=1000, nk=300, d=dims[0], dv=dims[1], **options)
        plan = dc_plan(problem, device)
        tiles = batch * 4 * -(-1000 // rows)
        assert row_tiles(plan) == tiles
        launch = launch_of(plan)
        assert launch["grid"] == [min(tiles, find_device(device).sm_count), 1, 1]
        assert launch["shared_bytes"] <= SHARED_LIMIT
        (told,) = struct.unpack_from("<i", bytes.fromhex(launch["params"]), TILES_OFFSET)
        assert told == tiles
        assert dict(plan.notes)["tile"].startswith(f"{rows} query rows x {keys} keys")


@every_head_dim
@every_dtype
def test_maps_describe_the_tensors_and_boxes_the_tiles(dtype: str, dims: tuple[int, int]) -> None:
    d, dv = dims
    keys = TILES[dims][1]
    plan = dc_plan(call(dtype, b=3, hq=8, hkv=2, nq=1000, nk=777, d=d, dv=dv))
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
    notes: dict[str, Any] = dict(dc_plan(call("bfloat16", nq=4096, d=128)).notes)
    assert notes["warps"] == "8 softmax, 4 correction, 1 each for products, loads and stores"
    assert notes["registers"] == "192 softmax, 80 correction, 48 others (setmaxnreg)"
    assert notes["stages"] == "3 that K and V share, 32 barriers"
    assert dict(dc_plan(call("bfloat16", d=256)).notes)["warps"].startswith("4 softmax")
    assert dict(dc_plan(call("bfloat16", d=192, dv=128)).notes)["stages"].startswith("2 of K, 1 ")


# --- pairs of CTAs ---

LONG = {"nq": 8192, "d": 128, "b": 2, "hq": 16}


def in_pairs(plan: native.LaunchPlan) -> bool:
    launch = launch_of(plan)
    pair = str(launch["kernel"]).endswith("_d128_pair")
    assert launch["cluster"] == [1 + pair, 1, 1]
    assert dict(plan.notes)["products"].startswith("2 CTAs" if pair else "1 CTA:")
    return pair


@every_dtype
@every_device
def test_long_calls_multiply_in_pairs(device: str, dtype: str) -> None:
    plan = dc_plan(call(dtype, **LONG), device)
    assert in_pairs(plan)
    launch = launch_of(plan)
    assert launch["image"] == f"{NAME}/fwd_pair"
    assert launch["kernel"] in kernels_built(launch["image"])
    assert len(kernels_built(launch["image"])) == len(DTYPES)
    sms = find_device(device).sm_count
    assert launch["grid"] == [sms // 2 * 2, 1, 1]
    assert launch["shared_bytes"] <= SHARED_LIMIT
    assert row_tiles(plan) == 2 * 16 * 8192 // 512
    maps = maps_of(plan)
    # A CTA brings half of a block's keys, all columns, and of all its keys half of the columns.
    assert [maps[name]["box"] for name in ("q", "k", "v", "out")] == [
        [64, rows, 1, 1] for rows in (128, 64, 128, 128)
    ]
    notes = dict(plan.notes)
    assert notes["tile"].startswith("512 query rows x 128 keys")
    assert notes["stages"] == "6 that K and V share, half a block each, 44 barriers"
    assert notes["CTAs"].endswith(" SMs, in pairs")
    (said,) = (text for name, text in plan_facts(plan) if name == "launch")
    assert f"_d128_pair, grid {sms // 2 * 2} in clusters of 2, block 512," in said


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"causal": True}, True),
        ({"d": 104, "dv": 8}, True),
        ({"d": 96}, False),
        ({"d": 192, "dv": 128}, False),
        ({"nq": 4096}, True),
        ({"nq": 4095}, False),  # 256 rows that a tile does not need are more than 1/16
        ({"nk": 4095}, False),
        ({"nq": 4096, "nk": 4096, "causal": True}, False),  # half of the keys are seen
        ({"nq": 4096, "nk": 8192, "causal": True}, True),  # all but a quarter
        ({"nq": 4096, "nk": 8192, "causal": True, "q_offset": 0}, False),
        ({"window": (3000, 0)}, False),
        ({"window": (2100, 2100)}, True),
        ({"window": (None, 2**59)}, True),
        ({"b": 1, "hq": 4}, False),  # 64 tiles for 74 pairs
        ({"b": 1, "hq": 5}, True),  # 80 for 74 pairs; 160 for 148 CTAs are two rounds too
        # 12 heads of 17 tiles each, in two rounds; of 9 tiles of twice the rows, 108, too.
        ({"b": 1, "hq": 12, "nq": 4352}, True),
        # 17 heads: 289 tiles are two rounds, 153 of twice the rows three.
        ({"b": 1, "hq": 17, "nq": 4352}, False),
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
    assert launch_of(plan)["grid"] == [1, 1, 1]


def test_packed_sequences_that_are_long_on_average_multiply_in_pairs() -> None:
    for sequences, expected in ((10, True), (20, False)):
        problem = packed_call("bfloat16", rows=50_000, sequences=sequences, d=128)
        assert in_pairs(dc_plan(problem)) == expected
