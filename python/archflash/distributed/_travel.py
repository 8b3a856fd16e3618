"""Keys and values on their way to the ranks whose rows see them, and their gradients on the way
back.

Keys and values travel with rows first, ``(rows, batch, heads, d)``, in all-gather as one tensor
``(rows, batch, heads, d + dv)``: they are received where they belong in buffers of ascending global
rows. Many pieces for a rank are one message; a kernel then takes the keys from buffers of the own
rows and of the messages behind them. In short calls of documents messages are one exchange, and
keys arrive in the order of the ranks (`_layout.py`). Gradients travel back in float32 likewise, and
are added up in an order that depends on the ranks alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from archflash.distributed import _exchange
from archflash.distributed._agree import Agreement
from archflash.distributed._calls import places
from archflash.distributed._layout import Layout
from archflash.distributed._mask import overlaps
from archflash.distributed._partial import Fresh
from archflash.distributed._pieces import Piece
from archflash.distributed._plan import Plan, Stage
from archflash.distributed._shards import rows_of
from archflash.distributed._turns import Turns


def columns(x: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """k and v, or their gradients, "bhnd" in a buffer."""
    x = x.permute(1, 2, 0, 3)
    return x[..., :d], x[..., d:]


def buffer_of(rows: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer for rows of k and v "bhnd", or for their gradients."""
    return k.new_empty((rows, *k.shape[:2], k.shape[-1] + v.shape[-1]), dtype=dtype)


# Pieces for one rank that are messages of their own; more are one message.
_MOST_ALONE = 2
_MOST_COPIED = 4  # pieces that are copied one by one
_ByRank = Sequence[tuple[int, tuple[Piece, ...]]]


def _is_packed(*all_by_rank: _ByRank) -> bool:
    return any(len(pieces) > _MOST_ALONE for x in all_by_rank for _, pieces in x)


def _messages(
    by_rank: _ByRank, tensors: Sequence[Tensor], first: int = 0
) -> list[_exchange.Message]:
    """Messages that stand one after another in tensors, from a row on, for each rank in order."""
    made, at = [], first
    for rank, pieces in by_rank:
        sizes = [end - start for start, end in pieces]
        for n in [sum(sizes)] if len(sizes) > _MOST_ALONE else sizes:
            made += [(rank, x[at : at + n]) for x in tensors]
            at += n
    return made


def _sends(
    plan: Plan, held: Sequence[Piece], by_rank: _ByRank, tensors: Sequence[Tensor]
) -> list[_exchange.Message]:
    """Global rows of tensors that hold those of `held`, with rows first, for each rank."""
    if _is_packed(by_rank):
        index = _index(plan, held, [piece for _, pieces in by_rank for piece in pieces], tensors[0])
        return _messages(by_rank, [x.index_select(0, index) for x in tensors])
    return [
        (rank, x[a:b]) for rank, pieces in by_rank for a, b in places(held, pieces) for x in tensors
    ]


def _index(plan: Plan, held: Sequence[Piece], pieces: Sequence[Piece], x: Tensor) -> Tensor:
    """Where global rows stand in a buffer of those of `held`, one number for each, beside x."""

    def make() -> tuple[Tensor]:
        return (rows_of(places(held, pieces)).to(x.device),)

    return plan.table(("index", tuple(held), tuple(pieces), x.device), make)[0]


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


def layout_of(plan: Plan, stage: Stage) -> Layout:
    if id(stage) not in plan.layouts:
        plan.layouts[id(stage)] = Layout.of(plan, stage)
    found: Layout = plan.layouts[id(stage)]
    return found


