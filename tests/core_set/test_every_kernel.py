"""Plans made for other GPUs, run here: so every compiled kernel runs, whoever would choose it."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as native

from ..replanned import replanned
from .executors import FP8, TWIN, executor

on = executor()

# Shared memory for a CTA, in KB.
DEVICES = {
    "T4": 64, "A100": 163, "RTX 4090": 99, "RTX 5090": 99, "H200": 227, "B200": 227, "B300": 227,
}  # fmt: skip
HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
WIDE_HEAD_DIMS = ((384, 384), (512, 512))
# Batch, query heads, key heads, queries, keys, causal. The simulator gets few rows, and plans for
# them as for a GPU with one SM, but for "short" (few keys), "few" and "grouped" (many heads share
# one of K). A GPU gets few keys, few rows, some, and enough to fill each of the others; few rows of
# many keys, and rows long enough for pairs of CTAs.
SHAPES: dict[str, tuple[int, int, int, int, int, bool]] = on.pick(
    simulator={
        "short": (1, 2, 2, 33, 65, True),
        "few": (1, 2, 2, 33, 85, True),
        "grouped": (1, 10, 2, 5, 65, True),
        "some": (2, 2, 2, 100, 150, True),
        "many": (1, 2, 2, 137, 150, True),
        "most": (2, 2, 2, 137, 150, True),
        "unmasked": (1, 2, 2, 137, 150, False),
        "rounds": (2, 2, 2, 301, 290, True),
        "two tiles": (2, 2, 2, 250, 350, True),
        "three blocks": (1, 2, 2, 250, 280, False),
        "few rows": (1, 2, 2, 60, 150, True),
        "few long": (1, 2, 2, 33, 390, True),
        "two long": (2, 2, 2, 250, 390, True),
        "large": (1, 2, 2, 500, 300, True),
    },
    gpu={
        "short": (1, 4, 2, 65, 77, True),
        "few": (1, 4, 2, 65, 129, True),
        "some": (2, 24, 12, 193, 321, True),
        "many": (4, 40, 20, 193, 321, True),
        "most": (12, 48, 24, 193, 321, True),
        "unmasked": (4, 40, 20, 193, 321, False),
        "split": (1, 4, 2, 5, 4100, True),
        "shares": (1, 4, 2, 9, 4100, True),
        "few keys": (4, 40, 20, 193, 77, False),
        "rows": (4, 40, 20, 1150, 321, False),
        "keys": (4, 20, 10, 600, 1500, False),
        "long": (1, 10, 5, 4096, 4096, False),
        "few rows": (4, 40, 20, 60, 129, True),
        "few long": (1, 4, 2, 65, 2000, True),
        "large": (4, 40, 20, 500, 400, True),
    },
)


def shapes_of(kernel: str) -> list[str]:
    if on.name == "gpu":  # some kernels of one folder are only for these
        only = {
            "long": "blackwell_dc",  # pairs of CTAs
            "shares": "ampere",
            "few keys": "ampere",
            "few rows": "ampere",
            "rows": "hopper",  # tiles of 192 rows
            "keys": "hopper",  # tiles of 256 rows
            "few long": "hopper",
            "large": "hopper",
        }
        return [shape for shape in SHAPES if only.get(shape, kernel) == kernel]
    return {
        "ada": ["few", "many", "unmasked"],  # one tile is for unmasked calls only
        "ampere": ["short", "few", "many", "most"],  # one tile is for few keys, and one for many
        "blackwell_consumer": ["short", "few", "some", "most"],  # and some are in between
        "blackwell_dc": ["few", "rounds"],  # one CTA goes from tile to tile
        # Tiles of 128 or of 256 rows, and those that take one turn for a block.
        "hopper": ["few", "many", "two tiles", "rounds", "three blocks"],
    }.get(kernel, ["few", "many"])


def takes_wide_heads(kernel: str, dtype: str) -> bool:
    """simt takes them in float32 only, and ampere has no float32."""
    wide = native.describe(kernel).largest_head_dim > 256
    return wide and (dtype == "float32") == (kernel == "simt")


def dims_of(kernel: str, dtype: str) -> tuple[tuple[int, int], ...]:
    """On the simulator larger heads get one shape, below."""
    wide = on.name == "gpu" and takes_wide_heads(kernel, dtype)
    return HEAD_DIMS + (WIDE_HEAD_DIMS if wide else ())


def devices_of(kernel: str) -> list[str]:
    """The GPUs to plan for; for the simulator those whose plans differ."""
    names: tuple[str, ...] = tuple(DEVICES)
    if on.name == "simulator":
        names = ("B200",) if kernel == "blackwell_dc" else ("A100", "RTX 4090", "RTX 5090", "H200")
    return [name for name in names if native.has_code(kernel, capability_of(name))]


def dtypes_of(kernel: str) -> list[str]:
    """On the simulator FP8 is in test_fp8.py."""
    served = on.dtypes_of(kernel)
    return served + on.dtypes_of(kernel, FP8) if on.name == "gpu" else served


def capability_of(device: str) -> tuple[int, int]:
    known = native.find_known_device(device)
    assert known is not None
    return known.device.capability


def takes_sinks(kernel: str, dtype: str) -> bool:
    """Whether calls have them: without sinks ampere has kernels of their own for causal calls."""
    return kernel == "ampere" and dtype in ("float16", "bfloat16")


def plan_for(
    kernel: str, device: str, dtype: str, dims: tuple[int, int], shape: str
) -> native.LaunchPlan:
    batch, heads, heads_kv, nq, nk, causal = SHAPES[shape]
    kind = getattr(torch, dtype)
    q = torch.empty(batch, heads, nq, dims[0], dtype=kind, device="meta")
    k, v = (torch.empty(batch, heads_kv, nk, dim, dtype=kind, device="meta") for dim in dims)
    more = {"sinks": torch.empty(heads, device="meta")} if takes_sinks(kernel, dtype) else {}
    with torch.no_grad():
        plan = archflash.explain(
            q, k, v, device=device, implementation=kernel, causal=causal, return_lse=True, **more
        ).plan
    assert plan is not None
    if on.name == "gpu" or shape in ("short", "few", "few long", "grouped"):
        return plan
    return replanned(plan, sm_count=1)


def kernels_of(plan: native.LaunchPlan) -> list[str]:
    return [launch["kernel"] for launch in plan.to_dict()["launches"]]


EVERY = [
    (kernel, device, dtype, dims, shape)
    for kernel in on.kernels()
    for device in devices_of(kernel)
    for dtype in dtypes_of(kernel)
    for dims in dims_of(kernel, dtype)
    if max(dims) <= 256 or device != "T4"  # whose shared memory is too small for larger heads
    for shape in shapes_of(kernel)
]
# Tiles of hopper with 192 columns of V.
EVERY += [
    ("hopper", "H200", dtype, (160, 160), shape)
    for dtype in ("float16", "bfloat16")
    for shape in on.pick(simulator=("few", "grouped"), gpu=("many", "few long"))
    if "hopper" in on.kernels()
]
if on.name == "simulator":  # one tile of ada is for calls of many rows only
    EVERY += [("ada", "RTX 4090", dtype, (128, 128), "rounds") for dtype in ("float16", "bfloat16")]
    # Some tiles are for heads that are packed, or for split keys, only.
    EVERY += [
        (kernel, device, dtype, dims, "grouped")
        for kernel, device in (("ada", "RTX 4090"), ("ampere", "A100"))
        for dtype in on.dtypes_of(kernel)
        for dims in ((64, 64), (96, 96), (192, 128), (256, 256))
    ]
    EVERY += [
        ("blackwell_consumer", "RTX 5090", dtype, (64, 64), "grouped")
        for dtype in on.dtypes_of("blackwell_consumer")
    ]
    # One tile of ampere is for sequences of 33 to 64 rows.
    EVERY += [("ampere", "A100", dtype, (32, 32), "few rows") for dtype in ("float16", "bfloat16")]
    # Short sequences have a tile of their own in hopper, and few and many rows other ones.
    EVERY += [
        ("hopper", "H200", dtype, (64, 64), shape)
        for dtype in ("float16", "bfloat16")
        for shape in ("few long", "two long", "grouped", "large")
    ]
    # One of larger heads, whose tile for few rows is for more keys or packed heads.
    EVERY += [
        ("hopper", "H200", dtype, dims, "grouped")
        for dtype in ("float16", "bfloat16")
        for dims in ((96, 96), (128, 128), (192, 128))
    ]
    # On 9.0 simt has tensor cores for it.
    EVERY += [("simt", "B200", "float32", (d, d), "many") for d in (128, 256)]
    # The tiles for larger heads.
    EVERY += [
        (kernel, device, dtype, dims, shape)
        for kernel in on.kernels()
        for dtype in on.dtypes_of(kernel)
        if takes_wide_heads(kernel, dtype)
        for device, shape in (("A100", "few"), ("RTX 4090", "few"), ("H200", "many"))
        for dims in WIDE_HEAD_DIMS
    ]
    # The head dimensions that have kernels of their own on 10.3.
    EVERY += [
        ("blackwell_dc", "B300", dtype, (d, d), "rounds")
        for dtype in on.dtypes_of("blackwell_dc")
        for d in (64, 96, 128)
    ]


def one_of_each(cases: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The first case for each (compiled kernels, head dims, shape) that the plans come to: two GPUs
    with the same plan need no second run. On the simulator that is so where they have one PTX text,
    as all GPUs here but those of blackwell_consumer; and a kernel for float16 has one shape there,
    because it is the one for bfloat16 but for conversions.
    """
    chosen: dict[Any, tuple[Any, ...]] = {}
    for case in cases:
        plan = plan_for(*case)
        what: tuple[Any, ...] = case[3:]
        if on.name == "simulator" and getattr(torch, case[2]) == TWIN:
            what = case[3:4]
        elif on.name == "simulator" and case[0] == "blackwell_consumer":
            what = (plan.code, *what)
        chosen.setdefault((*kernels_of(plan), *what), case)
    return list(chosen.values())


