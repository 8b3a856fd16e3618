"""Which keys the rows of a rank see, what travels for that, and the calls of attention that compute
it. Host code: it needs neither a GPU nor a process group.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from archflash.distributed._shards import Piece, Shards, digest, digest_of_tensor

_MOST_DENSE = 8  # calls of one stage that are launched one by one, where they cannot be packed
_MOST_PACKED = 4  # packed calls of one stage; a stage of more becomes one call with key_ranges
_BRIDGED = 128  # unseen rows between two seen ranges that are sent along


@dataclass(frozen=True, eq=False)
class Mask:
    """Who sees whom, in global rows.

    Attributes:
        n: number of rows.
        left, right: row i sees rows i - left to i + right; None for an unbounded side. Causal
            attention has right = 0.
        ends: where documents start, and n; None for one document.
        key_ranges: int32 on the CPU ``(batch or 1, heads or 1, n or 1, ranges, 2)``, or None.
    """

    n: int
    left: int | None = None
    right: int | None = None
    ends: tuple[int, ...] | None = None
    key_ranges: Tensor | None = None

    def documents(self, piece: Piece) -> Iterator[tuple[Piece, Piece]]:
        """Cuts a piece where documents end: (rows, rows of their document)."""
        start, end = piece
        if self.ends is None:
            yield piece, (0, self.n)
            return
        number = bisect.bisect_right(self.ends, start) - 1
        while start < end:
            document = self.ends[number], self.ends[number + 1]
            stop = min(end, document[1])
            if stop > start:
                yield (start, stop), document
            start, number = stop, number + 1

    def hull(self, rows: Piece, document: Piece) -> Piece:
        """The keys from the first to the last that some of these rows of a document see, by causal,
        window and documents.
        """
        begin = document[0] if self.left is None else max(document[0], rows[0] - self.left)
        end = document[1] if self.right is None else min(document[1], rows[1] + self.right)
        return begin, end

    def pairs(self, rows: Piece, document: Piece) -> int:
        """How many pairs of a row and a key that it sees these rows have, without key_ranges."""
        (a, b), (start, end) = rows, document
        total = (b - a) * end if self.right is None else _capped_sum(a, b, self.right + 1, end)
        if self.left is None:
            return total - (b - a) * start
        # max(start, i - left) = i - left + start - min(i - left, start)
        ramp = (b * (b - 1) - a * (a - 1)) // 2 - (b - a) * self.left
        return total - (ramp + (b - a) * start - _capped_sum(a, b, -self.left, start))

    def row_bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """First key and end of the keys that rows see, without key_ranges; on their device."""
        begin, end = torch.zeros_like(positions), torch.full_like(positions, self.n)
        if self.ends is not None:
            ends = torch.tensor(self.ends, dtype=positions.dtype, device=positions.device)
            number = torch.searchsorted(ends, positions, right=True)
            begin, end = ends[number - 1], ends[number]
        if self.left is not None:
            begin = torch.maximum(begin, positions - self.left)
        if self.right is not None:
            end = torch.minimum(end, positions + self.right + 1)
        return begin, end

    def row_ranges(self, positions: Tensor) -> Tensor:
        """The global keys that rows see as key_ranges ``(batch, heads, rows, ranges, 2)``, int64 on
        the device of the positions.
        """
        begin, end = self.row_bounds(positions)
        if self.key_ranges is None:
            return torch.stack([begin, end], -1)[None, None, :, None]
        given = self.key_ranges.to(positions.device)
        given = given[:, :, positions if given.shape[2] > 1 else torch.zeros_like(positions)].long()
        first = torch.maximum(given[..., 0], begin[:, None])
        last = torch.minimum(given[..., 1], end[:, None])
        return torch.stack([first, torch.maximum(first, last)], -1)

    @functools.cached_property
    def digest(self) -> int:
        ranges = None if self.key_ranges is None else digest_of_tensor(self.key_ranges)
        return digest((self.n, self.left, self.right, self.ends, ranges))


def _capped_sum(a: int, b: int, step: int, cap: int) -> int:
    """The sum of min(i + step, cap) for i from a up to b."""
    turn = min(max(cap - step, a), b)
    return (turn * (turn - 1) - a * (a - 1)) // 2 + (turn - a) * step + (b - turn) * cap


def seen(mask: Mask, pieces: Sequence[Piece]) -> list[Piece]:
    """The global keys that some row of these pieces sees, in ascending ranges; short gaps between
    two ranges count as seen.
    """
    if mask.key_ranges is None:
        hulls = [mask.hull(*cut) for piece in pieces for cut in mask.documents(piece)]
        return _united(hulls)
    edges = torch.zeros(mask.n + 1, dtype=torch.int64, device="cpu")
    for start, end in pieces:
        ranges = mask.row_ranges(torch.arange(start, end, device="cpu")).flatten(0, -2)
        ranges = ranges[ranges[:, 1] > ranges[:, 0]].clamp(0, mask.n)
        edges += torch.bincount(ranges[:, 0], minlength=mask.n + 1)
        edges -= torch.bincount(ranges[:, 1], minlength=mask.n + 1)
    covered = (edges.cumsum(0) > 0).to(torch.int8)
    turns = covered.diff(prepend=covered.new_zeros(1)).nonzero().flatten().tolist()
    return _united(zip(turns[::2], turns[1::2], strict=True))


def _united(ranges: Iterable[Piece]) -> list[Piece]:
    made: list[Piece] = []
    for start, end in sorted(ranges):
        if end <= start:
            continue
        if made and start <= made[-1][1] + _BRIDGED:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((start, end))
    return made


def overlaps(ranges: Sequence[Piece], pieces: Sequence[Piece]) -> list[Piece]:
    """The parts of ascending pieces that lie in ascending ranges."""
    made, i = [], 0
    for start, end in pieces:
        while i < len(ranges) and ranges[i][1] <= start:
            i += 1
        j = i
        while j < len(ranges) and ranges[j][0] < end:
            made.append((max(start, ranges[j][0]), min(end, ranges[j][1])))
            j += 1
    return made


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


@dataclass(frozen=True)
class Ranged:
    """All rows of a rank and all keys of a buffer, which a tensor of ranges tells apart."""

    q0: int
    q1: int


Call = Dense | Packed | Ranged


def calls(
    mask: Mask, rows: Sequence[Piece], keys: Sequence[Piece], *, packs: bool = True
) -> list[Call]:
    """The calls that give what local rows, of these ascending pieces, see of the keys of a buffer,
    of those ascending pieces.

    Args:
        packs: whether calls can be packed, for which the batch must be 1.
    """
    n = sum(end - start for start, end in rows)
    if not n or not keys:
        return []
    everything: list[Call] = [Ranged(0, n)]
    if mask.key_ranges is not None:
        return everything
    held = _Places(keys)
    made: list[Dense] = []
    at = 0
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


@dataclass(frozen=True)
class Part:
    """A call, and whether it is the first one of its rows."""

    call: Call
    first: bool


@dataclass(frozen=True)
class Stage:
    """What a rank computes at once: its rows against keys of some ranks, for some heads.

    Attributes:
        heads: the heads of k and v, from the first up to the last.
        keys: the global keys of the buffer, ascending pieces.
        own: the pieces of it that the rank holds itself, which are copied.
        receives, sends: what comes from which rank, and what goes to which rank: global rows.
        parts: the calls.
    """

    heads: Piece
    keys: tuple[Piece, ...]
    own: tuple[Piece, ...]
    receives: tuple[tuple[int, tuple[Piece, ...]], ...]
    sends: tuple[tuple[int, tuple[Piece, ...]], ...]
    parts: tuple[Part, ...]

    @property
    def key_rows(self) -> int:
        return sum(end - start for start, end in self.keys)


@dataclass(frozen=True, eq=False)
class Plan:
    """What one rank does.

    Attributes:
        shards: with ascending rows of each rank.
        mask: who sees whom.
        rank: whose plan it is.
        stages, stages_back: of the forward and of the backward pass, in order.
        once: whether each row is in one call of a pass at most, so that nothing is merged.
        untouched: local rows of which no part is the first: they start as rows that see no key.
    """

    shards: Shards
    mask: Mask
    rank: int
    stages: tuple[Stage, ...]
    stages_back: tuple[Stage, ...]
    once: bool
    untouched: tuple[Piece, ...]
    _tables: dict[object, tuple[Tensor, ...]] = field(default_factory=dict, compare=False)
    checked: set[object] = field(default_factory=set, compare=False)  # options that all calls take
    # By a call and its options: whether a kernel writes fp32 outputs of 16-bit inputs for it.
    in_f32: dict[object, bool] = field(default_factory=dict, compare=False)

    @property
    def rows(self) -> int:
        return self.shards.rows(self.rank)

    @functools.cached_property
    def stages_of_a_share(self) -> int:
        """How many stages there are for the same heads."""
        return sum(stage.heads == self.stages[0].heads for stage in self.stages)

    def table(self, key: object, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Tensors that calls read, made once for each key while the plan is one of the last two.

        Those of a CUDA graph that is captured belong to it, and are not kept.
        """
        if key in self._tables:
            return self._tables[key]
        made = make()
        if any(x.is_cuda for x in made):
            if torch.cuda.is_current_stream_capturing():
                return made
            torch.cuda.current_stream().synchronize()  # other streams may read them
        if self not in _with_tables:
            _with_tables.append(self)
            for plan in _with_tables[:-_MOST_WITH_TABLES]:
                plan._tables.clear()
            del _with_tables[:-_MOST_WITH_TABLES]
        self._tables[key] = made
        return made

    def local(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Where global rows that the rank holds stand among its own."""
        return places(self.shards.pieces[self.rank], pieces)


_with_tables: list[Plan] = []
_MOST_WITH_TABLES = 2


def places(held: Sequence[Piece], pieces: Sequence[Piece]) -> list[Piece]:
    """Where ascending pieces stand in a buffer of ascending pieces that has all their rows."""
    keys = _Places(held)
    return [(keys.before(start), keys.before(end)) for start, end in pieces]


def make(
    shards: Shards, mask: Mask, rank: int, sources: Sequence[Sequence[int]],
    heads: Sequence[Piece] = ((0, 1),), heads_back: Sequence[Piece] | None = None, *,
    packs: bool = True,
) -> Plan:  # fmt: skip
    """The plan of a rank.

    Args:
        shards: with ascending rows of each rank.
        sources: for each stage the distances of the ranks whose keys a rank sees in it: 0 is the
            rank itself, 1 the one before it.
        heads: the heads of k and v of each share, the last one to the end; each share has all the
            stages.
        heads_back: those of the backward pass; default the same.
        packs: whether calls can be packed.
    """
    mine = shards.pieces[rank]
    wanted = seen(mask, mine)
    # What a rank needs of this one is asked where that one's distance is in a stage.
    asked = {
        r: overlaps(seen(mask, shards.pieces[r]), mine)
        for r in range(shards.ranks)
        if r != rank and mine
    }
    stages, covered, once = _stages(shards, mask, rank, sources, wanted, asked, packs)
    gaps, at = [], 0
    for start, end in [*sorted(covered), (shards.rows(rank),) * 2]:
        if start > at:
            gaps.append((at, start))
        at = end
    forward, back = (
        tuple(dataclasses.replace(stage, heads=share) for share in shares for stage in stages)
        for shares in (heads, heads if heads_back is None else heads_back)
    )
    return Plan(shards, mask, rank, forward, back, once, tuple(gaps))


def _stages(
    shards: Shards, mask: Mask, rank: int, sources: Sequence[Sequence[int]],
    wanted: Sequence[Piece], asked: dict[int, list[Piece]], packs: bool,
) -> tuple[list[Stage], list[Piece], bool]:  # fmt: skip
    """The stages for some heads, the rows of first calls, and whether all calls are that."""
    ranks, mine = shards.ranks, shards.pieces[rank]
    once, covered, fresh = True, list[Piece](), list[Piece]()
    stages = []
    for distances in sources:
        receives, sends, own = [], [], tuple[Piece, ...]()
        for distance in distances:
            source, target = (rank - distance) % ranks, (rank + distance) % ranks
            if distance == 0:
                own = tuple(overlaps(wanted, mine))
                continue
            if pieces := overlaps(wanted, shards.pieces[source]):
                receives.append((source, tuple(pieces)))
            if pieces := asked.get(target, []):
                sends.append((target, tuple(pieces)))
        keys = _neighbours([*own, *(p for _, pieces in receives for p in pieces)])
        parts = []
        for whole in calls(mask, mine, keys, packs=packs):
            for call in _split(whole, covered):
                rows = (call.q0, call.q1)
                first = not overlaps(covered, [rows])
                once = once and first
                fresh += [rows] if first else []
                parts.append(Part(call, first))
            covered = _neighbours([*covered, (whole.q0, whole.q1)], overlapping=True)
        stages.append(Stage((0, 0), tuple(keys), own, tuple(receives), tuple(sends), tuple(parts)))
    return stages, fresh, once


def _split(call: Call, covered: Sequence[Piece]) -> list[Call]:
    """Cuts a dense call so that each part has only rows that are covered, or only others."""
    if not isinstance(call, Dense):
        return [call]
    edges = sorted(
        {call.q0, call.q1} | {x for piece in covered for x in piece if call.q0 < x < call.q1}
    )
    return [
        dataclasses.replace(call, q0=a, q1=b, offset=call.offset + a - call.q0)
        for a, b in itertools.pairwise(edges)
    ]


def _neighbours(pieces: Iterable[Piece], overlapping: bool = False) -> list[Piece]:
    """Ascending pieces, neighbours joined."""
    made: list[Piece] = []
    for start, end in sorted(pieces):
        if made and (made[-1][1] == start or (overlapping and start < made[-1][1])):
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((start, end))
    return made
