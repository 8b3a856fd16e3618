"""Which keys the rows of a rank see, what travels for that, and the calls of attention that compute
it. Host code: it needs neither a GPU nor a process group.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from archflash.distributed._calls import Call, Dense, calls, places
from archflash.distributed._mask import Mask, overlaps, seen
from archflash.distributed._pieces import Piece, joined
from archflash.distributed._shards import Shards


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
        travels: whether keys travel for it, of some ranks at least.
    """

    heads: Piece
    keys: tuple[Piece, ...]
    own: tuple[Piece, ...]
    receives: tuple[tuple[int, tuple[Piece, ...]], ...]
    sends: tuple[tuple[int, tuple[Piece, ...]], ...]
    parts: tuple[Part, ...]
    travels: bool = True

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
        gathers: whether a share of the heads gets all its keys at once.
        in_one: whether the messages of a stage are one exchange, in which all ranks take part.
    """

    shards: Shards
    mask: Mask
    rank: int
    stages: tuple[Stage, ...]
    stages_back: tuple[Stage, ...]
    once: bool
    untouched: tuple[Piece, ...]
    gathers: bool
    in_one: bool = False
    _tables: dict[object, tuple[Tensor, ...]] = field(default_factory=dict, compare=False)
    checked: set[object] = field(default_factory=set, compare=False)  # options that all calls take
    # By a call and its options: whether a kernel writes fp32 outputs of 16-bit inputs for it.
    in_f32: dict[object, bool] = field(default_factory=dict, compare=False)
    layouts: dict[int, Any] = field(default_factory=dict, compare=False)  # by a stage's id

    @property
    def rows(self) -> int:
        return self.shards.rows(self.rank)

    def changed(self, **fields: Any) -> Plan:
        """Another plan, which has nothing of what calls keep in this one."""
        kept: dict[str, Any] = {"_tables": {}, "checked": set(), "in_f32": {}, "layouts": {}}
        return dataclasses.replace(self, **kept, **fields)

    @functools.cached_property
    def stages_of_a_share(self) -> int:
        """How many stages of a pass there are for the same heads."""
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
    forward, back = (
        tuple(dataclasses.replace(stage, heads=share) for share in shares for stage in stages)
        for shares in (heads, heads if heads_back is None else heads_back)
    )
    gaps = untouched(covered, shards.rows(rank))
    return Plan(shards, mask, rank, forward, back, once, gaps, len(sources) == 1)


def untouched(firsts: Sequence[Piece], rows: int) -> tuple[Piece, ...]:
    """The local rows that the first calls of rows do not have."""
    gaps, at = [], 0
    for start, end in [*sorted(firsts), (rows, rows)]:
        if start > at:
            gaps.append((at, start))
        at = max(at, end)
    return tuple(gaps)


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
        keys = joined(sorted([*own, *(p for _, pieces in receives for p in pieces)]))
        parts = []
        for whole in calls(mask, mine, keys, packs=packs):
            for call in _split(whole, covered):
                rows = (call.q0, call.q1)
                first = not overlaps(covered, [rows])
                once = once and first
                fresh += [rows] if first else []
                parts.append(Part(call, first))
            covered = joined(sorted([*covered, (whole.q0, whole.q1)]), overlapping=True)
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
