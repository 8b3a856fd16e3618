"""Which of its kernels ampere plans, by shared memory, head dim and size, and in which order."""

from __future__ import annotations

import re

import pytest
from plan_cases import (
    HEAD_DIMS,
    call,
    every_head_dim,
    every_kind_of_head_dims,
    kernels_built,
    large_call,
    packed_call,
    plan_of,
    tile_of,
)
from tests.many_cases import one_test_for_each

from archflash import _archflash as native
from archflash._api import find_device

KB = 1024
RESERVED_SHARED_BYTES = 1024  # CUDA: taken from the SM by each CTA, from 8.0 on
DTYPES = {"float16": "f16", "bfloat16": "bf16"}
# The KB of shared memory that a CTA can have, and GPUs with it.
GPUS = {163: ("A100",), 99: ("RTX 4090", "RTX 5090", "A10G"), 227: ("H200", "B200")}
DEVICES = {device: kilobytes for kilobytes, names in GPUS.items() for device in names}

# For calls that fill the GPU: the kernel and how many of its CTAs an SM holds.
CHOICES = {
    163: {
        (64, 64): ("d64_large", 2),
        (96, 96): ("d96_large", 2),
        (128, 128): ("d128_medium", 2),
        (192, 128): ("d192_medium", 2),
        (256, 256): ("d256_medium", 1),
    },
    99: {
        (64, 64): ("d64_medium", 2),
        (96, 96): ("d96_medium", 2),
        (128, 128): ("d128_small", 2),
        (192, 128): ("d192_medium", 1),
        (256, 256): ("d256_small", 1),
    },
    227: {
        (64, 64): ("d64_large", 2),
        (96, 96): ("d96_large", 2),
        (128, 128): ("d128_large", 2),
        (192, 128): ("d192_large", 2),
        (256, 256): ("d256_large", 2),
    },
}
# For calls of few CTAs or short sequences.
FEW = {(64, 64): "d64_few", (128, 128): "d128_few"}

