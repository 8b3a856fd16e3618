"""The process that measures: `python -m archflash._calibrate.worker`. It reads what to do from
stdin and writes a line of JSON for each thing that it begins or has found. If a kernel breaks or
hangs, only this process is lost (measuring.py starts another one).
"""

from __future__ import annotations

import collections
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from archflash import _dispatch, _registry
from archflash._calibrate import grid
from archflash._calibrate.calls import PYTORCHS
from archflash._calibrate.grid import Point
from archflash._calibrate.lab import Lab
from archflash._call_times import BOTH, FORWARD, Kind

# A candidate that was so much slower at so many points of a kind and head dimensions is left out at
# the others.
_BEHIND, _ENOUGH = 1.25, 4
# Until every kind was measured, one that plans so long for each shape, as cuDNN does, is left out
# while plans have taken more than this part of the time, and it was measured at so many points of a
# family and head dimensions. With few rows candidates are nearly equally fast.
_SLOW_TO_PLAN_S, _MOST_OF_PLANS, _KNOWN = 0.04, 0.4, {"few": 8, "many": 1}
_WARM_S = 0.4

Times = dict[str, float]
Group = tuple[Kind, int, int]


def point_of(told: list[Any]) -> Point:
    """A point from its JSON."""
    kind, shape, d, dv = told
    b, hq, hkv, nq, nk = shape
    return Point(Kind(*kind), (b, hq, hkv, nq, nk), d, dv)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def group_of(point: Point) -> Group:
    """The points with which a point is compared."""
    return point.kind, point.d, point.dv


def is_enough(name: str, like: list[tuple[Point, Times]], needed: Callable[[], bool]) -> bool:
    """Whether a candidate need not be measured at further calls of a kind and head dimensions.

    Args:
        name: the candidate.
        like: what was measured of them.
        needed: tells whether dispatch could choose it. Of PyTorch's kernels it can choose one.
    """
    known = [times[name] / min(times.values()) for _, times in like if name in times]
    return len(known) >= _ENOUGH and (min(known) > _BEHIND or not needed())


def _is_slow(name: str) -> bool:
    """Whether it is a kernel on CUDA cores."""
    return name in _registry.kernel_names() and not _registry.uses_tensor_cores(name)


def main() -> int:
    asked, begin = json.loads(sys.stdin.read()), time.time()
    index = int(asked["device"])
    known = [(point_of(point), dict(times)) for point, times in asked["known"]]
    skip = {(str(name), str(passes)) for name, passes in asked["skip"]}
    sms = _dispatch.query_device(index).sm_count
    first = Point(Kind("16 bits", FORWARD, "many", False), (2, 16, 16, 2048, 2048), 128, 128)
    largest = max(point.bytes() for point in grid.points(sms, 1e12))
    free, _ = torch.cuda.mem_get_info(index)
    lab = Lab(index, min(largest, free // 16), trying=lambda point, name: say(trying=[point, name]))
    gc.freeze()
    speed, warm = 0.0, time.monotonic() + _WARM_S
    while not speed or time.monotonic() < warm:
        found = lab.measure(first, lambda name: (name, FORWARD) in skip or _is_slow(name))
        if not found.graph_us:
            say(error=f"nothing could be measured: {found.wrong or found.refused}")
            return 1
        speed = first.flops() / min(found.graph_us.values())
    say(trying=None)
    for passes in (FORWARD, BOTH):
        small = Point(Kind("16 bits", passes, "many", False), (1, 4, 4, 64, 64), 64, 64)
        for name in (*lab.ours(small), _registry.TORCH):
            if [passes, name] not in asked["host"] and (name, passes) not in skip:
                say(trying=[small, name])
                say(host=[passes, name, lab.host_us(small, name)])
    groups: dict[Group, list[tuple[Point, Times]]] = collections.defaultdict(list)
    for point, times in known:
        groups[group_of(point)].append((point, times))
    first_s: dict[str, list[float]] = collections.defaultdict(list)
    wrong_kinds: set[tuple[str, Kind]] = set()  # where a kernel of PyTorch was wrong

    def left(name: str) -> bool:
        if (name, point.kind.passes) in skip or (name, point.kind) in wrong_kinds:
            return True
        like = groups[group_of(point)]
        plans, family = first_s[name] or [0.0], point.kind.family()
        too_long = sum(plans) > _MOST_OF_PLANS * (time.time() - begin)
        if unseen and too_long and statistics.median(plans) > _SLOW_TO_PLAN_S:
            alike = (times for (kind, *dims), found in groups.items() for _, times in found
                     if kind.family() == family and dims == [point.d, point.dv])  # fmt: skip
            if sum(name in times for times in alike) >= _KNOWN[point.kind.rows]:
                return True
        return is_enough(name, like, lambda: name not in PYTORCHS or name == lab.pytorchs(point))

    done = {point for point, _ in known}
    every = grid.points(sms, speed)
    unseen = {point.kind for point in every}
    for point in every:
        unseen.discard(point.kind)
        if time.time() > float(asked["until"]):
            break
        if point in done or point.bytes() > free // 16:
            continue
        result = lab.measure(point, left)
        groups[group_of(point)].append((point, result.graph_us))
        for name, seconds in result.first_s.items():
            first_s[name].append(seconds)
        for name, text in result.refused.items():
            say(refused=[name, point, text])
        for name, text in result.wrong.items():
            if name in _registry.kernel_names():
                skip.add((name, point.kind.passes))
            wrong_kinds.add((name, point.kind))
            say(wrong=[name, point, text])
        say(point=point, graph_us=result.graph_us)
    say(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
