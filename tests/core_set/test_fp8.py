"""FP8 inputs: every feature with every kind of descale, lengths, head dims, and how far the result
is from that of the tensors before they were quantised.
"""

from __future__ import annotations

import itertools
import json
import math
from importlib import resources
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import reference

from ..replanned import plan_with, replanned
from ..sim.schedules import IN_FULL
from .checks import relative_rms_error, same_bits
from .executors import FP8, executor
from .memory import transposed
from .pairs import all_pairs, row_id

on = executor()

E4M3 = torch.float8_e4m3fn
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
KERNELS = on.kernels("descales")
KERNELS_AND_DTYPES = on.kernels_and_dtypes(FP8)
# Their kernels load FP8 with TMA, and weigh V by the descale of its block.
BY_TMA = [kernel for kernel in KERNELS if kernel.startswith(("blackwell_", "hopper"))]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_kernel_by_tma = pytest.mark.parametrize("kernel", BY_TMA)
every_kernel_and_dtype = pytest.mark.parametrize(("kernel", "dtype"), KERNELS_AND_DTYPES)
RANDOM = [2]  # one of the simulator's schedules: random, with seed 2


# --- every pair of features ---

FACTORS: dict[str, list[Any]] = {
    "descale": ["none", "tensor", "head", "batch", "block", "kv_head", "expanded"],
    "out_dtype": [None, torch.float16, torch.bfloat16],
    "layout": ["bhnd", "bnhd", "packed"],
    "lengths": on.pick(
        simulator=[(33, 70), (70, 33), (9, 270), (260, 64)],
        gpu=[(113, 203), (203, 113), (9, 799), (64, 64)],
    ),
    "dims": [(64, 64), (128, 128), (48, 80), (96, 96), (192, 128), (256, 256)],
    "heads": [(2, 2), (6, 2), (3, 1)],
    "causal": [False, True],
    "window": [None, (17, None), (None, 5), (16, 9), (0, 0)],
    "q_offset": [None, 0, -5, 50, "tensor"],
    "softcap": [None, 5.0],
    "sinks": [None, "float32", "bfloat16"],
    "scale": [None, 0.05, -0.3, 0.0],
    "transposed": [False, True],
    "out_pad": [0, 24],
}  # fmt: skip
# A packed call has three more sequences: one without queries, one without keys, one of one row.
MORE_Q, MORE_K = (0, 30, 1), (9, 0, 1)


def rows_of(kernel: str) -> list[dict[str, Any]]:
    if on.name == "simulator" and kernel != "blackwell_dc":
        return []  # for the others it has time for CALLS
    return all_pairs({"dtype": on.dtypes_of(kernel, FP8), **FACTORS})


