"""Who sees whom in one sequence over several ranks. Host code."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from archflash.distributed._pieces import Piece
from archflash.distributed._shards import digest, digest_of_tensor

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
