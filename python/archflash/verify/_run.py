"""Runs the jobs, each in a process of its own, and keeps what came of every item."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from archflash import _overrides, _posix, _registry
from archflash.verify import _worker
from archflash.verify._jobs import CORRECTNESS
from archflash.verify._setup import Item, Job, Setup

WORKER = ("-m", "archflash.verify._worker")  # what a process runs
TIMEOUT, CRASHED = "timeout", "crashed"
FAILED, NOT_RUN = _worker.FAILED, _worker.NOT_RUN
BAD = (_worker.WRONG, FAILED, TIMEOUT, CRASHED)
MOST_DEATHS = 3  # items of a job that crash or raise, after which its other items are left out
MOST_TIMEOUTS = 2  # items of correctness that run into their limits, after which the run ends
START_LIMIT = 180  # seconds in which a process must be ready: it imports torch
KILL_WAIT = 30
# Processes that wait for a job: importing torch and opening the GPU takes longer than most jobs.
AHEAD, BYTES_OF_PROCESS = 4, 4 << 30
PATIENCE = 5  # times the limit of an item, where the driver compiles kernels at first use
OUTPUT_END = 2000  # characters of what a process printed that are kept where it dies


@dataclass
class Row:
    """What came of an item.

    Attributes:
        part, kernel, job, item: which it is.
        of: the pass of the kernel that it speaks for.
        status: "ok", "wrong" (a result), "failed" (an exception), "timeout", "crashed" (its process
            died), "not here" (it cannot be tried on this GPU) or "not run".
        seconds: how long it took.
        detail: a remark, or the text of the error.
        where: a map of wrong elements.
        kernels: what was launched.
        numbers: what was measured.
    """

    part: str
    kernel: str
    job: str
    item: str
    of: str
    status: str
    seconds: float = 0.0
    detail: str = ""
    where: dict[str, Any] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


class Process:
    """A process that waits for a job. `ahead`: it opens the GPU meanwhile."""

    def __init__(self, worker: Sequence[str], setup: Setup, ahead: bool) -> None:
        read, write = os.pipe()
        self._answers = os.fdopen(read, "rb", buffering=0)
        self._rest = b""
        self.printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, end() closes it
        self.process = _posix.start(
            [sys.executable, *worker, str(write)], write,
            stdin=subprocess.PIPE, stdout=self.printed, stderr=subprocess.STDOUT,
            env=_overrides.environment_without(),
        )  # fmt: skip
        os.close(write)
        self._readable = _posix.Readable(self._answers)
        self._send(setup=setup.to_dict(), ahead=ahead)

    def give(self, job: Job, items: Iterable[Item]) -> None:
        """Sends the process its job."""
        self._send(job=job.name, items=[item.name for item in items])

    def _send(self, **told: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, which its answers will show
            self.process.stdin.write(json.dumps(told).encode() + b"\n")
            self.process.stdin.flush()

    def next_answer(self, limit_s: float) -> dict[str, Any] | None:
        """The next answer of the process; None where it has ended.

        Raises:
            TimeoutError: none came in time.
        """
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not self._readable.wait(left):
                raise TimeoutError
            piece = os.read(self._answers.fileno(), 1 << 16)
            if not piece:
                return None
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self, soon: bool = False) -> str:
        """Ends it and what it has started; the end of what it printed, and how it ended. `soon`: it
        is about to end by itself.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5 if soon else 0)
        status = self.process.poll()
        _posix.end_with_children(self.process)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in the driver
            self.process.wait(KILL_WAIT)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self._readable.close()
        self._answers.close()
        self.printed.seek(0)
        said = self.printed.read().decode(errors="replace")[-OUTPUT_END:].strip()
        self.printed.close()
        how = "killed" if status is None else f"exit status {status}"
        return f"{how}: {said}" if said else how


def compiles_first(setup: Setup) -> bool:
    """Whether the driver has to compile some folder's kernels for the GPU."""
    return any(_registry.compiled_by_driver(name, setup.capability) for name in setup.kernels)