def quantised(x: Tensor, dtype: str, kind: str, kv_heads: int) -> tuple[Tensor, Tensor | None]:
    """Values (B, H, N, D) and their descale, whose numbers differ on purpose: some are so small
    that values saturate.
    """
    batch, heads, rows, _ = x.shape
    kind = "head" if kind == "kv_head" and heads == kv_heads else kind
    if kind == "none":
        return x.to(FP8[dtype]), None
    sizes = {
        "tensor": (1, 1, 1),
        "head": (1, heads, 1),
        "kv_head": (1, kv_heads, 1),
        "batch": (batch, heads, 1),
        "expanded": (batch, 1, 1),
        "block": (batch, heads, math.ceil(rows / 64)),
    }[kind]
    limit = LARGEST[dtype]
    largest = x.abs().max() / limit
    descale = largest * (0.5 + torch.arange(math.prod(sizes), device=x.device).view(sizes) % 7)
    by_row = descale.repeat_interleave(heads // sizes[1], 1)
    if kind == "block":
        by_row = by_row.repeat_interleave(64, 2)[:, :, :rows]
    values = (x / by_row[..., None]).clamp(-limit, limit).to(FP8[dtype])
    if kind == "expanded":
        return values, descale[:, :, 0].expand(batch, heads)
    shape = {"tensor": (1,), "batch": sizes[:2], "block": sizes}.get(kind, (-1,))
    return values, descale.reshape(shape)


@pytest.mark.parametrize(
    ("kernel", "number", "row"),
    [
        pytest.param(kernel, number, row, id=f"{kernel}-{row_id(row)}")
        for kernel in KERNELS
        for number, row in enumerate(rows_of(kernel))
    ],
)
def test_every_pair_of_features_agrees_with_float64(
    kernel: str, number: int, row: dict[str, Any]
) -> None:
    (nq, nk), (d, dv), (hq, hkv) = row["lengths"], row["dims"], row["heads"]
    packed = row["layout"] == "packed"
    q_lengths, k_lengths = (nq, *MORE_Q), (nk, *MORE_K)
    sequences = len(q_lengths) if packed else 2
    batch, nq, nk = (1, sum(q_lengths), sum(k_lengths)) if packed else (2, nq, nk)
    kind = row["descale"]
    by_sequence = packed and kind in ("batch", "block", "expanded")
    kind = "head" if by_sequence else kind
    tensors = []
    call = {
        name: row[name]
        for name in ("causal", "window", "q_offset", "softcap", "scale", "out_dtype")
    }
    for seed, (name, heads, rows, dim) in enumerate(
        (("q", hq, nq, d), ("k", hkv, nk, d), ("v", hkv, nk, dv))
    ):
        x = on.rand(batch, heads, rows, dim, seed=seed)
        of = kind if name == "q" or kind != "kv_head" else "head"
        values, descale = quantised(x, row["dtype"], of, hkv)
        if packed:
            values = values[0].transpose(0, 1).contiguous()
        elif row["layout"] == "bnhd":
            values = values.transpose(1, 2).contiguous()
        tensors.append(transposed(values) if row["transposed"] else values)
        if descale is not None and by_sequence:
            factors = 1 + torch.arange(sequences, device=on.device)
            descale = descale.expand(sequences, -1) * factors[:, None]
        if descale is not None:
            call[f"{name}_descale"] = descale
    if row["q_offset"] == "tensor":
        call["q_offset"] = on.int32(*(7 - 10 * sequence for sequence in range(sequences)))
    if row["sinks"]:
        call["sinks"] = on.rand(hq, seed=9, dtype=row["sinks"])
    if packed:
        call |= {"cu_seqlens_q": on.cu_seqlens(q_lengths), "cu_seqlens_k": on.cu_seqlens(k_lengths)}
    else:
        call["layout"] = row["layout"]
    on.attend_and_check(kernel, *tensors, out_pad=row["out_pad"], schedules=[number], **call)


# --- calls, with every type and every code that a kernel has ---

# Type, rows of q and k, head dims, what has a descale of its own, options.
CALLS: dict[str, tuple[str, tuple[int, int], tuple[int, int], str, dict[str, Any]]] = {
    "one-tile": ("float8_e4m3fn", (64, 64), (64, 64), "tensor", {}),
    "causal": ("float8_e4m3fn", (70, 130), (128, 128), "tensor", {"causal": True}),
    "blocks": ("float8_e4m3fn", (70, 200), (128, 128), "block", {"causal": True}),
    "e5m2": ("float8_e5m2", (70, 130), (128, 128), "head", {"out_dtype": torch.float16}),
    "window-odd-dims": ("float8_e4m3fn", (70, 200), (112, 80), "head", {"window": (30, 5)}),
    "softcap-192": ("float8_e4m3fn", (20, 130), (192, 128), "block", {"softcap": 20.0}),
    "sinks-256": ("float8_e5m2", (20, 130), (256, 256), "block", {"sinks": [0.5, -1.0]}),
    "scale-zero": ("float8_e4m3fn", (33, 70), (64, 64), "tensor", {"scale": 0.0}),
    "scale-negative": ("float8_e4m3fn", (33, 70), (64, 64), "block", {"scale": -0.3}),
    "scale-huge": ("float8_e4m3fn", (33, 129), (64, 64), "tensor", {"scale": 1e7}),
    "decode": ("float8_e4m3fn", (1, 300), (64, 64), "block", {}),
    "no-keys": ("float8_e4m3fn", (5, 0), (64, 64), "head", {}),
}
# GPUs to plan for, and the code that runs there: on the simulator every code with other FP8
# instructions, on a GPU its own.
CODES = on.pick(
    simulator=[
        ("ada", "RTX 4090", "sm_89"),
        ("blackwell_consumer", "RTX 5090", "sm_120f"),
        ("blackwell_consumer", "H200", "sm_90a"),
        ("blackwell_dc", "B200", "sm_100f"),
        ("blackwell_dc", "Jetson Thor", "sm_110f"),
        ("hopper", "H200", "sm_90a"),
    ],
    gpu=[(kernel, None, "sm_") for kernel in KERNELS],
)


def quantised_call(
    dtype: str, rows: tuple[int, int], dims: tuple[int, int], heads: tuple[int, int], per: str
) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v by `quantize_fp8`, and their descales, which differ from block to block."""
    (nq, nk), (d, dv) = rows, dims
    shapes = {"q": (heads[0], nq, d), "k": (heads[1], nk, d), "v": (heads[1], nk, dv)}
    tensors, call = [], {}
    for seed, (name, shape) in enumerate(shapes.items()):
        x = on.rand(1, *shape, seed=seed)
        values, descale = archflash.quantize_fp8(x, per=per, dtype=FP8[dtype])
        sizes = 1 + torch.arange(descale.numel(), device=on.device).view(descale.shape) % 3
        tensors.append(values)
        call[f"{name}_descale"] = descale * sizes
    return tensors, call


@pytest.mark.parametrize(("kernel", "device", "code"), CODES)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_agrees_with_float64(kernel: str, device: str | None, code: str, name: str) -> None:
    dtype, rows, dims, per, options = CALLS[name]
    if dtype not in on.dtypes_of(kernel, FP8):
        dtype = "float8_e4m3fn"
    tensors, call = quantised_call(dtype, rows, dims, (2, 1), per)
    call |= on.with_tensors(options)
    plan = archflash.explain(
        *tensors, device=device, implementation=kernel, return_lse=True, **call
    ).plan
    assert plan is not None
    assert plan.code.startswith(code)
    on.attend_and_check(kernel, *tensors, plan=plan, schedules=RANDOM, **call)


@every_kernel_and_dtype
@pytest.mark.parametrize("nq", on.pick(simulator=[1], gpu=[0, 1, 63, 65, 129, 799]))
@pytest.mark.parametrize("nk", on.pick(simulator=[31], gpu=[0, 1, 31, 64, 127, 1023]))
def test_lengths_of_any_kind(kernel: str, dtype: str, nq: int, nk: int) -> None:
    for d, causal in itertools.product((64, 128), (False, True)):
        tensors = on.qkv(nq, nk, d, dtype=dtype, batch=2)
        on.attend_and_check(kernel, *tensors, schedules=RANDOM, causal=causal)


@every_kernel_and_dtype
@pytest.mark.parametrize("d", on.pick(simulator=[80], gpu=range(16, 257, 16)))
def test_head_dims_of_any_size(kernel: str, dtype: str, d: int) -> None:
    nq, nk = on.pick(simulator=(33, 70), gpu=(113, 239))
    for dv in (d, 272 - d):
        tensors = on.qkv(nq, nk, d, dv, dtype=dtype)
        on.attend_and_check(kernel, *tensors, schedules=RANDOM, causal=True)


# --- every kernel that loads with TMA ---

# Rows of q and of k, head dims, SMs: either few tiles, or enough to fill the GPU.
TILES: dict[tuple[str, str], tuple[tuple[int, int], tuple[int, int], int]] = {
    ("blackwell_consumer", "d64_pair"): ((300, 140), (64, 64), 2),
    ("blackwell_consumer", "d64_few"): ((61, 140), (64, 64), 2),
    ("blackwell_consumer", "d128_large"): ((300, 140), (128, 96), 2),
    ("blackwell_consumer", "d128_few"): ((61, 140), (112, 128), 3),
    ("blackwell_consumer", "d192"): ((140, 140), (192, 128), 1),
    ("blackwell_consumer", "d256"): ((140, 140), (256, 208), 1),
    ("blackwell_dc", "d64"): ((300, 270), (64, 48), 1),
    ("blackwell_dc", "d128"): ((300, 270), (96, 96), 1),
    ("blackwell_dc", "d192"): ((300, 270), (192, 128), 1),
    ("blackwell_dc", "d256"): ((140, 270), (256, 208), 1),
    ("blackwell_dc", "d64_mufu"): ((300, 270), (64, 48), 1),
    ("blackwell_dc", "d128_mufu"): ((300, 270), (96, 96), 1),
    ("blackwell_dc", "d192_mufu"): ((300, 270), (192, 128), 1),
    ("blackwell_dc", "d256_mufu"): ((140, 270), (256, 208), 1),
    ("hopper", "d64"): ((300, 270), (64, 48), 1),
    ("hopper", "d64_small"): ((100, 270), (64, 48), 2),
    ("hopper", "d64_blocks"): ((300, 270), (64, 48), 1),
    ("hopper", "d128"): ((260, 270), (128, 96), 1),
    ("hopper", "d128_small"): ((200, 270), (128, 96), 1),
    ("hopper", "d128_blocks"): ((200, 270), (112, 128), 1),
    ("hopper", "d192"): ((200, 270), (192, 128), 1),
    ("hopper", "d192_blocks"): ((200, 270), (176, 112), 1),
    ("hopper", "d256"): ((200, 270), (256, 208), 1),
    ("hopper", "d256_small"): ((130, 250), (256, 208), 1),
    ("hopper", "d256_blocks"): ((200, 270), (64, 144), 1),
}
HOME = {"blackwell_consumer": "RTX 5090", "blackwell_dc": "B200", "hopper": "H200"}


@pytest.mark.parametrize(("kernel", "tile"), [case for case in TILES if case[0] in KERNELS])
def test_every_kernel_with_several_tiles_for_a_cta(kernel: str, tile: str) -> None:
    rows, dims, sms = TILES[kernel, tile]
    by_head = kernel == "hopper" and not tile.endswith("_blocks")
    per = "head" if by_head else "block"
    tensors, call = quantised_call("float8_e4m3fn", rows, dims, (4, 2), per)
    of_10_3 = tile.endswith("_mufu")
    home = archflash.explain(
        *tensors,
        device="B300" if of_10_3 else HOME[kernel],
        implementation=kernel,
        return_lse=True,
        **call,
    ).plan
    assert home is not None
    plan = replanned(home, sm_count=sms)
    launch = plan.to_dict()["launches"][-1]
    assert launch["kernel"] == f"{kernel}_attention_fwd_e4m3_{tile}"
    # In every second one of the modes, by turns.
    first = list(TILES).index((kernel, tile)) % 2
    schedules = [1] if of_10_3 else range(first, 4, 1 if IN_FULL else 2)
    on.attend_and_check(kernel, *tensors, plan=plan, schedules=schedules, **call)


@every_kernel_by_tma
def test_the_kernels_above_are_all(kernel: str) -> None:
    compiled: set[str] = set()
    for file in (resources.files("archflash") / "_kernels" / kernel).iterdir():
        if file.name.endswith("e4m3.json"):
            for entries in json.loads(file.read_text()).values():
                compiled |= set(entries)
    compiled -= {"hopper_transpose_v"}
    assert compiled == {
        f"{kernel}_attention_fwd_e4m3_{tile}" for other, tile in TILES if other == kernel
    }


# --- what must not matter ---


@pytest.mark.parametrize("scale", [0.0, None], ids=["flat", "normal"])
@every_kernel_and_dtype
def test_sums_of_many_weighted_values_lose_nothing(
    kernel: str, dtype: str, scale: float | None
) -> None:
    """Some tensor cores keep 13 bits of a sum of 8-bit products: without sums in parts, 32,768
    values of one sign lose 39% in wgmma on 9.0 and as much in mma.sync on 8.9, and 8,192 a tenth.
    """
    rows, keys = on.pick(simulator=(16, 8192), gpu=(256, 32768))
    q, k, v = on.qkv(rows, keys, 64, dtype=dtype)
    values = v.float().abs().add(0.5).to(v.dtype)
    # The plan is for one SM of the kernel's home GPU, so that one CTA has all keys of a row.
    plan = plan_with({"sm_count": 1}, q, k, values, scale=scale, implementation=kernel)
    call: dict[str, Any] = {"plan": plan, "schedules": RANDOM, "scale": scale}
    out, _ = on.attend_and_check(kernel, q, k, values, **call)
    exact = reference.attention(q, k, values, scale=scale, return_lse=False)
    error = (out.double() - exact) / exact
    assert error.mean().abs() < 4e-3
    assert error.abs().max() < 2e-2


@pytest.mark.skipif("hopper" not in KERNELS, reason="hopper's kernels are not in this build")
def test_slices_of_v_have_the_bits_that_they_have_alone() -> None:
    q, k, v = on.qkv(70, 300, 224, 208, dtype="float8_e4m3fn", heads=(2, 1))
    by_block = 1 + torch.arange(5, device=on.device).view(1, 1, 5) / 8
    call: dict[str, Any] = {"causal": True, "v_descale": by_block, "schedules": RANDOM}
    out, lse = on.attend_and_check("hopper", q, k, v, **call)
    for columns in (slice(0, 128), slice(128, 208)):
        alone, alone_lse = on.attend("hopper", q, k, v[..., columns].contiguous(), **call)
        assert same_bits(alone, out[..., columns].contiguous())
        assert same_bits(alone_lse, lse)
    # Two CTAs compute a tile: the plan says so, and the model of its walk counts both.
    plan = archflash.explain(
        q, k, v, v_descale=by_block, causal=True, device="H200", implementation="hopper"
    ).plan
    assert plan is not None
    assert plan.tile is not None
    chosen = (plan.tile.name, plan.tile.v_slices, plan.tile.ctas)
    assert chosen == ("d256_blocks", 2, 2 * plan.tile.tiles)
    assert "for 2 tiles x 2 slices of V" in dict(plan.notes)["CTAs"]
    assert len(native.tile_times(plan)) == 2 * plan.tile.tiles


@pytest.mark.skipif("hopper" not in KERNELS, reason="hopper's kernels are not in this build")
@pytest.mark.parametrize("dims", [(224, 208), (256, 256)], ids=str)
def test_one_cta_multiplies_up_to_256_columns_of_v(dims: tuple[int, int]) -> None:
    q, k, v = on.qkv(70, 300, *dims, dtype="float8_e4m3fn", heads=(2, 1))
    plan = archflash.explain(q, k, v, device="H200", implementation="hopper").plan
    assert plan is not None
    assert plan.tile is not None
    assert (plan.tile.name, plan.tile.v_slices) == ("d256", 1)
    on.attend_and_check("hopper", q, k, v, causal=True, schedules=RANDOM)


@every_kernel
def test_rows_beyond_a_sequence_and_masked_ones_never_matter(kernel: str) -> None:
    q, k, v = on.qkv(*on.pick(simulator=(70, 70), gpu=(200, 200)), dtype="float8_e4m3fn")
    clean, _ = on.attend(kernel, q, k[:, :, :50], v[:, :, :50], schedules=RANDOM)
    poisoned_k, poisoned_v = k.clone(), v.clone()
    for x in (poisoned_k, poisoned_v):
        x.view(torch.uint8)[:, :, 50:] = 0x7F  # NaN
    keys, values = poisoned_k[:, :, :50], poisoned_v[:, :, :50]
    out, _ = on.attend(kernel, q, keys, values, schedules=RANDOM)
    assert same_bits(out, clean)
    query = q.clone()
    query.view(torch.uint8)[:, :, 7] = 0x7F
    out, _ = on.attend(kernel, query, k, v, schedules=RANDOM)
    assert out[:, :, 7].isnan().all()
    assert out.isnan().sum() == out[:, :, 7].numel()


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids=str)
@every_kernel
def test_the_next_sequence_never_matters(kernel: str, dims: tuple[int, int]) -> None:
    check_next_sequence(kernel, dims, (37, 20, 70))


@pytest.mark.skipif("hopper" not in KERNELS, reason="hopper's kernels are not in this build")
def test_the_next_sequence_never_matters_to_192_keys_at_a_time() -> None:
    """Columns of V hold multiples of 128 keys of each sequence: a block may go beyond them."""
    tensors, call = check_next_sequence("hopper", (256, 256), (150, 20, 300))
    plan = archflash.explain(*tensors, device="H200", implementation="hopper", **call).plan
    assert plan is not None
    assert plan.tile is not None
    assert plan.tile.name == "d256"


def check_next_sequence(
    kernel: str, dims: tuple[int, int], keys: tuple[int, int, int]
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """V of another sequence in the same block is NaN, and so is K. Returns the call."""
    queries = (33, 0, 20)
    total_q, total_k = sum(queries), sum(keys)
    q = on.rand(total_q, 2, dims[0], seed=0, dtype=E4M3)
    k = on.rand(total_k + 9, 1, dims[0], seed=1, dtype=E4M3)
    v = on.rand(total_k + 9, 1, dims[1], seed=2, dtype=E4M3)
    for x in (k, v):
        first = keys[0]  # of the sequence without queries
        x.view(torch.uint8)[first : first + keys[1]] = 0x7F
        x.view(torch.uint8)[total_k:] = 0x7F
    call = {
        "cu_seqlens_q": on.cu_seqlens(queries),
        "cu_seqlens_k": on.cu_seqlens(keys),
        "v_descale": on.tensor([[0.7], [1.4], [0.9]]),
    }
    on.attend_and_check(kernel, q, k, v, schedules=RANDOM, **call)
    return (q, k, v), call


# --- weights and descales of any size ---


@every_kernel
@pytest.mark.parametrize("rise", [0.5, 0.7, 0.74, 0.749, 0.76, 1.5, 3.0])
def test_no_weight_saturates_however_scores_rise(kernel: str, rise: float) -> None:
    """A key of the last block visited is 2^rise above all others: its weight is right to 2^-4."""
    keys = 128 if kernel == "blackwell_dc" else 64  # of a block
    q, k, v = (torch.zeros(1, 1, n, 64, device=on.device) for n in (16, 2 * keys, 2 * keys))
    q[..., 0] = 1
    k[:, :, :keys, 0] = -448
    k[:, :, keys - 59, 0] = 1
    v[:, :, keys - 59] = 1
    call: dict[str, Any] = {"scale": rise / math.log2(math.e), "out_dtype": torch.float16}
    out, _ = on.attend(kernel, *(x.to(E4M3) for x in (q, k, v)), schedules=RANDOM, **call)
    exact = 2**rise / (keys + 2**rise)
    assert (out.double() - exact).abs().max() <= (2**-4 + 2**-10) * exact


@every_kernel_by_tma
def test_a_block_of_v_may_stand_for_zeros(kernel: str) -> None:
    tensors, call = quantised_call("float8_e4m3fn", (70, 300), (64, 64), (2, 1), "block")
    call["v_descale"][:, :, 1::2] = 0
    tensors[2].view(torch.uint8)[:, :, 64:128] = 0x7E  # the largest number
    on.attend_and_check(kernel, *tensors, schedules=RANDOM, **call)


@pytest.mark.parametrize("scale", [None, -0.3, 1e7])
@every_kernel_by_tma
def test_descales_of_blocks_of_v_may_have_any_size_and_sign(
    kernel: str, scale: float | None
) -> None:
    """Each is judged beside the others: the largest block is visited first or last."""
    tensors, call = quantised_call("float8_e4m3fn", (70, 500), (64, 64), (2, 1), "block")
    sizes = on.tensor([1.0, -3e-3, 40.0, 2e-30, -0.5, 0.0, 1e-2, -7.0])
    call |= {"out_dtype": torch.bfloat16, "scale": scale}
    for descale in (sizes, sizes.flip(0), sizes * 1e-20):
        call["v_descale"] = descale.view(1, 1, -1)
        on.attend_and_check(kernel, *tensors, schedules=RANDOM, **call)


@pytest.mark.parametrize(
    "descales", [(1e-38, 8.0), (8.0, 1e-38), (1e-4, 0.0), (0.0, 1e-12)], ids=str
)
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel == "blackwell_dc"])
def test_tiny_descales_of_v_stand_for_zeros(kernel: str, descales: tuple[float, float]) -> None:
    """Rows see both blocks, or the first alone: an empty block must not spoil the others."""
    tensors, call = quantised_call("float8_e4m3fn", (128, 128), (64, 64), (1, 1), "block")
    call["v_descale"] = on.tensor(descales).view(1, 1, 2)
    on.attend_and_check(kernel, *tensors, schedules=RANDOM, causal=True, **call)


@pytest.mark.parametrize("descales", [(1.0, 100.0), (100.0, 1.0)], ids=str)
@every_kernel_by_tma
def test_descales_of_v_count_beside_equal_scores_of_any_size(
    kernel: str, descales: tuple[float, float]
) -> None:
    """All keys have one score, so large that the logarithm of a descale is less than its ulp."""
    q, k = (torch.ones(1, 1, n, 64, device=on.device).to(E4M3) for n in (5, 128))
    v = on.rand(1, 1, 128, 64, seed=1, dtype=E4M3)
    call = {"scale": 1e7, "v_descale": on.tensor(descales).view(1, 1, 2)}
    on.attend_and_check(kernel, q, k, v, schedules=RANDOM, **call)


# --- the whole way from unquantised tensors ---


@every_kernel
@pytest.mark.parametrize("kind", on.pick(simulator=["block"], gpu=["tensor", "head", "block"]))
def test_error_against_the_tensors_before_quantisation(kernel: str, kind: str) -> None:
    """PyTorch's own error at fp16 is about 0.0005."""
    batch, heads, rows = on.pick(simulator=(1, 1, 260), gpu=(2, 4, 700))
    outliers = torch.ones(128, device=on.device)
    outliers[5::40] = 20.0
    for channels, limit in ((torch.ones(128, device=on.device), 0.07), (outliers, 0.15)):
        q, k, v = on.qkv(rows, rows, 128, batch=batch, heads=(heads, heads))
        k = k * channels
        q = q / channels.sqrt()
        pairs = [archflash.quantize_fp8(x, per=kind) for x in (q, k, v)]
        values = [x for x, _ in pairs]
        call = {f"{name}_descale": d for name, (_, d) in zip("qkv", pairs, strict=True)}
        out, _ = on.attend(kernel, *values, schedules=RANDOM, **call)
        expected = reference.attention(q, k, v, return_lse=False)
        assert relative_rms_error(out, expected) < limit
