"""Documents that ranks hold, moved between them so that little waits for messages. Host code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from archflash.distributed._dealing import TILE, Held, deal, dealt, loads_of, work_of
from archflash.distributed._pieces import Piece, joined

_MOST_RANKS, _MOST_DOCUMENTS = 8, 512  # for more it takes too long
_CUT_ABOVE = (1.15, 0.5)  # of a rank's load
_ROW_TRAVELS = 512  # pairs of a row and a key that are computed while a key of a row travels
_EXCHANGE = 1.5e6  # pairs that are computed while the host and the GPU begin an exchange
_TRAVEL_COSTS = 0.5  # of that, where it is hidden: copies, and SMs for messages
_OVER, _OVER_COSTS = 0.03, 4.0  # work and rows over the mean, and what more of them costs
_BALANCED = 1.05  # the most work or rows of a rank over the mean
_GOAL, _LEAST_GAIN = 1.01, 0.004  # of the mean work
_NEAR, _MOST_BACK = 3, 3  # ranks with the least load that are tried, and documents of each
_MOST_WAYS = 50  # that are looked at closely in a step
_Load = tuple[float, float, int, int, int]


def deal_apart(lengths: Sequence[int], ranks: int, causal: bool) -> list[Held]:
    """As `deal`, of few ranks so that messages are few and rows that need none hide them."""
    held = deal(lengths, ranks, causal)
    if not 1 < ranks <= _MOST_RANKS or not 0 < len(lengths) <= _MOST_DOCUMENTS:
        return held
    best = _Loads(lengths, ranks, causal, held)
    loads = loads_of(lengths, ranks, causal)
    for share in _CUT_ABOVE:
        if best.cost() <= _GOAL:
            break
        parts = [min(ranks, math.ceil(x / min(1, share))) if x > share else 1 for x in loads]
        other = _Loads(lengths, ranks, causal, dealt(lengths, parts, ranks, causal)[1])
        other.improve()
        if other.is_balanced() and other.cost() < best.cost():
            best = other
    return best.held


class _Loads:
    """Documents on ranks, and the load of these: work of documents that need nothing of others and
    of other ones, rows, and rows that are received and sent.
    """

    def __init__(
        self, lengths: Sequence[int], ranks: int, causal: bool, held: Sequence[Held]
    ) -> None:
        self.held: list[Held] = [{} for _ in lengths]
        self._lengths, self._causal = lengths, causal
        self._mean_work = sum(work_of((0, n), n, causal) for n in lengths) / ranks
        self._mean_rows = sum(lengths) / ranks
        self._loads: list[_Load] = [(0.0, 0.0, 0, 0, 0)] * ranks
        self._of: list[set[int]] = [set() for _ in range(ranks)]  # documents
        for i, x in enumerate(held):
            self._put(i, x)

    def cost(self) -> float:
        """The time and rows of the rank with the most, over the mean; and an exchange of all ranks,
        if anything travels.
        """
        travels = any(received for _, _, _, received, _ in self._loads)
        return max(map(self._cost, self._loads)) + travels * _EXCHANGE / self._mean_work

    def is_balanced(self) -> bool:
        over = [
            max((alone + waiting) / self._mean_work, rows / self._mean_rows)
            for alone, waiting, rows, _, _ in self._loads
        ]
        return max(over) <= _BALANCED

    def improve(self) -> None:
        """Takes load from the rank that has the most, a piece for a document at a time, as long as
        that helps.
        """
        for _ in range(4 * len(self._of)):
            costs = [self._cost(load) for load in self._loads]
            top = max(costs)
            giver = costs.index(top)
            if top <= _GOAL:
                break
            others = sorted((r for r in range(len(costs)) if r != giver), key=costs.__getitem__)
            found = self._best(giver, others[:_NEAR], top)
            if found is None:
                break
            for i, held in found:
                self._put(i, held)

    def _best(self, giver: int, takers: Sequence[int], top: float) -> list[tuple[int, Held]] | None:
        """The exchange after which the most load of its ranks is the least."""
        ways = [way for taker in takers for way in self._ways(giver, taker, top - _LEAST_GAIN)]
        best, least = None, top - _LEAST_GAIN
        for bound, taker, i, piece, back in sorted(ways)[:_MOST_WAYS]:
            if bound >= least:
                break
            changed = [(i, _moved(self.held[i], giver, taker, piece))]
            if back >= 0:
                changed.append((back, {giver: self.held[back][taker]}))
            cost = self._cost_of(changed)
            if cost < least:
                best, least = changed, cost
        return best

    def _ways(
        self, giver: int, taker: int, most: float
    ) -> Iterator[tuple[float, int, int, Piece, int]]:
        """Pieces that the taker could have, and a document that it could give back or -1, each with
        the load that both have at least, where that is less than the most.
        """
        given, taken = self._loads[giver], self._loads[taker]
        works, rows = (given[0] + given[1], taken[0] + taken[1]), (given[2], taken[2])
        backs = [(-1, 0.0, 0)] + [
            (j, self._pairs((0, n), n), n)
            for j in sorted(j for j in self._of[taker] if len(self.held[j]) == 1)[:_MOST_BACK]
            for n in (self._lengths[j],)
        ]
        for i in self._of[giver]:
            for whole in self.held[i][giver]:
                for back, back_work, back_rows in backs:
                    if back == i:
                        continue
                    more_work = (works[0] - works[1]) / 2 + back_work
                    more_rows = (rows[0] - rows[1]) / 2 + back_rows
                    for piece in self._pieces(whole, i, more_work, more_rows):
                        work = self._pairs(piece, self._lengths[i]) - back_work
                        n = piece[1] - piece[0] - back_rows
                        bound = self._over(
                            max(works[0] - work, works[1] + work), max(rows[0] - n, rows[1] + n)
                        )
                        if bound < most:
                            yield bound, taker, i, piece, back

    def _pieces(self, whole: Piece, i: int, work: float, rows: float) -> set[Piece]:
        """Pieces of a piece that have about so much work or so many rows, or both."""
        (first, end), n = whole, self._lengths[i]
        made = [(float(first), float(end))]
        if work > 0 and self._causal:
            made.append((first, math.sqrt(first * first + 2 * work)))
            made.append((math.sqrt(max(0.0, end * end - 2 * work)), end))
        elif work > 0:
            made += [(first, first + work / n), (end - work / n, end)]
        if rows > 0:
            made += [(first, first + rows), (end - rows, end)]
        if rows > 0 and work > 0 and self._causal:
            for some in (0.7 * rows, rows, 1.4 * rows):
                made.append((work / some - some / 2, work / some + some / 2))
        found = set()
        for a, b in made:
            start = first if a <= first else round(a / TILE) * TILE
            stop = end if b >= end else round(b / TILE) * TILE
            if first <= start < stop <= end:
                found.add((start, stop))
        return found

    def _pairs(self, piece: Piece, n: int) -> float:
        return work_of(piece, n, self._causal)

    def _cost(self, load: _Load) -> float:
        """What a rank has over the mean."""
        alone, waiting, rows, received, sent = load
        travel = _ROW_TRAVELS * max(received, sent)
        work = max(max(alone, travel) + waiting, alone + waiting + _TRAVEL_COSTS * travel)
        return max(work / self._mean_work, self._over(alone + waiting, rows))

    def _over(self, work: float, rows: float) -> float:
        """What so much work and so many rows cost, whatever travels."""
        over = max(work / self._mean_work, rows / self._mean_rows) - 1 - _OVER
        return max(work / self._mean_work, 1 + _OVER_COSTS * over)

    def _cost_of(self, changed: Sequence[tuple[int, Held]]) -> float:
        """The most that a rank has whose documents change."""
        loads: dict[int, _Load] = {}
        for i, held in changed:
            for sign, parts in ((-1, self._parts(i, self.held[i])), (1, self._parts(i, held))):
                for r, part in parts.items():
                    before = loads.get(r, self._loads[r])
                    loads[r] = _sum(before, part, sign)
        return max(map(self._cost, loads.values()))

    def _parts(self, i: int, held: Held) -> dict[int, _Load]:
        """What a document is of the load of its ranks."""
        n = self._lengths[i]
        if len(held) == 1:
            return {r: (self._pairs((0, n), n), 0.0, n, 0, 0) for r in held}
        needed = {r: pieces[-1][1] if self._causal else n for r, pieces in held.items()}
        found: dict[int, _Load] = {}
        for r, pieces in held.items():
            work = sum(self._pairs(piece, n) for piece in pieces)
            rows = sum(b - a for a, b in pieces)
            received = needed[r] - rows
            sent = sum(
                max(0, min(b, needed[other]) - a) for other in held if other != r for a, b in pieces
            )
            alone, waiting = (0.0, work) if received else (work, 0.0)
            found[r] = (alone, waiting, rows, received, sent)
        return found

    def _put(self, i: int, held: Held) -> None:
        if self.held[i]:
            for r, part in self._parts(i, self.held[i]).items():
                self._loads[r] = _sum(self._loads[r], part, -1)
                self._of[r].discard(i)
        self.held[i] = held
        for r, part in self._parts(i, held).items():
            self._loads[r] = _sum(self._loads[r], part, 1)
            self._of[r].add(i)


def _sum(x: _Load, y: _Load, sign: int) -> _Load:
    return (
        x[0] + sign * y[0], x[1] + sign * y[1], x[2] + sign * y[2], x[3] + sign * y[3],
        x[4] + sign * y[4],
    )  # fmt: skip


def _moved(held: Held, giver: int, taker: int, piece: Piece) -> Held:
    new = {r: pieces for r, pieces in held.items() if r != giver}
    left = []
    for a, b in held[giver]:
        left += [x for x in ((a, min(b, piece[0])), (max(a, piece[1]), b)) if x[0] < x[1]]
    if left:
        new[giver] = left
    new[taker] = joined(sorted([*held.get(taker, []), piece]))
    return new
