"""The fused quantiser gives the bits of plain operations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import archflash

from .executors import DTYPES, FP8, executor

on = executor()
pytestmark = pytest.mark.skipif("ada" not in on.kernels(), reason="ada has no code for this GPU")

SHAPES = {
    "d48": ((2, 3, 150, 48), "bhnd"),
    "d256-bnhd": ((2, 150, 3, 256), "bnhd"),
    "d8-one-block": ((1, 2, 64, 8), "bhnd"),
    "d72-three-blocks": ((2, 3, 130, 72), "bhnd"),
    "one-row": ((3, 2, 1, 128), "bhnd"),
    "packed": ((333, 3, 64), "bhnd"),
} | on.pick(simulator={}, gpu={"many": ((4, 40, 1000, 128), "bhnd")})
CASES = [
    (per, name, dtype, fp8)
    for per in ("tensor", "head", "block")
    for name, (shape, _) in SHAPES.items()
    for dtype in DTYPES
    for fp8 in FP8
    if len(shape) == 4 or per != "block"  # packed sequences have no blocks
]
if on.name == "simulator":
    CASES = CASES[::4]


@pytest.mark.parametrize(("per", "name", "dtype", "fp8"), CASES)
def test_the_kernel_gives_the_bits_of_plain_operations(
    per: str, name: str, dtype: str, fp8: str
) -> None:
    shape, layout = SHAPES[name]
    x = on.rand(*shape, seed=1)
    sizes = torch.logspace(-3, 2, shape[1], device=on.device)  # of rows, or of heads
    x = (x * sizes.view(-1, *[1] * (len(shape) - 2))).to(DTYPES[dtype])
    x[0, 0] = 0
    x[-1, 0, 0] = math.inf
    x[-1, -1, -1] = -math.inf
    call: dict[str, Any] = {"per": per, "dtype": FP8[fp8], "layout": layout}
    values, descale = archflash.quantize_fp8(x, implementation="ada", **call)
    wanted, wanted_descale = archflash.quantize_fp8(x, implementation="torch", **call)
    assert torch.equal(descale, wanted_descale)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
    again, _ = archflash.quantize_fp8(x, **call)
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))


def test_rows_around_a_slice_are_neither_read_nor_written() -> None:
    around = torch.full((2, 4, 200, 80), math.nan, device=on.device, dtype=torch.float16)
    x = around[:, 1:3, 7:157, 8:72]
    x.copy_(on.rand(2, 2, 150, 64, seed=2, dtype="float16"))
    values, descale = archflash.quantize_fp8(x, per="block", implementation="ada")
    wanted, wanted_descale = archflash.quantize_fp8(
        x.contiguous(), per="block", implementation="torch"
    )
    assert torch.equal(descale, wanted_descale)
    assert torch.equal(values.float(), wanted.float())


def test_nan_stays_where_it_is() -> None:
    x = on.rand(1, 1, 100, 64, seed=3)
    x[0, 0, 70, 5] = math.nan
    values, descale = archflash.quantize_fp8(x, per="block", implementation="ada")
    assert descale.isfinite().all()
    assert values.float().isnan().nonzero().tolist() == [[0, 0, 70, 5]]
