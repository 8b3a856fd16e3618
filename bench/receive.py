"""Takes in what a stranger's card said: `python -m bench.receive FILE [--origin TEXT]`.

FILE is what `archflash verify --send FILE` wrote. It is checked: nothing of it is believed that its
rows do not say, and the verdicts are made anew from these. Then verdicts, times and failures become
rows of bench/results/<gpu>-verify.csv, each with its origin, from which `python -m bench.measured`
takes what is proved for everybody. Exit status 2 for a file that is no such archive.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import re
import sys
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from archflash import _archflash as native
from archflash.verify import _jobs, _run, _verdict, _worker
from archflash.verify._setup import Job, Setup, kernels_on
from bench.environment import gpu_slug
from bench.results import RESULTS_FOLDER, Row

COLUMNS = (
    "run_id", "date", "origin", "gpu", "capability", "driver", "torch", "archflash", "kind",
    "kernel", "pass", "item", "status", "detail", "numbers",
)  # fmt: skip
VERDICT, TIME, FAILURE = "verdict", "time", "failure"
SUFFIX = "-verify.csv"
MOST_BYTES = 32 << 20  # of what a file holds; a run has a hundredth of it
STATUSES = (*_run.BAD, _worker.OK, _worker.NOT_HERE, _run.NOT_RUN)
DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}Z"
FACTS = ("date", "gpu", "capability", "driver", "torch", "archflash", "memory_bytes", "kernels")


def read_archive(path: Path) -> dict[str, Any]:
    """What an archive holds.

    Raises:
        ValueError: it is none; the message says why.
    """
    try:
        with tarfile.open(path, "r:gz") as archive:
            entry = archive.getmember("verify.json")
            file = archive.extractfile(entry)
            if file is None or entry.size > MOST_BYTES:
                raise ValueError("verify.json is no file, or too large")
            found: dict[str, Any] = json.loads(file.read(MOST_BYTES))
    except (
        OSError, EOFError, zlib.error, tarfile.TarError, KeyError, ValueError, RecursionError,
    ) as error:  # fmt: skip
        raise ValueError(f"{path} is not of `archflash verify --send`: {error}") from error
    if not isinstance(found, dict) or found.get("format") != _verdict.FORMAT:
        raise ValueError(f"{path} has another format than {_verdict.FORMAT}: take that version")
    return found


def read_rows(told: dict[str, Any]) -> list[_run.Row]:
    """The rows of an archive.

    Raises:
        ValueError: a row is malformed.
    """
    try:
        rows = [_run.Row(**row) for row in told["rows"]]
    except (TypeError, KeyError) as error:
        raise ValueError(f"a row is malformed: {error}") from error
    for row in rows:
        texts = (row.part, row.kernel, row.job, row.item, row.of, row.detail)
        dicts = isinstance(row.where, dict) and isinstance(row.numbers, dict)
        if row.status not in STATUSES or not (dicts and all(isinstance(x, str) for x in texts)):
            raise ValueError(f"a row is malformed: {row}")
    return rows


def check_facts(facts: dict[str, str]) -> tuple[int, int]:
    """The compute capability that an archive is about.

    Raises:
        ValueError: facts are missing, or are not of this version of archflash.
    """
    if missing := [name for name in FACTS if not str(facts.get(name, ""))]:
        raise ValueError(f"it does not say {', '.join(missing)}")
    if facts["archflash"] != native.version:
        raise ValueError(
            f"it is of archflash {facts['archflash']}, and this is {native.version}: take it in "
            "with a checkout of that version"
        )
    major, _, minor = facts["capability"].partition(".")
    if not all(re.fullmatch("[0-9]{1,3}", word) for word in (major, minor)):
        raise ValueError(f"{facts['capability']!r} is no compute capability")
    if not re.fullmatch(DATE, facts["date"]):  # runs are ordered by it
        raise ValueError(f"{facts['date']!r} is no date such as 2027-01-31T12:00Z")
    if not re.fullmatch("[0-9]{1,18}", facts["memory_bytes"]):
        raise ValueError(f"{facts['memory_bytes']!r} is no number of bytes")
    capability = int(major), int(minor)
    known = native.find_known_device(facts["gpu"])
    if known is not None and known.device.capability != capability:
        raise ValueError(f"{facts['gpu']} has no compute capability {facts['capability']}")
    return capability


def has_item(job: Job, item: str) -> bool:
    """Whether a job has an item of this name. Which calls come to a kernel depends on all of a
    card, and so is not known here: of them only the kernel is looked at.
    """
    if job.part == _jobs.KERNELS:
        return item.partition(":")[0] in _verdict.kernel_names(job.kernel)
    return item in {one.name for one in job.items}


def rows_of(told: dict[str, Any], origin: str) -> tuple[list[Row], list[_verdict.Verdict]]:
    """The rows that an archive adds, and the verdicts that its own rows come to.

    Raises:
        ValueError: it is malformed, or says of a kernel what its rows do not.
    """
    if not isinstance(told.get("facts"), dict):
        raise ValueError("it has no facts")
    facts = {str(name): str(value) for name, value in told["facts"].items()}
    capability = check_facts(facts)
    found = read_rows(told)
    full = facts.get("full") == "True"
    setup = Setup(
        facts["gpu"], "cuda:0", capability, int(facts["memory_bytes"]), full,
        kernels_on(capability),
    )  # fmt: skip
    jobs = {job.name: job for job in _jobs.make_jobs(setup)}
    for row in found:
        job = jobs.get(row.job)
        if job is None or (job.part, job.kernel, job.of) != (row.part, row.kernel, row.of):
            raise ValueError(f"this version has no such job: {row.job}")
        if not has_item(job, row.item):
            raise ValueError(f"this version has no such item: {row.job}: {row.item}")
    wanted = sorted({(job.kernel, job.of, job.part) for job in jobs.values() if job.of})
    # A run that was not asked for all jobs, or did not come to the end of one, proves nothing
    # of its pass: which calls come to a kernel is not known here, so that none would be missed.
    ended = {row.job for row in found} - {*facts.get("unfinished", "").split("; ")}
    unfinished = [(x.kernel, x.of, x.name) for x in jobs.values() if x.name not in ended]
    if facts.get("only"):
        unfinished = [(x.kernel, x.of, x.name) for x in jobs.values()]
    said = _verdict.verdicts(found, wanted, unfinished)
    tried = {(row.job, row.item) for row in found}
    for verdict in said:
        left_out = [
            (job.name, item.name)
            for job in jobs.values()
            if (job.kernel, job.of) == (verdict.kernel, verdict.of) and job.part != _jobs.KERNELS
            for item in job.items
            if (job.name, item.name) not in tried
        ]
        if verdict.said == _verdict.PROVED and left_out:
            raise ValueError(f"{verdict.kernel}: {len(left_out)} items of that pass are missing")
    shared = {name: facts[name] for name in COLUMNS if name in facts}
    mark = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    shared |= {"origin": origin, "date": facts["date"][:10]}
    when = re.sub("[-:]", "", facts["date"])  # as the other files have it
    shared["run_id"] = f"{when}-{gpu_slug(facts['gpu'])}-{mark}"

    def row(kind: str, **more: str) -> Row:
        return {**dict.fromkeys(COLUMNS, ""), **shared, "kind": kind, **more}

    rows = [
        row(VERDICT, kernel=x.kernel, status=x.said, detail=str(x), **{"pass": x.of}) for x in said
    ]
    for one in found:
        told_of = {"kernel": one.kernel, "pass": one.of, "item": f"{one.job}: {one.item}"}
        if one.status in _run.BAD:
            detail = "; ".join(_verdict.failure_lines(one)[1:])
            said_of = f"{one.detail} {detail}".strip()
            rows.append(
                row(FAILURE, status=one.status, detail=" ".join(said_of.split()), **told_of)
            )
        elif one.part == _jobs.TIMES and one.numbers:
            rows.append(row(TIME, status=one.status, numbers=json.dumps(one.numbers), **told_of))
    return rows, said


def add(rows: Sequence[Row], folder: Path) -> Path:
    """Appends rows to their GPU's file.

    Raises:
        ValueError: they are in it.
    """
    path = folder / (gpu_slug(rows[0]["gpu"]) + SUFFIX)
    known = load(path) if path.exists() else []
    if any(row["run_id"] == rows[0]["run_id"] for row in known):
        raise ValueError(f"{path} has run {rows[0]['run_id']} already")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not known:
            writer.writeheader()
        writer.writerows(rows)
    return path


def load(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
        ValueError: it has other columns.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path} has other columns than {', '.join(COLUMNS)}")
        return list(reader)


def verdicts(folder: Path) -> Iterable[Row]:
    """The verdicts in all files, the oldest run first: one GPU's may speak against another's."""
    found = [row for path in sorted(folder.glob(f"*{SUFFIX}")) for row in load(path)]
    return sorted((row for row in found if row["kind"] == VERDICT), key=lambda row: row["run_id"])


def main(argv: Sequence[str] | None = None) -> int:
    """Takes in a file; see the top of this one."""
    parser = argparse.ArgumentParser(prog="python -m bench.receive", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--origin", default="", help="where it came from, such as an issue's link")
    parser.add_argument("--output", type=Path, default=RESULTS_FOLDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        rows, said = rows_of(read_archive(options.file), options.origin)
        path = add(rows, options.output)
    except ValueError as error:
        print(f"{options.file}: {error}", file=sys.stderr)
        return 2
    for verdict in said:
        print(verdict)
    print(f"{len(rows)} rows added to {path}; now run `python -m bench.measured`")
    return 0


if __name__ == "__main__":
    sys.exit(main())
