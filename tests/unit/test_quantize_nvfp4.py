"""quantize_nvfp4: what it makes of numbers, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import archflash
from archflash import reference

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per", ["tensor", "head"])
def test_each_number_is_the_nearest_of_its_group(dtype: torch.dtype, per: str) -> None:
    x = (rand(2, 3, 40, 64) * torch.tensor([1e-3, 1.0, 50.0]).view(1, 3, 1, 1)).to(dtype)
    values, scales, unit = archflash.quantize_nvfp4(x, per=per)
    assert (values.dtype, values.shape) == (torch.uint8, (2, 3, 40, 32))
    assert (scales.dtype, scales.shape) == (torch.float8_e4m3fn, (2, 3, 40, 4))
    assert unit.shape == ((1,) if per == "tensor" else (2, 3, 1, 1))
    made = reference.dequantize_nvfp4(values, scales, unit)
    steps = scales.double().repeat_interleave(16, -1) * unit.double()
    all_numbers = torch.tensor(NUMBERS + [-n for n in NUMBERS], dtype=torch.float64)
    away = (x.double()[..., None] - all_numbers * steps[..., None]).abs().amin(-1)
    # Quotients are rounded in float32.
    assert ((made - x.double()).abs() <= away + 1e-6 * steps).all()


def test_groups_along_rows_are_those_of_the_transposed_tensor() -> None:
    x = rand(2, 70, 32)
    values, scales, unit = archflash.quantize_nvfp4(x, dim=-2)
    assert (values.shape, scales.shape) == ((2, 70, 16), (2, 5, 32))
    padded = torch.nn.functional.pad(x, (0, 0, 0, 10)).transpose(1, 2)
    expected = reference.dequantize_nvfp4(*archflash.quantize_nvfp4(padded.contiguous()))
    made = reference.dequantize_nvfp4(values, scales, unit, -2)
    assert torch.equal(made, expected.transpose(1, 2)[:, :70])
    x[0, 66, 3] = math.nan
    made = reference.dequantize_nvfp4(*archflash.quantize_nvfp4(x, dim=-2), -2)
    assert made.isnan().nonzero().tolist() == [[0, row, 3] for row in range(64, 70)]


def test_the_largest_number_and_the_scales() -> None:
    x = rand(3, 50, 48)
    values, scales, unit = archflash.quantize_nvfp4(x)
    assert unit.item() == pytest.approx(float(x.abs().max()) / (6 * 448))
    most = x.abs().unflatten(-1, (3, 16)).amax(-1)
    assert torch.equal(scales, (most / unit / 6).clamp(max=448).to(torch.float8_e4m3fn))
    assert scales.float().max() == 448
    made = reference.dequantize_nvfp4(values, scales, unit)
    assert made.abs().max() == pytest.approx(float(x.abs().max()), rel=1e-6)


def test_two_neighbours_are_a_byte_and_ties_go_to_an_even_bit() -> None:
    # Their scale is 448, and the unit makes them what they are.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2) * 448
    ties[8:] *= -1
    values, scales, unit = archflash.quantize_nvfp4(ties)
    assert unit.item() == 1.0
    assert scales.float().item() == 448
    codes = torch.stack([values & 15, values >> 4], -1).flatten().tolist()
    even = [0, 2, 2, 4, 4, 6, 6, 7]
    assert codes == even + [8 + code for code in even]
    made = reference.dequantize_nvfp4(values, scales, unit)
    assert made[:4].tolist() == [0.0, 448.0, 448.0, 896.0]


def test_what_is_not_finite() -> None:
    x = rand(2, 64)
    x[0, 3], x[0, 20], x[1, 40] = math.inf, -math.inf, math.nan
    values, scales, unit = archflash.quantize_nvfp4(x)
    made = reference.dequantize_nvfp4(values, scales, unit)
    assert unit.item() == pytest.approx(float(x[x.isfinite()].abs().max()) / (6 * 448))
    assert made[1, 32:48].isnan().all()
    assert made.isnan().sum() == 16
    assert made[0, 3] == 6 * 448 * unit.double()
    assert made[0, 20] == -6 * 448 * unit.double()
    made = reference.dequantize_nvfp4(*archflash.quantize_nvfp4(torch.full((16,), -math.inf)))
    assert made.tolist() == [-2688.0] * 16


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (2, 0, 32)])
def test_tensors_without_numbers(shape: tuple[int, ...]) -> None:
    for per in ("tensor", "head"):
        values, scales, unit = archflash.quantize_nvfp4(torch.empty(shape), per=per)
        assert values.shape == (*shape[:-1], shape[-1] // 2)
        assert scales.shape == (*shape[:-1], shape[-1] // 16)
        assert (unit == 1).all()


def test_zeros_have_a_unit_of_1_and_small_numbers_vanish_beside_large_ones() -> None:
    values, scales, unit = archflash.quantize_nvfp4(torch.zeros(2, 32))
    assert unit.item() == 1
    assert not values.any()
    assert not scales.float().any()
    x = torch.cat([torch.full((16,), 1e-7), torch.full((16,), 1.0)])
    made = reference.dequantize_nvfp4(*archflash.quantize_nvfp4(x))
    assert not made[:16].any()
    assert made[16:].tolist() == pytest.approx([1.0] * 16)


def test_it_is_what_attention_of_four_bits_makes_of_q() -> None:
    """Rows of one head whose unit is that of all 16 of them."""
    q, k, v = rand(1, 1, 16, 64), rand(1, 1, 128, 64, seed=1), rand(1, 1, 128, 64, seed=2)
    stored = reference.nvfp4(q, k, v)[0][..., :-1]
    made = reference.dequantize_nvfp4(*archflash.quantize_nvfp4(q, per="head"))
    assert float((made - stored).abs().max()) < 1e-5


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "per": (torch.ones(16), {"per": "block"}, ValueError, "'block': it must be 'tensor' or 'head'"),
    "dim": (torch.ones(16, 16), {"dim": 0}, ValueError, "dim is 0: it must be -1 or -2"),
    "one row": (torch.ones(16), {"dim": -2}, ValueError, "it must have 2 or more dimensions"),
    "rows": (torch.ones(2, 24), {}, ValueError, "rows of 24 numbers: .* multiple of 16; pad them"),
    "no rows": (torch.tensor(1.0), {}, ValueError, "it must have 1 or more dimensions"),
    "no heads": (torch.ones(16), {"per": "head"}, ValueError, "it must have 2 or more dimensions"),
    "dtype": (torch.ones(16).double(), {}, TypeError, "float32, float16 or bfloat16"),
    "array": (np.ones(16), {}, TypeError, "torch.Tensor"),
    "gradient": (
        torch.ones(16, requires_grad=True), {}, archflash.UnsupportedError, "no derivative"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_it_refuses(name: str) -> None:
    x, options, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        archflash.quantize_nvfp4(x, **options)
