"""Rows that need no keys of other ranks, which are computed while messages travel. Host code."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from archflash.distributed._calls import Ranged, calls
from archflash.distributed._mask import Mask, overlaps, seen
from archflash.distributed._pieces import Piece, joined
from archflash.distributed._plan import Part, Plan, Stage, untouched

_Cut = tuple[Piece, Piece]  # neighbouring rows of a document, and the document
_MOST_OTHERS = 4  # calls of all other rows


def beside_messages(plan: Plan, packs: bool, least: float) -> Plan:
    """The plan whose messages are one exchange, and in which some neighbouring rows that need no
    keys of others do not wait for it, where that pays.

    Args:
        plan: with one stage in each pass, of all keys that the rank's rows see.
        packs: whether calls can be packed.
        least: so many pairs of a row and a key such rows must have, if other rows wait.
    """
    plan = plan.changed(in_one=True)
    (stage,), mask, mine = plan.stages, plan.mask, plan.shards.pieces[plan.rank]
    cuts = [cut for piece in mine for cut in mask.documents(piece)]
    run = _alone(mask, cuts)
    few = stage.receives and _pairs(mask, run) < least
    if mask.key_ranges is not None or not run or few or not plan.once:
        return plan

    def parts(rows: Sequence[Piece], keys: Sequence[Piece]) -> tuple[Part, ...]:
        found = calls(mask, joined(sorted(rows)), keys, packs=packs, among=mine)
        return tuple(Part(call, True) for call in found)

    before = [rows for rows, _ in cuts if rows[1] <= run[0][0][0]]
    after = [rows for rows, _ in cuts if rows[0] >= run[-1][0][1]]
    own = tuple(overlaps(seen(mask, [*before, *after]), mine))
    keys = tuple(joined(sorted([*own, *(p for _, pieces in stage.receives for p in pieces)])))
    others = dataclasses.replace(
        stage, keys=keys, own=own, parts=parts(before, keys) + parts(after, keys)
    )
    mine_alone = tuple(joined(sorted(rows for rows, _ in run)))
    calls_alone = parts(mine_alone, mine_alone)
    if len(others.parts) > _MOST_OTHERS or not _are_apart(calls_alone + others.parts):
        return plan
    alone = Stage(stage.heads, mine_alone, mine_alone, (), (), calls_alone, travels=False)
    stages = (alone, others)
    rows = [(part.call.q0, part.call.q1) for stage in stages for part in stage.parts]
    gaps = untouched(rows, plan.rows)
    return plan.changed(stages=stages, stages_back=stages, untouched=gaps)


def _alone(mask: Mask, cuts: Sequence[_Cut]) -> list[_Cut]:
    """The neighbouring rows, with their documents, that see but their own keys and have the most of
    them.
    """
    runs: list[list[_Cut]] = [[]]
    for rows, document in cuts:
        begin, end = mask.hull(rows, document)
        if rows[0] <= begin and end <= rows[1]:
            runs[-1].append((rows, document))
        else:
            runs.append([])
    return max(runs, key=lambda run: _pairs(mask, run))


def _pairs(mask: Mask, cuts: Sequence[_Cut]) -> int:
    return sum(mask.pairs(*cut) for cut in cuts)


def _are_apart(parts: Sequence[Part]) -> bool:
    """Whether no two calls have the same rows."""
    rows = sorted((part.call.q0, part.call.q1) for part in parts)
    ranged = any(isinstance(part.call, Ranged) for part in parts)  # it would have all rows
    return not ranged and all(a[1] <= b[0] for a, b in itertools.pairwise(rows))
