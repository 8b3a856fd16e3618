"""The calls of attention that compute what local rows see of the keys of a buffer. Host code."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from archflash.distributed._mask import Mask
from archflash.distributed._pieces import Piece

_MOST_DENSE = 8  # calls of one stage that are launched one by one, where they cannot be packed
_MOST_PACKED = 4  # packed calls of one stage; a stage of more becomes one call with key_ranges


@dataclass(frozen=True)
class Dense:
    """Rows q0 up to q1 of a rank and keys k0 up to k1 of a buffer. The first row stands at place
    `offset` among these keys, for the bounds left and right.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    left: int | None
    right: int | None
    offset: int

    @property
    def plain(self) -> bool:
        """Whether every row sees every key."""
        return self.left is None and self.right is None

    @property
    def bottom_right(self) -> bool:
        """Whether the last row stands at the last key, or where it stands does not matter."""
        return self.plain or self.offset == (self.k1 - self.k0) - (self.q1 - self.q0)


@dataclass(frozen=True)
class Packed:
    """Calls of ascending rows in one, with cu_seqlens. `apart` has them again, as calls in each of
    which no two share keys: gradients need that.
    """

    calls: tuple[Dense, ...]
    apart: tuple[Dense | Packed, ...] = ()

    @property
    def q0(self) -> int:
        return self.calls[0].q0

    @property
    def q1(self) -> int:
        return self.calls[-1].q1

    @functools.cached_property
    def longest(self) -> tuple[int, int]:
        """The most rows, and the most keys, of a call."""
        return max(c.q1 - c.q0 for c in self.calls), max(c.k1 - c.k0 for c in self.calls)


@dataclass(frozen=True)
class Ranged:
    """All rows of a rank and all keys of a buffer, which a tensor of ranges tells apart."""

    q0: int
    q1: int


Call = Dense | Packed | Ranged


def calls(
    mask: Mask, rows: Sequence[Piece], keys: Sequence[Piece], *, packs: bool = True,
    among: Sequence[Piece] | None = None,
) -> list[Call]:  # fmt: skip
    """The calls that give what local rows, of these ascending pieces, see of the keys of a buffer,
    of those ascending pieces.

    Args:
        packs: whether calls can be packed, for which the batch must be 1.
        among: the pieces of all local rows, where `rows` are some neighbours of them.
    """
    n = sum(end - start for start, end in rows)
    if not n or not keys:
        return []
    at = 0 if among is None else _Places(among).before(rows[0][0])
    everything: list[Call] = [Ranged(at, at + n)]
    if mask.key_ranges is not None:
        return everything
    held = _Places(keys)
    made: list[Dense] = []
    for piece, document in (cut for row in rows for cut in mask.documents(row)):
        found = _of_piece(mask, piece, document, at, held)
        if found is None:
            return everything
        made += found
        at += piece[1] - piece[0]
    made = _merged(made)
    packed = _packed(made, mask) if packs and len(made) > 1 else None
    # One launch of all tiles is faster than several; several packed ones are not.
    if packed is not None and (len(packed) == 1 or len(made) > _MOST_DENSE):
        return list(packed)
    return list(made) if len(made) <= _MOST_DENSE else everything


class _Places:
    """Where the keys of global rows stand in a buffer of ascending pieces."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self._starts = [start for start, _ in pieces]
        self._places = [0]
        for start, end in pieces:
            self._places.append(self._places[-1] + end - start)

    def before(self, row: int) -> int:
        """How many keys stand before a global row."""
        i = bisect.bisect_right(self._starts, row) - 1
        if i < 0:
            return 0
        return self._places[i] + min(row, self.pieces[i][1]) - self._starts[i]

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Neighbouring keys from one global row to another: start, end, place of the start."""
        i = max(bisect.bisect_right(self._starts, begin) - 1, 0)
        while i < len(self.pieces) and self._starts[i] < end:
            start, stop = max(self._starts[i], begin), min(self.pieces[i][1], end)
            if stop > start:
                yield start, stop, self._places[i] + start - self._starts[i]
            i += 1


def places(held: Sequence[Piece], pieces: Sequence[Piece]) -> list[Piece]:
    """Where ascending pieces stand in a buffer of ascending pieces that has all their rows."""
    keys = _Places(held)
    return [(keys.before(start), keys.before(end)) for start, end in pieces]


def _of_piece(
    mask: Mask, piece: Piece, document: Piece, q0: int, keys: _Places
) -> list[Dense] | None:
    """The calls of the rows of one piece; None if only ranges can say what they see."""
    (a, b), q1 = piece, q0 + piece[1] - piece[0]
    begin, end = mask.hull(piece, document)
    first, last = keys.before(begin), keys.before(end)
    if first == last:
        return []
    if mask.left is None and mask.right is None:
        return [Dense(q0, q1, first, last, None, None, 0)]
    if mask.left is None and mask.right == 0:
        # A row sees the keys that stand before it in the buffer, of whatever ranks, and of its own
        # piece those up to itself: all of that piece's keys must be there, or none.
        own, after = keys.before(a), keys.before(b)
        if after == own:
            return [Dense(q0, q1, first, own, None, None, 0)]
        if after - own == b - a:
            return [Dense(q0, q1, first, after, None, 0, own - first)]
        return None
    # Bounds are told by the distance of two places, so that the keys of a call must be neighbours.
    made: list[Dense] = []
    for start, stop, place in keys.runs(begin, end):
        left = None if mask.left is None or start >= b - 1 - mask.left else mask.left
        right = None if mask.right is None or stop <= a + mask.right + 1 else mask.right
        offset = 0 if left is None and right is None else a - start
        made.append(Dense(q0, q1, place, place + stop - start, left, right, offset))
        if len(made) > _MOST_DENSE:
            return None
    return made


def _merged(made: Iterable[Dense]) -> list[Dense]:
    """Joins calls of neighbouring rows that are one call."""
    joined: list[Dense] = []
    for call in made:
        if joined:
            last = joined[-1]
            follows = last.q1 == call.q0 and last.k0 == call.k0
            if follows and last.plain and call.plain and last.k1 == call.k1:
                joined[-1] = dataclasses.replace(last, q1=call.q1)
                continue
            causal = (None, 0) == (last.left, last.right) == (call.left, call.right)
            if follows and causal and call.offset - last.offset == call.q0 - last.q0:
                joined[-1] = dataclasses.replace(last, q1=call.q1, k1=call.k1)
                continue
        joined.append(call)
    return joined


def _packed(made: Sequence[Dense], mask: Mask) -> list[Packed] | None:
    """Calls of few rows as packed ones; None if they cannot be packed."""
    sets: list[list[Dense]] = []
    for call in sorted(made, key=lambda c: (not c.plain, c.q0, c.k0)):
        if not call.bottom_right:
            return None
        if not call.plain:  # the bounds of the others, which hide nothing more of this one
            if mask.right != 0:
                return None
            call = dataclasses.replace(call, left=mask.left, right=0)
        for held in sets:
            if held[-1].plain == call.plain and held[-1].q1 <= call.q0:
                held.append(call)
                break
        else:
            sets.append([call])
    packed = []
    for held in sets:
        apart: list[list[Dense]] = []
        for call in held:
            for others in apart:
                if others[-1].k1 <= call.k0:
                    others.append(call)
                    break
            else:
                apart.append([call])
        alone = (c[0] if len(c) == 1 else Packed(tuple(c)) for c in apart)
        packed.append(Packed(tuple(held), tuple(alone)))
    if sum(len(p.apart) for p in packed) > _MOST_PACKED:
        return None
    return packed
