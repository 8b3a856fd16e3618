"""torch's operators by their names, and the arguments of a call as their schemas list them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch


def find(name: str) -> Any:
    """An operator of aten, whose name may say an overload behind a dot; None where this PyTorch has
    none of that name.
    """
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


@lru_cache
def _arguments(op: Any) -> tuple[tuple[str, ...], int]:
    """The names of an operator's arguments, and how many of them have places."""
    overload = op.default if isinstance(op, torch._ops.OpOverloadPacket) else op
    arguments = overload._schema.arguments
    names = tuple(argument.name for argument in arguments)
    return names, sum(not argument.kwarg_only for argument in arguments)


def by_name(op: Any, *given: Any, **named: Any) -> dict[str, Any]:
    """The arguments of a call, however they came, in the order of the schema. What was left out is
    missing.
    """
    names, _ = _arguments(op)
    return dict(zip(names, given, strict=False)) | named


def by_place(op: Any, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by name as the operator takes them: those that have places, and the others."""
    names, count = _arguments(op)
    placed = [arguments[name] for name in names[:count] if name in arguments]
    return placed, {name: arguments[name] for name in names[count:] if name in arguments}
