"""Many random problems for a while: python -m tests.properties --executor gpu --seconds 60 --seed 1

It prints how often each implementation was right, refused or wrong, and of each failure a line that
runs the problem again. The exit status is 1 if there was one.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys

from tests.core_set.executors import EXECUTORS
from tests.properties import ENTRIES
from tests.properties.running import Counts, work


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.properties", description=__doc__)
    parser.add_argument("--executor", choices=("torch", *EXECUTORS), default="torch")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=300, help="the largest size")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with problems")
    parser.add_argument("--entry", choices=ENTRIES, action="append", help="default: every one")
    parser.add_argument("--implementation", action="append", help="default: every one")
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
    return int(any(row[2] == "wrong" for row in counts))


if __name__ == "__main__":
    sys.exit(main())
