"""The fused quantiser on tensors of more rows and blocks than 32 bits or a grid can count."""

from __future__ import annotations

import pytest
import torch

import archflash

from .gpu_cases import kernels, rand

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("ada" not in kernels(), reason="ada has no code for this GPU"),
]

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
