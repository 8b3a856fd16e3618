"""Tests of plug-ins inside the real packages of servers, which `make test-servers` installs: see
install.py. A folder of tests is of the package of its name, and skipped where that is missing.
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import importlib.util
import platform
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PASSED = HERE / "passed.csv"
PAGE = HERE.parents[1] / "docs" / "server_versions.md"
PACKAGES = ("vllm", "sglang")
collect_ignore = [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", choices=PACKAGES, help="note the versions if all tests passed")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    package = session.config.getoption("--record")
    if package is None or exitstatus != 0:
        return
    row = {
        "package": package,
        "version": importlib.metadata.version(package),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "tests": str(session.testscollected),
        "date": str(datetime.date.today()),
    }
    with PASSED.open() as file:
        rows = list(csv.DictReader(file))
    key = ("package", "version", "torch", "python")
    rows = [old for old in rows if any(old[name] != row[name] for name in key)] + [row]
    with PASSED.open("w", newline="") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    PAGE.write_text(page(rows))


def page(rows: list[dict[str, str]]) -> str:
    """docs/server_versions.md."""
    lines = [
        "# Versions of servers that passed",
        "",
        "`make test-servers` runs the plug-ins of [serving](serving.md) inside the real packages "
        "and notes here what",
        "passed: the last day for each version. CI runs it each week with the newest releases.",
        "",
        "| package | torch | transformers | Python | tests | date |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: (row["package"], row["date"])):
        names = ("torch", "transformers", "python", "tests", "date")
        cells = [f"{row['package']} {row['version']}", *(row[name] for name in names)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
