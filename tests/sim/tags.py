"""Tags in the CUDA sources by which tests know the instructions of a statement.

A comment on a line of its own, `// mutants: tag` or `// findings: tag` (or several tags, with
commas), names the statement below it: the lines up to the first that ends with a semicolon or a
brace. It covers the instructions of these lines, also of functions that are called there and
inlined. The first such comment of a file names this page in parentheses. What the first kind names
is told in tests/sim/mutation/excuses.py, the second in tests/sim/explained.py. The words of all
other comments, and the code itself, may change freely.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
KINDS = ("mutants", "findings")
EXPLANATION = " (tests/sim/tags.py)"
_TAG = re.compile(rf"^\s*// ({'|'.join(KINDS)}): (.+?)(?:{re.escape(EXPLANATION)})?$")


def tags_of(text: str, kind: str) -> dict[int, frozenset[str]]:
    """The tags of each line of a source that has any; the first line is 1."""
    found: dict[int, frozenset[str]] = {}
    waiting: frozenset[str] = frozenset()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TAG.match(line):
            if match[1] == kind:
                waiting |= {tag.strip() for tag in match[2].split(",")}
            continue
        code = line.partition("//")[0].rstrip()
        if waiting and code:
            found[number] = waiting
            if code[-1] in ";{}":
                waiting = frozenset()
    return found


@functools.cache
def tags_in(file: Path, kind: str) -> dict[int, frozenset[str]]:
    """The tags of the lines of a file; none if it does not exist."""
    return tags_of(file.read_text(), kind) if file.exists() else {}


def tags_at(source: str, kind: str) -> frozenset[str]:
    """The tags of all lines that "file:line, inlined at file:line, ..." names, in src."""
    return frozenset[str]().union(
        *(
            tags_in(SOURCES / file, kind).get(int(line), ())
            for file, line in re.findall(r"([^, ]+):(\d+)", source)
        )
    )


def tagged_lines(kind: str) -> dict[str, set[tuple[str, int]]]:
    """For each tag in the sources the lines that it covers: file, from src on, and number."""
    lines: dict[str, set[tuple[str, int]]] = {}
    for file in sorted(SOURCES.rglob("*.cu*")):
        for number, tags in tags_in(file, kind).items():
            for tag in tags:
                lines.setdefault(tag, set()).add((str(file.relative_to(SOURCES)), number))
    return lines


def unexplained() -> list[str]:
    """The files, from src on, whose first tag does not name this file."""
    first = {
        str(file.relative_to(SOURCES)): next(filter(_TAG.match, file.read_text().splitlines()), "")
        for file in sorted(SOURCES.rglob("*.cu*"))
    }
    return [name for name, line in first.items() if line and not line.endswith(EXPLANATION)]
