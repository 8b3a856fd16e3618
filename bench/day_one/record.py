"""The file of a day: the outcome of every job, and the rows that it measured."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from bench.results import COLUMNS, Row

OWN_COLUMNS = ("part", "item", "status", "seconds", "detail")
RECORD_COLUMNS = (*OWN_COLUMNS, *COLUMNS)
# A job's status is "ok", "failed" (it ran and something is wrong), "timeout" or "crashed" (its
# process died). Other rows have "timed", "simulated" (no times), "refused" (a candidate's reason)
# or "note".
OK, TIMEOUT = "ok", "timeout"
# The columns that must be the same in all rows of one file.
SAME = ("implementation", "simulated", "commit", "dirty", "gpu", "driver", "torch")


def make_row(
    part: str,
    item: str,
    status: str,
    detail: str = "",
    seconds: float | None = None,
    measured: Mapping[str, str] | None = None,
) -> Row:
    """A row of the file.

    Args:
        part: "environment", or one of jobs.PARTS.
        item: the job's name.
        status: see the top of this file.
        detail: a sentence or other remark.
        seconds: how long the job took.
        measured: columns of bench/results, if something was measured.
    """
    row = dict.fromkeys(RECORD_COLUMNS, "")
    row |= {"part": part, "item": item, "status": status, "detail": " ".join(detail.split())}
    if seconds is not None:
        row["seconds"] = f"{seconds:.1f}"
    return {**row, **(measured or {})}


def load(path: Path) -> list[Row]:
    """The rows of a file; none if there is no file.

    Raises:
        ValueError: the file is no record, or ends in the middle of a row.
    """
    if not path.exists() or path.stat().st_size == 0:
        return []
    text = path.read_text()
    if text.split("\n", 1)[0] != ",".join(RECORD_COLUMNS) or not text.endswith("\n"):
        raise ValueError(f"{path} is no record of a day, or is cut off; choose another --output")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Appends rows, with the header where the file is new."""
    is_new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, RECORD_COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def status_of_jobs(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, str], str]:
    """The latest status of each job, by part and item. Rows of measurements are left out."""
    jobs = {}
    for row in rows:
        if row["status"] in (OK, "failed", TIMEOUT, "crashed"):
            jobs[row["part"], row["item"]] = row["status"]
    return jobs


def difference(known: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Why a run cannot be continued in this environment; None if it can."""
    for name in SAME:
        if known.get(name) != here.get(name):
            return f"{name} was {known.get(name)!r} and is {here.get(name)!r}"
    return None
