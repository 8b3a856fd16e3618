"""Checks of what makers of masks are given, before they compute with it."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash._eager import give_code, is_tracing, recorded
from archflash._given import as_device, check_dense

_Maker = TypeVar("_Maker", bound=Callable[..., Any])
# Arguments that hold numbers of tokens, keys or blocks. What is bool in tables is a flag.
_INTEGERS = {
    "chunks", "counts", "ids", "indices", "indptr", "key_indices", "key_ranges", "key_sizes",
    "lengths", "query_ranges", "row_sizes", "slash", "spans", "startend_row_indices",
    "topk_lengths", "vertical",
}  # fmt: skip
# Makers compute with these as int64 if they are narrower than int32, which the number of keys may
# not fit into, or unsigned, for which PyTorch lacks operations.
_WIDENED = (_INTEGERS | {"table"}) - {"query_ranges", "startend_row_indices"}
_KEPT = (torch.bool, torch.int32, torch.int64)
_END = 1 << 31  # of the numbers of queries and keys, which ranges hold as int32
# Tensors that a maker moves to the device of the others.
_MOVED = {("from_bsr", "indptr"), ("from_block_lists", "key_sizes")}


def checked(maker: _Maker) -> _Maker:
    """Has a maker refuse what its annotations do not say: other types, negative numbers, tensors
    on two devices, and what is no integer where numbers of keys are wanted.
    """
    signature = inspect.signature(maker)
    names = tuple(signature.parameters)

    @functools.wraps(maker)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = (*map(_widened, names, args), *args[len(names) :])
        kwargs = {name: _widened(name, x) for name, x in kwargs.items()}
        if not is_tracing() and not torch.compiler.is_compiling():
            if (result := recorded(call, args, kwargs)) is not NotImplemented:
                return result
            bound = signature.bind(*args, **kwargs)
            _check(maker.__name__, signature, bound.arguments)
            return maker(*bound.args, **bound.kwargs)
        return maker(*args, **kwargs)

    give_code(call, maker)
    return call  # type: ignore[return-value]


def _widened(name: str, x: Any) -> Any:
    """An argument as its maker takes it."""
    if name not in _WIDENED or not isinstance(x, Tensor) or x.layout != torch.strided:
        return x
    if x.is_quantized:  # refused later
        return x
    return x.long() if _has_integers(x) and x.dtype not in _KEPT else x


def _has_integers(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _check(maker: str, signature: inspect.Signature, given: dict[str, Any]) -> None:
    """Checks all arguments. Ints of numpy become Python's in `given`, and what can be gone through
    only once a list.
    """
    held = ((x, y) for x, y in given.items() if isinstance(y, Tensor) and (maker, x) not in _MOVED)
    first, of_first = next(held, ("", None))
    for name, value in given.items():
        kind, _, optional = str(signature.parameters[name].annotation).partition(" | ")
        if value is None and optional:
            continue
        wrong = f"{name} is {_native.given(value)}: it must be "
        if kind == "Tensor":
            check_dense(**{name: value})
            is_moved = (maker, name) in _MOVED and not value.is_meta
            if of_first is not None and value.device != of_first.device and not is_moved:
                raise TypeError(
                    f"{name} is on {value.device} but {first} is on {of_first.device}: move one"
                )
            # A flag for each token is a way to say two documents, but no number of keys.
            is_flag = value.dtype == torch.bool and name != "ids"
            if name in _INTEGERS and (is_flag or not _has_integers(value)):
                raise TypeError(f"{name} has dtype {value.dtype}: it must be of integers")
            if name == "table" and not _has_integers(value):
                raise TypeError(f"table has dtype {value.dtype}: it must be bool or of integers")
        elif kind == "int":
            if not _is_int(value):
                raise TypeError(f"{wrong}an int")
            if isinstance(value, (Tensor, torch.SymInt)):
                continue
            given[name] = value = operator.index(value)
            if not 0 <= value < _END:
                raise ValueError(f"{wrong}>= 0" + " and below 2^31" * (value > 0))
        elif kind == "tuple[int, int]":
            if not _is_pair(value) or not _all_below_end(value, 1):
                raise TypeError(f"{wrong}two ints above 0 and below 2^31, of queries and keys")
        elif kind == "torch.device":
            as_device(value)
        elif kind == "bool" and not _is_bool(value):
            raise TypeError(f"{wrong}a bool")
        elif kind == "torch.dtype" and not isinstance(value, torch.dtype):
            raise TypeError(f"{wrong}a torch.dtype")
        elif kind == "Sequence[int]":
            is_sequence = hasattr(value, "__len__") and not isinstance(value, (str, bytes))
            is_sequence = is_sequence and getattr(value, "ndim", 1) == 1
            if not is_sequence or not _all_below_end(value, 0):
                raise TypeError(f"{wrong}a sequence of ints from 0 on and below 2^31")
        elif kind == "Iterable[int]":
            if isinstance(value, Tensor):
                check_dense(**{name: value})
            is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
            if not is_list or getattr(value, "ndim", 1) != 1:
                raise TypeError(f"{wrong}ints in their order, a list or what else has them")
            given[name] = list(value)
            if not all(map(_is_int, given[name])):
                raise TypeError(f"{wrong}ints in their order, a list or what else has them")


def _all_below_end(values: Any, first: int) -> bool:
    return all(_is_int(x) and first <= x < _END for x in values)


def _is_int(value: Any) -> bool:
    """Whether this is one integer: of Python, numpy or a tensor."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype != torch.bool and _has_integers(value)
    if isinstance(value, (torch.SymInt, bool, type)):
        return isinstance(value, torch.SymInt)
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_pair(value: Any) -> bool:
    """Whether these are two things, of Python or of numpy."""
    is_array = type(value).__module__ == "numpy" and getattr(value, "ndim", 0) == 1
    return (is_array or isinstance(value, (tuple, list))) and len(value) == 2


def _is_bool(value: Any) -> bool:
    """Whether this is a bool of Python or of numpy, or 0 or 1."""
    if isinstance(value, int):
        return value in (0, 1)
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
