"""The fused quantiser gives the bits of plain operations."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import kernels, rand

import archflash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("ada" not in kernels(), reason="ada has no code for this GPU"),
]

SHAPES = {
    "d48": ((2, 3, 150, 48), "bhnd"),
    "d256-bnhd": ((2, 150, 3, 256), "bnhd"),
    "d8-one-block": ((1, 2, 64, 8), "bhnd"),
    "one-row": ((3, 2, 1, 128), "bhnd"),
    "packed": ((333, 3, 64), "bhnd"),
    "many": ((4, 40, 1000, 128), "bhnd"),
}


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_the_kernel_gives_the_bits_of_plain_operations(
    per: str, name: str, dtype: str, fp8: torch.dtype
) -> None:
    shape, layout = SHAPES[name]
    if len(shape) == 3 and per == "block":
        pytest.skip("packed sequences have no blocks")
    x = rand(*shape, seed=1, dtype=dtype)
    x[0, 0] = 0
    x[-1, 0, 0] = float("inf")
    x[-1, -1, -1] = -float("inf")
    call = {"per": per, "dtype": fp8, "layout": layout}
    values, descale = archflash.quantize_fp8(x, implementation="ada", **call)
    wanted, wanted_descale = archflash.quantize_fp8(x, implementation="torch", **call)
    assert torch.equal(descale, wanted_descale)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
    again, _ = archflash.quantize_fp8(x, **call)
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))


def test_rows_around_a_slice_are_neither_read_nor_written() -> None:
    around = torch.full((2, 4, 200, 80), float("nan"), device="cuda", dtype=torch.float16)
    x = around[:, 1:3, 7:157, 8:72]
    x.copy_(rand(2, 2, 150, 64, seed=2, dtype="float16"))
    values, descale = archflash.quantize_fp8(x, per="block", implementation="ada")
    wanted, wanted_descale = archflash.quantize_fp8(x.contiguous(), per="block")
    assert torch.equal(descale, wanted_descale)
    assert torch.equal(values.float(), wanted.float())


def test_nan_stays_where_it_is() -> None:
    x = rand(1, 1, 100, 64, seed=3)
    x[0, 0, 70, 5] = float("nan")
    values, descale = archflash.quantize_fp8(x, per="block", implementation="ada")
    assert descale.isfinite().all()
    assert values.float().isnan().nonzero().tolist() == [[0, 0, 70, 5]]


GIB = 1 << 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "per", "gib"),
    [
        ((1, 1, 2**31 + 64, 16), "tensor", 99),  # rows beyond 32 bits
        ((1, 1, 2**31 + 64, 16), "block", 99),
        ((2**31 + 64, 1, 1, 8), "block", 59),  # more blocks than a grid has CTAs
    ],
    ids=["rows-tensor", "rows-block", "blocks"],
)
def test_the_first_and_the_last_of_more_than_2_31_rows(
    shape: tuple[int, ...], per: str, gib: int
) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] // GIB
    if free < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory, {free} are free")
    x = torch.zeros(shape, dtype=torch.float16, device="cuda")
    rows = x.view(-1, shape[-1])
    for seed, end in enumerate((slice(0, 64), slice(-64, None))):
        rows[end] = rand(64, shape[-1], seed=seed, dtype="float16")
    rows[-1, -1] = 100  # the largest of all
    values, descale = archflash.quantize_fp8(x, per=per, implementation="ada")
    for end in (slice(0, 64), slice(-64, None)):
        part = rows[end].view(1, 1, 64, -1) if shape[2] > 1 else rows[end].view(64, 1, 1, -1)
        if per == "block":
            wanted, descales = archflash.quantize_fp8(part, per=per, implementation="torch")
            count = descales.numel()
            found = descale.flatten()[:count] if end.start == 0 else descale.flatten()[-count:]
            assert torch.equal(found, descales.flatten())
        else:
            assert descale.cpu() == torch.tensor([100.0]) / 448
            wanted = (part.float() * (1.0 / descale)).to(values.dtype)
        stored = values.view(-1, shape[-1])[end]
        assert torch.equal(stored.float(), wanted.view(64, -1).float())
