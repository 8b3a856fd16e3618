"""Keys and values on their way to the ranks whose rows see them, and their gradients on the way
back.

Keys and values travel with rows first, ``(rows, batch, heads, d)``, in all-gather as one tensor
``(rows, batch, heads, d + dv)``: they are received where they belong in buffers of ascending global
rows. Their gradients travel back in float32 as such a tensor, and are added up in an order that
depends on the ranks alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from archflash.distributed import _exchange
from archflash.distributed._calls import places
from archflash.distributed._mask import overlaps
from archflash.distributed._partial import Fresh
from archflash.distributed._plan import Plan, Stage
from archflash.distributed._shards import Piece
from archflash.distributed._turns import Turns


def columns(x: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """k and v, or their gradients, "bhnd" in a buffer."""
    x = x.permute(1, 2, 0, 3)
    return x[..., :d], x[..., d:]


def buffer_of(rows: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer for rows of k and v "bhnd", or for their gradients."""
    return k.new_empty((rows, *k.shape[:2], k.shape[-1] + v.shape[-1]), dtype=dtype)


def where_alone(plan: Plan, stage: Stage) -> Piece | None:
    """Where the keys of a stage stand among the rank's own, if it needs no others and these are
    neighbours.
    """
    if stage.receives:
        return None
    local = plan.local(stage.own)
    if not local:
        return (0, 0)
    if any(a[1] != b[0] for a, b in itertools.pairwise(local)):
        return None
    return local[0][0], local[-1][1]


class Arrivals:
    """The keys of the stages, of which the next one's are under way, or in turns all others'.

    Attributes:
        k, v: "bhnd", of the stage that was taken last.
    """

    def __init__(
        self, plan: Plan, stages: Sequence[Stage], group: dist.ProcessGroup | None, k: Tensor,
        v: Tensor, turns: Turns,
    ) -> None:  # fmt: skip
        self._plan, self._stages, self._group, self._k, self._v = plan, stages, group, k, v
        self._turns = turns
        self.k, self.v = k, v
        # The own keys and values of the heads of a share, as they travel.
        self._sent: tuple[Piece, list[Tensor]] | None = None
        self._together = plan.stages_of_a_share == 1
        # K and V of the stages that are still to be taken (with turns, of every stage), each with
        # the messages that bring them.
        self._coming: list[tuple[Tensor, Tensor, _exchange.Pending]] = []
        self._asked = 0  # stages whose messages were started
        self._pending, self._behind = _exchange.Pending(), _exchange.Pending()

    def take(self, number: int, back: Returned | None = None) -> None:
        """Turns to the keys of a stage. Starts the messages of the next one, and those of `back`
        with them: what one kernel of NCCL sends needs SMs once.
        """
        if number == 0:
            self._ask(1)
        self.k, self.v, self._pending = self._coming[number] if self._turns else self._coming.pop()
        self._behind = self._ask(len(self._stages) if self._turns else number + 2, back)
        if number == 0:
            # Attention on all SMs would let copies wait, and the messages that wait for these.
            self._pending.after = self._behind.after = self._turns.now()
        if back is not None:
            back.pending = self._behind

    def arrive(self) -> None:
        """Lets the current stream wait for the keys of the stage that was taken."""
        self._pending.wait()
        self._behind.let_start()

    def _ask(self, end: int, back: Returned | None = None) -> _exchange.Pending:
        """Starts the messages of the stages up to `end`, and those of `back`, at once."""
        sends, receives = ([], []) if back is None else ([*back.sends], [*back.receives])
        made = []
        for number in range(self._asked, min(end, len(self._stages))):
            k, v, of_stage, to_stage = self._prepare(number)
            made.append((k, v))
            sends += of_stage
            receives += to_stage
        self._asked += len(made)
        pending = _exchange.start(self._group, sends, receives)
        self._coming += [(k, v, pending) for k, v in made]
        return pending

    def _prepare(
        self, number: int
    ) -> tuple[Tensor, Tensor, list[_exchange.Message], list[_exchange.Message]]:
        """k and v of a stage, and the messages that bring them."""
        stage = self._stages[number]
        heads = slice(*stage.heads)
        alone = where_alone(self._plan, stage)
        if alone is not None:
            k, v = (x[:, heads, slice(*alone)] for x in (self._k, self._v))
            return k, v, self._sends(stage, heads), []
        tensors, (k, v) = self._room(stage.key_rows, heads)
        own = zip(places(stage.keys, stage.own), self._plan.local(stage.own), strict=True)
        for (a, b), (start, end) in own:
            k[:, :, a:b] = self._k[:, heads, start:end]
            v[:, :, a:b] = self._v[:, heads, start:end]
        if all(overlaps(stage.own, pieces) == list(pieces) for _, pieces in stage.sends):
            sends = _messages(stage.keys, stage.sends, tensors)
        else:
            sends = self._sends(stage, heads)
        return k, v, sends, _messages(stage.keys, stage.receives, tensors)

    def _sends(self, stage: Stage, heads: slice) -> list[_exchange.Message]:
        """What a stage sends, from the rank's own keys and values as they travel."""
        if not stage.sends:
            return []
        share = (heads.start, heads.stop)
        if self._sent is None or self._sent[0] != share:
            k, v = self._k[:, heads], self._v[:, heads]
            if self._together:
                own, to = self._room(self._plan.rows, heads)
                to[0].copy_(k), to[1].copy_(v)
            else:
                own = [x.permute(2, 0, 1, 3).contiguous() for x in (k, v)]
            self._sent = share, own
        return _messages(self._plan.shards.pieces[self._plan.rank], stage.sends, self._sent[1])

    def _room(self, rows: int, heads: slice) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
        """New tensors for keys and values as they travel, and both "bhnd" in them."""
        k, v = self._k[:, heads], self._v[:, heads]
        if self._together:
            both = buffer_of(rows, k, v, k.dtype)
            return [both], columns(both, k.shape[3])
        apart = [x.new_empty((rows, *x.shape[:2], x.shape[3])) for x in (k, v)]
        return apart, (apart[0].permute(1, 2, 0, 3), apart[1].permute(1, 2, 0, 3))


