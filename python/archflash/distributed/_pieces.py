"""Pieces of a sequence: half-open ranges of rows. Host code."""

from __future__ import annotations

from collections.abc import Iterable

Piece = tuple[int, int]


def joined(pieces: Iterable[Piece], overlapping: bool = False) -> list[Piece]:
    """Pieces in their order, each joined with the one before where it follows that one (or where
    they overlap, if pieces ascend), and empty ones left out.
    """
    made: list[Piece] = []
    for start, end in pieces:
        if start == end:
            continue
        if made and (made[-1][1] == start or (overlapping and start < made[-1][1])):
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((start, end))
    return made
