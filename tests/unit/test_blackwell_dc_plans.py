"""Which of its kernels blackwell_dc plans, their grid and boxes, what plans say."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from plan_cases import call, launch_of, maps_of, plan_of, row_tiles

import archflash
from archflash import _archflash as native
from archflash._api import find_device

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
    file = Path(archflash.__file__).parent / "_kernels" / NAME / f"fwd_{DTYPES[dtype]}.json"
    built = {name for names in json.loads(file.read_text()).values() for name in names}
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
