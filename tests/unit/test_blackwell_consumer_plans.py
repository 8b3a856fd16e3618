"""Which of its kernels blackwell_consumer plans, its tensor maps, what TMA cannot describe."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest
from plan_cases import (
    HEAD_DIMS,
    call,
    every_head_dim,
    every_kind_of_head_dims,
    kernels_built,
    large_call,
    launch_of,
    maps_of,
    packed_call,
    plan_of,
    tile_of,
)

from archflash import _archflash as native
from archflash._api import find_device

KB = 1024
NAME = "blackwell_consumer"
DTYPES = {"float16": "f16", "bfloat16": "bf16"}
HOME = ("RTX 5060 laptop", "RTX 5080", "RTX 5090", "RTX PRO 6000", "GB10")
DEVICES = (*HOME, "H200")
B64, B128 = 2, 3  # swizzles

every_device = pytest.mark.parametrize("device", DEVICES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def consumer(problem: native.Problem, device: str) -> native.LaunchPlan:
    return plan_of(problem, device, NAME)


def variant(plan: native.LaunchPlan) -> str:
    return str(tile_of(plan).name)


def largest(device: str, dims: tuple[int, int]) -> str:
    """The kernel for a call that fills the GPU: 9.0 has room for two CTAs of 99 KB in an SM."""
    pair = device == "H200" and dims == (256, 256)
    return f"d{dims[0]}_pair" if pair else f"d{dims[0]}_large"


def smallest(device: str, dims: tuple[int, int]) -> str:
    if device == "H200" and dims == (256, 256):
        return "d256_pair"
    return "d64_small" if dims[0] == 64 else f"d{dims[0]}_few"


# --- which kernel ---


@every_head_dim
@every_dtype
@every_device
def test_a_call_that_fills_the_gpu_gets_the_largest_tiles(
    device: str, dtype: str, dims: tuple[int, int]
) -> None:
    plan = consumer(large_call(dtype, dims), device)
    launch = launch_of(plan)
    assert launch["kernel"] == f"{NAME}_attention_fwd_{DTYPES[dtype]}_{largest(device, dims)}"
    assert launch["image"] == f"{NAME}/fwd_{DTYPES[dtype]}"
    assert launch["shared_bytes"] <= 99 * KB  # what 12.x has, on 9.0 too


@every_head_dim
@every_dtype
@every_device
def test_a_call_of_few_tiles_gets_small_ones(
    device: str, dtype: str, dims: tuple[int, int]
) -> None:
    problem = call(dtype, b=1, hq=1, nq=64, nk=128, d=dims[0], dv=dims[1])
    assert variant(consumer(problem, device)) == smallest(device, dims)


@every_device
def test_a_call_of_few_keys_has_one_block_of_them(device: str) -> None:
    def chosen(keys: int) -> str:
        return variant(consumer(call("float16", b=16, hq=32, nq=1024, nk=keys), device))

    assert chosen(1) == chosen(77) == chosen(80) == "d64_short"
    assert chosen(81) == largest(device, (64, 64))


@every_kind_of_head_dims
@every_device
def test_the_smallest_kernel_that_holds_both_head_dims_serves(
    device: str, dims: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert variant(consumer(large_call("bfloat16", dims), device)) == largest(device, expected)


@pytest.mark.slow
@every_dtype
def test_every_kernel_that_was_built_is_chosen_somewhere(dtype: str) -> None:
    built = kernels_built(f"{NAME}/fwd_{DTYPES[dtype]}")
    chosen = {
        str(launch_of(consumer(call(dtype, b=b, hq=8, nq=nq, d=d, dv=dv), device))["kernel"])
        for device in DEVICES
        for d, dv in HEAD_DIMS
        for b in (1, 2, 4, 8, 16, 64)
        for nq in (64, 512, 1024, 2048)
    }
    uneven = consumer(call(dtype, b=2, hq=32, nq=1024, causal=True), "RTX 5090")
    chosen |= set(uneven.kernels)
    for nq in (1, 64):
        plan = consumer(call(dtype, b=1, hq=8, nq=nq, nk=8192), "RTX 5090")
        chosen |= set(plan.kernels)
    assert chosen == built


def test_too_little_shared_memory_is_a_reason() -> None:
    facts = find_device("RTX 5090").to_dict()
    small = native.Device.from_dict(facts | {"name": "small", "shared_per_block": 40 * KB})
    (reason,) = native.plan(NAME, call("float16", d=256), small)
    assert reason.startswith("shared memory: small gives a CTA 40960 bytes and ")
    assert reason.endswith("use another GPU or use implementation='torch'")


# --- the grid and what is said ---


@every_head_dim
@every_device
def test_ctas_go_on_to_the_next_of_equal_tiles_where_one_fits_an_sm_or_keys_are_few(
    device: str, dims: tuple[int, int]
) -> None:
    sm_count = find_device(device).sm_count
    for batch, nk in ((1, 300), (64, 300), (64, 512), (64, 513)):
        shape: dict[str, Any] = {"b": batch, "nq": 1000, "nk": nk, "d": dims[0], "dv": dims[1]}
        plan = consumer(call("float16", **shape), device)
        tiles = batch * 4 * -(-1000 // tile_of(plan).block_q)
        assert tile_of(plan).tiles == tiles
        resident = tile_of(plan).ctas_per_sm
        stays = resident == 1 or nk <= 512
        ctas = min(tiles, resident * sm_count) if stays else tiles
        assert launch_of(plan)["grid"] == [ctas, 1, 1]
        (told,) = struct.unpack_from("<i", bytes.fromhex(launch_of(plan)["params"]), 272)
        assert told == tiles


@every_device
def test_unequal_tiles_go_to_whoever_is_done(device: str) -> None:
    for options in ({"causal": True}, {"window": (30, None)}, {"window": (None, 5)}):
        plan = consumer(call("float16", b=64, nq=1000, d=128, **options), device)
        assert launch_of(plan)["grid"] == [tile_of(plan).tiles, 1, 1]
    plan = consumer(packed_call("float16", rows=100_000, sequences=50), device)
    assert launch_of(plan)["grid"] == [tile_of(plan).tiles, 1, 1]


@pytest.mark.parametrize("device", HOME)
def test_the_plan_shows_stages_barriers_registers_and_ctas(device: str) -> None:
    notes = dict(consumer(large_call("float16", (128, 128)), device).notes)
    assert re.fullmatch(r"\d+ of K and of V, \d+ barriers", notes["stages"])
    assert re.search(r"^\d+ of (16|32) rows.*, 1 producer$", notes["warps"])
    assert re.search(r"setmaxnreg|the same for all", notes["registers"])
    assert f"per SM on {find_device(device).sm_count} SMs" in notes["CTAs"]


# --- tensor maps ---


@every_head_dim
@every_dtype
def test_maps_describe_the_tensors_and_boxes_the_tiles(dtype: str, dims: tuple[int, int]) -> None:
    d, dv = dims
    plan = consumer(call(dtype, b=3, hq=8, hkv=2, nq=1000, nk=777, d=d, dv=dv), "RTX 5090")
    rows, keys = tile_of(plan).block_q, tile_of(plan).block_k
    slab, swizzle = (64, B128) if d % 64 == 0 else (32, B64)
    for operand, columns, length, heads, box in (
        ("q", d, 1000, 8, rows),
        ("k", d, 777, 2, keys),
        ("v", dv, 777, 2, keys),
    ):
        spec = maps_of(plan)[operand]
        row = 2 * columns
        assert spec["dims"] == [columns, length, heads, 3]
        assert spec["strides"] == [row, row * length, row * length * heads]
        assert spec["box"] == [slab, box, 1, 1]
        assert (spec["dtype"], spec["swizzle"]) == (dtype, swizzle)
        assert (spec["addend"], spec["nan_fill"], spec["offset"] % 64) == (0, False, 0)
