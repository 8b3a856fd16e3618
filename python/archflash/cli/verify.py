"""`archflash verify`: which kernels are right on this machine's GPU."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

from archflash import _api, _dispatch, _proofs, _user_tables
from archflash import _archflash as _native
from archflash.cli import INTERRUPTED, gpus
from archflash.verify import _jobs, _machine, _run, _verdict, _worker
from archflash.verify._setup import Job, Setup, kernels_on

MEMORY_OF_SIMULATOR = 1 << 30
SIMULATED = "H200"


def add_parser(commands: Any) -> None:
    """Adds the command to the parser of `archflash`."""
    parser = commands.add_parser(
        "verify",
        help="show in minutes which kernels are right on this GPU, and let dispatch choose them",
        description="Compares every kernel that this GPU can run with float64, each job in a "
        "process of its own. What is proved here is chosen here from then on. Exit status: 0 if "
        "everything was right, 1 if something was not, 2 if nothing can be run.",
    )
    gpus.add_argument(parser)
    parser.add_argument("--full", action="store_true", help="more of everything")
    parser.add_argument(
        "--only", type=pattern, default="", metavar="REGEX", help="jobs whose name matches"
    )
    parser.add_argument("--list", action="store_true", help="name the jobs and stop")
    parser.add_argument(
        "--continue", action="store_true", dest="go_on",
        help=f"go on after {_run.MOST_TIMEOUTS} items that ran into their limits",
    )  # fmt: skip
    parser.add_argument(
        "--send", type=Path, metavar="FILE",
        help="write one archive (.tar.gz) for the authors; it names no person and no machine",
    )  # fmt: skip
    parser.add_argument(
        "--simulate", nargs="?", const=SIMULATED, metavar="GPU",
        help=f"the same way on the simulator, tiny, as on a GPU of the table ({SIMULATED})",
    )  # fmt: skip
    parser.set_defaults(run=run)


def pattern(text: str) -> str:
    """A regular expression of the command line."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return text


def lacking_on(capability: tuple[int, int]) -> list[str]:
    """The targets of this build that a GPU would load, but whose machine code it has left out."""
    names = _native.left_out_targets()
    return [name for name in names if _native.target(name).loads_on(capability)]


def make_setup(arguments: argparse.Namespace) -> tuple[Setup, dict[str, str]]:
    """What the jobs share, and what torch says of the GPU.

    Raises:
        ValueError: there is nothing to run on; the message says what is missing.
    """
    if arguments.simulate is not None:
        gpu = _api.find_device(arguments.simulate)
        kernels = kernels_on(gpu.capability)
        return Setup(gpu.name, "cpu", gpu.capability, MEMORY_OF_SIMULATOR, False, kernels), {}
    device = gpus.find(arguments.device, "verify", " (--simulate goes the same way without one)")
    kernels = kernels_on(device.capability)
    if not kernels:
        raise ValueError(
            f"no kernel of this build has code for {device.name} (compute capability "
            f"{device.major}.{device.minor}): archflash info lists what they are built for"
        )
    if left_out := lacking_on(device.capability):
        raise ValueError(
            f"this build has no machine code for {', '.join(left_out)}, which {device.name} loads: "
            "build again with ARCHFLASH_MACHINE_CODE=all"
        )
    machine = _machine.ask(arguments.device)
    where, free = f"cuda:{arguments.device}", int(machine["free_bytes"])
    alone = machine.get("compute_mode") == _machine.ALONE
    return Setup(
        device.name, where, device.capability, free, arguments.full, kernels, alone
    ), machine


def run(arguments: argparse.Namespace) -> int:
    """Runs the jobs and prints the verdict."""
    setup, machine = make_setup(arguments)
    every = _jobs.make_jobs(setup)
    jobs = [job for job in every if re.search(arguments.only, job.name)]
    if not jobs:
        raise ValueError(f"no job matches --only {arguments.only!r}: --list names them")
    if arguments.list:
        for job in jobs:
            print(f"{job.name} ({len(job.items)} items)")
        return 0
    if arguments.send is not None:  # now rather than after the work
        arguments.send.open("ab").close()
    if not setup.simulate:
        try:
            _user_tables.check_writable(_proofs.KIND)
        except ValueError as error:
            print(f"archflash: what is proved will not be kept: {error}", file=sys.stderr)
    told = _verdict.facts(setup, machine)
    on = f"{setup.gpu} (simulated)" if setup.simulate else setup.gpu
    print(
        f"{on}, compute capability {told['capability']}, driver {told['driver']}, "
        f"torch {told['torch']}, archflash {told['archflash']}"
    )
    print(f"kernels with code for it: {', '.join(setup.kernels)}", flush=True)
    began = time.monotonic()
    printer = Printer(jobs)
    runner = _run.Runner(setup, printer.row, arguments.go_on)
    interrupted = False
    try:
        runner.run(jobs)
    except KeyboardInterrupt:  # what is known is told all the same
        interrupted = True
    finally:
        printer.close()
    status = finish(arguments, setup, every, runner, told, time.monotonic() - began)
    return INTERRUPTED if interrupted else status


