"""What became of the calls of PyTorch's attention operators: stats(), and the counts behind it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from archflash import _archflash as _native
from archflash import _dispatch


@dataclass(frozen=True)
class Stats:
    """What became of the calls of PyTorch's attention operators while archflash was enabled.

    Attributes:
        served: the number of calls that each implementation served.
        declined: the number of calls that PyTorch's own kernels served, for each reason. Reasons
            that differ only in numbers count as one, under the first of them.
        approximated: the number of calls that kernels served approximately, for each word of
            `archflash.attention`'s option `approximate`. Those of archflash's own functions are
            among them.
    """

    served: dict[str, int]
    declined: dict[str, int]
    approximated: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        by_archflash, by_pytorch = sum(self.served.values()), sum(self.declined.values())
        lines = [f"{by_archflash} calls served by archflash, {by_pytorch} by PyTorch's own kernels"]
        for counts in (self.served, self.declined):
            for what, count in sorted(counts.items(), key=lambda item: -item[1]):
                lines.append(f"  {count:>9}  {what}")
        lines += [f"  {count:>9}  with approximate={x!r}" for x, count in self.approximated.items()]
        return "\n".join(lines)


_kind_of = lru_cache(_dispatch.kind_of)  # the reasons are few, and each is counted many times


class _Declined:
    """Counts of declined calls that several threads may add to. The runtime counts the others:
    those that were served, and those that it handed over without asking here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, list[Any]] = {}  # by kind of reason: the first one, the number

    def add(self, reason: str) -> None:
        with self._lock:
            self._add(reason, 1)

    def _add(self, reason: str, count: int) -> None:
        self._counts.setdefault(_kind_of(reason), [reason, 0])[1] += count

    def read(self, reset: bool) -> dict[str, int]:
        with self._lock:
            for reason, count in _native.operators_declined(True).items():
                self._add(reason, count)
            counts = dict(self._counts.values())
            if reset:
                self._counts.clear()
        return counts


declined = _Declined()


def stats(*, reset: bool = False) -> Stats:
    """Counts the calls of PyTorch's attention operators since archflash was first enabled.

    Calls of `archflash.attention` are among them only where that hands them on to PyTorch. Calls
    for which PyTorch uses none of its fused kernels are not. Calls with dropout that
    `archflash.scaled_dot_product_attention` hands to PyTorch's function are, enabled or not.

    Args:
        reset: start to count anew; off by default.

    Returns:
        A `Stats`: how many calls each implementation served, and for what reasons PyTorch served
        the others. Its str() is readable.

    Example:
        >>> import archflash
        >>> before = archflash.stats(reset=True)
        >>> print(archflash.stats())
        0 calls served by archflash, 0 by PyTorch's own kernels
    """
    if not isinstance(reset, bool):
        raise TypeError(f"reset is {_native.given(reset)}: it must be a bool")
    served, approximated = _native.operators_served(reset), _native.calls_approximated(reset)
    return Stats(served, declined.read(reset), approximated)