class Arrivals:
    """The keys of the stages, of which the next one's are under way, or in turns all others'.

    Attributes:
        k, v: "bhnd", of the stage that was taken last, once they arrived.
    """

    def __init__(
        self, plan: Plan, stages: Sequence[Stage], group: dist.ProcessGroup | None, k: Tensor,
        v: Tensor, turns: Turns, agreement: Agreement | None = None,
    ) -> None:  # fmt: skip
        self._agreement = agreement
        self._plan, self._stages, self._group, self._k, self._v = plan, stages, group, k, v
        self._turns = turns
        self.k, self.v = k, v
        # The own keys and values of the heads of a share, as they travel.
        self._sent: tuple[Piece, list[Tensor]] | None = None
        self._together = plan.gathers
        # K and V of the stages that are still to be taken (with turns, of every stage), each with
        # the messages that bring them.
        self._coming: list[tuple[_Coming, _exchange.Pending]] = []
        self._taken = _Coming((k, v))
        self._asked = 0  # stages whose messages were started
        self._pending, self._behind = _exchange.Pending(), _exchange.Pending()

    def take(self, number: int, back: Returned | None = None) -> None:
        """Turns to the keys of a stage. Starts the messages of the next one, and those of `back`
        with them: what one kernel of NCCL sends needs SMs once.
        """
        if number == 0:
            self._ask(1)
        self._taken, self._pending = self._coming[number] if self._turns else self._coming.pop()
        self.k, self.v = self._taken.keys or (self._k, self._v)
        self._behind = self._ask(len(self._stages) if self._turns else number + 2, back)
        if number == 0:
            # Attention on all SMs would let copies wait, and the messages that wait for these.
            self._pending.after = self._behind.after = self._turns.now()
        if back is not None:
            back.pending = self._behind

    def arrive(self) -> None:
        """Lets the current stream wait for the keys of the stage that was taken."""
        self._pending.wait()
        if self._taken.keys is None:
            self.k, self.v = self._taken.in_order(self._k)
            self._taken = _Coming((self.k, self.v))
        self._behind.let_start()

    def _ask(self, end: int, back: Returned | None = None) -> _exchange.Pending:
        """Starts the messages of the stages up to `end`, and those of `back`, at once."""
        if self._plan.in_one:
            return self._ask_in_one(end, back)
        sends, receives = ([], []) if back is None else ([*back.sends], [*back.receives])
        made = []
        for number in range(self._asked, min(end, len(self._stages))):
            coming, of_stage, to_stage = self._prepare(number)
            made.append(coming)
            sends += of_stage
            receives += to_stage
        self._asked += len(made)
        pending = _exchange.start(self._group, sends, receives)
        self._coming += [(coming, pending) for coming in made]
        return pending

    def _ask_in_one(self, end: int, back: Returned | None) -> _exchange.Pending:
        """As `_ask`, of stages of which one has messages."""
        latest = _exchange.Pending()
        if back is not None and back.layout is not None:
            back.start(self._group)
            latest = back.pending
        for number in range(self._asked, min(end, len(self._stages))):
            stage, pending = self._stages[number], _exchange.Pending()
            if stage.travels:
                coming, latest = self._exchanged(stage)
                pending = latest
            else:
                alone = where_alone(self._plan, stage)
                assert alone is not None
                k, v = (x.narrow(2, alone[0], stage.key_rows) for x in (self._k, self._v))
                coming = _Coming((k, v))
            self._coming.append((coming, pending))
            self._asked += 1
        return latest

    def _exchanged(self, stage: Stage) -> tuple[_Coming, _exchange.Pending]:
        """The keys of a stage whose messages are one exchange, which it starts."""
        plan, layout = self._plan, layout_of(self._plan, stage)
        sent = buffer_of(sum(layout.sent_rows), self._k, self._v, self._k.dtype)
        self._fill(sent, 0, layout.sent)
        x = buffer_of(stage.key_rows, self._k, self._v, self._k.dtype)
        others = sum(layout.received_rows)
        if self._agreement is not None:
            self._agreement.rows()
        pending = _exchange.start_in_one(
            self._group,
            _exchange.Block(sent, layout.sent_rows),
            _exchange.Block(x[:others], layout.received_rows),
        )
        # What follows does not let the messages wait.
        self._fill(x, others, layout.own)
        pending.has_time = bool(layout.own)
        if layout.order is None:
            return _Coming(_by_head([x], self._k)), pending
        here = layout.order
        order = plan.table(("order", stage.keys, x.device), lambda: (here.to(x.device),))[0]
        return _Coming(None, [x], order), pending

    def _fill(self, to: Tensor, at: int, pieces: Sequence[Piece]) -> None:
        """Copies own keys and values of some places, one piece behind another, to rows from `at`
        on.
        """
        k, v = (x.permute(2, 0, 1, 3) for x in (self._k, self._v))
        if len(pieces) > _MOST_COPIED:
            rows = self._plan.table(
                ("rows", pieces, to.device), lambda: (rows_of(pieces).to(to.device),)
            )[0]
            k, v = k.index_select(0, rows), v.index_select(0, rows)
            pieces = ((0, len(rows)),)
        for start, end in pieces:
            n = end - start
            torch.cat([k[start:end], v[start:end]], -1, out=to[at : at + n])
            at += n

    def _prepare(
        self, number: int
    ) -> tuple[_Coming, list[_exchange.Message], list[_exchange.Message]]:
        """What is there of a stage's keys, what is sent, and the messages that bring the others."""
        stage, plan = self._stages[number], self._plan
        heads = slice(*stage.heads)
        alone = where_alone(plan, stage)
        if alone is not None:
            k, v = (x[:, heads, slice(*alone)] for x in (self._k, self._v))
            return _Coming((k, v)), self._sends(stage, heads), []
        if _is_packed(stage.sends, stage.receives):
            return self._prepare_packed(stage, heads)
        tensors = self._room(stage.key_rows, heads)
        k, v = _by_head(tensors, self._k)
        for (a, b), (start, end) in zip(
            places(stage.keys, stage.own), plan.local(stage.own), strict=True
        ):
            k[:, :, a:b] = self._k[:, heads, start:end]
            v[:, :, a:b] = self._v[:, heads, start:end]
        if all(overlaps(stage.own, pieces) == list(pieces) for _, pieces in stage.sends):
            sends = _sends(plan, stage.keys, stage.sends, tensors)
        else:
            sends = self._sends(stage, heads)
        return _Coming((k, v)), sends, _sends(plan, stage.keys, stage.receives, tensors)

    def _prepare_packed(
        self, stage: Stage, heads: slice
    ) -> tuple[_Coming, list[_exchange.Message], list[_exchange.Message]]:
        """As `_prepare`, in buffers of the own rows, where they are among the keys, and behind them
        of what is received, in that order.
        """
        plan, device = self._plan, self._k.device
        n = plan.rows if stage.own else 0
        others = [piece for _, pieces in stage.receives for piece in pieces]
        tensors = self._room(n + sum(end - start for start, end in others), heads)
        receives = _messages(stage.receives, tensors, n)
        if not n:
            sends = self._sends(stage, heads)
            if len(stage.receives) == 1:
                return _Coming(_by_head(tensors, self._k)), sends, receives
        else:
            for x, own in zip(_by_head(tensors, self._k), (self._k, self._v), strict=True):
                x[:, :, :n] = own[:, heads]
            mine = plan.shards.pieces[plan.rank]
            sends = _sends(plan, mine, stage.sends, [x[:n] for x in tensors])

        def make() -> tuple[Tensor]:
            rows, of_own = rows_of([*stage.own, *others]), rows_of(plan.local(stage.own))
            behind = torch.arange(n, n + len(rows) - len(of_own), device="cpu")
            return (torch.cat([of_own, behind])[rows.argsort()].to(device),)

        order = plan.table(("order", stage.keys, stage.own, device), make)[0]
        return _Coming(None, tensors, order), sends, receives

    def _sends(self, stage: Stage, heads: slice) -> list[_exchange.Message]:
        """What a stage sends, from the rank's own keys and values as they travel."""
        if not stage.sends:
            return []
        share = (heads.start, heads.stop)
        if self._sent is None or self._sent[0] != share:
            k, v = self._k[:, heads], self._v[:, heads]
            if self._together:
                own = self._room(self._plan.rows, heads)
                for x, to in zip((k, v), columns(own[0], k.shape[3]), strict=True):
                    to.copy_(x)
            else:
                own = [x.permute(2, 0, 1, 3).contiguous() for x in (k, v)]
            self._sent = share, own
        held = self._plan.shards.pieces[self._plan.rank]
        return _sends(self._plan, held, stage.sends, self._sent[1])

    def _room(self, rows: int, heads: slice) -> list[Tensor]:
        """New tensors for keys and values as they travel."""
        k, v = self._k[:, heads], self._v[:, heads]
        if self._together:
            return [buffer_of(rows, k, v, k.dtype)]
        return [x.new_empty((rows, *x.shape[:2], x.shape[3])) for x in (k, v)]


