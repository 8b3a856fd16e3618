"""Where the rows of one exchange among all ranks stand in what is sent and received. Host code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from archflash.distributed._calls import places
from archflash.distributed._pieces import Piece, joined
from archflash.distributed._plan import Plan, Stage
from archflash.distributed._shards import rows_of


@dataclass(frozen=True)
class Layout:
    """The rows of a stage whose messages are one exchange. Keys arrive in the order of the ranks,
    in front of the own ones.

    Attributes:
        sent: places of the rank's own rows, those for each rank one behind another.
        sent_rows, received_rows: how many are for, and from, each rank.
        own: places of the rank's own rows that are among the keys.
        received: where what came from the ranks stands among the keys in ascending order.
        order: for each key its row in the buffer, int64 on the CPU; None where all are in order.
    """

    sent: tuple[Piece, ...]
    sent_rows: list[int]
    received_rows: list[int]
    own: tuple[Piece, ...]
    received: tuple[Piece, ...]
    order: Tensor | None

    @staticmethod
    def of(plan: Plan, stage: Stage) -> Layout:
        ranks = plan.shards.ranks
        sends, receives = dict(stage.sends), dict(stage.receives)
        sent = [piece for rank in sorted(sends) for piece in sends[rank]]
        received = [piece for rank in sorted(receives) for piece in receives[rank]]
        order = rows_of([*received, *stage.own]).argsort()
        return Layout(
            tuple(joined(plan.local(sent))),
            [_count(sends.get(rank, ())) for rank in range(ranks)],
            [_count(receives.get(rank, ())) for rank in range(ranks)],
            tuple(plan.local(stage.own)),
            tuple(joined(places(stage.keys, received))),
            None if bool((order.diff() == 1).all()) else order,
        )


def _count(pieces: Sequence[Piece]) -> int:
    return sum(end - start for start, end in pieces)
