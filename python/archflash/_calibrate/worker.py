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
from collections.abc import Callable, Iterator
from typing import Any

import torch

from archflash import _dispatch, _registry
from archflash._calibrate import grid
from archflash._calibrate.calls import PYTORCHS
from archflash._calibrate.grid import Point
from archflash._calibrate.lab import Lab
from archflash._call_times import BOTH, FORWARD, Kind

# A candidate that was so much slower at so many points of a kind is left out at the others.
_BEHIND, _ENOUGH = 1.25, 4
# One that plans so long for each shape, as cuDNN does, is measured at so many points of a group and
# at every second one of the others.
_SLOW_TO_PLAN_S, _SOME = 0.04, 8
# Where plans take more than this part of the time, at so many points and every second one.
_MOST_OF_PLANS, _FEWEST = 0.5, 3
_FOR_CROSSOVERS = 0.08  # of the time
_APART, _NEAR = 3.0, 0.45  # octaves between points whose middle is measured, and which is no news
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
    """Whether a candidate need not be measured at further calls of a group.

    Args:
        name: the candidate.
        like: what was measured of the group.
        needed: tells whether dispatch could choose it. Of PyTorch's kernels it can choose one.
    """
    known = [times[name] / min(times.values()) for _, times in like if name in times]
    return len(known) >= _ENOUGH and (min(known) > _BEHIND or not needed())


def is_half(name: str, like: list[tuple[Point, Times]], some: int = _SOME) -> bool:
    """Whether a candidate was measured at some calls of a group and at half of the others."""
    count = sum(name in times for _, times in like)
    return count >= some and count - some >= (len(like) - some) / 2


def crossovers(known: list[tuple[Point, Times]]) -> list[Point]:
    """Points in the middle of two near ones at which different candidates are the fastest."""
    found: dict[Point, None] = {}
    groups: dict[Group, list[tuple[Point, Times]]] = {}
    for point, times in known:
        groups.setdefault(group_of(point), []).append((point, times))
    for mine in groups.values():
        places = [point.sizes.place() for point, _ in mine]
        for i, (one, times) in enumerate(mine):
            for j in range(i):
                other, others = mine[j]
                if _distance(places[i], places[j]) > _APART or not _differ(times, others):
                    continue
                middle = grid.between(one, other)
                if middle is None:
                    continue
                place = middle.sizes.place()
                if all(_distance(place, known_place) > _NEAR for known_place in places):
                    found[middle] = None
    return list(found)


def _distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return float(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5)


def _differ(times: Times, others: Times) -> bool:
    """Whether the fastest candidate of one point is slower by more than noise at the other."""
    both = times.keys() & others.keys()
    if not both:
        return False
    one, other = min(both, key=times.__getitem__), min(both, key=others.__getitem__)
    return times[other] > 1.03 * times[one] and others[one] > 1.03 * others[other]


def points_of(
    asked: dict[str, Any], speed: float, known: list[tuple[Point, Times]]
) -> Iterator[Point]:
    """What is measured, until nobody asks for more."""
    begin, done = time.time(), {point for point, _ in known}
    end = begin + (1 - _FOR_CROSSOVERS) * (float(asked["until"]) - begin)
    sms = _dispatch.query_device(int(asked["device"])).sm_count
    for point in grid.points(sms, speed):
        if time.time() > end:
            break
        if point not in done:
            yield point
    while True:
        done = {point for point, _ in known}
        fresh = [point for point in crossovers(known) if point not in done]
        if not fresh:
            return
        yield from fresh


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
    lab = Lab(
        index,
        min(largest, free // 16),
        trying=lambda point, name: say(trying=[point, name]),
    )
    gc.freeze()
    speed, warm = 0.0, time.monotonic() + _WARM_S
    while not speed or time.monotonic() < warm:
        found = lab.measure(first, lambda name: (name, FORWARD) in skip or _is_slow(name))
        if not found.graph_us:
            say(error=f"nothing could be measured: {found.wrong or found.refused}")
            return 1
        speed = first.flops() / min(found.graph_us.values())
    say(trying=None)
    if not asked["host"]:
        for passes in (FORWARD, BOTH):
            small = Point(Kind("16 bits", passes, "many", False), (1, 4, 4, 64, 64), 64, 64)
            for who, name in (("ours", lab.one_of_ours(small)), ("torch", _registry.TORCH)):
                if name is not None:
                    say(host=[passes, who, lab.host_us(small, name)])
    groups: dict[Group, list[tuple[Point, Times]]] = collections.defaultdict(list)
    for point, times in known:
        groups[group_of(point)].append((point, times))
    first_s: dict[str, list[float]] = collections.defaultdict(list)
    wrong_kinds: set[tuple[str, Kind]] = set()  # where a kernel of PyTorch was wrong

    def left(name: str) -> bool:
        if (name, point.kind.passes) in skip or (name, point.kind) in wrong_kinds:
            return True
        like = groups[group_of(point)]
        if statistics.median(first_s[name] or [0.0]) > _SLOW_TO_PLAN_S:
            too_long = sum(first_s[name]) > _MOST_OF_PLANS * (time.time() - begin)
            if is_half(name, like) or (too_long and is_half(name, like, _FEWEST)):
                return True
        return is_enough(name, like, lambda: name not in PYTORCHS or name == lab.pytorchs(point))

    for point in points_of(asked, speed, known):
        if time.time() > float(asked["until"]):
            break
        if point.bytes() > free // 16:
            continue
        result = lab.measure(point, left)
        known.append((point, result.graph_us))
        groups[group_of(point)].append(known[-1])
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
