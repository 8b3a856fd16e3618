"""How long a call takes, by a formula whose numbers `archflash calibrate` finds on a GPU.

A call belongs to a kind, within it to the measured head dimensions that are large enough for it,
and has sizes. For each candidate (a folder of ours or a kernel of PyTorch) a few numbers say how
long a call of some sizes takes: the start, the work of all tiles over the SMs, the waves of tiles,
the longest tile, the tiles, and the bytes. What this formula misses at the measured sizes is known
and is taken into account near them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

FORWARD, BOTH = "forward", "both"
# How far measured sizes reach, in octaves, and how much of a lone one's deviation is believed.
_REACH, _DOUBT = 0.9, 0.15
# Octaves between sizes that take about the same time, and so many sizes that the formula holds.
_NEAR, _MANY = 0.4, 16
_BLOCK = 128  # keys that kernels read at a time; a part of such a block needs a mask

Place = tuple[float, float, float, float]


class Kind(NamedTuple):
    """A kind of calls, whose times are measured and predicted together.

    Attributes:
        dtype: "16 bits", "fp8" or "float32".
        passes: FORWARD, or BOTH for a call and its gradients.
        rows: "few" query rows of a sequence (decoding), or "many".
        causal: whether there is a causal mask; False for few rows, where it makes no difference.
        mask: the mask as data, as _measured.Kind has it.
        way: "dense", "packed" for sequences behind one another, or "cache".
    """

    dtype: str
    passes: str
    rows: str
    causal: bool
    mask: str = "none"
    way: str = "dense"


class Sizes(NamedTuple):
    """The sizes of a call.

    Attributes:
        batch: sequences.
        heads_q, heads_kv: heads of q, and of k and v.
        nq, nk: query rows and keys of a sequence; of packed ones the mean.
        seen: keys that a query row sees on average.
    """

    batch: int
    heads_q: int
    heads_kv: int
    nq: int
    nk: int
    seen: float

    @classmethod
    def of(
        cls,
        shape: tuple[int, int, int, int, int],
        causal: bool,
        window: tuple[int | None, int | None] = (None, None),
    ) -> Sizes:
        """The sizes for (batch, heads of q, heads of k, rows, keys), a causal mask and a window."""
        *_, nq, nk = shape
        left, right = window
        if causal:
            right = 0 if right is None else min(right, 0)
        first = nk - nq  # the key at the place of the first row
        end = nq * nk if right is None else _total(first + right + 1, nq, nk)
        begin = 0 if left is None else _total(first - left, nq, nk)
        return cls(*shape, max((end - begin) / max(nq, 1), 1.0))

    def place(self) -> Place:
        """Where the sizes lie among others, in octaves of rows and keys. A double number of heads
        is half as far, and whether heads share one of k matters more than how many do; likewise
        whether the keys fill whole blocks.
        """
        group = self.heads_q // max(self.heads_kv, 1)
        return (
            math.log2(max(self.nq, 1)),
            math.log2(max(self.nk, 1)),
            math.log2(max(self.batch * self.heads_q, 1)) / 2,
            (1.5 + math.log2(group) / 4 if group > 1 else 0.0) + (0.7 if self.nk % _BLOCK else 0.0),
        )


def _total(first: int, count: int, most: int) -> float:
    """The sum of first, first + 1, ..., each at least 0 and at most `most`."""
    low = min(max(-first, 0), count)
    high = min(max(most - first, 0), count)
    return (high - low) * (2 * first + low + high - 1) / 2 + (count - high) * most


class Shape(NamedTuple):
    """How a candidate is taken to divide a call: query rows of a tile, and CTAs of an SM."""

    rows: int
    ctas: int


SHAPES = tuple(Shape(rows, ctas) for rows in (64, 128, 192, 256) for ctas in (1, 2))
FEATURES = 10


def features(kind: Kind, sizes: Sizes, head_dims: int, shape: Shape, sms: int) -> tuple[float, ...]:
    """What the time of a call is made of, each about a microsecond on a GPU of today.

    Args:
        kind: the kind of the call.
        sizes: its sizes.
        head_dims: both head dimensions together.
        shape: how the candidate divides it.
        sms: SMs of the GPU.
    """
    few = kind.rows == "few"
    group = sizes.heads_q // max(sizes.heads_kv, 1) if few else 1
    heads = sizes.batch * (sizes.heads_kv if few else sizes.heads_q)
    tiles = heads * math.ceil(max(sizes.nq, 1) * group / shape.rows)
    # A tile of rows visits all keys that its last row sees, and whole blocks of them.
    seen = min(sizes.seen + (shape.rows / 2 if kind.causal else 0), sizes.nk)
    seen = math.ceil(seen / 64) * 64
    of_tile = shape.rows * seen * head_dims / 1e6
    longest = shape.rows * min(sizes.nk, 2 * seen) * head_dims / 1e6
    data = sizes.batch * (sizes.heads_q * sizes.nq + sizes.heads_kv * sizes.nk) * head_dims / 1e4
    load, slots = tiles / sms, sms * shape.ctas
    shared = sizes.heads_q > sizes.heads_kv and not few
    over_keys = 0.0
    if kind.passes == BOTH:
        blocks = heads * math.ceil(max(sizes.nk, 1) / shape.rows)
        over_keys = math.ceil(blocks / slots) * shape.ctas * tiles * of_tile / max(blocks, 1)
    return (
        1.0,
        max(load * of_tile, longest),
        math.ceil(tiles / slots) * shape.ctas * of_tile,
        longest,
        max(load, 1.0),
        data / sms,
        over_keys,
        1.0 if shared else 0.0,
        load * of_tile if shared else 0.0,
        load * of_tile if sizes.nk % _BLOCK and not few else 0.0,
    )


class Fit(NamedTuple):
    """The times of one candidate for a kind and head dimensions.

    Attributes:
        shape: how it is taken to divide a call.
        weights: what a unit of each feature costs, in microseconds.
        residuals: for each measured point the logarithm of the measured over the predicted time;
            None where it was not measured.
    """

    shape: Shape
    weights: tuple[float, ...]
    residuals: tuple[float | None, ...]


class Group(NamedTuple):
    """What was measured of a kind for a pair of head dimensions.

    Attributes:
        d, dv: head dimensions.
        points: the sizes that were measured, and behind them those of other head dimensions that
            help out.
        fits: the candidates by name.
        own: how many of the points are of these head dimensions.
    """

    d: int
    dv: int
    points: tuple[Sizes, ...]
    fits: dict[str, Fit]
    own: int

    def predict(self, kind: Kind, sizes: Sizes, sms: int) -> dict[str, float]:
        """Microseconds of every candidate on the device, without the host."""
        near = _near(sizes.place(), _places_of(self.points))
        known: dict[Shape, tuple[float, ...]] = {}
        times = {}
        for name, fit in self.fits.items():
            parts = known.get(fit.shape)
            if parts is None:
                parts = features(kind, sizes, self.d + self.dv, fit.shape, sms)
                known[fit.shape] = parts
            us = sum(map(_times, fit.weights, parts))
            total, weight = 0.0, _DOUBT
            for number, share in near:
                residual = fit.residuals[number]
                if residual is not None:
                    total += share * residual
                    weight += share
            times[name] = max(us, 0.1) * math.exp(total / weight)
        return times

    def sure_of(self, sizes: Sizes) -> frozenset[str]:
        """The candidates whose times at some sizes are known well: those that were measured near
        them or at many others.
        """
        place, places = sizes.place(), _places_of(self.points)[: self.own]
        near = [number for number, own in enumerate(places) if math.dist(place, own) <= _NEAR]
        return frozenset(
            name
            for name, fit in self.fits.items()
            if sum(x is not None for x in fit.residuals[: self.own]) >= _MANY
            or any(fit.residuals[number] is not None for number in near)
        )

    def measured(self, kind: Kind, number: int, sms: int) -> dict[str, float]:
        """The times of a point, by candidate."""
        times = {}
        for name, fit in self.fits.items():
            residual = fit.residuals[number]
            if residual is not None:
                parts = features(kind, self.points[number], self.d + self.dv, fit.shape, sms)
                us = max(sum(map(_times, fit.weights, parts)), 0.1)
                times[name] = us * math.exp(residual)
        return times


def _times(a: float, b: float) -> float:
    return a * b


@lru_cache(maxsize=512)
def _places_of(points: tuple[Sizes, ...]) -> tuple[Place, ...]:
    return tuple(point.place() for point in points)


def _near(place: Place, points: tuple[Place, ...]) -> list[tuple[int, float]]:
    """The points that are near a place, by number, and what each counts."""
    a, b, c, d = place
    found = []
    for number, (e, f, g, h) in enumerate(points):
        squares = (a - e) ** 2 + (b - f) ** 2 + (c - g) ** 2 + (d - h) ** 2
        if squares < 9.0:
            found.append((number, math.exp(squares / (-2 * _REACH * _REACH))))
    return found