def _messages(
    held: Sequence[Piece], by_rank: Sequence[tuple[int, tuple[Piece, ...]]],
    tensors: Sequence[Tensor],
) -> list[_exchange.Message]:  # fmt: skip
    """Global rows of tensors that hold those of `held`, with rows first, for each rank."""
    return [
        (rank, x[a:b]) for rank, pieces in by_rank for a, b in places(held, pieces) for x in tensors
    ]


class Returned:
    """Gradients of a stage's keys on their way to the ranks that hold these."""

    def __init__(self, plan: Plan, stage: Stage, found: Fresh, own: Fresh, adds_own: bool) -> None:
        self._own = own.x
        self.sends = _messages(stage.keys, stage.receives, [found.x])
        if adds_own:
            for (a, b), (start, end) in zip(
                places(stage.keys, stage.own), plan.local(stage.own), strict=True
            ):
                if own.holds_none(start, end):
                    own.x[start:end] = found.x[a:b]
                    own.wrote(start, end)
                else:
                    own.clear(start, end)
                    own.x[start:end] += found.x[a:b]
        self._received = []
        for rank, pieces in stage.sends:
            for start, end in plan.local(pieces):
                own.clear(start, end)
                x = own.x.new_empty((end - start, *own.x.shape[1:]))
                self._received.append((rank, (start, end), x))
        self.receives = [(rank, x) for rank, _, x in self._received]
        self.pending = _exchange.Pending()  # once these messages are under way

    def start(self, group: dist.ProcessGroup | None) -> None:
        self.pending = _exchange.start(group, self.sends, self.receives)

    def add(self) -> None:
        """Adds what other ranks found, in the order of the plan."""
        self.pending.wait()
        for _, (start, end), x in self._received:
            self._own[start:end] += x
