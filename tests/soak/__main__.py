"""Calls of all kinds from many threads: python -m tests.soak --seconds 100 [--csv FILE]

Each thread has a stream, and draws one kind of call after the other: known calls by every
implementation, whose bits are known; shapes that have not been there, run twice; caches to which
rows are added; gradients; replayed graphs with other inputs, and newly captured ones; wrong calls,
which are refused. Now and then all wait while one call has no memory left. At the end the bits of
known calls are the same, no tensor is left over, and the process has grown by at most --growth MB
since a third of the time. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import collections
import csv
import datetime
import gc
import resource
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import torch
from bench import environment

from tests.soak.kinds import KINDS, Known, Worker, allocated, without_memory

COLUMNS = ("date", "commit", "gpu", "torch", "threads", "seconds", "kind", "calls", "wrong")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth", type=float, default=200.0, help="MB of the process, at most")
    parser.add_argument("--csv", type=Path, help="a file to which the counts are appended")
    args = parser.parse_args()
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
    begin, refusals = 0.0, 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(min(5.0, args.seconds / 10))
        if device == "cuda":
            with known.quiet():
                refusals += without_memory(known, wrong)
        if not begin and time.monotonic() > end - args.seconds * 2 / 3:
            begin = _megabytes()
    for thread in threads:
        thread.join()
    grown = _megabytes() - (begin or _megabytes())
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
    if grown > args.growth:
        wrong.append(f"the process has grown by {grown:.0f} MB")
    print("\n".join(wrong[:50]))
    total = sum(counts.values())
    print(f"{args.threads} threads, {args.seconds:.0f} s, {total} calls, {len(wrong)} wrong")
    print(f"the process grew by {grown:.0f} MB in the last two thirds, to {_megabytes():.0f}")
    for kind, count in sorted(counts.items()):
        print(f"  {count:9}  {kind}")
    if args.csv is not None:
        _append(args, counts, len(wrong))
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


def _megabytes() -> float:
    """Memory of this process that is in use now."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _append(args: argparse.Namespace, counts: collections.Counter[str], wrong: int) -> None:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    date = datetime.datetime.now(datetime.timezone.utc).date()
    run = (date, environment.git_state()[0][:8], gpu, torch.__version__, args.threads)
    new = not args.csv.exists()
    with args.csv.open("a", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        if new:
            rows.writerow(COLUMNS)
        rows.writerow((*run, f"{args.seconds:.0f}", "all", sum(counts.values()), wrong))
        for kind, count in sorted(counts.items()):
            rows.writerow((*run, "", kind, count, ""))


if __name__ == "__main__":
    sys.exit(main())