def processes_ahead(setup: Setup) -> int:
    """How many processes wait for a job: as many as the machine has room for."""
    if setup.simulate or setup.alone:
        return 1
    return max(1, min(AHEAD, (os.cpu_count() or 1) // 2, setup.memory // BYTES_OF_PROCESS))


class Runner:
    """Runs jobs one after another.

    Args:
        setup: what they share.
        tell: called with each row as it comes.
        go_on: whether to go on after MOST_TIMEOUTS.
        worker: what Python runs in a process; tests have others.

    Attributes:
        rows: what came of each item.
        timeouts: items of correctness that ran into their limits.
        finished: the names of the jobs whose last item was come to.
    """

    def __init__(
        self, setup: Setup, tell: Callable[[Row], None], go_on: bool = False,
        worker: Sequence[str] = WORKER,
    ) -> None:  # fmt: skip
        self._setup, self._tell, self._go_on, self._worker = setup, tell, go_on, worker
        self._spares = deque[Process]()
        # Where the driver compiles kernels at their first use, first calls take long.
        self._patience = PATIENCE if compiles_first(setup) else 1
        self.rows: list[Row] = []
        self.timeouts = 0
        self.finished: set[str] = set()

    @property
    def ended(self) -> bool:
        """Whether too many items ran into their limits."""
        return self.timeouts >= MOST_TIMEOUTS and not self._go_on

    def run(self, jobs: list[Job]) -> None:
        """Runs jobs. Those that are left out after too many timeouts have rows, too."""
        try:
            self._start(len(jobs))  # while items are listed
            for number, job in enumerate(jobs):
                if self.ended:
                    said = f"{self.timeouts} items ran into their limits: --continue goes on"
                    for item in job.items:
                        self._add(job, item, status=NOT_RUN, detail=said)
                else:
                    self._run(job, len(jobs) - 1 - number)
        finally:
            while self._spares:
                self._spares.pop().end()

    def _start(self, wanted: int) -> None:
        """Starts processes for `wanted` jobs, but no more than there is room for."""
        warm = not (self._setup.simulate or self._setup.alone)
        while len(self._spares) < min(wanted, processes_ahead(self._setup)):
            self._spares.append(Process(self._worker, self._setup, warm))

    def _run(self, job: Job, later: int) -> None:
        pending, before = list(job.items), len(self.rows)
        died = 0  # processes of this job, by their own hand
        while pending and not self.ended and died < MOST_DEATHS:
            pending = self._serve(job, pending, later)
            died = sum(row.status in (CRASHED, FAILED) for row in self.rows[before:])
        for item in pending:
            self._add(job, item, status=NOT_RUN, detail="after items that ended so")
        self.finished.add(job.name)

    def _serve(self, job: Job, pending: list[Item], later: int) -> list[Item]:
        """Has a process try items of a job, after which come `later` others; returns those that it
        did not come to.
        """
        self._start(1)
        process = self._spares.popleft()
        process.give(job, pending)
        self._start(later)
        running: Item | None = None
        limit_s, began = float(START_LIMIT), time.monotonic()
        some, in_time = False, True
        try:
            while pending and (answer := process.next_answer(limit_s)) is not None:
                limit_s, began = START_LIMIT, time.monotonic()
                if answer["said"] == "begin":
                    running = next(x for x in pending if x.name == answer["item"])
                    limit_s = running.limit_s * self._patience
                elif answer["said"] == "end" and running is not None:
                    told = {x: answer[x] for x in answer if x not in ("said", "item")}
                    self._add(job, running, **told)
                    pending = pending[pending.index(running) + 1 :]
                    running, some = None, True
        except TimeoutError:
            in_time = False
        except BaseException:  # a person's interrupt, too: the process is in a session of its own
            process.end()
            raise
        printed = process.end(soon=in_time)
        if not pending or (running is None and some and in_time):
            return pending  # it is done, or ended itself after a failure that broke CUDA
        item = running or pending[0]
        seconds = round(time.monotonic() - began, 1)
        if in_time:
            self._add(job, item, status=CRASHED, seconds=seconds, detail=printed)
        else:
            self.timeouts += job.part in CORRECTNESS
            said = f"no end after {limit_s:.0f} s; {printed}"
            self._add(job, item, status=TIMEOUT, seconds=seconds, detail=said)
        return pending[pending.index(item) + 1 :]

    def _add(self, job: Job, item: Item, **told: Any) -> None:
        row = Row(job.part, job.kernel, job.name, item.name, job.of, **told)
        self.rows.append(row)
        self._tell(row)