CASES = one_of_each(EVERY) if on.why_not() is None else EVERY


@pytest.mark.parametrize(
    ("kernel", "device", "dtype", "dims", "shape"),
    [
        pytest.param(*case, id=f"{kernel}-{device}-{dtype}-d{d}-{dv}-{shape}")
        for case in CASES
        for kernel, device, dtype, (d, dv), shape in [case]
    ],
)
def test_a_plan_for_another_gpu_is_right_here(
    kernel: str, device: str, dtype: str, dims: tuple[int, int], shape: str
) -> None:
    plan = plan_for(kernel, device, dtype, dims, shape)
    for launch in plan.to_dict()["launches"]:
        assert launch["shared_bytes"] <= DEVICES[device] * 1024
    batch, heads, heads_kv, nq, nk, causal = SHAPES[shape]
    tensors = on.qkv(nq, nk, *dims, dtype=dtype, batch=batch, heads=(heads, heads_kv), seed=1)
    number = (sum(dims) // 64 + len(shape)) % 4
    more = {"sinks": on.rand(heads, seed=2)} if takes_sinks(kernel, dtype) else {}
    on.attend_and_check(kernel, *tensors, plan=plan, schedules=[number], causal=causal, **more)


@pytest.mark.parametrize("kernel", on.kernels())
def test_the_plans_above_run_every_compiled_kernel(kernel: str) -> None:
    ran = {name for case in CASES if case[0] == kernel for name in kernels_of(plan_for(*case))}
    compiled: set[str] = set()
    for file in (files("archflash") / "_kernels" / kernel).iterdir():
        if file.name.endswith(".json"):
            for entries in json.loads(file.read_text()).values():
                compiled |= set(entries)
    # Other tests run the kernels of a KV cache (test_kvcache.py, test_prefill_caches.py,
    # test_mixed_lengths.py), of gradients (test_gradients.py),
    # of descales by block (test_fp8.py), with masks as data (test_mask_data.py,
    # test_dense_masks.py, test_ordered_tiles.py, test_tables_of_blocks.py), with dropout
    # (test_dropout.py), with fp32 outputs (test_f32_outputs.py), with block scales (test_mxfp8.py)
    # and in four bits (test_nvfp4.py).
    others = "_quantize_|int8_|_cache(_fp8)?$|_decode(_plain|_joined)?$|_mla$|_append_"
    others += "|_bwd_|_backward_|_masked$"
    others += "|_e4m3_.*_blocks$|_combine_f32$|_dense$|_summarize_|_order_tiles_|_convert_cache_"
    others += "|_sum_mask_gradients_"  # test_mask_gradients.py
    others += "|_prepare_mask_|_copy_mask_|^hopper_.*_(wide|added|added_short|shared|windows)$"
    others += "|^hopper_.*_d64_large$"  # test_hopper_tiles.py
    # Every key seen, and keys that two warps share out: test_every_key_seen.py.
    others += "|_dense_(few|short|medium|small|long)$|^ampere_.*_d128_groups(_few)?$"
    # Keys up to one: test_key_shares.py.
    others += "|_shares(_three|_groups)?$|_causal$|_packed_large$|_combine_shares_"
    # Short packed sequences: test_hopper_tiles.py; of unequal lengths: test_listed_tiles.py.
    others += "|_d(96|128|256)_short$"
    others += "|_d80_(large|turns)$|^hopper_.*_(heads|tail)$"  # test_hopper_tiles.py
    # Lists of keys: test_key_indices.py.
    others += "|_dropout$|_f32_out$|_gather(_large|_capped)?$|_packed(_pair)?(_capped)?$"
    others += "|_table(_keys)?$|_mixed$|_order_(mixed|packed)_|_nvfp4_|_mx_|_approximate_"
    compiled = {name for name in compiled if not re.search(others, name)}
    ran = {name for name in ran if not re.search(others, name)}
    if on.name == "simulator":
        # FP8: test_fp8.py; pairs of CTAs: test_blackwell_dc_tiles.py; for as many tiles as SMs:
        # test_hopper_tiles.py.
        compiled = {name for name in compiled if not re.search("hopper_.*_d96_medium$", name)}
        compiled = {name for name in compiled if re.search(r"_attention_fwd_(f32|f16|bf16)_", name)}
        compiled = {name for name in compiled if not re.search("blackwell_dc_.*_pair$", name)}
        ran = {name for name in ran if not re.search("_combine_|_clear_counter_", name)}
    assert ran == compiled
