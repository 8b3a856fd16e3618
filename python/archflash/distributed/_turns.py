"""Two streams on which the stages of a call take turns."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from archflash.distributed import _exchange
from archflash.distributed._plan import Plan, Stage


class Turns:
    """A stream on which stages take turns with the current one; or the current one for all.

    Shares of the heads take turns: while SMs compute the last tiles of one, others begin with the
    next. Both wait for each other at the end of the context. Until then what both read is kept;
    then either may reuse its memory, the other one in a call from any stream.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._beside = None if device is None else _stream_beside(device)

    def __bool__(self) -> bool:
        return self._beside is not None

    def of(self, number: int) -> contextlib.AbstractContextManager[None]:
        """The stream of a stage."""
        if self._beside is None or number % 2:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._beside)

    def now(self) -> torch.cuda.Event | None:
        """The current stream up to here."""
        if self._beside is None:
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        if self._beside is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._beside)
            self._beside.wait_stream(current)


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_MOST_TURNS = 3  # shares of the heads; there are more of them only for lack of memory


def turns_of(
    plan: Plan, stages: Sequence[Stage], group: dist.ProcessGroup | None, device: torch.device
) -> Turns:
    shares = plan.gathers and not plan.in_one and 1 < len(stages) <= _MOST_TURNS
    in_turns = shares and device.type == "cuda" and _exchange.carries(group, device)
    return Turns(device if in_turns else None)
