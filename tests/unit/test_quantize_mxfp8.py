"""quantize_mxfp8: what it makes of numbers, what it refuses, and what attention refuses of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import archflash
from archflash import reference

pytestmark = pytest.mark.skipif(
    not hasattr(torch, "float8_e8m0fnu"), reason="torch before 2.7 has no float8_e8m0fnu"
)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("dim", [-1, 1, 2])
def test_a_scale_is_the_smallest_power_of_two_that_suffices(dtype: torch.dtype, dim: int) -> None:
    x = rand(2, 70, 3, 48).to(torch.bfloat16) * torch.tensor([1e-3, 1.0, 50.0])[:, None]
    values, scales = archflash.quantize_mxfp8(x, dtype=dtype, dim=dim)
    assert (values.dtype, values.shape) == (dtype, x.shape)
    shape = list(x.shape)
    shape[dim] = -(-shape[dim] // 32)
    assert (scales.dtype, list(scales.shape)) == (torch.float8_e8m0fnu, shape)
    assert scales.is_contiguous()
    for group in range(shape[dim]):
        length = min(32, x.shape[dim] - 32 * group)
        most = x.double().abs().narrow(dim, 32 * group, length).amax(dim)
        scale = scales.double().select(dim, group)
        assert (most <= LARGEST[dtype] * scale).all()
        assert (most > LARGEST[dtype] * scale / 2).all()
    made = reference.dequantize_mxfp8(values, scales, dim)
    wide = scales.double().repeat_interleave(32, dim).narrow(dim, 0, x.shape[dim])
    rounded = (x.double() / wide).to(dtype).double() * wide
    assert torch.equal(made, rounded)


def test_the_ends_of_the_range() -> None:
    limits = torch.tensor([448.0, 448.1, 2.0**-149, 3e38])[:, None].expand(4, 32)
    values, scales = archflash.quantize_mxfp8(limits)
    assert scales.view(torch.uint8).flatten().tolist() == [127, 128, 0, 127 + 120]
    assert values[0].float().tolist() == [448.0] * 32
    assert values.float().abs().max() <= 448


def test_what_is_not_finite() -> None:
    x = rand(2, 64)
    x[0, 3], x[0, 20], x[1, 40] = math.inf, -math.inf, math.nan
    values, scales = archflash.quantize_mxfp8(x)
    finite = torch.where(x.isfinite(), x, 0.0)
    assert torch.equal(
        scales.view(torch.uint8), archflash.quantize_mxfp8(finite)[1].view(torch.uint8)
    )
    assert values[0, 3].float() == 448
    assert values[0, 20].float() == -448
    assert values.float().isnan().nonzero().tolist() == [[1, 40]]
    values, scales = archflash.quantize_mxfp8(torch.zeros(2, 40))
    assert (scales.double() == 1).all()
    assert not values.float().any()


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (2, 0, 32)])
def test_tensors_without_numbers(shape: tuple[int, ...]) -> None:
    for dim in range(len(shape)):
        values, scales = archflash.quantize_mxfp8(torch.empty(shape), dim=dim)
        assert values.shape == shape
        assert scales.shape[dim] == -(-shape[dim] // 32)


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "dtype": (torch.ones(32).double(), {}, TypeError, "float32, float16 or bfloat16"),
    "type": (torch.ones(32), {"dtype": torch.int8}, TypeError, "float8_e4m3fn or torch.float8_e5"),
    "no dimension": (torch.tensor(1.0), {}, ValueError, "x has no dimension"),
    "dim": (torch.ones(2, 32), {"dim": 2}, ValueError, "dim is 2: .* from -2 to 1"),
    "flag": (torch.ones(2, 32), {"dim": True}, ValueError, "dim is True: .* from -2 to 1"),
    "array": (np.ones(32), {}, TypeError, "torch.Tensor"),
    "gradient": (
        torch.ones(32, requires_grad=True), {}, archflash.UnsupportedError, "no derivative"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_it_refuses(name: str) -> None:
    x, options, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        archflash.quantize_mxfp8(x, **options)


def call() -> tuple[list[Tensor], dict[str, Any]]:
    made = [
        archflash.quantize_mxfp8(rand(1, 2, n, 64), dim=d) for n, d in ((40, 3), (70, 3), (70, 2))
    ]
    scales = dict(zip(("q_descale", "k_descale", "v_descale"), (x[1] for x in made), strict=True))
    return [x[0] for x in made], scales


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "one is missing": ({"k_descale": None}, ValueError, "k_descale is None: with block scales"),
    "another dtype": (
        {"v_descale": torch.ones(1)}, TypeError, "v_descale has dtype torch.float32: with block"
    ),
    "along columns": (
        {"v_descale": torch.zeros(1, 2, 70, 2, dtype=torch.uint8)}, ValueError,
        r"v_descale has shape \(1, 2, 70, 2\): with block scales it must be \(1, 2, 3, 64\), a "
        "scale for 32 rows of a column",
    ),
    "too few": (
        {"q_descale": torch.zeros(1, 2, 40, 1, dtype=torch.uint8)}, ValueError,
        r"it must be \(1, 2, 40, 2\), a scale for 32 columns of a row",
    ),
    "strided": (
        {"k_descale": torch.zeros(1, 2, 70, 4, dtype=torch.uint8)[..., ::2]}, ValueError,
        "k_descale has a strided last dimension",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_attention_refuses_of_it(name: str) -> None:
    change, kind, words = REFUSED[name]
    (q, k, v), scales = call()
    scales |= {
        key: x.view(torch.float8_e8m0fnu) if x is not None and x.dtype == torch.uint8 else x
        for key, x in change.items()
    }
    with pytest.raises(kind, match=words):
        archflash.attention(q, k, v, **scales)


def test_calls_that_cannot_have_block_scales() -> None:
    (q, k, v), scales = call()
    with pytest.raises(ValueError, match=r"a descale is given but q is float32"):
        archflash.attention(q.float(), k.float(), v.float(), **scales)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    lengths = {
        f"cu_seqlens_{x}": torch.tensor([0, n], dtype=torch.int32)
        for x, n in (("q", 40), ("k", 70))
    }
    with pytest.raises(ValueError, match="with cu_seqlens: block scales"):
        archflash.attention(*packed, **lengths, **scales)
    with pytest.raises(ValueError, match="with a cache: block scales"):
        archflash.attention_with_kvcache(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            cache_seqlens=torch.tensor([70], dtype=torch.int32), **scales,
        )  # fmt: skip
