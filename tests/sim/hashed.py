"""Inputs of recordings: numbers from an integer hash, of the same bits on every machine. Those of
torch.randn depend on the processor, because its vector instructions have logarithms of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def hashed(shape: tuple[int, ...], stream: int) -> Tensor:
    """Numbers of mean 0 and deviation near 1, float32: multiples of 1/128 below 4, which fp16 holds
    exactly.
    """
    return torch.from_numpy(_numbers(shape, stream))


def wide(shape: tuple[int, ...], stream: int) -> Tensor:
    """Such numbers with all bits of a float32 times 2^-6 .. 2^6: widely different exponents show
    how the addends of a sum are aligned, and the bits what a conversion does with them.
    """
    numbers, more, exponents = (_numbers(shape, 3 * stream + i) for i in range(3))
    factors = np.float32(1) + more / np.float32(128)
    return torch.from_numpy(np.ldexp(numbers * factors, (exponents * 128).astype(int) % 13 - 6))


def _numbers(shape: tuple[int, ...], stream: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    x = np.arange(int(np.prod(shape)), dtype=np.uint32) + np.uint32(stream * 0x9E3779B9 % 2**32)
    # The finaliser of MurmurHash3.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    sums = x.view(np.uint8).reshape(-1, 4).astype(np.int32).sum(axis=1)
    return ((sums - 510) / 128).astype(np.float32).reshape(shape)
