"""What functions of the package are given, checked before PyTorch's operations see it, whose errors
do not say which argument was wrong.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native

_in_transform = torch._C._are_functorch_transforms_active


def check_dense(**given: Any) -> None:
    """Refuses what is no tensor, or one whose values do not lie in memory one by one. Operations of
    PyTorch crash the process where a tensor's storage was freed.
    """
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {_native.given(x)}: it must be a torch.Tensor")
        if x.is_nested or x.layout is not torch.strided:
            raise TypeError(f"{name} is a nested or sparse tensor: it must be dense")
        if x.is_quantized:
            raise TypeError(f"{name} has dtype {x.dtype}: pass its numbers, {name}.dequantize()")
        if torch.compiler.is_compiling() or _in_transform():
            continue
        if _native.is_plain_tensor(x):  # sizes of others may be symbols
            _native.check_data(x, name)


def is_one_of(x: object, words: Iterable[str]) -> bool:
    """Whether x is one of these words. Neither asks an array whether it is true, nor for a hash."""
    return isinstance(x, str) and x in words


def is_int(x: object) -> bool:
    """Whether x is an integer of Python, numpy or a compiler, and no bool."""
    return isinstance(x, (numbers.Integral, torch.SymInt)) and not isinstance(x, bool)


def as_device(device: Any) -> torch.device:
    """A device as PyTorch has it, of its name or index."""
    if isinstance(device, torch.device):
        return device
    if not isinstance(device, str) and not is_int(device):
        raise TypeError(
            f"device is {_native.given(device)}: it must be a torch.device, its name or its index"
        )
    try:
        return torch.device(device)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"device is {_native.given(device)}: it must be one that PyTorch knows, such as "
            "'cuda:0' or 'cpu'"
        ) from error
