"""Checks of what makers of masks are given, before they compute with it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash._eager import give_code, is_tracing

_Maker = TypeVar("_Maker", bound=Callable[..., Any])
# Arguments that hold numbers of tokens, keys or blocks. What is bool in tables is a flag.
_INTEGERS = {
    "chunks", "counts", "ids", "indices", "indptr", "key_indices", "key_ranges", "key_sizes",
    "lengths", "query_ranges", "row_sizes", "slash", "spans", "startend_row_indices",
    "topk_lengths", "vertical",
}  # fmt: skip


def checked(maker: _Maker) -> _Maker:
    """Has a maker refuse what its annotations do not say: other types, negative numbers, tensors
    on two devices, and what is no integer where numbers of keys are wanted.
    """
    signature = inspect.signature(maker)

    @functools.wraps(maker)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_tracing() and not torch.compiler.is_compiling():
            _check(signature, signature.bind(*args, **kwargs).arguments)
        return maker(*args, **kwargs)

    give_code(call, maker)
    return call  # type: ignore[return-value]


def _check(signature: inspect.Signature, given: dict[str, Any]) -> None:
    first: tuple[str, Tensor] | None = None
    for name, value in given.items():
        kind, _, optional = str(signature.parameters[name].annotation).partition(" | ")
        if value is None and optional:
            continue
        wrong = f"{name} is {_native.given(value)}: it must be "
        if kind == "Tensor":
            if not isinstance(value, Tensor):
                raise TypeError(f"{wrong}a torch.Tensor")
            if value.is_nested or value.layout != torch.strided:
                raise TypeError(f"{name} is a nested or sparse tensor: it must be dense")
            first = first or (name, value)
            if value.device != first[1].device:
                raise TypeError(
                    f"{name} is on {value.device} but {first[0]} is on {first[1].device}: move one"
                )
            if name in _INTEGERS and (value.is_floating_point() or value.is_complex()):
                raise TypeError(f"{name} has dtype {value.dtype}: it must be of integers")
            if name == "table" and value.dtype not in (torch.bool, torch.int8):
                raise TypeError(f"table has dtype {value.dtype}: it must be bool or int8")
        elif kind == "int":
            is_one = not isinstance(value, Tensor) or value.numel() == 1
            if isinstance(value, bool) or not hasattr(value, "__index__") or not is_one:
                raise TypeError(f"{wrong}an int")
            if not isinstance(value, (Tensor, torch.SymInt)) and value < 0:
                raise ValueError(f"{wrong}>= 0")
        elif kind == "tuple[int, int]":
            pair = isinstance(value, (tuple, list)) and len(value) == 2
            if not pair or not all(hasattr(x, "__index__") and x > 0 for x in value):
                raise TypeError(f"{wrong}two ints above 0, of queries and keys")
        elif kind == "bool" and not isinstance(value, bool):
            raise TypeError(f"{wrong}a bool")
        elif kind == "torch.dtype" and not isinstance(value, torch.dtype):
            raise TypeError(f"{wrong}a torch.dtype")
        elif kind == "Sequence[int]":
            if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
                raise TypeError(f"{wrong}a sequence of ints")
            if not all(hasattr(x, "__index__") for x in value):
                raise TypeError(f"{wrong}a sequence of ints")
