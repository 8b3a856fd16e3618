"""How good the choice of a calibrated GPU is: calls that `archflash calibrate` did not measure, all
candidates of each, and the one that dispatch chooses with the committed table taken away.

    archflash calibrate && python -m bench.calibrated [--calls N] [--seed N] [--csv FILE]

For each call the loss is what the chosen candidate takes longer than the fastest: in a CUDA graph,
eagerly, and by the geometric mean of both, which is what a calibrated dispatch chooses by. In a
graph each kernel of PyTorch counts, also those that PyTorch does not choose; eagerly and by the
mean PyTorch as archflash calls it. Exit
status: 0 when by that mean at least 95% of the calls lose at most 2% and none more than 10%, else
1; 2 when nothing can be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from archflash import _calibrated, _dispatch, _measured, _registry
from archflash._calibrate.calls import PYTORCHS, Call
from archflash._calibrate.grid import Point, points
from archflash._calibrate.lab import Lab, Result
from archflash._call_times import BOTH, FORWARD, Kind
from bench.cases import Case
from bench.models import load_models

LIMIT, WORST, SHARE = 0.02, 0.10, 0.95
MOST_FLOPS = {FORWARD: 1.2e12, BOTH: 3e12}  # what takes longer says nothing new
DIMS = ((64, 64), (128, 128), (128, 128), (64, 64), (256, 256), (96, 96), (72, 72), (192, 128))


def of_model(case: Case, passes: str) -> Point | None:
    """A call of a model; None for those whose masks PyTorch's kernels do not take as they are."""
    if case.window is not None or case.sinks or (case.causal and case.nq != case.nk):
        return None
    kind = Kind("16 bits", passes, "many", case.causal)
    return Point(kind, (case.b, case.hq, case.hkv, case.nq, case.nk), case.d, case.dv)


