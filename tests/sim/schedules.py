"""The schedules under which tests run a kernel on the simulator."""

from __future__ import annotations

import os
from collections.abc import Sequence

MODES = ("lazy", "eager", "random", "priority")
# Schedule number n has mode n % 4 and seed n. By default each mode runs once.
SEEDS = int(os.environ.get("ARCHFLASH_SIM_SEEDS", "4"))
IN_FULL = len(MODES) < SEEDS  # `make test-sim-full`


def looks_for_races(number: int, schedules: Sequence[int]) -> bool:
    """Whether a run of a call under one of its schedules does: the last one. Races are found
    whatever the schedule (docs/simulator.md); the other runs say whether the bits of the call
    depend on it, in half of the time.
    """
    return IN_FULL or number == schedules[-1]


def some_of(schedules: Sequence[int], number: int, *, compared: bool = False) -> list[int]:
    """Those of the schedules of a call that `make test` runs: of more than two every second one; of
    two each third call has both, and the others one of them. The number of a call, which its shape
    gives, decides which, so that the calls of a kernel have all schedules between them.

    Args:
        schedules: those that `make test-sim-full` runs.
        number: of the call.
        compared: whether the bits of schedules are compared: a call has two at least, if the test
            names as many.
    """
    if IN_FULL or len(schedules) < 2:
        return list(schedules)
    first = number % 2
    if len(schedules) == 2:
        return list(schedules) if compared or number % 3 == 0 else [schedules[first]]
    kept = list(schedules[first::2])
    return kept if len(kept) > 1 else list(schedules[-2:])
