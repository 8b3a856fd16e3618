"""Tables of calls in which every feature meets every other one."""

from __future__ import annotations

import itertools
from typing import Any


def all_pairs(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Rows with a value for every factor; any two values of two factors meet in some row.

    Greedy and deterministic: a row starts from the first pair that has not met yet and takes,
    factor by factor, the value that meets most new ones.
    """
    names = list(factors)
    missing = {
        pair: None
        for a, b in itertools.combinations(names, 2)
        for pair in itertools.product(
            [(a, i) for i in range(len(factors[a]))], [(b, i) for i in range(len(factors[b]))]
        )
    }

    def new_pairs(row: dict[str, int], name: str, index: int) -> list[Any]:
        meets = [((other, i), (name, index)) for other, i in row.items() if other != name]
        return [p for x, y in meets for p in ((x, y), (y, x)) if p in missing]

    rows: list[dict[str, Any]] = []
    while missing:
        row = dict(next(iter(missing)))
        for number, name in enumerate(names):
            if name not in row:
                # Ties go to a value that moves from row to row, so that triples vary too.
                count = len(factors[name])
                order = [(i + number + len(rows)) % count for i in range(count)]
                row[name] = max(order, key=lambda i: len(new_pairs(row, name, i)))
        for name in names:
            for pair in new_pairs(row, name, row[name]):
                missing.pop(pair, None)
        rows.append({name: factors[name][row[name]] for name in names})
    return rows


def row_id(row: dict[str, Any]) -> str:
    """A test id from what a row sets, such as layoutbnhd-lengths33_70-causalTrue."""
    parts = [f"{name}{value}" for name, value in row.items() if value not in (None, False)]
    text = "-".join(parts).replace("torch.", "")
    return text.translate(str.maketrans("", "", " '()")).replace(",", "_")