def of_chance(count: int, seed: int = 0) -> Iterator[Point]:
    """Calls of sizes that nobody chose."""
    chance = random.Random(seed)
    for number in range(count):
        d, dv = chance.choice(DIMS)
        heads, group = chance.choice((8, 12, 16, 32)), chance.choice((1, 1, 1, 4))
        if number % 5 == 4:  # decoding
            keys = round(2 ** chance.uniform(8, 15))
            shape = (chance.choice((1, 4, 8, 32, 96)), heads, heads // group, 1, keys)
            yield Point(Kind("16 bits", FORWARD, "few", False), shape, min(d, dv), min(d, dv))
            continue
        rows = round(2 ** chance.uniform(7.5, 13.5))
        batch = max(1, round(2 ** chance.uniform(13, 17) / rows / heads * 8))
        causal, passes = chance.random() < 0.5, chance.choice((FORWARD, BOTH))
        kind = Kind("16 bits", passes, "many", causal)
        yield Point(kind, (batch, heads, heads // group, rows, rows), d, dv)


def calls(count: int, sms: int, seed: int = 0) -> list[Point]:
    """Calls that are not among those that are measured, half of them of models; others by seed."""
    models = [
        point
        for passes in (FORWARD, BOTH)
        for case in load_models()
        if case.documents is None and (passes == FORWARD or case.passes == "both")
        if (point := of_model(case, passes))
    ]
    grid = set(points(sms, 1e12))

    def fitting(given: Sequence[Point]) -> list[Point]:
        return [p for p in given if p not in grid and p.flops() <= MOST_FLOPS[p.kind.passes]]

    of_models = fitting(models)
    random.Random(seed + 1).shuffle(of_models)
    of_models = of_models[: count // 2]
    return of_models + fitting(list(of_chance(4 * count, seed)))[: count - len(of_models)]


@contextlib.contextmanager
def without_committed_table() -> Iterator[None]:
    """As if nothing had been measured but by the user."""
    with mock.patch.object(_measured, "_table", dict):
        yield


def choice(point: Point, index: int) -> str:
    """Who serves a call."""
    return Call(point, torch.device("cuda", index)).decision().chosen


def losses(result: Result, chosen: str) -> tuple[float, float, float]:
    """By what part the chosen candidate is slower than the fastest: graph, eager, mean of both."""
    graph = result.graph_us
    eager = {name: result.eager_us.get(name, us) for name, us in graph.items()}
    both = {name: math.sqrt(us * eager[name]) for name, us in graph.items()}
    if chosen not in graph:
        return (math.inf,) * 3
    # Which can be chosen, `torch` standing for PyTorch, and were near enough to be timed eagerly.
    can = [name for name in result.eager_us if name not in PYTORCHS] or [chosen]
    least = (min(graph.values()), min(eager[x] for x in can), min(both[x] for x in can))
    found = [times[chosen] / us - 1 for times, us in zip((graph, eager, both), least, strict=True)]
    return found[0], found[1], found[2]


def summary(found: Sequence[tuple[float, float, float]]) -> str:
    """The shares of calls that lose little, and the largest losses."""
    lines = []
    for number, way in enumerate(("graph", "eager", "both")):
        values = [loss[number] for loss in found]
        good = sum(value <= LIMIT for value in values)
        lines.append(
            f"{way}: {good} of {len(values)} calls ({good / len(values):.1%}) lose at most "
            f"{LIMIT:.0%}, the worst {max(values):.1%}"
        )
    return "\n".join(lines)


def is_good(found: Sequence[tuple[float, float, float]]) -> bool:
    values = [loss[2] for loss in found]
    return sum(x <= LIMIT for x in values) >= SHARE * len(values) and max(values) <= WORST


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; see the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m bench.calibrated")
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="another one draws other calls")
    parser.add_argument("--csv", type=Path, help="the times of every candidate")
    options = parser.parse_args(argv)
    if trouble := _dispatch.driver_problem():
        print(f"nothing can be measured: {trouble}", file=sys.stderr)
        return 2
    index = torch.cuda.current_device()
    device = _dispatch.query_device(index)
    if _calibrated.table_of(device) is None:
        print("there is no table: run `archflash calibrate` first", file=sys.stderr)
        return 2
    asked = calls(options.calls, device.sm_count, options.seed)
    lab = Lab(index, max(point.bytes() for point in asked), rounds=9)
    found, before, rows = [], [], []
    torch_itself = (_registry.TORCH,)  # as dispatch would call it
    for point in asked:
        result = lab.measure(point, lambda name: name == "simt", eager=True, more=torch_itself)
        if len(result.graph_us) < 2:
            continue
        usual = choice_without_calibration(point, index)
        with without_committed_table():
            chosen = choice(point, index)
        found.append(losses(result, chosen))
        before.append(losses(result, usual))
        print(f"{max(found[-1]):7.1%} {point.kind.passes} {point.shape} {point.d} "
              f"{'causal ' if point.kind.causal else ''}{chosen}: "
              + ", ".join(f"{n} {us:.1f}/{result.eager_us.get(n, us):.1f}"
                          for n, us in sorted(result.graph_us.items(), key=lambda x: x[1])[:4]),
              flush=True)  # fmt: skip
        rows += [
            {"point": str(point), "candidate": name, "graph_us": us, "chosen": int(name == chosen),
             "eager_us": result.eager_us.get(name, us), "usual": int(name == usual)}
            for name, us in result.graph_us.items()
        ]  # fmt: skip
    if options.csv is not None and rows:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    print(f"calibrated\n{summary(found)}\nby the committed table\n{summary(before)}")
    return 0 if is_good(found) else 1


def choice_without_calibration(point: Point, index: int) -> str:
    """Who serves a call by the committed table alone."""

    def none(*given: Any) -> None:
        return None

    with mock.patch.object(_calibrated, "find", none):
        return choice(point, index)


if __name__ == "__main__":
    sys.exit(main())
