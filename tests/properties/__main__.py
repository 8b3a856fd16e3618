"""Many random problems for a while: python -m tests.properties --executor gpu --seconds 60 --seed 1

It prints how often each implementation was right, refused or wrong, and of each failure a line that
runs the problem again: its problem belongs into found.py. The exit status is 1 if there was one.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import multiprocessing
import sys
from pathlib import Path

import torch
from bench import environment

from tests.core_set.executors import EXECUTORS
from tests.properties import ENTRIES
from tests.properties.running import Counts, work

COLUMNS = (
    "date", "commit", "gpu", "torch", "seed", "entry", "implementation", "right", "refused",
    "wrong",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.properties", description=__doc__)
    parser.add_argument("--executor", choices=("torch", *EXECUTORS), default="torch")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=300, help="the largest size")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with problems")
    parser.add_argument("--entry", choices=ENTRIES, action="append", help="default: every one")
    parser.add_argument("--implementation", action="append", help="default: every one")
    parser.add_argument("--csv", type=Path, help="a file to which the counts are appended")
    args = parser.parse_args()
    if args.executor != "torch" and (why := EXECUTORS[args.executor]().why_not()):
        parser.error(why)
    run = functools.partial(work, args)
    if args.workers == 1:
        found = [run(0)]
    else:
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
            answers = pool.map_async(run, range(args.workers), chunksize=1)
            found = answers.get(args.seconds + 120)
    problems, counts = sum(n for n, _ in found), sum((c for _, c in found), Counts())
    print(f"{problems} problems, seeds {args.seed}, sizes up to {args.most}")
    print(f"{'':28} {'':16} {'right':>8} {'refused':>8} {'wrong':>8}")
    for entry, name in sorted({row[:2] for row in counts}):
        cells = (counts[entry, name, verdict] for verdict in ("right", "refused", "wrong"))
        print(f"{entry:28} {name:16} " + " ".join(f"{cell:8}" for cell in cells))
    if args.csv is not None:
        _append(args.csv, args.seed, problems, counts)
    return int(any(row[2] == "wrong" for row in counts))


def _append(path: Path, seed: int, problems: int, counts: Counts) -> None:
    """Adds a row of how many problems there were, and one for each entry and implementation."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    date = datetime.datetime.now(datetime.timezone.utc).date()
    run = (date, environment.git_state()[0][:8], gpu, torch.__version__, seed)
    new = not path.exists()
    with path.open("a", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        if new:
            rows.writerow(COLUMNS)
        rows.writerow((*run, "all", "problems", problems, "", ""))
        for entry, name in sorted({row[:2] for row in counts}):
            cells = (counts[entry, name, verdict] for verdict in ("right", "refused", "wrong"))
            rows.writerow((*run, entry, name, *cells))


if __name__ == "__main__":
    sys.exit(main())
