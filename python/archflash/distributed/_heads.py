"""Ulysses: ranks give their rows to the ranks that have their heads, and take back what is theirs.

A head of k and v goes to every rank that has query heads of its group; where a rank's query heads
are not the same number of each group, once for each query head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from archflash.distributed import _exchange
from archflash.distributed._calls import places
from archflash.distributed._pieces import Piece


@dataclass(frozen=True)
class Split:
    """Which heads each rank has.

    Attributes:
        of_q: for each rank the first query head, and the end.
        of_kv: for each rank its heads of k and v, as many as divide its query heads; a head may
            stand in it several times.
    """

    of_q: tuple[Piece, ...]
    of_kv: tuple[tuple[int, ...], ...]

    @staticmethod
    def make(heads_q: int, heads_kv: int, ranks: int) -> Split:
        shared = heads_q // max(1, heads_kv)
        of_q, of_kv = [], []
        for r in range(ranks):
            first, end = heads_q * r // ranks, heads_q * (r + 1) // ranks
            groups = [h // shared for h in range(first, end)]
            once = sorted(set(groups))
            even = len({groups.count(g) for g in once}) <= 1
            of_q.append((first, end))
            of_kv.append(tuple(once if even else groups))
        return Split(tuple(of_q), tuple(of_kv))

    @property
    def repeats(self) -> bool:
        """Whether a head of k and v has several copies."""
        every = [g for groups in self.of_kv for g in groups]
        return len(set(every)) < len(every)


def to_heads(
    group: dist.ProcessGroup | None,
    pieces: Sequence[Sequence[Piece]],
    x: Tensor,
    heads: Sequence[Sequence[int]],
) -> tuple[Tensor, _exchange.Pending]:
    """Gives each rank its heads of the local rows.

    Args:
        pieces: for each rank of the group the global rows that it holds, ascending.
        x: the local rows of all heads, ``(batch, heads, rows, columns)``.
        heads: for each rank its heads.

    Returns:
        All rows of this rank's heads in ascending order, ``(rows of the group, batch, heads,
        columns)``, and the messages to wait for.
    """
    rank, held = dist.get_rank(group), _all(pieces)
    local = places(pieces[rank], pieces[rank])
    all_rows = x.new_empty((_rows(held), x.shape[0], len(heads[rank]), x.shape[3]))
    sends, receives = [], []
    for r, of_rank in enumerate(pieces):
        part = _chosen(x, heads[r]).permute(2, 0, 1, 3)
        here = places(held, of_rank)
        if r == rank:
            for (a, b), (start, end) in zip(here, local, strict=True):
                all_rows[a:b] = part[start:end]
            continue
        part = part.contiguous()
        sends += [(r, part[a:b]) for a, b in local]
        receives += [(r, all_rows[a:b]) for a, b in here]
    return all_rows, _exchange.start(group, sends, receives)


def to_rows(
    group: dist.ProcessGroup | None, pieces: Sequence[Sequence[Piece]], x: Tensor,
    heads: Sequence[Sequence[int]], into: Tensor, *, adds: bool = False,
) -> None:  # fmt: skip
    """The way back: takes the local rows of all heads from the ranks that have them.

    Args:
        x: all rows of this rank's heads, ``(rows of the group, batch, heads, columns)``.
        into: where the local rows go, ``(batch, heads, rows, columns)``.
        adds: whether copies of a head are added up, in the order of the ranks; `into` holds 0 then.
    """
    rank, held = dist.get_rank(group), _all(pieces)
    local, x = places(pieces[rank], pieces[rank]), x.contiguous()
    found = [x.new_empty((into.shape[2], x.shape[1], len(h), x.shape[3])) for h in heads]
    sends, receives = [], []
    for r, of_rank in enumerate(pieces):
        there = places(held, of_rank)
        if r == rank:
            for (a, b), (start, end) in zip(there, local, strict=True):
                found[r][start:end] = x[a:b]
            continue
        sends += [(r, x[a:b]) for a, b in there]
        receives += [(r, found[r][a:b]) for a, b in local]
    _exchange.start(group, sends, receives).wait()
    for chosen, part in zip(heads, found, strict=True):
        part = part.permute(1, 2, 0, 3)
        if adds:
            for i, head in enumerate(chosen):
                into[:, head] += part[:, i]
        elif chosen:
            into[:, chosen[0] : chosen[-1] + 1] = part


def _all(pieces: Sequence[Sequence[Piece]]) -> list[Piece]:
    return sorted(piece for of_rank in pieces for piece in of_rank)


def _rows(pieces: Sequence[Piece]) -> int:
    return sum(end - start for start, end in pieces)


def _chosen(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of a tensor "bhnd"."""
    if not heads:
        return x[:, :0]
    if list(heads) == list(range(heads[0], heads[-1] + 1)):
        return x[:, heads[0] : heads[-1] + 1]
    return x.index_select(1, torch.tensor(heads, device=x.device))
