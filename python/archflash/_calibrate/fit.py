"""From measured times to a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from archflash import _calibrated
from archflash._call_times import NOISE, Fit, Kind, Measured, likeness, work_of

# Before anything is known a candidate is taken to vary so much around its mean, as if that had been
# seen in so many calls.
_USUAL_SPREAD, _AS_IF = 0.15, 4
_STARTS = tuple(2.0**exponent for exponent in range(-4, 12))


def fits(calls: Sequence[Measured], sms: int) -> tuple[float, str, dict[str, Fit]]:
    """The start, the reference and the fits of a family, which was measured at some calls."""
    counts: dict[str, int] = {}
    wins: dict[str, int] = {}
    for call in calls:
        for name in call.graph_us:
            counts[name] = counts.get(name, 0) + 1
        fastest = min(call.graph_us, key=call.graph_us.__getitem__)
        wins[fastest] = wins.get(fastest, 0) + 1

    def rank(name: str) -> tuple[int, bool, int]:
        return counts[name], not name.startswith("torch"), wins.get(name, 0)

    reference = max(counts, key=rank)
    places = [call.place(sms) for call in calls]

    def fit(logs: Sequence[float | None]) -> Fit:
        at = [number for number, log in enumerate(logs) if log is not None]
        values = _vector(log for log in logs if log is not None)
        alike = torch.tensor(
            [[likeness(math.dist(places[i], places[j])) for j in at] for i in at],
            dtype=torch.float64,
        )
        alike += NOISE * torch.eye(len(at), dtype=torch.float64)
        both = torch.linalg.solve(alike, torch.stack([values, torch.ones_like(values)], 1))
        mean = float(both[:, 0].sum() / both[:, 1].sum())
        pulls = both[:, 0] - mean * both[:, 1]
        squares = float((values - mean) @ pulls) + _AS_IF * _USUAL_SPREAD**2
        spread = math.sqrt(squares / (len(at) + _AS_IF))
        found = dict(zip(at, pulls.tolist(), strict=True))
        return Fit(mean, spread, tuple(found.get(number) for number in range(len(logs))))

    work = [work_of(call.kind, call.sizes, call.d + call.dv, sms) for call in calls]
    times = [call.graph_us.get(reference) for call in calls]

    def per_work(start: float) -> list[float | None]:
        return [
            None if us is None else math.log(us / (amount + start))
            for us, amount in zip(times, work, strict=True)
        ]

    def scatter(start: float) -> float:
        return float(_vector(x for x in per_work(start) if x is not None).var(correction=0))

    start = min(_STARTS, key=scatter)
    made = {reference: fit(per_work(start))}
    for name in counts:
        if name != reference:
            ratios = [
                math.log(call.graph_us[name] / us)
                if us is not None and name in call.graph_us else None
                for call, us in zip(calls, times, strict=True)
            ]  # fmt: skip
            if any(ratio is not None for ratio in ratios):
                made[name] = fit(ratios)
    return start, reference, made


def _vector(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def entry(
    key: dict[str, str],
    date: str,
    sms: int,
    measured: Sequence[Measured],
    host_us: Mapping[tuple[str, str], float],
    wrong: Mapping[tuple[str, str], str],
    wrong_kinds: Iterable[tuple[str, Kind]] = (),
) -> dict[str, Any]:
    """The entry of a table in the user's file, as `_calibrated.Table.read` takes it."""

    def short(x: float) -> float:
        return float(f"{x:.4g}")

    families: dict[Kind, list[Measured]] = {}
    for call in measured:
        families.setdefault(call.kind.family(), []).append(call)
    told = []
    for kind, calls in families.items():
        start, reference, made = fits(calls, sms)
        told.append(
            {
                "kind": list(kind),
                "start": start,
                "reference": reference,
                "calls": [
                    [call.kind.causal, call.d, call.dv, *call.sizes[:5],
                     {name: short(us) for name, us in call.graph_us.items()}]
                    for call in calls
                ],
                "fits": {
                    name: [fit.mean, fit.spread, [x and round(x, 6) for x in fit.pulls]]
                    for name, fit in made.items()
                },
            }
        )  # fmt: skip
    return {
        "key": key,
        "format": _calibrated.FORMAT,
        "date": date,
        "sms": sms,
        "host_us": [[passes, who, short(us)] for (passes, who), us in host_us.items()],
        "wrong": [[name, passes, text] for (name, passes), text in wrong.items()],
        "wrong_kinds": [[name, list(kind)] for name, kind in wrong_kinds],
        "families": told,
    }
