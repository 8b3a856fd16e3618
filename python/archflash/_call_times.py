"""How long a call takes, predicted from the calls that `archflash calibrate` measured on a GPU.

Calls of one family (the same dtype, passes, mask, and few or many rows) lie at places: their sizes,
head dimensions and causal mask as coordinates. One candidate, the reference, is measured at all of
them; what is predicted of it is the logarithm of its time over a rough amount of work, and of each
other candidate (a folder of ours or a kernel of PyTorch) that of its time over the reference's.
Both are Gaussian processes: near measured places what was seen there, far from all of them the
mean, and everywhere how far off the prediction may be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

FORWARD, BOTH = "forward", "both"
Place = tuple[float, ...]
# What a measured time scatters by, over what the times of a family differ by, squared.
NOISE = 0.03
MOST_LOG = 100.0  # of a time, far beyond what any GPU gives
_BLOCK = 128  # keys that kernels read at a time; a part of such a block needs a mask
_TILE = 128  # query rows of a tile
# Tiles for each SM below which, and tiles and keys above which, their number matters little.
_FEW_TILES, _MANY_TILES, _MANY_KEYS = 0.25, 8, 8192
# Kernels are made for multiples of so many head dimensions, and others pay for what they lack.
_HEAD_DIMS = 64


class Kind(NamedTuple):
    """A kind of calls.

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

    def family(self) -> Kind:
        """The kind for all whose times are predicted together."""
        return self._replace(causal=False)


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


def _total(first: int, count: int, most: int) -> float:
    """The sum of first, first + 1, ..., each at least 0 and at most `most`."""
    low = min(max(-first, 0), count)
    high = min(max(most - first, 0), count)
    return (high - low) * (2 * first + low + high - 1) / 2 + (count - high) * most


def tiles_of(kind: Kind, sizes: Sizes, sms: int) -> float:
    """Tiles of query rows for each SM; for few rows, whose heads of q share a tile, heads of k."""
    if kind.rows == "few":
        return sizes.batch * sizes.heads_kv / sms
    return sizes.batch * sizes.heads_q * math.ceil(max(sizes.nq, 1) / _TILE) / sms


def place_of(kind: Kind, sizes: Sizes, d: int, dv: int, sms: int) -> Place:
    """Where a call lies among others of its family. The divisors say how far apart calls are whose
    times still have to do with one another: so many octaves, or such a part of another feature.
    They are near those that make the times of 230 calls on an H200 the likeliest.
    """
    group = sizes.heads_q // max(sizes.heads_kv, 1)
    # A window, or rows before the first key, leave fewer keys to read.
    keys = min(sizes.nk, sizes.seen * (2 if kind.causal else 1))
    tiles = tiles_of(kind, sizes, sms)
    return (
        math.log2(max(sizes.nq, 1)) / 7.0,
        math.log2(max(keys, 1) / (1 + keys / _MANY_KEYS)) / 3.0,
        math.log2(_FEW_TILES + tiles / (1 + tiles / _MANY_TILES)) / 1.7,
        (group > 1) / 5.5,
        math.log2(max(group, 1)) / 9.0,
        (sizes.nk % _BLOCK > 0) / 6.0,
        kind.causal / 3.2,
        math.log2(max(d, 1)) / 2.8,
        math.log2(max(dv, 1)) / 3.4,
        (d % _HEAD_DIMS > 0) / 5.0,
    )


def work_of(kind: Kind, sizes: Sizes, head_dims: int, sms: int) -> float:
    """A rough amount of work on each SM: bytes of keys and values for few rows, else products.

    Args:
        kind, sizes: the call.
        head_dims: both head dimensions together.
        sms: SMs of the GPU.
    """
    tiles = tiles_of(kind, sizes, sms)
    if kind.rows == "few":
        return tiles * sizes.seen * head_dims / 1e4
    seen = min(sizes.seen + (_TILE / 2 if kind.causal else 0), sizes.nk)
    return max(tiles, 1.0) * _TILE * seen * head_dims / 1e6


class Fit(NamedTuple):
    """What is known of one candidate in a family, as logarithms.

    Attributes:
        mean: far from all measured calls.
        spread: by how much it varies around the mean (a standard deviation).
        pulls: of each measured call, by what it moves predictions near it; None where the candidate
            was not measured.
    """

    mean: float
    spread: float
    pulls: tuple[float | None, ...]


class Measured(NamedTuple):
    """One call that was measured.

    Attributes:
        kind: its kind.
        d, dv: its head dimensions.
        sizes: its sizes.
        graph_us: microseconds in a CUDA graph, by candidate.
    """

    kind: Kind
    d: int
    dv: int
    sizes: Sizes
    graph_us: dict[str, float]

    def place(self, sms: int) -> Place:
        """Where the call lies among others of its family."""
        return place_of(self.kind, self.sizes, self.d, self.dv, sms)


class Times(NamedTuple):
    """Predicted times of a call.

    Attributes:
        us: microseconds of every candidate on the device, without the host.
        doubt: the standard deviation of the logarithm of each over the reference's.
    """

    us: dict[str, float]
    doubt: dict[str, float]


@dataclass(frozen=True, eq=False)  # equal only to itself
class Family:
    """Calls whose times are predicted together.

    Attributes:
        calls: what was measured.
        start: the work that takes as long as the start of a call.
        reference: the candidate that was measured everywhere.
        fits: the candidates by name.
        sms: SMs of the GPU.
    """

    calls: tuple[Measured, ...]
    start: float
    reference: str
    fits: dict[str, Fit]
    sms: int

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Where the calls lie."""
        return tuple(call.place(self.sms) for call in self.calls)

    def reaches(self, d: int, dv: int) -> bool:
        """Whether head dimensions as large as these were measured."""
        return any(call.d >= d and call.dv >= dv for call in self.calls)

    def predict(self, kind: Kind, sizes: Sizes, d: int, dv: int) -> Times:
        """The times of a call."""
        place = place_of(kind, sizes, d, dv, self.sms)
        like = [likeness(math.dist(place, other)) for other in self.places]
        logs, doubt = {}, {}
        for name, fit in self.fits.items():
            found, nearest = fit.mean, 0.0
            for near, pull in zip(like, fit.pulls, strict=True):
                if pull is not None:
                    found += near * pull
                    nearest = max(nearest, near)
            logs[name] = found
            # As if only the nearest call had been measured.
            doubt[name] = fit.spread * math.sqrt(max(1 - nearest**2, 0.0))
        work = work_of(kind, sizes, d + dv, self.sms) + self.start
        reference = logs.pop(self.reference) + math.log(work)
        us = {name: _time(reference + log) for name, log in logs.items()}
        return Times({self.reference: _time(reference), **us}, doubt | {self.reference: 0.0})


def _time(log: float) -> float:
    """A time from its logarithm, without an overflow."""
    return math.exp(min(log, MOST_LOG))


def likeness(distance: float) -> float:
    """How much the times at two places have in common, from 1 down to 0 (a Matern kernel)."""
    far = math.sqrt(3) * distance
    return (1 + far) * math.exp(-far)
