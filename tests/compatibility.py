"""Which versions of which packages passed which tests. Runs of tests note themselves in
compatibility.csv, of which docs/compatibility.md is made:

    python -m tests.compatibility transformers diffusers

runs the tests of packages that are installed here. tests/torch_versions.py and tests/servers note
what they ran.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import fcntl
import importlib.metadata
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PASSED = Path(__file__).with_name("compatibility.csv")
PAGE = ROOT / "docs" / "compatibility.md"
COLUMNS = ("package", "version", "tested", "torch", "python", "passed", "skipped", "date")
# What is tested inside a package: words, and where the tests are.
PACKAGES = {
    "transformers": ("attention function in its models", ["tests/unit/test_transformers.py"]),
    "diffusers": (
        "attention backend in its pipelines and parallel calls", ["tests/unit/test_diffusers.py"],
    ),
    "triton": ("its kernels on the simulator", ["tests/sim/test_third_party.py"]),
    "python": (
        "calls, plans, interfaces of others, torch.compile",
        [
            *(
                f"tests/unit/test_{name}.py"
                for name in (
                    "api", "bad_input", "bounded", "cli", "compat", "compat_cute",
                    "compat_xformers", "dispatch", "export", "kvcache", "layers", "masks", "plan",
                    "prepared_calls", "tracing", "transforms",
                )
            ),
            "tests/core_set/test_calls.py",
        ],
    ),
}  # fmt: skip

HEAD = """\
# Versions that passed

Tests note here what passed, the last day for each version; nobody edits this page. Rows of torch
come from `make test-torch TORCH=VERSION` (on a CPU, all that depends on torch's version), those of
vLLM and SGLang from `make test-servers` (inside the real packages, each week in CI with the
newest), others from `python -m tests.compatibility PACKAGE`. Skipped are tests of what a version
does not have.

| package | tested | torch | Python | passed | skipped | date |
| --- | --- | --- | --- | --- | --- | --- |
"""

Row = dict[str, str]


def rows() -> list[Row]:
    """What was noted."""
    with PASSED.open() as file:
        return list(csv.DictReader(file))


def note(
    package: str, version: str, tested: str, *, torch: str, passed: int, skipped: int = 0
) -> None:
    """Notes that the tests of a version passed today, in place of what is known of it."""
    python = ".".join(platform.python_version_tuple()[:2])
    values = (package, version, tested, torch, python, str(passed), str(skipped))
    row = dict(zip(COLUMNS, (*values, str(datetime.date.today())), strict=True))
    key = ("package", "version", "torch", "python")
    with PASSED.open("r+", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the tests of two servers may end at once
        kept = [old for old in csv.DictReader(file) if any(old[name] != row[name] for name in key)]
        made = sorted([*kept, row], key=_order)
        file.seek(0)
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(made)
        file.truncate()
        PAGE.write_text(page(made))


def _order(row: Row) -> tuple[str, list[int], str]:
    numbers = [int(number) for number in re.findall(r"\d+", row["version"])]
    return row["package"], numbers, row["torch"]


def page(noted: Sequence[Row]) -> str:
    """docs/compatibility.md."""
    lines = []
    for row in noted:
        names = ("tested", "torch", "python", "passed", "skipped", "date")
        cells = [f"{row['package']} {row['version']}", *(row[name] for name in names)]
        lines.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(lines)


def counts(output: str) -> tuple[int, int]:
    """How many tests passed and were skipped, by the last line of pytest."""
    found = re.findall(r"(\d+) (passed|skipped)", output.splitlines()[-1])
    words = {word: int(number) for number, word in found}
    return words.get("passed", 0), words.get("skipped", 0)


def installed(package: str) -> str:
    """The version of a package here, or in the folder of packages that are for tests alone."""
    if package == "python":
        return platform.python_version()
    path = [*sys.path, str(Path(sys.prefix) / "third-party")]
    found = importlib.metadata.distributions(name=package, path=path)
    return next(iter(found)).version


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility", description=__doc__)
    parser.add_argument("packages", nargs="+", choices=sorted(PACKAGES), metavar="PACKAGE")
    failed = []
    for package in parser.parse_args(argv).packages:
        tested, files = PACKAGES[package]
        version = installed(package)
        command = [sys.executable, "-m", "pytest", "-q", *files]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        passed, skipped = counts(done.stdout)
        if done.returncode != 0 or not passed:
            failed.append(f"{package} {version}")
            continue
        torch = importlib.metadata.version("torch")
        note(package, version, tested, torch=torch, passed=passed, skipped=skipped)
    if failed:
        print(f"did not pass: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
