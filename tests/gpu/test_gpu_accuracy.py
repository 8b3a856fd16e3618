"""How exact the 16-bit kernels are beside PyTorch's flash kernel, on data whose largest weights
count.

Sizes of q, k and v: 1 makes rows whose weights are spread, 3 and 6 make rows that a few keys
dominate.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import archflash

from .gpu_cases import DTYPES, kernel_dtypes, rand

pytestmark = pytest.mark.gpu

# simt adds and weighs in fp32 throughout.
TENSOR_CORES = [
    (kernel, dtype) for kernel, dtype in kernel_dtypes(("float16", "bfloat16")) if kernel != "simt"
]


def errors(out: Tensor, expected: Tensor) -> tuple[float, float]:
    """The mean and the 99.9% quantile of the absolute error."""
    error = (out.double() - expected).abs().flatten()
    rank = math.ceil(0.999 * error.numel())
    return float(error.mean()), float(error.kthvalue(rank).values)


@pytest.mark.parametrize("keys", [512, 2048])
@pytest.mark.parametrize("size", [1, 3, 6])
@pytest.mark.parametrize(("kernel", "dtype"), TENSOR_CORES)
def test_errors_are_those_of_pytorchs_flash_kernel(
    kernel: str, dtype: str, size: int, keys: int
) -> None:
    shape = (2, 8, keys, 128)
    q, k, v = (rand(*shape, seed=seed).mul(size).to(DTYPES[dtype]) for seed in range(3))
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(128)
    expected = torch.softmax(scores, -1) @ v.double()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    mean, quantile = errors(archflash.attention(q, k, v, implementation=kernel), expected)
    flash_mean, flash_quantile = errors(flash, expected)
    # Where weights are spread, a base that does not follow every rise costs up to 4%; where a few
    # keys dominate, at most 1% (H200: 1.010 at size 3 and 512 keys, 1.000 at 2,048).
    room = 1.05 if size == 1 else 1.015
    assert mean <= room * flash_mean
    assert quantile <= room * flash_quantile