def _by_head(tensors: Sequence[Tensor], k: Tensor) -> tuple[Tensor, Tensor]:
    """K and V, "bhnd", in tensors as they travel."""
    if len(tensors) == 1:
        return columns(tensors[0], k.shape[3])
    return tensors[0].permute(1, 2, 0, 3), tensors[1].permute(1, 2, 0, 3)


@dataclasses.dataclass(frozen=True)
class _Coming:
    """Keys and values of a stage, "bhnd"; or tensors as they travel, and which of their rows are
    the keys.
    """

    keys: tuple[Tensor, Tensor] | None
    tensors: Sequence[Tensor] = ()
    order: Tensor | None = None

    def in_order(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Both, "bhnd", once the tensors have arrived. k: any of the call."""
        assert self.order is not None
        return _by_head([x.index_select(0, self.order) for x in self.tensors], k)


class Returned:
    """Gradients of a stage's keys on their way to the ranks that hold these."""

    def __init__(self, plan: Plan, stage: Stage, found: Fresh, own: Fresh, adds_own: bool) -> None:
        self._own = own.x
        self.pending = _exchange.Pending()  # once these messages are under way
        self.sends: list[_exchange.Message] = []
        self.receives: list[_exchange.Message] = []
        self._where: list[slice | Tensor] = []  # the rows of each message
        self.layout = layout_of(plan, stage) if plan.in_one and stage.travels else None
        if self.layout is not None:
            self._return_in_one(plan, stage, self.layout, found, own, adds_own)
            return
        self.sends = _sends(plan, stage.keys, stage.receives, [found.x])
        if adds_own:
            self._add_own(plan, stage, found, own)
        mine = plan.shards.pieces[plan.rank]
        rows = 0
        for _, pieces in stage.sends:
            local = plan.local(pieces)
            for start, end in local:
                own.clear(start, end)
                rows += end - start
            if len(pieces) > _MOST_ALONE:
                self._where.append(_index(plan, mine, pieces, own.x))
            else:
                self._where += [slice(start, end) for start, end in local]
        self.receives = _messages(stage.sends, [own.x.new_empty((rows, *own.x.shape[1:]))])

    def _return_in_one(
        self, plan: Plan, stage: Stage, layout: Layout, found: Fresh, own: Fresh, adds_own: bool
    ) -> None:
        pieces = [found.x[start:end] for start, end in layout.received]
        given = pieces[0] if len(pieces) == 1 else torch.cat(pieces or [found.x[:0]])
        taken = own.x.new_empty((sum(layout.sent_rows), *own.x.shape[1:]))
        self._blocks = (
            _exchange.Block(given, layout.received_rows), _exchange.Block(taken, layout.sent_rows)
        )  # fmt: skip
        if adds_own:
            self._add_own(plan, stage, found, own)
        for start, end in layout.sent:
            own.clear(start, end)
        if len(layout.sent) <= _MOST_COPIED:
            self._where = [slice(start, end) for start, end in layout.sent]
            rows = [end - start for start, end in layout.sent]
        else:
            mine, by_rank = plan.shards.pieces[plan.rank], sorted(stage.sends)
            self._where = [_index(plan, mine, pieces, own.x) for _, pieces in by_rank]
            rows = [n for n in layout.sent_rows if n]
        places_of = itertools.pairwise(itertools.accumulate(rows, initial=0))
        self.receives = [(-1, taken[start:end]) for start, end in places_of]

    def _add_own(self, plan: Plan, stage: Stage, found: Fresh, own: Fresh) -> None:
        """Adds what the rank itself found of its own keys."""
        local = plan.local(stage.own)
        if len(local) > _MOST_ALONE and all(own.holds_none(*piece) for piece in local):
            mine = plan.shards.pieces[plan.rank]
            taken = found.x.index_select(0, _index(plan, stage.keys, stage.own, own.x))
            own.x.index_copy_(0, _index(plan, mine, stage.own, own.x), taken)
            for piece in local:
                own.wrote(*piece)
            return
        _add_pieces(own, local, [found.x[a:b] for a, b in places(stage.keys, stage.own)])

    def start(self, group: dist.ProcessGroup | None) -> None:
        if self.layout is None:
            self.pending = _exchange.start(group, self.sends, self.receives)
        else:
            self.pending = _exchange.start_in_one(group, *self._blocks)

    def add(self) -> None:
        """Adds what other ranks found, in the order of the plan."""
        self.pending.wait()
        for where, (_, x) in zip(self._where, self.receives, strict=True):
            if isinstance(where, slice):
                self._own[where] += x
            else:  # each row once, so that the order is that of the messages
                self._own.index_add_(0, where, x)


def _add_pieces(own: Fresh, where: Sequence[Piece], pieces: Sequence[Tensor]) -> None:
    """Adds gradients to some rows of the own ones, or writes them where these hold nothing yet."""
    for (start, end), x in zip(where, pieces, strict=True):
        if own.holds_none(start, end):
            own.x[start:end] = x
            own.wrote(start, end)
        else:
            own.clear(start, end)
            own.x[start:end] += x
