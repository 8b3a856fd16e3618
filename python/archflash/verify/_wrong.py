"""What is said of a wrong result: how far it is off, and where."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archflash import reference

TILE, QUARTER, SLAB = 128, 32, 64  # rows of a tile, rows of a quarter of its lanes, columns
LUCK = 2  # times the bound of the largest error, where the mean is within its own
SHOWN = 8  # tiles, heads and elements that are named one by one


class WrongError(Exception):
    """A result is wrong.

    Attributes:
        where: a map of the wrong elements, for people and for the archive.
    """

    def __init__(self, said: str, where: dict[str, Any] | None = None) -> None:
        super().__init__(said)
        self.where = where or {}


def judge(what: str, got: Tensor, expected: Tensor, report: reference.ErrorReport) -> None:
    """Raises WrongError if a report of the error rule says so.

    Args:
        what: the tensor, in words.
        got: the tensor, its rows before its last dimension.
        expected: its reference in float64.
        report: that of `reference.check` and its like.
    """
    if report.ok:
        return
    # The baseline's largest error of few numbers may be small by luck. A right kernel must not be
    # called wrong for that, and a wrong one is further off, in its mean or its largest error.
    if report.mean_error <= report.mean_bound and report.max_error <= LUCK * report.bound:
        return
    error = (got.double() - expected).abs()
    same = (got.double() == expected) | (got.isnan() & expected.isnan())
    # Where no element is beyond the bound their mean is: then the map shows what is beyond that.
    bound = report.bound if report.bad_elements else report.mean_bound
    wrong = ~same & ~(error <= bound)
    raise WrongError(f"{what}: {report}", where(wrong, got))


def same_bits(what: str, first: Tensor, again: Tensor) -> None:
    """Raises WrongError where two results of the same call differ."""
    differs = (first != again) & ~(first.isnan() & again.isnan())
    if bool(differs.any()):
        count = int(differs.sum())
        said = f"{what}: {count} of {differs.numel()} elements differ between two runs"
        raise WrongError(said, where(differs, again))


def where(wrong: Tensor, got: Tensor) -> dict[str, Any]:
    """Where the wrong elements of a result are.

    Args:
        wrong: bool, (..., rows, columns).
        got: the result.

    Returns:
        Counts, and the share of wrong elements by head, tile of rows, quarter of the lanes of such
        a tile, and slab of columns. Shares of parts that are all right are left out.
    """
    wrong, got = (x.reshape(-1, *x.shape[-2:]) if x.dim() > 1 else x[None, :, None]
                  for x in (wrong, got))  # fmt: skip
    rows, columns = wrong.shape[1:]
    of_row = wrong.double().mean((0, 2))
    of_column = wrong.double().mean((0, 1))
    row = torch.arange(rows, device=wrong.device)

    def shares(values: Tensor, parts: Tensor) -> dict[str, float]:
        found = {part: float(values[parts == part].mean()) for part in sorted({*parts.tolist()})}
        return {str(part): float(f"{share:.3g}") for part, share in found.items() if share > 0}

    places = wrong.nonzero()[:SHOWN].tolist()
    return {
        "wrong": int(wrong.sum()),
        "of": wrong.numel(),
        "nan": int(got.isnan().sum()),
        "infinite": int(got.isinf().sum()),
        "heads": shares(wrong.double().mean((1, 2)), torch.arange(len(wrong), device=row.device)),
        f"tiles of {TILE} rows": shares(of_row, row // TILE),
        "lane quarters": shares(of_row, row % TILE // QUARTER),
        f"slabs of {SLAB} columns": shares(
            of_column, torch.arange(columns, device=row.device) // SLAB
        ),
        "first": [[*place, float(got[tuple(place)])] for place in places],
    }


def as_text(found: dict[str, Any]) -> list[str]:
    """A map as lines for people."""
    if not found:
        return []
    lines = [
        f"{found['wrong']} of {found['of']} elements wrong; the result has {found['nan']} NaN and "
        f"{found['infinite']} infinities"
    ]
    for name, shares in found.items():
        if isinstance(shares, dict):
            parts = [f"{part}: {100 * share:.3g}%" for part, share in shares.items()]
            more = f", and {len(parts) - SHOWN} more" if len(parts) > SHOWN else ""
            lines.append(f"wrong by {name}: {', '.join(parts[:SHOWN])}{more}")
    first = [f"({', '.join(map(str, place))}) {value:.6g}" for *place, value in found["first"]]
    lines.append(f"first: {'; '.join(first)}")
    return lines