every_device = pytest.mark.parametrize("device", DEVICES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def ampere(problem: native.Problem, device: str) -> native.LaunchPlan:
    return plan_of(problem, device, "ampere")


def kernel(plan: native.LaunchPlan) -> str:
    (launch,) = plan.to_dict()["launches"]
    return str(launch["kernel"])


def variant(plan: native.LaunchPlan) -> str:
    return str(tile_of(plan).name)


def claimed_per_sm(reason: str, kilobytes: int) -> int | None:
    """How many CTAs per SM a variant's reason speaks of, for that much shared memory."""
    parts = [part for part in reason.split(", ") if f" in {kilobytes} KB" in part] or [reason]
    found = re.search(r"\b(one|two)(?: CTAs?\b| in\b)", parts[0])
    return {"one": 1, "two": 2}[found[1]] if found else None


# --- which kernel ---


@every_head_dim
@every_dtype
@every_device
def test_a_call_that_fills_the_gpu_gets_the_kernel_for_its_shared_memory(
    device: str, dtype: str, dims: tuple[int, int]
) -> None:
    kilobytes, limits = DEVICES[device], find_device(device)
    assert limits.shared_per_block == kilobytes * KB
    plan = ampere(large_call(dtype, dims), device)
    name, per_sm = CHOICES[kilobytes][dims]
    assert kernel(plan) == f"ampere_attention_fwd_{DTYPES[dtype]}_{name}"
    (launch,) = plan.to_dict()["launches"]
    assert launch["image"] == f"ampere/fwd_{DTYPES[dtype]}"
    assert launch["shared_bytes"] <= limits.shared_per_block
    assert tile_of(plan).ctas_per_sm == per_sm


@every_head_dim
@every_device
def test_as_many_ctas_fit_an_sm_as_the_variants_reason_claims(
    device: str, dims: tuple[int, int]
) -> None:
    plan = ampere(large_call("float16", dims), device)
    (launch,) = plan.to_dict()["launches"]
    limits = find_device(device)
    by_shared = limits.shared_per_sm // (launch["shared_bytes"] + RESERVED_SHARED_BYTES)
    assert 1 <= tile_of(plan).ctas_per_sm <= by_shared
    assert tile_of(plan).ctas_per_sm * launch["block"][0] <= limits.threads_per_sm
    reason = tile_of(plan).reason
    if variant(plan) != "d64_medium":  # its reason speaks of keys
        assert claimed_per_sm(reason, DEVICES[device]) == tile_of(plan).ctas_per_sm
    for named in re.findall(r"(\d+) KB", reason):
        assert int(named) in GPUS


@every_kind_of_head_dims
@every_device
def test_the_smallest_kernel_that_holds_both_head_dims_serves(
    device: str, dims: tuple[int, int], expected: tuple[int, int]
) -> None:
    plan = ampere(large_call("bfloat16", dims), device)
    assert variant(plan) == CHOICES[DEVICES[device]][expected][0]


@every_head_dim
@every_dtype
@every_device
def test_a_call_of_few_ctas_gets_smaller_tiles_where_there_are_some(
    device: str, dtype: str, dims: tuple[int, int]
) -> None:
    plan = ampere(call(dtype, b=1, hq=2, nq=256, d=dims[0], dv=dims[1]), device)
    assert variant(plan) == FEW.get(dims, CHOICES[DEVICES[device]][dims][0])
    (launch,) = plan.to_dict()["launches"]
    assert launch["shared_bytes"] <= find_device(device).shared_per_block


@pytest.mark.parametrize("d", [64, 128])
@every_device
def test_large_tiles_begin_where_their_ctas_outnumber_the_sms(device: str, d: int) -> None:
    sm_count = find_device(device).sm_count

    def chosen(heads: int) -> str:
        return variant(ampere(call("float16", b=1, hq=heads, nq=128, nk=512, d=d), device))

    assert chosen(sm_count) == FEW[d, d]
    assert chosen(sm_count + 1) == CHOICES[DEVICES[device]][d, d][0]


@every_device
def test_unequal_tiles_of_128_rows_begin_at_two_for_each_sm(device: str) -> None:
    """With fewer of them the longest one takes all the time, and 64 rows make it shorter."""
    heads = 2 * find_device(device).sm_count

    def chosen(heads: int) -> str:
        problem = call("float16", b=1, hq=heads, nq=128, nk=512, causal=True)
        return variant(ampere(problem, device))

    assert chosen(heads) == "d64_few"
    assert chosen(heads + 1) == CHOICES[DEVICES[device]][64, 64][0]


@pytest.mark.parametrize("d", [64, 128])
@every_device
def test_tiles_of_128_rows_are_for_sequences_that_use_more_than_half(device: str, d: int) -> None:
    def chosen(rows: int) -> str:
        return variant(ampere(call("float16", b=64, hq=32, nq=rows, nk=512, d=d), device))

    assert chosen(64) == FEW[d, d]
    assert chosen(65) == CHOICES[DEVICES[device]][d, d][0]


@every_device
def test_packed_sequences_count_with_their_average_length(device: str) -> None:
    def chosen(sequences: int) -> str:
        problem = packed_call("float16", rows=64 * 1024, sequences=sequences)
        return variant(ampere(problem, device))

    assert chosen(1024) == "d64_few"
    assert chosen(512) == CHOICES[DEVICES[device]][64, 64][0]


@pytest.mark.parametrize("device", GPUS[163] + GPUS[227])
def test_128_keys_at_a_time_are_for_more_than_64_keys(device: str) -> None:
    def chosen(keys: int) -> str:
        return variant(ampere(call("float16", b=16, hq=32, nq=1024, nk=keys), device))

    assert chosen(64) == "d64_medium"
    assert chosen(65) == "d64_large"


@every_dtype
def test_every_kernel_that_was_built_is_chosen_somewhere(dtype: str) -> None:
    built = kernels_built(f"ampere/fwd_{DTYPES[dtype]}")
    chosen = {
        kernel(ampere(problem, device))
        for device in DEVICES
        for dims in HEAD_DIMS
        for problem in (large_call(dtype, dims), call(dtype, nq=1, d=dims[0], dv=dims[1]))
    }
    assert chosen == built
    assert len(built) == 14


def test_too_little_shared_memory_is_a_reason_and_only_where_no_kernel_fits() -> None:
    facts = find_device("A100").to_dict()
    small = native.Device.from_dict(facts | {"name": "small", "shared_per_block": 64 * KB})
    assert isinstance(native.plan("ampere", call("float16"), small), native.LaunchPlan)
    (reason,) = native.plan("ampere", call("float16", d=256), small)
    assert reason.startswith("shared memory: small gives a CTA 65536 bytes and ampere needs ")
    assert reason.endswith("use another GPU or use implementation='torch'")


# --- the grid ---


@one_test_for_each(
    {
        device: [
            (device, dims, rows)
            for dims in HEAD_DIMS
            for rows in (1, 63, 64, 65, 127, 128, 129, 1000)
        ]
        for device in DEVICES
    }
)
def test_the_grid_covers_all_rows_and_no_tile_more(
    device: str, dims: tuple[int, int], rows: int
) -> None:
    for batch, heads in ((1, 3), (16, 32)):
        problem = call("float16", b=batch, hq=heads, nq=rows, nk=300, d=dims[0], dv=dims[1])
        plan = ampere(problem, device)
        (launch,) = plan.to_dict()["launches"]
        tile = tile_of(plan).block_q
        tiles, rest = divmod(launch["grid"][0], batch * heads)
        assert (rest, launch["grid"][1:]) == (0, [1, 1])
        assert (tiles - 1) * tile < rows <= tiles * tile
        warps = tile_of(plan).warps
        assert warps * tile_of(plan).rows_per_warp == tile
        assert launch["block"] == [32 * warps, 1, 1]


# --- the order of CTAs ---


def test_packed_sequences_go_in_their_own_order() -> None:
    plan = ampere(packed_call("float16"), "A100")
    assert dict(plan.notes)["order"] == "by sequence, last row tiles first"
