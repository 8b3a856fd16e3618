"""Partial results of a stage: outputs that are merged, and gradients that are added up."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from archflash import _merge
from archflash.distributed._calls import Call
from archflash.distributed._mask import overlaps
from archflash.distributed._plan import Plan

# Partial outputs that are kept before they are merged: at most so many, and so many bytes. More of
# them take less of the memory's time.
_MOST_PARTS, _BYTES_OF_PARTS = 4, 1 << 30


class Merged:
    """Partial outputs of rows, which are merged in float32, several at once, and rounded once."""

    def __init__(self, plan: Plan, out: Tensor, lse: Tensor) -> None:
        self._out, self._lse = out, lse
        self._sum: Tensor | None = None  # of parts that were merged already
        self._parts: list[tuple[int, int, Tensor, Tensor]] = []  # first row, end, output, lse
        for start, end in plan.untouched:  # what they hold is a part
            rows = slice(start, end)
            self._parts.append((start, end, out[:, :, rows].clone(), lse[:, :, rows].clone()))

    def add(self, call: Call, part: Tensor, lse: Tensor) -> None:
        self._parts.append((call.q0, call.q1, part, lse))
        kept = sum(x.numel() * x.element_size() for _, _, x, _ in self._parts)
        if len(self._parts) > _MOST_PARTS or (kept > _BYTES_OF_PARTS and len(self._parts) > 1):
            wide = torch.promote_types(part.dtype, torch.float32)
            total = self._sum
            if total is None:
                total = self._out.new_empty(self._out.shape, dtype=wide)
            self._merge(total)
            self._sum = total

    def finish(self) -> None:
        self._merge(self._out)

    def _merge(self, target: Tensor) -> None:
        """Merges what there is into `target`, for rows of the same parts at a time."""
        edges = sorted({x for part in self._parts for x in part[:2]} | {0, target.shape[2]})
        before = self._sum
        for start, end in itertools.pairwise(edges):
            parts = [p for p in self._parts if p[0] <= start and end <= p[1]]
            outs = [out[:, :, start - q0 : end - q0] for q0, _, out, _ in parts]
            lses = [lse[:, :, start - q0 : end - q0] for q0, _, _, lse in parts]
            if before is not None:
                outs.insert(0, before[:, :, start:end])
                lses.insert(0, self._lse[:, :, start:end])
            here = target[:, :, start:end]
            if outs:
                self._lse[:, :, start:end] = _merge.merge_into(outs, lses, here)
            else:  # rows whose first part is still to come
                here.zero_()
                self._lse[:, :, start:end] = -torch.inf
        self._parts = []


class Fresh:
    """A gradient, and which of its rows hold nothing yet: the first call writes to them, others add
    to what they hold.
    """

    def __init__(self, x: Tensor, dim: int) -> None:
        self.x, self._dim = x, dim
        self._left = [(0, x.shape[dim])]

    def rows(self, start: int, end: int) -> Fresh:
        """Some rows, which count as written from here on."""
        part = Fresh(self.x.narrow(self._dim, start, end - start), self._dim)
        part._left = [(a - start, b - start) for a, b in overlaps(self._left, [(start, end)])]
        self.wrote(start, end)
        return part

    def holds_none(self, start: int, end: int) -> bool:
        return any(a <= start and end <= b for a, b in self._left)

    def wrote(self, start: int, end: int) -> None:
        cut = [piece for a, b in self._left for piece in ((a, min(b, start)), (max(a, end), b))]
        self._left = [(a, b) for a, b in cut if a < b]

    def clear(self, start: int = 0, end: int | None = None) -> None:
        """Lets rows that hold nothing hold 0."""
        end = self.x.shape[self._dim] if end is None else end
        for a, b in overlaps(self._left, [(start, end)]):
            self.x.narrow(self._dim, a, b - a).zero_()
        self.wrote(start, end)
