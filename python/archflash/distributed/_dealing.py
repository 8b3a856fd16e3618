"""Documents dealt to ranks, whole or in pieces, so that work and rows are balanced. Host code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from archflash.distributed._pieces import Piece, joined

Held = dict[int, list[Piece]]  # ranks, and what each holds of a document
TILE = 128  # rows of a kernel's tile
_TOLERANCE = 1.04  # the most work or rows of a rank over the mean, where documents allow that
_SMALLEST_SHARE = 1 / 32  # of what a rank should have: no smaller document is cut
_MOST_PARTS = 8  # of a document, or one for each rank
_MOST_TRIED = 100  # ways to cut documents
_MOST_PIECES = 8  # of all documents, for each rank, in these


def deal(lengths: Sequence[int], ranks: int, causal: bool) -> list[Held]:
    """What the ranks hold of each document: whole ones where work and rows can be balanced so, else
    some of the longest are cut in zigzag, those whose rows travel least.

    Args:
        lengths: of the documents, each of at least one row.
        causal: whether the work is that of a causal mask or of none.
    """
    best: tuple[float, list[Held]] = (math.inf, [])
    for parts in _cuts(lengths, ranks, causal) if lengths else ():
        best = min(best, dealt(lengths, parts, ranks, causal), key=lambda x: x[0])
        if best[0] <= _TOLERANCE:
            break
    return best[1]


def _cuts(lengths: Sequence[int], ranks: int, causal: bool) -> Iterator[list[int]]:
    """Ways to cut documents, in how many parts each: the longest ones, in the order of what would
    travel; and if that will not do, all that are more than some share of what a rank should have.
    """
    longest = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    loads = loads_of(lengths, ranks, causal)

    largest = [*(loads[i] for i in longest), 0.0]
    ways = [(0, 0, 1)]  # rows that travel, documents that are cut, parts
    all_rows = itertools.accumulate(lengths[i] for i in longest[: 2 * ranks])
    for count, together in enumerate(all_rows, start=1):
        if largest[count] <= _TOLERANCE:
            numbers = {*range(2, min(ranks, _MOST_PARTS) + 1), ranks} - {1}
            ways += [
                (together * (x - 1), count, x)
                for x in numbers
                if largest[0] <= x and count * x <= _MOST_PIECES * ranks
            ]
    for _, count, number in sorted(ways)[:_MOST_TRIED]:
        parts = [1] * len(lengths)
        for i in longest[:count]:
            parts[i] = number
        yield parts

    share = 1.0
    while share >= _SMALLEST_SHARE:
        yield [min(ranks, math.ceil(load / share)) for load in loads]
        share /= 2


def loads_of(lengths: Sequence[int], ranks: int, causal: bool) -> list[float]:
    """The work or rows of each document over what a rank should have, whichever is more."""
    work = [work_of((0, n), n, causal) for n in lengths]
    most_work, most_rows = sum(work) / ranks, sum(lengths) / ranks
    return [max(w / most_work, n / most_rows) for w, n in zip(work, lengths, strict=True)]


def dealt(
    lengths: Sequence[int], parts: Sequence[int], ranks: int, causal: bool
) -> tuple[float, list[Held]]:
    """Deals documents to ranks, the largest first, each to the rank that has the least with it.

    Args:
        parts: in how many each is cut before.

    Returns:
        The most work or rows of a rank over the mean, and what the ranks hold of each document.
    """
    all_work = sum(work_of((0, n), n, causal) for n in lengths) / ranks
    all_rows = sum(lengths) / ranks
    items: list[tuple[float, float, int, list[Piece]]] = []  # work, rows, document and pieces
    for i, n in enumerate(lengths):
        for pieces in _zigzag(n, parts[i]):
            work = sum(work_of(piece, n, causal) for piece in pieces) / all_work
            rows = sum(b - a for a, b in pieces) / all_rows
            items.append((work, rows, i, pieces))
    items.sort(key=lambda item: -max(item[:2]))
    held: list[Held] = [{} for _ in lengths]
    works, all_held = [0.0] * ranks, [0.0] * ranks
    for work, rows, i, pieces in items:
        loads = [max(w + work, n + rows) for w, n in zip(works, all_held, strict=True)]
        r = loads.index(min(loads))
        works[r] += work
        all_held[r] += rows
        held[i][r] = joined(sorted([*held[i].get(r, []), *pieces]))
    return max(*works, *all_held), held


def work_of(piece: Piece, n: int, causal: bool) -> float:
    """Pairs of a row of a piece and a key of its document of n rows that it sees."""
    a, b = piece
    return (b * (b + 1) - a * (a + 1)) / 2 if causal else float((b - a) * n)


def _zigzag(n: int, parts: int) -> list[list[Piece]]:
    """A document of n rows in zigzag, in full tiles as far as there are that many."""
    tile = TILE if n >= 4 * parts * TILE else 1
    tiles = -(-n // tile)
    edges = [tiles * i // (2 * parts) * tile for i in range(2 * parts)] + [n]
    both = list(itertools.pairwise(edges))
    made = (joined(sorted([both[i], both[-1 - i]])) for i in range(parts))
    return [pieces for pieces in made if pieces]
