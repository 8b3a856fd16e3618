"""Which approximation is asked for by `approximate` in a context, or by the environment variable,
for programs that cannot pass attention's option of that name.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator

from archflash import _archflash as _native
from archflash import _options
from archflash._dispatch.forcing import forced

APPROXIMATE_VARIABLE = "ARCHFLASH_APPROXIMATE"
_PLACE = list(_options.DEFAULTS).index("approximate")
_CACHE, _PLACES = map(list(_options.DEFAULTS).index, ("cache_seqlens", "physical_indices"))


NAMES = tuple(name for name, *_ in _native.approximations())


def where_served(name: object, what: str) -> str | None:
    """The value of the option that asks for an approximation where a kernel offers it, and else for
    an exact result; None for no name.

    Raises:
        ValueError: no approximation has that name; the message begins with `what`.
    """
    if name is None:
        return None
    if name not in NAMES:
        raise ValueError(
            f"{what} {_native.given(name)}: it must be one of {', '.join(NAMES)}, or None"
        )
    return f"{name} if served"


_of_environment = where_served(
    os.environ.get(APPROXIMATE_VARIABLE) or None, f"{APPROXIMATE_VARIABLE} is"
)
_asked: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "archflash_approximate", default=_of_environment
)
asked_for = _asked.get
if asked_for() is not None:
    _native.note_forced()


@contextlib.contextmanager
def approximate(name: str | None) -> Iterator[None]:
    """Lets the calls inside a `with` block be approximate where a kernel offers it, on GPUs of
    compute capability 8.x and 12.x (on others exact kernels are faster), in this thread or task:
    those of `archflash.attention` that do not say `approximate` themselves, and with
    `archflash.enable` PyTorch's own. The others are served exactly, and so is every call whose
    gradients are needed. `archflash.stats` counts the calls that were approximate.

    Args:
        name: as `approximate` of `archflash.attention`; None for exact calls, whatever the
            environment variable ARCHFLASH_APPROXIMATE says.

    Raises:
        ValueError: no approximation has that name.

    Example:
        >>> import archflash, torch
        >>> q = torch.randn(1, 2, 5, 8)
        >>> with archflash.approximate("int8"):  # exact, on a CPU
        ...     archflash.attention(q, q, q).shape
        torch.Size([1, 2, 5, 8])
    """
    value = where_served(name, "approximate() got")
    _native.note_forced()
    token = _asked.set(value)
    try:
        yield
    finally:
        _asked.reset(token)


def ask_for_nothing() -> None:
    """Takes back in this context what the environment variable asks for."""
    _asked.set(None)


def with_approximate(values: tuple[object, ...]) -> tuple[object, ...]:
    """The values of all options, with what is asked for if the call does not say it itself."""
    asked = asked_for()
    if asked is None or values[_PLACE] is not None:
        return values
    if len(values) > _CACHE and (values[_CACHE] is not None or values[_PLACES]):
        return values
    return (*values[:_PLACE], asked, *values[_PLACE + 1 :])


def steered() -> str | None:
    """What is forced or asked for: the runtime then leaves PyTorch's operators to Python."""
    return forced() or asked_for()
