"""Measures a GPU in a process of its own, and starts another one where a kernel breaks or hangs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from archflash import _overrides, _registry
from archflash._calibrate.grid import Point
from archflash._calibrate.worker import point_of
from archflash._call_times import BOTH, FORWARD, Kind, Measured
from archflash._errors import LaunchError

WORKER = (sys.executable, "-m", "archflash._calibrate.worker")
_SILENT_S = 60.0  # a worker that says nothing for so long hangs
_PATIENCE = 5  # times as long, where the driver compiles kernels at their first use
_LEAST_S = 5.0  # with less time left no worker is started again
_PROOFS = {FORWARD: "forward", BOTH: "backward"}  # the pass that _proofs calls so
_RIGHT = 10  # points at which a pass of a kernel was right: then it is proved


@dataclass
class Findings:
    """What was measured.

    Attributes:
        times: microseconds in a CUDA graph by candidate, for each point.
        host_us: what an eager call costs on the host, by passes and a folder of ours or "torch".
        wrong: what was wrong, by candidate and passes; also what broke or hung.
        wrong_kinds: the kinds of calls at which a candidate was wrong.
        refused: why candidates did not run, the first reason of each.
    """

    times: list[tuple[Point, dict[str, float]]] = field(default_factory=list)
    host_us: dict[tuple[str, str], float] = field(default_factory=dict)
    wrong: dict[tuple[str, str], str] = field(default_factory=dict)
    wrong_kinds: set[tuple[str, Kind]] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)

    def note_wrong(
        self, name: str, point: Point, text: str, progress: Callable[[str], None]
    ) -> None:
        """Notes that a candidate was wrong, or broke, at a point."""
        text = f"{text}, at {point}"
        self.wrong.setdefault((name, point.kind.passes), text)
        self.wrong_kinds.add((name, point.kind))
        progress(f"{name}: {text}")

    def measured(self) -> list[Measured]:
        """What the table is made of: what was right."""
        return [
            Measured(point.kind, point.d, point.dv, point.sizes, kept)
            for point, times in self.times
            if (kept := {n: us for n, us in times.items() if self._counts(n, point)})
        ]

    def _counts(self, name: str, point: Point) -> bool:
        ours = name in _registry.kernel_names()
        if ours and (name, point.kind.passes) in self.wrong:
            return False
        return (name, point.kind) not in self.wrong_kinds

    def proved(self) -> list[tuple[str, str]]:
        """The passes of our kernels that were right at many points and wrong at none, as (folder,
        pass) of _proofs.
        """
        wrong = {name for name, _ in self.wrong}
        return [
            (name, proof)
            for name in _registry.kernel_names()
            for passes, proof in _PROOFS.items()
            if name not in wrong
            and sum(name in t and p.kind.passes == passes for p, t in self.times) >= _RIGHT
        ]

    def refuted(self) -> list[tuple[str, str]]:
        """The passes of our kernels that were wrong somewhere, likewise."""
        kernels = _registry.kernel_names()
        return [(name, _PROOFS[passes]) for name, passes in self.wrong if name in kernels]


def silence_on(capability: tuple[int, int]) -> float:
    """Seconds after which a silent worker is taken to hang on GPUs of a compute capability."""
    compiles = (_registry.compiled_by_driver(x, capability) for x in _registry.kernel_names())
    return _SILENT_S * (_PATIENCE if any(compiles) else 1)


def measure(
    index: int,
    seconds: float,
    progress: Callable[[str], None] = lambda text: None,
    worker: Sequence[str] = WORKER,
    silent_s: float = _SILENT_S,
) -> Findings:
    """Measures a GPU.

    Args:
        index: which GPU.
        seconds: how long points are measured.
        progress: is told what happens.
        worker: the program of the process that measures.
        silent_s: seconds without a word after which it is taken to hang.

    Raises:
        LaunchError: nothing could be measured.
    """
    found = Findings()
    start = time.monotonic()
    while True:
        left = seconds - (time.monotonic() - start)
        ended, trying, said = _run_worker(found, index, left, progress, worker, silent_s)
        if ended:
            break
        if trying is None:  # no kernel is to blame
            if found.times:
                progress(f"the process that measures ended early: {said}")
                break
            raise LaunchError(f"the process that measures ended at its start: {said}")
        point, name = trying
        found.note_wrong(name, point, f"it broke: {said}", progress)
        if seconds - (time.monotonic() - start) < _LEAST_S:
            break
    if not found.times:
        said = "".join(f"; {name}: {text}" for (name, _), text in found.wrong.items())
        raise LaunchError(f"nothing could be measured{said}")
    return found


def _run_worker(
    found: Findings,
    index: int,
    seconds: float,
    progress: Callable[[str], None],
    worker: Sequence[str],
    silent_s: float,
) -> tuple[bool, tuple[Point, str] | None, str]:
    """One process: whether it came to its end, what it was trying when it ended, and its last
    words.
    """
    asked = {
        "device": index,
        "until": time.time() + seconds,
        "known": found.times,
        "host": [list(key) for key in found.host_us],
        "skip": [list(key) for key in found.wrong],
    }
    environment = _overrides.environment_without() | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment,
    ) as process:  # fmt: skip
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, which its answers will show
            stdin.write(json.dumps(asked))
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        words: list[str] = []
        listener = threading.Thread(target=words.extend, args=(stderr,), daemon=True)
        listener.start()
        hung, trying, ended = False, None, False

        def kill() -> None:
            nonlocal hung
            hung = True
            process.kill()

        while True:
            clock = threading.Timer(silent_s, kill)
            clock.start()
            line = stdout.readline()
            clock.cancel()
            if not line:
                break
            if not line.startswith("{"):  # a library printed it
                continue
            told = json.loads(line)
            if told.get("trying"):
                trying = point_of(told["trying"][0]), str(told["trying"][1])
            elif told.keys() & {"trying", "host", "point"}:
                trying = None
            ended = ended or "done" in told
            _take(found, told, progress)
        listener.join(silent_s)
    said = "it hung" if hung else " ".join("".join(words[-3:]).split())[-300:]
    return ended, trying, said


def _take(found: Findings, told: dict[str, Any], progress: Callable[[str], None]) -> None:
    """One line of the worker."""
    if "error" in told:
        raise LaunchError(str(told["error"]))
    if "host" in told:
        passes, who, us = told["host"]
        found.host_us[str(passes), str(who)] = float(us)
    if "wrong" in told:
        name, point, text = told["wrong"]
        found.note_wrong(str(name), point_of(point), str(text), progress)
    if "refused" in told:
        name, _, text = told["refused"]
        found.refused.setdefault(str(name), str(text))
    if "point" in told:
        found.times.append((point_of(told["point"]), dict(told["graph_us"])))
