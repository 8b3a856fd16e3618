"""Which branches of python/archflash and which lines of the host code in C++ tests run:

    python -m tests.covered run FOLDER tests/unit tests/sim    # once, or several times for parts
    python -m tests.covered report FOLDER [--write]            # make coverage does both

FOLDER is a build with -C cmake.define.ARCHFLASH_COVERAGE=ON, whose counters run() adds to; any
other folder will do with --only python. Tests in other environments, such as those of servers, add
to the same FOLDER. --write writes tests/uncovered.csv: what no test came to, and which tests were
run. With --only it keeps the rows of the other language.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
UNCOVERED = Path(__file__).with_name("uncovered.csv")
PACKAGE = "python/archflash"
LINES = ("src/runtime", "src/common/planning", "sim")  # of which lines are counted
TESTS_OF_PYTHON = "tests of python/archflash"  # a row of the table
TESTS = "tests.txt"  # in the folder: a line of what pytest was given for each run
# What coverage.py is told: branches, of every process that tests start.
SETTINGS = """\
[run]
branch = true
parallel = true
patch =
    subprocess
    _exit
source_pkgs = archflash
data_file = {data}
[paths]
package =
    {package}
    */archflash
[json]
output = {json}
"""


class Part(NamedTuple):
    """What is covered of a file, or of a folder.

    Attributes:
        name: of the file or folder.
        covered, of: branches or lines.
        missing: which were not run: lines as "12" or "12-15", branches as "12 to 15", or "12 to
            end" of the function.
    """

    name: str
    covered: int
    of: int
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.covered} of {self.of} ({self.covered / max(1, self.of):.1%})"


def together(name: str, parts: Iterable[Part]) -> Part:
    """What is covered of several files."""
    listed = list(parts)
    return Part(name, sum(part.covered for part in listed), sum(part.of for part in listed))


def settings(folder: Path) -> Path:
    """The file of settings of coverage.py."""
    file = folder / "coverage.ini"
    data, told = folder / "python" / ".coverage", folder / "python.json"
    data.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(SETTINGS.format(data=data, json=told, package=ROOT / PACKAGE))
    return file


def run(folder: Path, tests: Sequence[str]) -> int:
    """Runs tests, and adds what they cover to what is known."""
    with (settings(folder).parent / TESTS).open("a") as file:
        file.write(" ".join(tests) + "\n")
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings(folder)}"]
    return subprocess.run([*command, "-m", "pytest", "-q", *tests], cwd=ROOT).returncode


# --- branches of Python ---


def branches(told: dict[str, object], package: Path) -> list[Part]:
    """The files of the package, by what coverage.py tells of the installed ones."""
    parts = []
    files = told["files"]
    assert isinstance(files, dict)
    for path, file in sorted(files.items()):
        if "archflash/" not in path:
            continue
        name = f"{PACKAGE}/{path.rpartition('archflash/')[2]}"
        missing = tuple(
            f"{start} to {'end' if stop < 0 else stop}"
            for start, stop in sorted(file["missing_branches"])
        )
        summary = file["summary"]
        parts.append(Part(name, summary["covered_branches"], summary["num_branches"], missing))
    seen = {part.name for part in parts}
    assert seen or not package.is_dir(), "no file of the package was measured"
    return parts


# --- lines of C++ ---


def counted(folder: Path) -> Iterator[dict[str, object]]:
    """What gcov tells of each object file of a build, also of those that never ran."""
    notes = sorted(folder.rglob("*.gcno"))
    for note in notes:
        command = ["gcov", "--json-format", "--stdout", str(note)]
        done = subprocess.run(command, cwd=note.parent, capture_output=True, check=True)
        for line in done.stdout.splitlines():
            if line.startswith(b"{"):
                yield json.loads(line)


def lines(told: Iterable[dict[str, object]], root: Path) -> list[Part]:
    """The files of this project. A line of a header counts as run if it ran anywhere."""
    runs: dict[str, dict[int, int]] = collections.defaultdict(dict)
    for unit in told:
        files = unit["files"]
        assert isinstance(files, list)
        for file in files:
            path = Path(str(unit["current_working_directory"])) / file["file"]
            if not path.is_relative_to(root):
                continue
            known = runs[path.relative_to(root).as_posix()]
            for line in file["lines"]:
                number = line["line_number"]
                known[number] = max(known.get(number, 0), line["count"])
    return [
        Part(name, sum(map(bool, known.values())), len(known), missed(known))
        for name, known in sorted(runs.items())
        if name.startswith(tuple(f"{place}/" for place in LINES))
    ]


def missed(counts: dict[int, int]) -> tuple[str, ...]:
    """The lines that never ran, as ranges of lines between which nothing ran."""
    found: list[list[int]] = []
    ran = True
    for number, count in sorted(counts.items()):
        if count == 0 and ran:
            found.append([number, number])
        elif count == 0:
            found[-1][1] = number
        ran = count > 0
    return tuple(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


# --- the report ---


def report(folder: Path, source: Path, only: str | None, write: bool) -> list[Part]:
    """Tells what is covered; write: also into tests/uncovered.csv.

    Args:
        folder: of the build.
        source: the folder that was built.
        only: "python" or "c++" for one of them.
        write: whether the file is written.
    """
    found = lines(counted(folder), source) if only != "python" else []
    if only != "c++":
        found += branches(of_coverage(folder), ROOT / PACKAGE)
    if write:
        write_missing(found, (folder / TESTS).read_text().splitlines())
    totals = (
        together(place, (part for part in found if part.name.startswith(f"{place}/")))
        for place in (PACKAGE, *LINES)
    )
    return [total for total in totals if total.of]


def of_coverage(folder: Path) -> dict[str, object]:
    """What coverage.py tells of all runs together."""
    environment = os.environ | {"COVERAGE_RCFILE": str(settings(folder))}
    coverage = [sys.executable, "-m", "coverage"]
    subprocess.run([*coverage, "combine", "-q", "--keep"], env=environment, check=True)
    subprocess.run([*coverage, "json", "-q", "-i"], env=environment, check=True)
    told: dict[str, object] = json.loads((folder / "python.json").read_text())
    return told


def write_missing(found: Sequence[Part], tests: Iterable[str]) -> None:
    """Writes what is missing, in place of the rows of the same kind: of Python or of C++."""

    def kind(name: str) -> bool:  # whether it is of Python
        return name.startswith((PACKAGE, TESTS_OF_PYTHON))

    rows = [
        [part.name, str(part.covered), str(part.of), "; ".join(part.missing)]
        for part in found
        if part.missing
    ]
    measured = {kind(part.name) for part in found}
    if True in measured:
        rows.append([TESTS_OF_PYTHON, "", "", "; ".join(dict.fromkeys(tests))])
    if UNCOVERED.exists():
        with UNCOVERED.open(newline="") as file:
            rows += [row for row in [*csv.reader(file)][1:] if kind(row[0]) not in measured]
    with UNCOVERED.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([["file", "covered", "of", "not covered"], *sorted(rows)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.covered", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run tests")
    runs.add_argument("folder", type=Path)
    runs.add_argument("tests", nargs=argparse.REMAINDER, help="what pytest is given")
    reports = commands.add_parser("report", help="tell what is covered")
    reports.add_argument("folder", type=Path)
    reports.add_argument("--source", type=Path, default=ROOT, help="the folder that was built")
    reports.add_argument("--only", choices=("python", "c++"), help="what is told (default: both)")
    reports.add_argument("--write", action="store_true", help="write tests/uncovered.csv")
    options = parser.parse_args(argv)
    folder = options.folder.resolve()
    if options.command == "run":
        return run(folder, options.tests)
    for part in report(folder, options.source.resolve(), options.only, options.write):
        print(part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
