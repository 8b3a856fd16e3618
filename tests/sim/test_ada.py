"""ada on the simulator: FP8 with every kind of descale, its 16-bit tiles, the quantiser."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash, reference
from archflash._api import find_device
from archflash.sim import _attention, _launch

sim = pytest.importorskip("archflash.sim")

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantised(x: Tensor, per: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """With descales that differ from block to block on purpose."""
    values, descale = archflash.quantize_fp8(x, per=per, dtype=dtype)
    return values, descale * (1 + torch.arange(descale.numel()).view(descale.shape) % 3)


CASES: dict[str, tuple[str, tuple[int, int], tuple[int, int], str, dict[str, Any]]] = {
    "one-tile": ("e4m3", (64, 64), (64, 64), "tensor", {}),
    "causal": ("e4m3", (70, 130), (128, 128), "tensor", {"causal": True}),
    "blocks": ("e4m3", (70, 200), (128, 128), "block", {"causal": True}),
    "e5m2": ("e5m2", (70, 130), (128, 128), "head", {"out_dtype": torch.float16}),
    "window-odd-dims": ("e4m3", (70, 200), (112, 80), "head", {"window": (30, 5)}),
    "softcap-192": ("e4m3", (20, 130), (192, 128), "block", {"softcap": 20.0}),
    "sinks-256": ("e5m2", (20, 130), (256, 256), "block", {"sinks": torch.tensor([0.5, -1.0])}),
    "scale-zero": ("e4m3", (33, 70), (64, 64), "tensor", {"scale": 0.0}),
    "scale-negative": ("e4m3", (33, 70), (64, 64), "block", {"scale": -0.3}),
    "scale-huge": ("e4m3", (33, 129), (64, 64), "tensor", {"scale": 1e7}),
    "decode": ("e4m3", (1, 300), (64, 64), "block", {}),
    "no-keys": ("e4m3", (5, 0), (64, 64), "head", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_fp8_meets_its_error_rule(name: str) -> None:
    dtype, (nq, nk), (d, dv), per, options = CASES[name]
    shapes = ((nq, 2, d), (nk, 1, d), (nk, 1, dv))
    call = dict(options)
    tensors = []
    for letter, (rows, heads, dim) in zip("qkv", shapes, strict=True):
        values, descale = quantised(rand(1, heads, rows, dim, seed=ord(letter)), per, FP8[dtype])
        tensors.append(values)
        call[f"{letter}_descale"] = descale
    ran = sim.run(*tensors, implementation="ada", return_lse=True, **call)
    expected, expected_lse = reference.attention(*tensors, **call)
    report = reference.check_fp8(ran.out, expected, *tensors, **call)
    assert report.ok, report
    lse_report = reference.check_lse(ran.lse, expected_lse)
    assert lse_report.ok, lse_report


def test_packed_fp8_sequences() -> None:
    q, k, v = (rand(100, 2, 64, seed=i).to(torch.float8_e4m3fn) for i in range(3))
    ends = torch.tensor([0, 0, 70, 71, 100], dtype=torch.int32)
    other = torch.tensor([0, 30, 30, 95, 100], dtype=torch.int32)
    descale = torch.rand(4, 2, generator=torch.Generator().manual_seed(5)) + 0.5
    call = {"cu_seqlens_q": ends, "cu_seqlens_k": other, "causal": True, "v_descale": descale}
    ran = sim.run(q, k, v, implementation="ada", **call)
    expected = reference.attention(q, k, v, return_lse=False, **call)
    report = reference.check_fp8(ran.out, expected, q, k, v, **call)
    assert report.ok, report


@pytest.mark.parametrize("rise", [0.5, 0.7, 0.74, 0.749, 0.76, 1.5, 3.0])
@pytest.mark.parametrize(("name", "keys"), [("ada", 64), ("blackwell_dc", 128)])
def test_no_weight_saturates_however_scores_rise(name: str, keys: int, rise: float) -> None:
    """A key of the last block visited is 2^rise above all others: its weight is right to 2^-4."""
    q, k, v = (torch.zeros(1, 1, n, 64) for n in (16, 2 * keys, 2 * keys))
    q[..., 0] = 1
    k[:, :, :keys, 0] = -448
    k[:, :, keys - 59, 0] = 1
    v[:, :, keys - 59] = 1
    call = {"scale": rise / math.log2(math.e)}
    stored = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    out = sim.run(*stored, implementation=name, out_dtype=torch.float16, **call).out.double()
    exact = 2**rise / (keys + 2**rise)
    assert (out - exact).abs().max() <= (2**-4 + 2**-10) * exact


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("d", "dv", "nq", "nk", "causal"),
    [
        (64, 64, 20, 70, True),
        (96, 96, 70, 100, False),
        (128, 128, 70, 130, True),
        (192, 128, 70, 70, False),
        (256, 256, 40, 70, True),
    ],
)
def test_16_bit_tiles_meet_the_error_rule(
    dtype: torch.dtype, d: int, dv: int, nq: int, nk: int, causal: bool
) -> None:
    shapes = ((2, nq, d), (1, nk, d), (1, nk, dv))
    q, k, v = (rand(1, *shape, seed=i).to(dtype) for i, shape in enumerate(shapes))
    ran = sim.run(q, k, v, implementation="ada", causal=causal)
    expected = reference.attention(q, k, v, return_lse=False, causal=causal)
    report = reference.check(ran.out, expected, reference.baseline(q, k, v, causal=causal))
    assert report.ok, report


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(
    ("per", "dtype", "of", "d"),
    [
        ("tensor", torch.float8_e4m3fn, torch.float32, 64),
        ("head", torch.float8_e5m2, torch.float16, 256),
        ("block", torch.float8_e4m3fn, torch.bfloat16, 72),
    ],
)
def test_the_quantiser_gives_the_bits_of_plain_operations(
    per: str, dtype: torch.dtype, of: torch.dtype, d: int, layout: str
) -> None:
    x = (rand(2, 3, 130, d, seed=1) * torch.logspace(-3, 2, 130)[:, None]).to(of)
    x[0, 1] = 0
    x[1, 0, 64:, 8] = math.inf
    x[1, 0, 70:90] = -math.inf
    x = x.transpose(1, 2).contiguous() if layout == "bnhd" else x
    options: dict[str, Any] = {"per": per, "dtype": dtype, "layout": layout}
    expected, expected_descale = archflash.quantize_fp8(x, implementation="torch", **options)
    values, descale = archflash.quantize_fp8(x, implementation="ada", **options)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(descale, expected_descale)


@pytest.mark.parametrize("per", ["tensor", "block"])
def test_the_quantiser_finds_tiles_beyond_31_bits(per: str) -> None:
    """The last launch of a plan with more tiles than a grid can have: its two CTAs alone.

    Only the last 65 rows are in memory; the addresses are those of tensors that start far before.
    """
    d, tiles, held = 8, 2**31 + 1, 65
    rows = 64 * tiles - 63  # one row in the last tile
    whole = torch.empty(1, 1, rows, d, dtype=torch.float16, device="meta")
    stored = torch.empty_like(whole, dtype=torch.uint8)
    home = find_device("RTX 4090")
    number = ["tensor", "head", "block"].index(per)
    plan = _archflash.plan_quantize("float8_e4m3fn", number, whole, stored, home)
    x = rand(held, d, seed=4).half()
    of_tiles = torch.tensor([x[:64].abs().max(), x[64:].abs().max()]).float()
    held_tensors = {
        "q": (x, rows - held),  # and the first of their rows or numbers that is held
        "out": (torch.zeros(held, d, dtype=torch.uint8), rows - held),
        "descale": (torch.ones(1 if per == "tensor" else 2), 0 if per == "tensor" else tiles - 2),
        "workspace": (torch.zeros(2), tiles - 2),
    }
    memory = _launch._native.Memory()
    buffers = [_launch.Buffer(tensor, name=name) for name, (tensor, _) in held_tensors.items()]
    at = _launch.Bindings(memory, buffers).addresses
    addresses = [
        (name, (address - first * tensor[0].nbytes) % 2**64)
        for address, (name, (tensor, first)) in zip(at, held_tensors.items(), strict=True)
    ]
    ran = []
    for index, row in enumerate(plan.to_dict()["launches"]):
        if row["grid"][0] != 2:
            continue
        parameters = _attention.bound_parameters(plan, index, row, addresses)
        program = _attention.find_program(row["image"], home.capability)
        report = _launch.run_kernel(
            program, row["kernel"], parameters, memory, grid=row["grid"], block=row["block"],
            shared_bytes=0, mode="random", seed=0, race_check=True, threads=0,
        )  # fmt: skip
        assert not report.errors, report
        ran.append(row["kernel"])
    steps = ["largest_f16", "values_f16"] if per == "tensor" else ["at_once_f16"]
    assert ran == [f"ada_quantize_{step}" for step in steps]
    descale = held_tensors["descale"][0]
    if per == "tensor":
        assert torch.equal(held_tensors["workspace"][0], of_tiles)
        assert descale.tolist() == [1.0]
    else:
        assert torch.equal(descale, of_tiles / 448)
    factor = (1 / descale).repeat_interleave(64)[:held, None] if per == "block" else 1.0
    expected = (x.float() * factor).to(torch.float8_e4m3fn)
    assert torch.equal(held_tensors["out"][0], expected.view(torch.uint8))
