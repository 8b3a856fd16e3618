"""Which of its kernels ampere plans, by shared memory, head dim and size, and in which order."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
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
from archflash._api import find_device, make_problem

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
FEW = {(64, 64): "d64_groups", (96, 96): "d96_few", (128, 128): "d128_few"}

every_device = pytest.mark.parametrize("device", DEVICES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def ampere(problem: native.Problem, device: str) -> native.LaunchPlan:
    return plan_of(problem, device, "ampere")


def with_sinks(dtype: str, **options: Any) -> native.Problem:
    """A call with sinks, so that the kernels for every key seen do not serve it."""
    return call(dtype, sinks=True, **options)


def large_with_sinks(dtype: str, dims: tuple[int, int]) -> native.Problem:
    """The same, which fills every GPU."""
    return with_sinks(dtype, b=16, hq=32, nq=2048, d=dims[0], dv=dims[1])


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
    plan = ampere(large_with_sinks(dtype, dims), device)
    name, per_sm = CHOICES[kilobytes][dims]
    assert kernel(plan) == f"ampere_attention_fwd_{DTYPES[dtype]}_{name}"
    (launch,) = plan.to_dict()["launches"]
    # Kernels that no GPU with 227 KB takes have no machine code for one: they are in fwd_small.
    file = (
        "fwd" if kilobytes == 227 or name.startswith("d64") or name == "d96_large" else "fwd_small"
    )
    assert launch["image"] == f"ampere/{file}_{DTYPES[dtype]}"
    assert launch["shared_bytes"] <= limits.shared_per_block
    assert tile_of(plan).ctas_per_sm == per_sm


@every_head_dim
@every_device
def test_as_many_ctas_fit_an_sm_as_the_variants_reason_claims(
    device: str, dims: tuple[int, int]
) -> None:
    plan = ampere(large_with_sinks("float16", dims), device)
    (launch,) = plan.to_dict()["launches"]
    limits = find_device(device)
    by_shared = limits.shared_per_sm // (launch["shared_bytes"] + RESERVED_SHARED_BYTES)
    assert 1 <= tile_of(plan).ctas_per_sm <= by_shared
    assert tile_of(plan).ctas_per_sm * launch["block"][0] <= limits.threads_per_sm
    reason = tile_of(plan).reason
    assert claimed_per_sm(reason, DEVICES[device]) == tile_of(plan).ctas_per_sm
    for named in re.findall(r"(\d+) KB", reason):
        assert int(named) in GPUS


@every_kind_of_head_dims
@every_device
def test_the_smallest_kernel_that_holds_both_head_dims_serves(
    device: str, dims: tuple[int, int], expected: tuple[int, int]
) -> None:
    plan = ampere(large_with_sinks("bfloat16", dims), device)
    name = "d32_large" if max(dims) <= 32 else CHOICES[DEVICES[device]][expected][0]
    assert variant(plan) == name


@every_device
def test_only_many_rows_have_a_kernel_for_head_dimensions_up_to_32(device: str) -> None:
    def chosen(**options: Any) -> str:
        given = {"b": 32, "hq": 32, "nq": 512, "nk": 512, "d": 32} | options
        return variant(ampere(with_sinks("float16", **given), device))

    assert chosen() == "d32_large"
    assert chosen(nk=64) == "d64_medium"
    assert chosen(num_splits=2) == chosen(batch_invariant=True) == "d64_few"
    assert chosen(nq=60) == "d32_few"
    few = ampere(with_sinks("float16", b=1, hq=2, nq=256, d=32), device)
    assert variant(few) == "d64_groups"


@every_head_dim
@every_dtype
@every_device
def test_a_call_of_few_ctas_gets_smaller_tiles_where_there_are_some(
    device: str, dtype: str, dims: tuple[int, int]
) -> None:
    plan = ampere(with_sinks(dtype, b=1, hq=2, nq=256, d=dims[0], dv=dims[1]), device)
    assert variant(plan) == FEW.get(dims, CHOICES[DEVICES[device]][dims][0])
    (launch,) = plan.to_dict()["launches"]
    assert launch["shared_bytes"] <= find_device(device).shared_per_block


@pytest.mark.parametrize("d", [64, 128])
@every_device
def test_large_tiles_begin_where_their_ctas_outnumber_the_sms(device: str, d: int) -> None:
    """Up to 96 columns in 99 KB at half as many, since an SM has room for one CTA of 64 rows."""
    most = find_device(device).sm_count // (2 if DEVICES[device] == 99 and d == 64 else 1)

    def chosen(heads: int) -> str:
        return variant(ampere(with_sinks("float16", b=1, hq=heads, nq=128, nk=512, d=d), device))

    assert chosen(most) == FEW[d, d]
    assert chosen(most + 1) == CHOICES[DEVICES[device]][d, d][0]


@every_device
def test_unequal_tiles_of_128_rows_begin_at_two_for_each_sm(device: str) -> None:
    """With fewer of them the longest one takes all the time, and 64 rows make it shorter. In 99 KB
    they begin at three for four SMs.
    """
    heads = int((0.75 if DEVICES[device] == 99 else 2) * find_device(device).sm_count)

    def chosen(heads: int) -> str:
        problem = with_sinks("float16", b=1, hq=heads, nq=128, nk=512, causal=True)
        return variant(ampere(problem, device))

    assert chosen(heads) == "d64_groups"
    assert chosen(heads + 1) == CHOICES[DEVICES[device]][64, 64][0]


@pytest.mark.parametrize("d", [64, 128])
@every_device
def test_tiles_of_128_rows_are_for_sequences_that_use_more_than_half(device: str, d: int) -> None:
    def chosen(rows: int) -> str:
        return variant(ampere(with_sinks("float16", b=64, hq=32, nq=rows, nk=512, d=d), device))

    assert chosen(64) == FEW[d, d]
    assert chosen(65) == CHOICES[DEVICES[device]][d, d][0]


@every_device
def test_packed_sequences_count_with_their_average_length(device: str) -> None:
    def chosen(sequences: int) -> str:
        problem = packed_call("float16", rows=64 * 1024, sequences=sequences)
        return variant(ampere(problem, device))

    assert chosen(1024) == "d64_groups"
    assert chosen(512) == CHOICES[DEVICES[device]][64, 64][0]


@every_device
def test_a_call_of_few_keys_has_one_block_of_them(device: str) -> None:
    """77 keys are those of the text that many image models look at."""

    def chosen(keys: int) -> str:
        return variant(ampere(with_sinks("float16", b=16, hq=32, nq=1024, nk=keys), device))

    assert chosen(1) == chosen(64) == "d64_medium"
    assert chosen(65) == chosen(77) == chosen(80) == "d64_short"
    assert chosen(81) == CHOICES[DEVICES[device]][64, 64][0]


@every_device
def test_few_rows_and_keys_have_the_kernel_with_the_most_ctas(device: str) -> None:
    """`d64_short` has three on an SM in 99 KB, where the others have one, and four in 163 KB."""

    def chosen(rows: int, keys: int, **options: Any) -> str:
        problem = call("float16", b=512, hq=8, nq=rows, nk=keys, **options)
        return variant(ampere(problem, device))

    small = DEVICES[device] < 227
    assert (chosen(20, 20) == "d64_short") == (chosen(64, 64, causal=True) == "d64_short") == small
    # The decoding kernels share out keys over their warps: more than one row wants more of them.
    assert chosen(1, 17) == chosen(16, 81) == "d64_decode_plain"
    assert chosen(1, 16) == chosen(2, 20) == chosen(20, 20)
    assert chosen(16, 80) == chosen(20, 80)


def test_only_the_kernels_for_few_rows_keep_the_bits_of_a_row() -> None:
    for keys in (80, 512):
        problem = call("float16", b=1, hq=2, nq=256, nk=keys, batch_invariant=True)
        assert variant(ampere(problem, "A100")) == "d64_few"


@pytest.mark.parametrize(
    ("shape", "chosen"),
    [
        ((1, 4, 2, 2048, 2048), "d128_groups_few"),
        ((1, 6, 2, 3000, 3000), "d128_groups_few"),
        ((1, 2, 2, 2048, 2048), "d128_few"),  # half as many tiles as SMs: their keys are split
        ((1, 4, 4, 4096, 4096), "d128_few"),
        ((1, 8, 8, 100, 2048), "d128_few"),
        ((2, 16, 4, 1024, 1024), "d128_large"),  # four tiles for each SM
    ],
)
def test_few_causal_tiles_have_two_warps_for_16_rows(
    shape: tuple[int, int, int, int, int], chosen: str
) -> None:
    b, hq, hkv, nq, nk = shape
    problem = with_sinks("bfloat16", b=b, hq=hq, hkv=hkv, nq=nq, nk=nk, d=128, causal=True)
    assert variant(ampere(problem, "H200")) == chosen


@pytest.mark.parametrize(
    ("shape", "d", "splits"),
    [
        ((1, 4, 4, 2048, 2048), 256, 3),
        ((1, 2, 2, 4096, 4096), 128, 4),
        ((1, 3, 3, 4096, 4096), 128, 3),
        ((1, 4, 4, 4096, 4096), 128, 2),
        ((1, 2, 2, 1024, 1024), 128, 8),
    ],
)
def test_causal_tiles_count_with_their_mean_length_when_keys_are_split(
    shape: tuple[int, int, int, int, int], d: int, splits: int
) -> None:
    b, hq, hkv, nq, nk = shape
    problem = with_sinks("bfloat16", b=b, hq=hq, hkv=hkv, nq=nq, nk=nk, d=d, causal=True)
    plan = ampere(problem, "H200")
    assert plan.tile is not None
    assert plan.tile.splits == splits


@every_dtype
def test_every_kernel_that_was_built_is_chosen_somewhere(dtype: str) -> None:
    word = DTYPES[dtype]
    images = ("fwd", "fwd_small", "dense", "dense_small", "decode", "decode_joined", "shares")
    built = set().union(*(kernels_built(f"ampere/{image}_{word}") for image in images))
    # Others are in the tests of dropout, and of caches and packed sequences.
    built = {kernel for kernel in built if not re.search(r"_dropout$|_d\d+_decode$", kernel)}
    keys = torch.empty(8192, dtype=torch.bool, device="meta")
    chosen = {
        name
        for device in DEVICES
        for dims in ((32, 32), (80, 80), (160, 160), (192, 192), *HEAD_DIMS)
        for problem in (
            large_call(dtype, dims),
            large_with_sinks(dtype, dims),
            call(dtype, b=32, hq=32, nq=1024, nk=77, d=dims[0], dv=dims[1], sinks=True),
            call(dtype, b=8, hq=8, nq=950, d=dims[0], dv=dims[1]),
            call(dtype, b=1, hq=32, nq=512, nk=8192, d=dims[0], dv=dims[1], sinks=True),
            call(dtype, b=1, hq=28, nq=512, nk=8192, d=dims[0], dv=dims[1], sinks=True),
            call(dtype, b=4, hq=60, hkv=60, nq=130, nk=130, d=dims[0], dv=dims[1], sinks=True),
            call(dtype, b=4, hq=60, hkv=60, nq=60, nk=130, d=dims[0], dv=dims[1], sinks=True),
            call(dtype, b=1, hq=100, nq=128, nk=512, d=dims[0], dv=dims[1]),
            call(dtype, nq=17, d=dims[0], dv=dims[1]),
            *(
                call(dtype, b=1, hq=heads, nq=rows, d=dims[0], dv=dims[1], causal=True, sinks=sinks)
                for heads, rows in ((8, 1024), (2, 2048), (128, 512), (8, 128), (4, 4096))
                for sinks in (False, True)
            ),
            call(dtype, b=4, hq=60, hkv=60, nq=130, nk=130, d=dims[0], dv=dims[1]),
            call(dtype, b=4, hq=60, hkv=60, nq=60, nk=130, d=dims[0], dv=dims[1]),
            call(dtype, nq=17, nk=8192, d=dims[0], dv=dims[1]),
            call(dtype, nq=17, nk=77, d=dims[0], dv=dims[1]),
            call(dtype, nq=1, nk=8192, d=dims[0], dv=dims[1]),
            call(dtype, nq=1, nk=8192, d=dims[0], dv=dims[1], attn_mask=keys),
            call(dtype, nq=1, nk=1024, d=dims[0], dv=dims[1]),
            call(dtype, nq=1, nk=1024, d=dims[0], dv=dims[1], attn_mask=keys[:1024]),
        )
        for name in ampere(problem, device).kernels
    }
    assert chosen == built
    assert len(built) == 71


# --- every query sees every key ---


# For 227, 163 and 99 KB.
DENSE = {
    (32, 32): ("d32_dense", "d32_dense", "d32_dense_medium"),
    (64, 64): ("d64_dense", "d64_dense", "d64_dense_small"),
    (72, 80): ("d80_dense", "d80_dense", "d80_dense_small"),
    (88, 96): ("d96_dense", "d96_dense", "d96_dense_small"),
    (128, 128): ("d128_dense", "d128_dense_medium", "d128_dense_small"),
    (136, 160): ("d160_dense", "d160_dense", "d192_dense"),
    (168, 192): ("d192_dense", "d192_dense", "d192_dense"),
    (208, 256): ("d256_dense", "d256_dense_medium", "d256_dense"),
}


@pytest.mark.parametrize("dims", DENSE)
@every_device
def test_large_calls_without_masks_have_kernels_of_their_own(
    device: str, dims: tuple[int, int]
) -> None:
    """On GPUs that they have machine code for. Up to 128 columns two CTAs share an SM."""
    name = DENSE[dims][(227, 163, 99).index(DEVICES[device])]
    plan = ampere(large_call("bfloat16", dims), device)
    has_code = find_device(device).major <= 9
    assert (variant(plan) == name) == has_code
    (launch,) = plan.to_dict()["launches"]
    if not has_code:
        assert launch["image"] in ("ampere/fwd_bf16", "ampere/fwd_small_bf16")
        return
    of_8x = name.endswith("_small") or name in ("d128_dense_medium", "d256_dense_medium")
    assert launch["image"] == ("ampere/dense_small_bf16" if of_8x else "ampere/dense_bf16")
    if max(dims) <= 128:
        assert tile_of(plan).ctas_per_sm >= 2


def test_few_tiles_in_99_kb_have_an_sm_each_and_two_buffers() -> None:
    def chosen(heads: int, **options: Any) -> str:
        return variant(ampere(call("float16", b=1, hq=heads, nq=128, **options), "A10G"))

    assert chosen(80, d=80) == chosen(41, d=80, nk=77) == "d80_dense"
    assert chosen(80, d=96) == "d96_dense"
    assert chosen(80, d=128) == "d128_dense"
    assert chosen(160, d=128) == "d128_dense_small"
    assert chosen(161, d=128) == "d128_dense"  # three rounds of one CTA an SM, or two of two
    assert chosen(81, d=256, nk=300) == "d256_dense"
    assert chosen(81, d=256, nk=77) == "d256_small"
    assert chosen(80, d=32, nk=300) == "d32_dense_few"


def test_few_keys_and_few_tiles_have_dense_kernels_of_their_own() -> None:
    def chosen(**options: Any) -> str:
        return variant(ampere(call("float16", **options), "H200"))

    assert chosen(b=64, hq=12, nq=197) == chosen(b=64, hq=12, nq=197, nk=224) == "d64_dense_short"
    assert chosen(b=64, hq=24, nq=197, nk=225) == "d64_dense"
    assert chosen(b=8, hq=8, nq=950, d=32) == "d32_dense_medium"
    # A tile of 128 rows for each SM is two of 64; and so many that keys need not be split.
    assert chosen(b=1, hq=200, nq=128, nk=512) == "d64_dense"
    assert chosen(b=1, hq=132, nq=128, nk=512) == "d64_dense_few"
    assert chosen(b=1, hq=50, nq=128, nk=1025) == "d64_dense_few"
    # CTAs share out the keys of fewer tiles.
    assert chosen(b=1, hq=27, nq=128, nk=1024) == "d64_shares_three"
    assert "dense" not in chosen(b=1, hq=26, nq=128, nk=1024)
    assert "dense" not in chosen(b=1, hq=49, nq=128, nk=1025)
    assert chosen(b=1, hq=50, nq=128, nk=224) == "d64_dense_few"
    assert chosen(b=2, hq=8, nq=1024, nk=77, d=80) == "d80_dense_few"
    assert chosen(b=2, hq=12, nq=200, nk=200, d=128) == "d128_dense_few"
    assert chosen(b=2, hq=8, nq=64, d=160) == "d160_dense"
    assert chosen(b=2, hq=8, nq=64, nk=1025, d=160) == "d160_shares"
    assert chosen(b=4, hq=4, nq=200, d=192) == "d192_dense"
    assert chosen(b=2, hq=8, nq=64, nk=1024, d=192) == "d256_shares"


def test_few_keys_have_a_dense_kernel_for_fewer_tiles_in_99_kb() -> None:
    """Where d64_groups would have one CTA of 64 rows on an SM."""

    def chosen(heads: int, device: str) -> str:
        return variant(ampere(call("float16", b=1, hq=heads, nq=197, nk=197), device))

    assert chosen(21, "A10G") == "d64_dense_small"  # 42 tiles of 128 rows, 80 SMs
    assert "dense" not in chosen(19, "A10G")


@pytest.mark.parametrize("device", ["A100", "A10G"])
def test_head_dimensions_up_to_256_have_64_rows_where_one_cta_has_an_sm(device: str) -> None:
    """Where their tiles are few; 8 warps with 128 rows take less time for each row."""

    def chosen(**options: Any) -> tuple[str, int]:
        tile = tile_of(ampere(call("bfloat16", d=256, **options), device))
        return tile.name, tile.splits

    many = "d256_medium" if device == "A100" else "d256_small"
    dense = "d256_dense_medium" if device == "A100" else "d256_dense"
    assert chosen(b=1, hq=16, hkv=8, nq=300, causal=True) == ("d256_shares", 1)
    assert chosen(b=1, hq=16, hkv=8, nq=4096, causal=True) == (many, 1)
    assert chosen(b=8, hq=16, nq=512) == (dense, 1)


# --- few query rows ---


@pytest.mark.parametrize(("batch", "splits"), [(32, 2), (1, 26)])
def test_decoding_packs_heads_and_fills_the_gpu(batch: int, splits: int) -> None:
    problem = call("float16", b=batch, hq=32, hkv=8, nq=1, nk=13_312, d=128, causal=True)
    plan = ampere(problem, "A100")
    tile = tile_of(plan)
    # Four heads of one row are four rows of one warp.
    assert (tile.name, tile.packed_heads, tile.block_q) == ("d128_decode_plain", 4, 1)
    assert tile.splits == splits
    assert plan.to_dict()["launches"][0]["grid"] == [batch, 8, splits]


@pytest.mark.parametrize(
    ("batch", "heads", "keys", "shares", "early"),
    [
        (1, 8, 1024, 8, True),  # no more: a cluster has eight CTAs
        (1, 8, 256, 4, True),  # of 64 keys
        (4, 8, 2048, 5, True),  # all of the next call's CTAs have room beside them
        (8, 8, 1024, 5, True),  # more than two for each SM
        (12, 8, 1024, 2, True),
        (3, 40, 700, 3, True),
        (16, 8, 1024, 2, False),  # two for each SM, which the next call's would crowd
        (20, 8, 600, 1, False),
        (1, 8, 8192, 32, True),  # so many shares read faster, and a second kernel combines them
    ],
)
def test_shares_of_decoding_calls_are_a_cluster_on_an_h200(
    batch: int, heads: int, keys: int, shares: int, early: bool
) -> None:
    plan = ampere(call("bfloat16", b=batch, hq=heads, nq=1, nk=keys, d=128), "H200")
    first, *others = plan.to_dict()["launches"]
    joins = 1 < shares <= 8
    assert first["kernel"].endswith("_d128_decode_joined" if joins else "_d128_decode_plain")
    assert first["cluster"] == [1, 1, shares if joins else 1]
    assert first["grid"] == [batch, heads, shares]
    assert (first["uses_pdl"], len(others)) == (early, int(shares > 8))


def test_more_heads_than_a_grid_has_along_a_side_decode_too() -> None:
    problem = call("float16", b=1, hq=70_000, hkv=70_000, nq=1, nk=300)
    plan = ampere(problem, "A100")
    assert variant(plan) == "d64_decode"
    assert plan.to_dict()["launches"][0]["grid"] == [70_000, 1, 1]


@every_head_dim
@every_device
def test_packed_heads_are_taken_where_they_save_a_quarter_of_the_tiles(
    device: str, dims: tuple[int, int]
) -> None:
    def tile(rows: int, group: int = 4) -> native.TileChoice:
        d, dv = dims
        problem = with_sinks("float16", b=64, hq=8 * group, hkv=8, nq=rows, nk=512, d=d, dv=dv)
        return tile_of(ampere(problem, device))

    assert (tile(5).name, tile(5).packed_heads) == (f"d{dims[0]}_few", 4)
    size = next(size for size in (64, 128, 256) if dims[0] <= size)
    assert (tile(4).name, tile(4).packed_heads) == (f"d{size}_decode_plain", 4)
    assert (tile(3).block_q, tile(16).block_q, tile(17).block_q) == (4, 16, 16)
    assert tile(48).packed_heads == 4
    assert tile(49).packed_heads == 1
    assert tile(1, group=1).packed_heads == 1


def test_packed_sequences_have_whole_tiles_for_their_heads() -> None:
    q = torch.empty(64, 8, 64, dtype=torch.float16, device="meta")
    k = torch.empty(9000, 2, 64, dtype=torch.float16, device="meta")
    ends = torch.empty(65, dtype=torch.int32, device="meta")
    problem = make_problem(q, k, k, cu_seqlens_q=ends, cu_seqlens_k=ends, num_splits=1)
    tile = tile_of(ampere(problem.as_if_on_cuda(), "A100"))
    assert (tile.packed_heads, tile.block_q) == (4, 16)


# --- a KV cache ---


@pytest.mark.parametrize(
    ("batch", "keys", "splits"),
    [
        (1, 1024, 16), (1, 2048, 16), (1, 4096, 32), (1, 8192, 32), (1, 32_768, 32),
        (1, 131_072, 33), (4, 2048, 8), (4, 8192, 8), (8, 8192, 4), (16, 4096, 2), (24, 4096, 1),
        (32, 8192, 1), (128, 2048, 1),
    ],
)  # fmt: skip
def test_decoding_shares_keys_as_was_fastest_on_an_h200(batch: int, keys: int, splits: int) -> None:
    """Each is within a few percent of the fastest number (docs/lab/ampere.md)."""
    q = torch.empty(batch, 1, 32, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, keys, 8, 128, dtype=torch.bfloat16, device="meta")
    lengths = torch.empty(batch, dtype=torch.int32, device="meta")
    problem = make_problem(q, k, k, layout="bnhd", cache_seqlens=lengths).as_if_on_cuda()
    assert tile_of(ampere(problem, "H200")).splits == splits


@pytest.mark.parametrize(
    ("batch", "pages", "splits"), [(2, 16, 2), (8, 512, 33), (19, 1040, 33), (64, 232, 29)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_sequences_with_pages_share_keys_by_their_lengths(
    batch: int, pages: int, splits: int, packed: bool
) -> None:
    """Three CTAs an SM for the keys beside one for each tile, but not more than there can be."""
    rows = (batch,) if packed else (batch, 1)
    q = torch.empty(*rows, 32, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(100, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    call: dict[str, Any] = {
        "cache_seqlens": torch.empty(batch, dtype=torch.int32, device="meta"),
        "page_table": torch.empty(batch, pages, dtype=torch.int32, device="meta"),
    }
    if packed:
        call["cu_seqlens_q"] = torch.empty(batch + 1, dtype=torch.int32, device="meta")
        call["max_seqlen_q"] = 1
    problem = make_problem(q, k, k, layout="bnhd", **call).as_if_on_cuda()
    plan = ampere(problem, "H200")
    tile = tile_of(plan)
    assert tile.splits == splits
    assert plan.to_dict()["launches"][0]["grid"][0] == tile.tiles + min(
        3 * 132, tile.tiles * (splits - 1)
    )
    assert "by the lengths" in dict(plan.notes)["splits"]
    for one_share in ({"window": (127, 0)}, {"num_splits": 1}):
        problem = make_problem(q, k, k, layout="bnhd", **call, **one_share).as_if_on_cuda()
        assert tile_of(ampere(problem, "H200")).splits == 1


@pytest.mark.parametrize(
    ("batch", "keys", "early"),
    [(1, 8192, True), (24, 4096, False), (32, 8192, False), (128, 2048, True)],
)
def test_a_decoding_call_starts_early_unless_its_ctas_are_all_there_at_once(
    batch: int, keys: int, early: bool
) -> None:
    problem = call("float16", b=batch, hq=32, hkv=8, nq=1, nk=keys, d=128)
    assert ampere(problem, "H200").to_dict()["launches"][0]["uses_pdl"] == early
    # Behind an append it always does.
    q = torch.empty(batch, 1, 32, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, keys, 8, 128, dtype=torch.bfloat16, device="meta")
    lengths = torch.empty(batch, dtype=torch.int32, device="meta")
    new = k[:, :1]
    problem = make_problem(
        q, k, k, layout="bnhd", cache_seqlens=lengths, k_new=new, v_new=new
    ).as_if_on_cuda()
    append, attention, *_ = ampere(problem, "H200").to_dict()["launches"]
    assert (append["uses_pdl"], attention["uses_pdl"]) == (False, True)


def cache_tile(
    nq: int,
    heads: tuple[int, int] = (32, 8),
    dims: tuple[int, int] = (128, 128),
    cache_dtype: torch.dtype = torch.float16,
    packed: bool = False,
    device: str = "H200",
    **options: object,
) -> native.TileChoice:
    rows = (3 * nq,) if packed else (3, nq)
    q = torch.empty(*rows, heads[0], dims[0], dtype=torch.float16, device="meta")
    k, v = (torch.empty(3, 512, heads[1], d, dtype=cache_dtype, device="meta") for d in dims)
    given = {**options, "cache_seqlens": torch.empty(3, dtype=torch.int32, device="meta")}
    if packed:
        given["cu_seqlens_q"] = torch.empty(4, dtype=torch.int32, device="meta")
    problem = make_problem(q, k, v, layout="bnhd", **given).as_if_on_cuda()
    return tile_of(ampere(problem, device))


@every_device
@pytest.mark.parametrize(
    ("nq", "heads", "decodes"),
    [
        (1, (32, 8), True),
        (4, (32, 8), True),
        (5, (32, 8), False),
        (4, (24, 8), True),
        (5, (24, 8), False),
        (16, (8, 8), True),
        (17, (8, 8), False),
        (1, (16, 1), True),
        (1, (17, 1), False),
    ],
)
def test_rows_that_fit_a_tile_of_16_decode(
    nq: int, heads: tuple[int, int], decodes: bool, device: str
) -> None:
    tile = cache_tile(nq, heads, device=device)
    assert tile.name == ("d128_decode" if decodes else "d128_cache")
    # Rows of packed sequences are known only if the caller says so.
    assert cache_tile(nq, heads, packed=True, device=device).name == "d128_cache"
    known = cache_tile(nq, heads, packed=True, max_seqlen_q=nq, device=device)
    assert known.name == tile.name
    # The bits of a row must not depend on how many rows there are.
    assert cache_tile(nq, heads, batch_invariant=True, device=device).name == "d128_cache"


@every_head_dim
@pytest.mark.parametrize("nq", [1, 17])
def test_a_cache_of_8_bits_has_kernels_of_its_own_for_any_rows(
    nq: int, dims: tuple[int, int]
) -> None:
    size = next(size for size in (64, 128, 256) if dims[0] <= size)
    for invariant in (False, True):
        tile = cache_tile(nq, dims=dims, cache_dtype=torch.float8_e5m2, batch_invariant=invariant)
        assert tile.name == f"d{size}_cache_fp8"
    assert cache_tile(1, dims=dims).name == f"d{size}_decode"
    assert cache_tile(17, dims=dims).name == f"d{dims[0]}_cache"


@every_device
@pytest.mark.parametrize("d", [40, 64, 96, 128, 192, 256])
def test_dropout_alone_has_kernels_of_its_own_for_many_rows(device: str, d: int) -> None:
    q = torch.empty(4, 32, 2048, d, dtype=torch.float16, device="meta")
    ranges = torch.empty(1, 1, 2048, 1, 2, dtype=torch.int32, device="meta")
    size = next(size for size in (64, 96, 128, 256) if d <= size)

    def name_of(q: torch.Tensor, **options: object) -> str:
        problem = make_problem(q, q, q, dropout_p=0.1, **options).as_if_on_cuda()
        return variant(ampere(problem, device))

    of_64 = "d64_medium_dropout" if DEVICES[device] == 99 else "d64_large_dropout"
    expected = of_64 if size == 64 else f"d{size}_dropout"
    assert name_of(q, causal=True, window=(9, 0)) == expected
    assert name_of(q, sinks=torch.empty(32, device="meta")) == expected
    dense = size == 64 and find_device(device).major <= 9
    assert name_of(q) == ("d64_dense_dropout" if dense else expected)
    few = q[:1, :1, :512]
    if dense:
        name = "d64_dense_few_dropout" if DEVICES[device] > 99 else "d64_dense_dropout"
        assert name_of(few) == name
    size = next(size for size in (64, 128, 256) if d <= size)
    assert name_of(few, causal=True) == f"d{size}_masked"
    others: tuple[dict[str, object], ...] = (
        {"softcap": 2.0}, {"scale": -1.0}, {"num_splits": 2}, {"key_ranges": ranges},
    )  # fmt: skip
    for options in others:
        assert name_of(q, **options) == f"d{size}_masked"
    assert name_of(q[:1, :1]) == f"d{size}_masked"  # few tiles


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
        launch = plan.to_dict()["launches"][0]
        tile = tile_of(plan).block_q
        if tile_of(plan).share_keys > 0:  # CTAs for each tile and share
            assert math.prod(launch["grid"]) == len(native.tile_times(plan))
            continue
        if launch["kernel"].endswith(("_decode_plain", "_decode_joined")):  # a tile for each head
            assert launch["grid"] == [batch, heads, max(tile_of(plan).splits, 1)]
            assert rows <= tile
            continue
        tiles, rest = divmod(math.prod(launch["grid"]), batch * heads)
        assert rest == 0
        if "_dense" in launch["kernel"]:
            assert launch["grid"][1:] == [heads, batch]
        elif "_shares" not in launch["kernel"]:
            assert launch["grid"][1:] == [1, 1]
        assert (tiles - 1) * tile < rows <= tiles * tile
        warps = tile_of(plan).warps
        sharing = 2 if "_groups" in launch["kernel"] else 1  # warps that have the same rows
        if tile_of(plan).rows_per_warp > 0:  # else the warps share the rows
            assert warps * tile_of(plan).rows_per_warp == tile * sharing
        assert launch["block"] == [32 * warps, 1, 1]


# --- the order of CTAs ---


def test_packed_sequences_go_in_their_own_order() -> None:
    plan = ampere(packed_call("float16"), "A100")
    assert dict(plan.notes)["order"] == "by sequence, last row tiles first"
