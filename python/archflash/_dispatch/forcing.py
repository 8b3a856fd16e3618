"""Which implementation is forced: by `force` in a context, or by the environment variable."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator

from archflash import _archflash as _native
from archflash import _registry
from archflash._errors import ForcedImplementationError

FORCE_VARIABLE = "ARCHFLASH_FORCE_IMPLEMENTATION"
# What force() has set in this context. It overrides the environment variable; an argument of the
# call overrides it.
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "archflash_forced", default=os.environ.get(FORCE_VARIABLE) or None
)
forced = _forced.get
if forced() is not None:
    _native.note_forced()


@contextlib.contextmanager
def force(name: str) -> Iterator[None]:
    """Forces an implementation for the calls inside a `with` block, in this thread or task.

    Args:
        name: one of the names that `archflash.implementations()` lists.

    Raises:
        ForcedImplementationError: `name` is not one of them. A call that the forced implementation
            cannot serve raises it too.

    Example:
        >>> import archflash, torch
        >>> q = torch.randn(1, 2, 5, 8)
        >>> with archflash.force("torch"):
        ...     archflash.attention(q, q, q).shape
        torch.Size([1, 2, 5, 8])
    """
    check_name(name)
    _native.note_forced()
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def force_nothing() -> None:
    """Takes back in this context what the environment variable forces."""
    _forced.set(None)


def check_name(name: object) -> None:
    """Raises ForcedImplementationError unless an implementation has that name."""
    if not (isinstance(name, str) and name in _registry.names()):
        raise ForcedImplementationError(
            f"no implementation is called {_native.given(name)}: "
            f"this build has {', '.join(_registry.names())}"
        )