def finish(
    arguments: argparse.Namespace, setup: Setup, every: list[Job], runner: _run.Runner,
    told: dict[str, str], seconds: float,
) -> int:  # fmt: skip
    """Prints what the rows say, keeps the proof, writes the archive; the exit status."""
    wanted = sorted({(job.kernel, job.of, job.part) for job in every if job.of})
    unfinished = [job for job in every if job.name not in runner.finished]
    said = _verdict.verdicts(
        runner.rows, wanted, [(job.kernel, job.of, job.name) for job in unfinished]
    )
    bad = [row for row in runner.rows if row.status in _run.BAD]
    if bad:
        print("\nfailures")
        for row in bad:
            print("\n".join(f"  {line}" for line in _verdict.failure_lines(row)))
    times = [row for row in runner.rows if row.part == _jobs.TIMES and row.numbers]
    if times:
        print("\ntimes")
        for row in times:
            print(f"  {row.item}: {row.detail}")
    if arguments.full:
        for name, left in _verdict.coverage(runner.rows, setup).items():
            print(f"{name}: {len(left)} kernels were not launched: {', '.join(left) or 'none'}")
    if arguments.send is not None:
        names = "; ".join(job.name for job in unfinished)
        told |= {"seconds": f"{seconds:.0f}", "only": arguments.only, "unfinished": names}
        _verdict.write_archive(arguments.send, told, runner.rows, said)
        print(f"\nwritten: {arguments.send}; docs/your-card.md says where to send it")
    print("\nverdict")
    for verdict in said:
        print(f"  {verdict}")
    if not setup.simulate:
        keep(arguments.device, said)
    counts = _verdict.counts(runner.rows)
    words = ", ".join(f"{number} {status}" for status, number in counts.items())
    proved = sum(verdict.said == _verdict.PROVED for verdict in said)
    right = not bad and not runner.ended
    print(
        f"{'RIGHT' if right else 'WRONG'}: {proved} of {len(said)} passes of kernels proved on "
        f"{told['gpu']}; items: {words}; {seconds:.0f} s"
    )
    return 0 if right else 1


def keep(index: int, said: list[_verdict.Verdict]) -> None:
    """Keeps what was proved for dispatch; a place that cannot be written is named."""
    passes = {
        what: [(x.kernel, x.of) for x in said if x.said == what]
        for what in (_verdict.PROVED, _verdict.FAILED)
    }
    device = _dispatch.query_device(index)
    try:
        file = _proofs.keep(device, passes[_verdict.PROVED], passes[_verdict.FAILED])
    except ValueError as error:
        print(f"archflash: the proof is not kept: {error}", file=sys.stderr)
        return
    print(f"kept in {file}: on this GPU dispatch chooses what is proved, and nothing that failed")


class Printer:
    """Prints a line for each job when it has ended, with the time since the one before."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = {job.name: job for job in jobs}
        self._ended, self._rows = 0, list[_run.Row]()
        self._since = time.monotonic()

    def row(self, row: _run.Row) -> None:
        """Takes a row as it comes."""
        self._rows.append(row)
        if len(self._rows) == len(self._jobs[row.job].items):
            self._ended += 1
            self.close()

    def close(self) -> None:
        """Ends the line of a job."""
        if not self._rows:
            return
        counts = _verdict.counts(self._rows)
        ok = counts.pop(_worker.OK, 0)
        words = [f"{ok} ok", *(f"{number} {status}" for status, number in counts.items())]
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        count = f"[{self._ended}/{len(self._jobs)}]"
        head = f"{count} {self._rows[0].job}: {', '.join(words)}, {seconds:.1f} s"
        bad = next((row for row in self._rows if row.status in _run.BAD), None)
        said = "" if bad is None else f"; {bad.item}: {bad.detail[:200]}"
        print(head + said.replace("\n", " "), flush=True)
        self._rows = []
