"""Calls of all kinds from many threads: python -m tests.soak --seconds 100 [--csv FILE]

`python -m tests.soak --add FILE` takes in what a run on an H200 wrote, and says in
docs/reliability.md how many seconds were run.

Each thread has a stream, and draws one kind of call after the other: known calls by every
implementation, whose bits are known; shapes that have not been there, run twice; caches to which
rows are added; gradients; replayed graphs with other inputs, and newly captured ones; wrong calls,
which are refused. Now and then all wait while one call has no memory left. At the end the bits of
known calls are the same, no tensor is left over, and the process has grown by at most --growth MB
since a third of the time. The exit status is 1 if anything was wrong.

PyTorch's cuDNN kernel is off: PyTorch keeps a plan of cuDNN for each shape in each thread for ever,
so that a process with new shapes grows. With --cudnn it is on, and growth is told but not judged.
"""

from __future__ import annotations

import argparse
import collections
import csv
import ctypes
import datetime
import gc
import re
import resource
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from bench import environment

from tests.soak.kinds import KINDS, Known, Worker, allocated, without_memory

COLUMNS = (
    "date", "commit", "gpu", "torch", "threads", "seconds", "kind", "calls", "wrong", "cudnn",
    "grown_mb",
)  # fmt: skip
H200 = Path(__file__).with_name("h200.csv")
DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"
DONE = re.compile(r"[\d,]+ s, [\d,]+ calls")  # the document's words


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth", type=float, default=150.0, help="MB of the process, at most")
    parser.add_argument("--cudnn", action="store_true", help="leave PyTorch's cuDNN kernel on")
    parser.add_argument("--csv", type=Path, help="a file to which the counts are appended")
    parser.add_argument("--add", type=Path, help="take in such a file, and run nothing")
    args = parser.parse_args()
    if args.add is not None:
        add(args.add, H200, DOCUMENT)
        return 0
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(args.cudnn)
    try:
        return _soak(args)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


def _soak(args: argparse.Namespace) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    known = Known(device)
    workers = [Worker(known, args.seed * 1000 + i) for i in range(args.threads)]
    end = time.monotonic() + args.seconds
    wrong: list[str] = []
    threads = [
        threading.Thread(target=_work, args=(worker, end, wrong), name=f"soak {i}")
        for i, worker in enumerate(workers)
    ]
    for thread in threads:
        thread.start()
    begin, refusals = None, 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(min(5.0, args.seconds / 10))
        if device == "cuda":
            with known.quiet():
                refusals += without_memory(known, wrong)
        if begin is None and time.monotonic() > end - args.seconds * 2 / 3:
            begin = Memory.now()
    for thread in threads:
        thread.join()
    now = Memory.now()
    grown = now.since(begin or now)
    wrong += known.differences()
    counts = sum((worker.counts for worker in workers), collections.Counter())
    counts["without memory"] = refusals
    del workers
    gc.collect()
    if device == "cuda":
        if not refusals:
            wrong.append("no call was short of memory")
        left = allocated() - known.bytes
        if left > 0:
            wrong.append(f"{left} bytes of the GPU are left over")
    if grown.resident > args.growth and not args.cudnn:
        wrong.append(f"the process has grown by {grown.resident:.0f} MB")
    print("\n".join(wrong[:50]))
    total = sum(counts.values())
    print(f"{args.threads} threads, {args.seconds:.0f} s, {total} calls, {len(wrong)} wrong")
    print(f"in the last two thirds the process grew by {grown}, to {now.resident:.0f} MB")
    for kind, count in sorted(counts.items()):
        print(f"  {count:9}  {kind}")
    if args.csv is not None:
        _append(args, counts, len(wrong), grown.resident)
    return int(bool(wrong))


def _work(worker: Worker, end: float, wrong: list[str]) -> None:
    try:
        while time.monotonic() < end and len(wrong) < 50:
            kind = worker.chance.choice(list(KINDS))
            with worker.known.turn():
                said = worker.run(kind)
            if said:
                wrong.append(f"{kind}: {said}")
    except Exception:
        wrong.append(traceback.format_exc())


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Memory of this process, or what it grew by.

    Attributes:
        resident: MB in use of the machine.
        malloc: MB that the C library has given out.
        free: MB that it keeps for later. Most of them have been given back to the machine.
        objects: containers that Python's garbage collector knows.
    """

    resident: float
    malloc: float
    free: float
    objects: int

    @classmethod
    def now(cls) -> Memory:
        gc.collect()
        library, info = ctypes.CDLL(None), _MallInfo()
        if hasattr(library, "malloc_trim"):  # gives back what each thread's arena has free
            library.malloc_trim(0)
        if hasattr(library, "mallinfo2"):  # glibc's, from 2.33 on
            library.mallinfo2.restype = _MallInfo
            info = library.mallinfo2()
        statm = Path("/proc/self/statm")
        if statm.exists():
            resident = int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20
        else:
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        malloc = (info.uordblks + info.hblkhd) / 2**20
        return cls(resident, malloc, info.fordblks / 2**20, len(gc.get_objects()))

    def since(self, other: Memory) -> Memory:
        return Memory(
            self.resident - other.resident, self.malloc - other.malloc, self.free - other.free,
            self.objects - other.objects,
        )  # fmt: skip

    def __str__(self) -> str:
        return (
            f"{self.resident:.0f} MB (malloc: {self.malloc:.0f} in use and {self.free:.0f} free; "
            f"{self.objects} Python objects)"
        )


def _append(
    args: argparse.Namespace, counts: collections.Counter[str], wrong: int, grown: float
) -> None:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    date = datetime.datetime.now(datetime.timezone.utc).date()
    run = (date, environment.git_state()[0][:8], gpu, torch.__version__, args.threads)
    new = not args.csv.exists()
    with args.csv.open("a", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        if new:
            rows.writerow(COLUMNS)
        cudnn = "on" if args.cudnn else "off"
        seconds = f"{args.seconds:.0f}"
        rows.writerow((*run, seconds, "all", sum(counts.values()), wrong, cudnn, f"{grown:.0f}"))
        for kind, count in sorted(counts.items()):
            rows.writerow((*run, "", kind, count, "", "", ""))


def done(file: Path) -> str:
    """What all runs of a file have done, as the document says it."""
    with file.open(newline="") as lines:
        runs = [row for row in csv.DictReader(lines) if row["kind"] == "all"]
    seconds, calls = (sum(int(row[name]) for row in runs) for name in ("seconds", "calls"))
    return f"{seconds:,} s, {calls:,} calls"


def add(run: Path, to: Path, document: Path) -> None:
    """Adds the rows of a run to those of a file, and has the document say how much is done."""
    header, *rows = run.read_text().splitlines(keepends=True)
    if header.strip() != ",".join(COLUMNS):
        raise SystemExit(f"{run} has other columns: {header.strip()}")
    to.write_text(to.read_text() + "".join(rows))
    document.write_text(DONE.sub(done(to), document.read_text()))


if __name__ == "__main__":
    sys.exit(main())
