"""Which calls are measured: a few sizes of each kind, the common kinds first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from archflash._call_times import BOTH, FORWARD, Kind, Sizes


class Point(NamedTuple):
    """A call to be measured.

    Attributes:
        kind: the kind of the call.
        shape: batch, heads of q, heads of k, query rows, keys.
        d, dv: head dimensions.
    """

    kind: Kind
    shape: tuple[int, int, int, int, int]
    d: int
    dv: int

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.shape, self.kind.causal)

    def flops(self) -> float:
        """Operations of both products, and of the five of a backward pass."""
        b, hq, _, nq, _ = self.shape
        forward = 2.0 * b * hq * nq * self.sizes.seen * (self.d + self.dv)
        return forward * (3.5 if self.kind.passes == BOTH else 1.0)

    def bytes(self) -> int:
        """Bytes of q, k, v and the output."""
        b, hq, hkv, nq, nk = self.shape
        size = {"float32": 4, "fp8": 1}.get(self.kind.dtype, 2)
        return size * b * (hq * nq + hkv * nk) * (self.d + self.dv)


# Query rows and keys of a sequence, and how many 128-row tiles each SM gets: from a GPU that is
# nearly empty to many waves. Each part of the list covers both.
_PLAIN = (
    (512, 1.5), (2048, 16.0), (577, 12.0), (200, 5.0), (512, 0.2), (3001, 5.0), (4096, 1.5),
    (1024, 5.0), (8192, 3.0), (512, 16.0), (1374, 3.0), (4096, 0.4), (197, 0.3), (4096, 5.0),
    (200, 16.0), (1024, 1.0), (2048, 5.0), (6007, 4.0), (1024, 0.2), (2501, 10.0), (512, 5.0),
    (2048, 1.5), (1024, 16.0), (200, 1.5), (2048, 0.3), (729, 2.0), (16384, 1.5), (320, 3.0),
    (1024, 2.5), (704, 8.0), (8192, 1.0), (1500, 0.7), (4096, 16.0), (2048, 2.5), (8192, 8.0),
    (512, 0.7), (16384, 5.0),
)  # fmt: skip
# Rows and fills for rare head dimensions.
_RARE = ((4096, 5.0), (577, 8.0), (1024, 0.5), (200, 8.0), (2048, 2.0), (3001, 4.0), *_PLAIN)
# Calls that need longer are not measured: what holds for many waves holds for more of them.
_MOST_US = {FORWARD: 1000.0, BOTH: 2800.0}


def _heads(rows: int, fill: float, sms: int) -> int:
    """Heads of all sequences of so many rows that fill the SMs with tiles of 128 rows."""
    return max(2, round(fill * sms / math.ceil(rows / 128)))


def _split(heads: int, group: int = 1) -> tuple[int, int, int]:
    """Sequences of at most 16 heads for a number of heads; heads of q and of k."""
    batch = math.ceil(heads / 16)
    hq = max(1, round(heads / batch / group)) * group
    return batch, hq, hq // group


def _plain(
    kind: Kind, d: int, dv: int, sms: int, sizes: Sequence[tuple[int, float]] = _PLAIN
) -> Iterator[Point]:
    for rows, fill in sizes:
        yield Point(kind, (*_split(_heads(rows, fill, sms)), rows, rows), d, dv)


def _others(kind: Kind, d: int, dv: int, sms: int) -> list[list[Point]]:
    """Heads that share one of k, and other numbers of keys than of rows."""
    sharing = [
        (4096, 4.0, 4), (512, 8.0, 4), (1024, 1.0, 4), (256, 20.0, 4), (2048, 0.4, 8),
        (2048, 8.0, 8), (4096, 1.5, 7), (512, 0.3, 4), (8192, 5.0, 8), (1024, 16.0, 4),
    ]  # fmt: skip
    crossing = [
        (4096, 77, 5.0), (128, 1024, 0.5), (512, 2048, 2.0), (8192, 512, 16.0), (1024, 77, 2.0),
    ]  # fmt: skip
    return [
        [
            Point(kind, (*_split(_heads(rows, fill, sms), group), rows, rows), d, dv)
            for rows, fill, group in sharing
        ],
        [
            Point(kind, (*_split(_heads(rows, fill, sms)), rows, keys), d, dv)
            for rows, keys, fill in crossing
            if not kind.causal
        ],
    ]


def _few(d: int) -> Iterator[Point]:
    kind = Kind("16 bits", FORWARD, "few", False)
    for shape in (
        (1, 32, 8, 1, 2048), (16, 32, 8, 1, 4096), (8, 16, 16, 1, 2048), (64, 32, 8, 1, 4096),
        (1, 32, 8, 1, 16384), (32, 16, 16, 1, 4096), (4, 16, 4, 1, 8192), (16, 32, 8, 1, 1024),
        (96, 16, 4, 1, 4096), (64, 16, 16, 1, 8192), (1, 16, 16, 1, 512), (8, 32, 8, 8, 4096),
        (1, 32, 8, 1, 65536), (2, 16, 16, 16, 1024), (128, 16, 16, 1, 1024), (4, 32, 32, 1, 2048),
    ):  # fmt: skip
        yield Point(kind, shape, d, d)


def _caches(d: int) -> Iterator[Point]:
    for rows, shapes in (
        ("few", ((16, 32, 8, 1, 4096), (64, 32, 8, 1, 2048), (1, 32, 8, 1, 16384))),
        ("many", ((4, 32, 8, 512, 4096), (1, 32, 8, 2048, 8192), (8, 32, 8, 128, 2048))),
    ):
        kind = Kind("16 bits", FORWARD, rows, rows == "many", way="cache")
        for shape in shapes:
            yield Point(kind, shape, d, d)


def _of_kind(
    kind: Kind, dims: Iterable[int], sms: int, sizes: Sequence[tuple[int, float]]
) -> Iterator[Point]:
    for d in dims:
        for rows, fill in sizes:
            yield Point(kind, (*_split(_heads(rows, fill, sms)), rows, rows), d, d)


def points(sms: int, flops_per_us: float) -> list[Point]:
    """All points in the order in which they are measured.

    Args:
        sms: SMs of the GPU.
        flops_per_us: about what its fastest kernel reaches.
    """
    dense = [Kind("16 bits", p, "many", c) for c in (False, True) for p in (FORWARD, BOTH)]
    common, rare = (64, 128), ((256, 256), (192, 128), (96, 96), (32, 32), (80, 80))
    usual = [list(_plain(kind, d, d, sms)) for d in common for kind in dense]
    less = [list(_plain(kind, *dims, sms, _RARE)) for dims in rare for kind in dense]
    shared = [list(_in_turns(_others(kind, d, d, sms))) for d in common for kind in dense]
    rounds: list[Iterable[Iterable[Point]]] = [
        [each[:4] for each in usual] + [each[:2] for each in shared] + [_few(128)],
        [each[:1] for each in less],
        [_of_kind(Kind("fp8", FORWARD, "many", c), (128, 64, 256), sms, _SOME[:2])
         for c in (False, True)] + [list(_few(d))[:2] for d in (64, 256, 80)],
        [_of_kind(Kind("float32", p, "many", c), common, sms, _SOME[:1])
         for c in (False, True) for p in (FORWARD, BOTH)],
        [_caches(128), _caches(64)],
        [_of_kind(Kind("16 bits", FORWARD, "many", c, way="packed"), common, sms, _SOME[:2])
         for c in (False, True)],
        [_of_kind(Kind("16 bits", FORWARD, "many", False, mask), common, sms, _SOME[:1])
         for mask in ("bool", "added", "ranges", "blocks", "slopes")],
        [each[4:10] for each in usual] + [each[2:6] for each in shared],
        [each[1:4] for each in less],
        [_of_kind(Kind("fp8", FORWARD, "many", c), (128, 64, 256), sms, _SOME)
         for c in (False, True)] + [_few(64), _few(256), _few(80)],
        [_of_kind(Kind("float32", p, "many", c), common, sms, _SOME[:3])
         for c in (False, True) for p in (FORWARD, BOTH)],
        [_of_kind(Kind("16 bits", FORWARD, "many", c, way="packed"), common, sms, _SOME)
         for c in (False, True)],
        [_of_kind(Kind("16 bits", FORWARD, "many", False, mask), common, sms, _SOME[:3])
         for mask in ("bool", "added", "ranges", "blocks", "slopes")],
        [each[10:] for each in usual] + [each[6:] for each in shared],
        [each[4:8] for each in less],
    ]  # fmt: skip
    most = {passes: us * flops_per_us for passes, us in _MOST_US.items()}
    made: dict[Point, None] = {}
    for each in rounds:
        for turn in _in_turns(each):
            rate = 0.1 if turn.kind.dtype == "float32" else 1.0  # of the speed
            if turn.flops() <= most[turn.kind.passes] * rate:
                made[turn] = None
    return list(made)


_SOME = ((1024, 5.0), (4096, 5.0), (2048, 1.5), (512, 1.5), (8192, 16.0))


def _in_turns(streams: Iterable[Iterable[Point]]) -> Iterator[Point]:
    """One point of each stream, then the next of each."""
    left = [iter(stream) for stream in streams]
    while left:
        for stream in list(left):
            point = next(stream, None)
            if point is None:
                left.remove(stream)
            else:
                yield point
