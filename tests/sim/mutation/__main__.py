"""Runs every mutant of every kernel, or a sample of them, and writes the summary that is committed:
``python -m tests.sim.mutation [--count N] [implementation ...]``.

For each implementation ``<implementation>.json``: date, commit, whether the run was full or a
sample, of how many mutants, scores by kernel with the hash of the kernel's PTX, survivors, excused
mutants with their reasons.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .. import json_rows
from . import protocols
from .runner import Outcome, Score, Subject, run_subject, subject_of, targets_of
from .targets import implementations

FOLDER = Path(__file__).parent


def shown(outcome: Outcome) -> str:
    """One line for an outcome, without the numbers of registers and labels."""
    return f"{outcome.kind}: {outcome.change} | {outcome.source}"


def counted(outcomes: list[Outcome]) -> dict[str, int]:
    """How often each line came."""
    return dict(sorted(Counter(map(shown, outcomes)).items()))


def subjects_of(implementation: str) -> Iterator[Subject]:
    """The kernels of an implementation, or "protocols"."""
    if implementation == "protocols":
        yield from protocols.subjects()
        return
    for target in targets_of(implementation):
        yield subject_of(target)


def summary(implementation: str, count: int | None, seed: int) -> dict[str, Any]:
    """Runs the mutants of an implementation."""
    kernels: dict[str, Any] = {}
    every: list[Outcome] = []
    there_are = 0
    for subject in subjects_of(implementation):
        score, of = run_subject(subject, count, seed)
        there_are += of
        print(f"{subject.name}: mutation score {score}", flush=True)
        every += score.outcomes
        kernels[subject.name] = (
            {"ptx": subject.ptx, "of": of}
            | score.to_dict()
            | {"survivors": counted(score.survivors)}
        )
    whole = Score(every)
    print(f"{implementation}: mutation score {whole}", flush=True)
    reasons: dict[str, dict[str, int]] = {}
    for outcome in every:
        if outcome.result == "excused":
            reasons.setdefault(outcome.detail, {}).setdefault(shown(outcome), 0)
            reasons[outcome.detail][shown(outcome)] += 1
    return {
        "implementation": implementation,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "seed": seed,
        "extent": "full" if whole.run == there_are else "sample",
        "of": there_are,
        **whole.to_dict(),
        "kernels": kernels,
        "excused_because": reasons,
    }


def commit() -> str:
    """Of the checkout; empty where there is no git."""
    command = ["git", "-C", str(FOLDER), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("implementation", nargs="*")
    parser.add_argument("--count", type=int, help="of each kernel; default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for implementation in options.implementation or [*implementations(), "protocols"]:
        result = summary(implementation, options.count, options.seed)
        file = options.output / f"{implementation}.json"
        file.write_text(json_rows.dump(result))


if __name__ == "__main__":
    main()
