"""What all jobs of a day share: what a job is, limits, and tiny cases for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.cases import Case
from bench.results import Row
from bench.switches import variants

WITH_SWITCHES = variants.NAME
TINY = (
    Case("bf16 1x2/1 300x260 d128 c", "bf16", 1, 2, 1, 300, 260, 128, 128, True),
    Case("fp16 1x1 130x140 d64", "fp16", 1, 1, 1, 130, 140, 64, 64, False),
    Case("bf16 1x2/1 1x4000 d64", "bf16", 1, 2, 1, 1, 4000, 64, 64, False),
)
# Limits of a process in seconds, which a kernel that hangs uses up.
FIRST_LIMIT, TESTS_LIMIT, SWITCH_LIMIT, TIMING_LIMIT = 180, 1200, 240, 900
SANITIZER_LIMIT = 900
MESSAGE_LENGTH = 600  # characters of a failure's text that are recorded


@dataclass(frozen=True)
class Setup:
    """What all jobs of a run share.

    Attributes:
        implementation: the implementation that is examined.
        simulate: whether CPU tensors run on the simulator, with tiny problems and no times.
        facts: columns of bench/results that the run's rows share.
        without: settings that are not timed, because their results are wrong.
        pairs: whether pairs of CTAs have worked so far. If not, the calls that are timed run on
            CTAs alone.
    """

    implementation: str
    simulate: bool
    facts: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    pairs: bool = True

    @property
    def device(self) -> str:
        """The torch device of the tensors."""
        return "cpu" if self.simulate else "cuda"


VERIFY, WAITS = "verify", "waits"
PARTS = ("correctness", "pairs", VERIFY, "sanitizers", "switches", "walks", WAITS, "peers")


@dataclass(frozen=True)
class Job:
    """The work of one process.

    Attributes:
        part: part of the day, one of PARTS.
        name: what it is about.
        limit_s: seconds that it may take.
        run: does the work. Yields rows, and raises if something is wrong.
        needs_nvcc: whether it compiles states of switches.
    """

    part: str
    name: str
    limit_s: float
    run: Callable[[Setup], Iterator[Row]]
    needs_nvcc: bool = False


class WrongError(Exception):
    """A result is wrong, or a test failed."""
