"""The options of a call beside q, k, v and `implementation`: the rows of src/common/options.inc,
and what follows from them for the layers above.

The runtime takes the values of all options as one tuple in the order of NAMES, or those of
attention() alone, which come first.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from archflash import _archflash as _native

ROWS = tuple(_native.call_options())
NAMES = tuple(row.name for row in ROWS)
OF_ATTENTION = tuple(row.name for row in ROWS if row.of_attention)
OF_CACHE = tuple(row.name for row in ROWS if row.of_cache)
DEFAULTS: dict[str, Any] = {row.name: row.default for row in ROWS}
OF_BACKWARD = tuple(row.name for row in ROWS if row.of_backward and row.of_attention)
# The operand that each option which is a tensor becomes.
OPERANDS = {row.name: row.operand for row in ROWS if row.operand is not None}
# Options that autograd may want gradients of, beside q, k and v.
DIFFERENTIABLE = tuple(row.name for row in ROWS if row.differentiable and row.of_attention)
# Options without which the exact result is the same: `torch` and the float64 reference ignore them.
ADVICE = tuple(row.name for row in ROWS if row.advice)
_OF_TORCH = tuple(name for name in OF_ATTENTION if name not in ADVICE)
# For each option of kind "flag" the attribute of a Problem that it sets.
FLAG_FIELDS = {row.name: row.field for row in ROWS if row.field is not None}
_ABSENT = {row.name: row.default for row in ROWS if not row.of_cache}  # from a call with a cache


def _of_kind(*kinds: str) -> tuple[str, ...]:
    return tuple(row.name for row in ROWS if row.kind in kinds)


_WINDOWS = _of_kind("window")
_INTEGERS_OR_TENSORS = _of_kind("integer or tensor")
_NUMBERS = _of_kind("number", "integer", "integer or tensor")
_HOLDING_NUMBERS = frozenset((*_NUMBERS, *_WINDOWS))
_HINTS = ("max_seqlen_q", "max_seqlen_k")
# How the operators declare an option of each kind. They take every option of their call but for
# `out`: an operator that writes an argument would have to say so to autograd.
_DECLARATIONS = {
    "flag": "bool {0}",
    "number": "float? {0}",
    "integer": "SymInt? {0}",
    "tensor": "Tensor? {0}",
    "integer or tensor": "SymInt? {0}, Tensor? {0}_tensor",
    "window": "SymInt? {0}_left, SymInt? {0}_right",
    "dtype": "ScalarType? {0}",
    "text": "str? {0}",
}
_OF_OPERATOR = _of_kind(*_DECLARATIONS)


def _schema(names: tuple[str, ...]) -> str:
    return ", ".join(
        _DECLARATIONS[row.kind].format(row.name)
        for row in ROWS
        if row.name in _OF_OPERATOR and row.name in names
    )


SCHEMA = _schema(OF_ATTENTION)
CACHE_SCHEMA = _schema(OF_CACHE)


def complete(options: dict[str, Any]) -> dict[str, Any]:
    """All options in the order of NAMES, those that are not given at their defaults.

    Raises:
        TypeError: a name that no option has.
    """
    for name in options:
        if name not in DEFAULTS:
            raise TypeError(f"{name} is no option of a call: it takes {', '.join(NAMES)}")
    # As attention_with_kvcache has it.
    layout = {"layout": "bnhd"} if has_cache(options) else {}
    return {**DEFAULTS, **layout, **options}


def has_cache(options: Mapping[str, Any]) -> bool:
    """Whether options, of which some may be left out, are those of attention_with_kvcache."""
    return options.get("cache_seqlens") is not None or bool(options.get("physical_indices"))


def named(values: tuple[Any, ...]) -> dict[str, Any]:
    """The values of all options, in the order of NAMES, by name."""
    return dict(zip(NAMES, values, strict=True))


def replaced(values: tuple[Any, ...], **new: Any) -> tuple[Any, ...]:
    """Values of options with others for some of them."""
    return tuple(new.get(name, value) for name, value in zip(NAMES, values, strict=False))


def with_cache(values: list[Any]) -> tuple[Any, ...]:
    """The values of all options, from those of OF_CACHE in its order."""
    given = {**_ABSENT, **dict(zip(OF_CACHE, values, strict=True))}  # torch 2.6 traces no union
    return tuple(given[name] for name in NAMES)


def for_torch(options: dict[str, Any]) -> dict[str, Any]:
    """The options that the implementation `torch` takes: those that its result depends on."""
    return {name: options[name] for name in _OF_TORCH}


def given_to_torch(values: Sequence[Any]) -> dict[str, Any]:
    """What `for_torch` gives, without options at their defaults and with Python's own numbers.

    This is part of every eager call that `torch` serves, so C++ does most of it.
    """
    given = _native.options_for_torch(values)
    return given if _HOLDING_NUMBERS.isdisjoint(given) else with_python_numbers(given)


def python_number(x: Any) -> Any:
    """Python's own number for one of numpy's and the like, and for an int that operations of torch
    do not take; everything else as it is.
    """
    if isinstance(x, int) and abs(x) >= 1 << 63:
        return float(x)
    if x is None or isinstance(x, (int, float, Tensor)):
        return x
    return operator.index(x) if hasattr(x, "__index__") else float(x)


def traced(options: dict[str, Any]) -> dict[str, Any]:
    """The options as torch.jit.trace records them.

    Sizes are tensors there, and so is what is computed from them: a number of that kind becomes a
    constant, of which PyTorch warns. Hints are left out, which other inputs might prove wrong.
    """

    def constant(x: Any, kind: type[int] | type[float]) -> Any:
        return kind(x) if isinstance(x, Tensor) and x.ndim == 0 else x

    floats = _of_kind("number")
    options = {
        name: constant(x, float if name in floats else int) if name in _NUMBERS else x
        for name, x in options.items()
    }
    for name in _WINDOWS:
        if isinstance(window := options[name], (tuple, list)):
            options[name] = tuple(constant(side, int) for side in window)
    return with_python_numbers(options | dict.fromkeys(_HINTS))


def with_python_numbers(options: dict[str, Any]) -> dict[str, Any]:
    """The options with Python's own numbers in place of those of numpy and the like, which
    operations of torch do not take.
    """
    for name in _NUMBERS:
        if name in options:
            options[name] = python_number(options[name])
    for name in _WINDOWS:
        if (window := options.get(name)) is not None:
            options[name] = (python_number(window[0]), python_number(window[1]))
    return options


def to_operator(options: dict[str, Any], of: tuple[str, ...] = OF_ATTENTION) -> dict[str, Any]:
    """The options as an operator's arguments, which SCHEMA declares, or CACHE_SCHEMA for those of
    OF_CACHE.
    """
    arguments = {name: options[name] for name in _OF_OPERATOR if name in of}
    for name in _WINDOWS:
        window = arguments.pop(name)
        arguments[f"{name}_left"], arguments[f"{name}_right"] = window or (None, None)
    for name in _INTEGERS_OR_TENSORS:
        if name not in arguments:
            continue
        value = arguments[name]
        is_tensor = isinstance(value, Tensor)
        arguments[name] = None if is_tensor else value
        arguments[f"{name}_tensor"] = value if is_tensor else None
    return arguments


def from_operator(arguments: dict[str, Any]) -> dict[str, Any]:
    """All options of a call, from what `to_operator` gives."""
    options = dict(arguments)
    for name in _WINDOWS:
        left, right = options.pop(f"{name}_left"), options.pop(f"{name}_right")
        options[name] = None if left is right is None else (left, right)
    for name in _INTEGERS_OR_TENSORS:
        if name not in options:
            continue
        tensor = options.pop(f"{name}_tensor")
        options[name] = options[name] if tensor is None else tensor
    return complete(options)
