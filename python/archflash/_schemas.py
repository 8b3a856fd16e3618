"""torch's operators by their names, and the arguments of a call as their schemas list them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.torch_version import TorchVersion


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


# --- how the runtime takes an operator's arguments, and tensors ---

_OLDEST_FOR_RUNTIME = (2, 11)  # the oldest version of PyTorch with which this was tried
_LETTERS = {
    "Tensor": "T", "float": "f", "bool": "b", "int": "i", "SymInt": "i", "Optional[Tensor]": "t",
    "Optional[float]": "g", "Optional[int]": "j", "Optional[SymInt]": "j",
}  # fmt: skip


def letters(name: str) -> str | None:
    """The types of an operator's arguments as the runtime takes them; None if there is no such
    operator, or one of a kind that the runtime does not read.
    """
    op = find(name)
    if op is None:
        return None
    found = [_LETTERS.get(str(argument.real_type)) for argument in op._schema.arguments]
    return None if None in found else "".join(map(str, found))


def handle_functions() -> tuple[Any, Any] | None:
    """The two private functions of PyTorch with which the runtime makes a Python tensor of a
    handle, and handles of Python tensors; None if this PyTorch lacks one, or is too old.
    """
    new = bool(TorchVersion(torch.__version__) >= _OLDEST_FOR_RUNTIME)  # type: ignore[operator]
    core = getattr(torch._C, "_aoti", None)
    tensor_of = getattr(core, "alloc_tensor_by_stealing_from_void_ptr", None)
    handles_of = getattr(core, "unsafe_alloc_void_ptrs_from_tensors", None)
    return None if not new or tensor_of is None or handles_of is None else (tensor_of, handles_of)
