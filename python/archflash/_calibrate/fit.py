"""From measured times to a table: the formula of `_calibrated` for each candidate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from archflash import _calibrated
from archflash._call_times import FEATURES, SHAPES, Fit, Group, Kind, Shape, Sizes, features

_OWN = 8  # points from which head dimensions need no help of others
_FEWEST = 5  # times of a candidate from which its own formula is made
_LEAST = 1e-6  # pull towards small weights: terms that say the same stay small
_FLAT = 1e-6  # a slope that is not worth another weight


class Measured(NamedTuple):
    """One call on the device.

    Attributes:
        kind: the kind of the call.
        d, dv: its head dimensions.
        sizes: its sizes.
        graph_us: microseconds in a CUDA graph, by candidate.
    """

    kind: Kind
    d: int
    dv: int
    sizes: Sizes
    graph_us: dict[str, float]


def fitted(
    kind: Kind, head_dims: int, points: Sequence[Sizes], us: Sequence[float | None], sms: int
) -> Fit:
    """The numbers of one candidate, by its times at some points (None where it has none)."""
    known = [(point, time) for point, time in zip(points, us, strict=True) if time is not None]
    best: tuple[float, Shape, list[float]] | None = None
    for shape in SHAPES:
        rows = [
            [x / time for x in features(kind, point, head_dims, shape, sms)]
            for point, time in known
        ]  # relative: short calls count as much as long ones
        weights = _least_squares(rows)
        error = sum((sum(map(_product, row, weights)) - 1) ** 2 for row in rows)
        if best is None or error < best[0]:
            best = (error, shape, weights)
    assert best is not None
    _, shape, weights = best
    fit = Fit(shape, tuple(weights), ())
    residuals = [
        None if time is None else math.log(time / _formula(kind, point, head_dims, fit, sms))
        for point, time in zip(points, us, strict=True)
    ]
    return fit._replace(residuals=tuple(residuals))


def _as_a_multiple(
    us: Sequence[float | None], reference: Fit, of_reference: Sequence[float | None]
) -> Fit:
    """The numbers of a candidate with few times: a multiple of the best known one, also where it
    was not measured.
    """
    ratios = [
        None if mine is None or other is None else math.log(mine / other)
        for mine, other in zip(us, of_reference, strict=True)
    ]
    known = [ratio for ratio in ratios if ratio is not None]
    mean = statistics.fmean(known) if known else 0.0
    mean += statistics.pstdev(known) if known else 0.0  # it is not to be first by chance
    residuals = [
        None if residual is None else residual + (0.0 if ratio is None else ratio - mean)
        for ratio, residual in zip(ratios, reference.residuals, strict=True)
    ]
    weights = tuple(weight * math.exp(mean) for weight in reference.weights)
    return Fit(reference.shape, weights, tuple(residuals))


def _product(a: float, b: float) -> float:
    return a * b


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """Weights of at least 0 with which the terms of each row add up to about 1 (the active-set
    method of Lawson and Hanson).
    """
    scale = [math.sqrt(sum(row[i] ** 2 for row in rows)) for i in range(FEATURES)]
    terms = [i for i in range(FEATURES) if scale[i] > 0]
    scaled = [[row[i] / scale[i] for i in terms] for row in rows]
    count = range(len(terms))
    matrix = [[sum(row[i] * row[j] for row in scaled) for j in count] for i in count]
    target = [sum(row[i] for row in scaled) for i in count]
    solution, used = [0.0] * len(terms), set[int]()
    for _ in range(3 * len(terms)):
        slopes = [target[i] - sum(map(_product, matrix[i], solution)) for i in count]
        steepest = max((i for i in count if i not in used), key=slopes.__getitem__, default=None)
        if steepest is None or slopes[steepest] < _FLAT:
            break
        used.add(steepest)
        while True:
            at = sorted(used)
            wanted = _solved([[matrix[i][j] for j in at] for i in at], [target[i] for i in at])
            if min(wanted) > 0:
                break
            # As far towards it as no weight becomes negative; what reaches 0 leaves.
            step = min(
                solution[i] / (solution[i] - new)
                for i, new in zip(at, wanted, strict=True)
                if new <= 0 and solution[i] > new
            )
            for i, new in zip(at, wanted, strict=True):
                solution[i] += step * (new - solution[i])
            gone = {i for i in at if solution[i] <= 1e-12} or {at[wanted.index(min(wanted))]}
            used -= gone
            for i in gone:
                solution[i] = 0.0
            if not used:
                break
        if not used:
            break
        for i, new in zip(at, wanted, strict=True):
            solution[i] = new
    weights = [0.0] * FEATURES
    for i, value in zip(terms, solution, strict=True):
        weights[i] = value / scale[i]
    return weights


def _solved(matrix: list[list[float]], target: list[float]) -> list[float]:
    """The solution of a small symmetric system, whose diagonal is raised by _LEAST."""
    size = len(target)
    rows = [[*line, value] for line, value in zip(matrix, target, strict=True)]
    for i in range(size):
        rows[i][i] += _LEAST
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            for k in range(i, size + 1):
                rows[j][k] -= factor * rows[i][k]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution


def groups(measured: Sequence[Measured], sms: int) -> list[tuple[Kind, Group]]:
    """Everything that was measured, by kind and head dimensions."""
    kinds: dict[Kind, dict[tuple[int, int], list[Measured]]] = {}
    for one in measured:
        kinds.setdefault(one.kind, {}).setdefault((one.d, one.dv), []).append(one)
    made = []
    for kind, by_dims in kinds.items():
        most = max(by_dims.values(), key=len)
        best_known = _alone(kind, most, sms)
        for mine in by_dims.values():
            if mine is most:
                made.append((kind, best_known))
            elif len(mine) < _OWN:
                made.append((kind, _with_the_help_of(best_known, kind, mine, sms)))
            else:
                made.append((kind, _alone(kind, mine, sms)))
    return made


def _alone(kind: Kind, mine: Sequence[Measured], sms: int) -> Group:
    """A group from its own times."""
    d, dv = mine[0].d, mine[0].dv
    points = tuple(one.sizes for one in mine)
    times = {
        name: [one.graph_us.get(name) for one in mine]
        for name in dict.fromkeys(name for one in mine for name in one.graph_us)
    }
    counts = {name: len(us) - us.count(None) for name, us in times.items()}
    best_known = max(counts, key=counts.__getitem__)
    reference = fitted(kind, d + dv, points, times[best_known], sms)
    fits = {
        name: fitted(kind, d + dv, points, us, sms)
        if counts[name] >= max(_FEWEST, len(points) / 2)
        else _as_a_multiple(us, reference, times[best_known])
        for name, us in times.items()
    }
    return Group(d, dv, points, fits, len(points))


def _with_the_help_of(other: Group, kind: Kind, mine: Sequence[Measured], sms: int) -> Group:
    """A group of few points: it takes over how the times of other head dimensions depend on sizes,
    and by its own points how much longer or shorter they are.
    """
    d, dv = mine[0].d, mine[0].dv
    points = tuple(one.sizes for one in mine)
    fits = {}
    for name, fit in other.fits.items():
        deviations = [
            None if (us := one.graph_us.get(name)) is None
            else math.log(us / _formula(kind, one.sizes, d + dv, fit, sms))
            for one in mine
        ]  # fmt: skip
        known = [x for x in deviations if x is not None]
        if not known:
            continue
        mean = sum(known) / len(known)
        fits[name] = Fit(
            fit.shape,
            tuple(weight * math.exp(mean) for weight in fit.weights),
            (*(None if x is None else x - mean for x in deviations), *fit.residuals),
        )
    return Group(d, dv, points + other.points, fits, len(points))


def _formula(kind: Kind, sizes: Sizes, head_dims: int, fit: Fit, sms: int) -> float:
    parts = features(kind, sizes, head_dims, fit.shape, sms)
    return max(sum(map(_product, fit.weights, parts)), 0.1)


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

    return {
        "key": key,
        "format": _calibrated.FORMAT,
        "date": date,
        "sms": sms,
        "host_us": [[passes, who, short(us)] for (passes, who), us in host_us.items()],
        "wrong": [[name, passes, text] for (name, passes), text in wrong.items()],
        "wrong_kinds": [[name, list(kind)] for name, kind in wrong_kinds],
        "groups": [
            {
                "kind": list(kind),
                "d": group.d,
                "dv": group.dv,
                "own": group.own,
                "points": [[*point[:5], short(point.seen)] for point in group.points],
                "fits": {
                    name: {
                        "shape": list(fit.shape),
                        "weights": [short(x) for x in fit.weights],
                        "residuals": [None if x is None else round(x, 4) for x in fit.residuals],
                    }
                    for name, fit in group.fits.items()
                },
            }
            for kind, group in groups(measured, sms)
        ],
    }


def table(entry_: dict[str, Any]) -> _calibrated.Table:
    """The table of an entry."""
    return _calibrated.Table.read(entry_)
