"""Errors of other libraries' functions in the words of their arguments, and checks of arguments
that are used before `archflash.attention` sees them.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash._eager import give_code, recorded, stands_for_tensor
from archflash._errors import UnsupportedError
from archflash._given import check_dense

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Numbers that a compiler has in the place of sizes stand for ints.
_TYPES: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor,),
    "bool": (int, torch.SymBool),
    "float": (int, float, torch.SymInt, torch.SymFloat),
    "int": (int, torch.SymInt),
}
_END = 1 << 31
_WORDS = {"Tensor": "a torch.Tensor", "bool": "a bool", "float": "a number", "int": "an int"}


def plain(value: Any) -> Any:
    """A number as Python's: FlashAttention's operators also take tensors of one, and numpy's."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else value
    if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
        return value.item()
    return value


def flag(value: Any) -> Any:
    """A bool as Python's; other libraries also take numbers, and None as False."""
    value = plain(value)
    return bool(value) if value is None or isinstance(value, int) else value


def boolean(name: str, value: Any) -> bool:
    """`flag` of an argument that `archflash.attention` does not check."""
    if value is True or value is False:
        return value
    value = flag(value)
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {_native.given(value)}: it must be a bool")
    return value


def count(name: str, value: Any) -> int:
    """A number from 0 on that int32 holds, as rows and lengths are counted. One that a compiler has
    in the place of a size is taken as it is.
    """
    if (type(value) is int and 0 <= value < _END) or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    number = plain(value)
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{name} is {_native.given(value)}: it must be an int")
    if number < 0:
        raise ValueError(f"{name} is {_native.given(number)}: it must be >= 0")
    if number >= _END:
        raise ValueError(f"{name} is {_native.given(number)}: it must be below 2^31")
    return number


def check_tensors(**given: Any) -> None:
    for name, x in given.items():
        check_dense(**{name: x})
        if x.ndim == 0:
            raise ValueError(f"{name} has shape (): it must have dimensions")


def check_ints(name: str, x: Any, size: int | None = None, like: Tensor | None = None) -> None:
    """Checks lengths or ends of sequences, which operations of PyTorch are about to use.

    Args:
        size: how many there must be.
        like: a tensor whose device they must be on.
    """
    check_tensors(**{name: x})
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {x.dtype}: it must be torch.int32")
    if x.ndim != 1 or (len(x) != size if size is not None else not len(x)):
        shape = "(sequences + 1,)" if size is None else f"({size},)"
        raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be {shape}")
    check_device(name, x, like)


def check_device(name: str, x: Tensor, like: Tensor | None) -> None:
    if like is not None and x.device != like.device:
        raise TypeError(f"{name} is on {x.device} but others are on {like.device}: move them")


def check_starts(name: str, value: Any, sequences: int) -> Any:
    """Checks a number from 0 on for all sequences, or one for each; returns it."""
    if not isinstance(value, Tensor):
        return count(name, value)
    check_ints(name, value, sequences)
    return value


def in_its_words(**names: str) -> Callable[[_Function], _Function]:
    """Makes a function's errors name its own arguments. A call that is right pays 0.2 us for it.

    Args:
        names: for each name that an error may have the function's own. English words are names only
            where an error begins with them.
    """
    words, others = (
        "|".join(x for x in names if ("_" in x) is has_bar) or "(?!)" for has_bar in (False, True)
    )
    found = re.compile(rf"^({words})\b|\b({others})\b")

    def wrap(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if args and stands_for_tensor(args[0]):
                return recorded(call, args, kwargs)
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError, UnsupportedError) as error:
                said = found.sub(lambda name: names[name[0]], str(error))
                wrong = _wrong_argument(function, args, kwargs)
                if wrong and wrong.split()[0] not in re.findall(r"\w+", said):
                    raise TypeError(wrong) from error
                if said == str(error):
                    raise
                raise type(error)(said) from error
            except (AttributeError, IndexError, AssertionError, RuntimeError) as error:
                # An argument was of no use at all. Where all are of their types, it was not that:
                # the GPU may have no memory.
                if wrong := _wrong_argument(function, args, kwargs, of_rows=True):
                    raise TypeError(wrong) from error
                raise

        give_code(call, function)
        return call  # type: ignore[return-value]

    return wrap


def _wrong_argument(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    of_rows: bool = False,
) -> str:
    """Which argument is not of the type of its annotation, or on another device than the first
    tensor, or, where tensors must have rows, one without dimensions; nothing if all are right.
    """
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return ""  # Python's own error names it
    first, of_first = next(((x, y) for x, y in given.items() if isinstance(y, Tensor)), ("", None))
    for name, value in given.items():
        kinds = str(signature.parameters[name].annotation).split(" | ")
        wanted = [kind for kind in kinds if kind in _TYPES]
        if not wanted or (value is None and ("None" in kinds or "bool" in kinds)):
            continue
        is_operand = isinstance(value, Tensor) and "Tensor" in wanted
        what = value if is_operand else plain(value)
        if not isinstance(what, tuple(x for kind in wanted for x in _TYPES[kind])):
            words = " or ".join(_WORDS[kind] for kind in wanted)
            return f"{name} is {_native.given(value)}: it must be {words}"
        if of_rows and is_operand and value.ndim == 0 and not name.endswith("_descale"):
            return f"{name} has shape (): it must have dimensions"
        if is_operand and of_first is not None and value.device != of_first.device:
            return f"{first} is on {of_first.device} but {name} is on {value.device}: move one"
    return ""
