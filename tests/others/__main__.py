"""Others' tests on archflash, from folders that hold their repositories; nothing is fetched.

    python -m tests.others --flash-attention DIR --pytorch DIR --xformers DIR --flashinfer DIR \
        --flashmla DIR [--seconds 60] [--sample 40] [--together] [--shares 1] [--csv FILE]

Each suite runs in a process of its own, as suites.py says, on the GPU at hand, or in --shares of
them. Of each test function at most --sample cases are drawn, the same in each run, and begun for
--seconds; --together runs all suites at once. What fails in a library that PyTorch's own operators
serve is run again without archflash. The table is that of docs/reliability.md. The exit status is 1
if a test failed with archflash alone.
"""

from __future__ import annotations

import argparse
import collections
import csv
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench import environment

from tests.others.suites import LIBRARIES, SUITES, Suite

ROOT = Path(__file__).resolve().parents[2]
COUNTED = ("passed", "failed", "alone", "refused", "skipped", "left")
COLUMNS = (
    "date", "commit", "machine", "torch", "suite", "theirs", "passed", "failed", "alone", "refused",
    "skipped", "left",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.others", description=__doc__)
    for library in LIBRARIES:
        parser.add_argument(f"--{library}", type=Path, metavar="DIR", help="its repository")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each suite")
    parser.add_argument("--grace", type=float, default=60.0, help="for its start and last test")
    parser.add_argument("--sample", type=int, default=40, help="cases of a test function, at most")
    parser.add_argument("--together", action="store_true", help="all suites at once")
    parser.add_argument("--shares", type=int, default=1, help="processes of a suite")
    parser.add_argument("--suite", action="append", choices=[s.name for s in SUITES])
    parser.add_argument("--csv", type=Path, help="a file to which the counts are appended")
    parser.add_argument("--why", type=Path, help="a file for the first line of each failure")
    args = parser.parse_args()
    given = {x: getattr(args, x.replace("-", "_")) for x in LIBRARIES}
    chosen = [s for s in SUITES if given[s.library] and s.name in (args.suite or [s.name])]
    if not chosen:
        parser.error("no folder is given: each of " + ", ".join(f"--{x}" for x in LIBRARIES))
    for suite in chosen:
        if suite.file_in(given[suite.library]) is None:
            parser.error(f"--{suite.library} {given[suite.library]}: has none of {suite.files}")
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for suite in chosen:
            run = _Run(suite, given[suite.library].resolve(), Path(folder), args)
            running.append(run)
            if not args.together:
                run.wait()
        for run in running:
            run.again()
        rows = [run.row() for run in running]
    why = [f"{run.suite.name}: {line}" for run in running for line in run.why]
    if args.why is not None:
        args.why.write_text("\n".join(why) + "\n")
    else:
        print("\n".join(why))
    print(table(rows))
    if args.csv is not None:
        new = not args.csv.exists()
        with args.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(rows)
    return int(any(row["failed"] for row in rows))


class _Run:
    """A suite in its processes, and again without archflash what has failed in it."""

    def __init__(self, suite: Suite, folder: Path, out: Path, args: argparse.Namespace) -> None:
        self.suite, self.folder, self.out, self.args = suite, folder, out, args
        self.why: list[str] = []
        self._again = False
        self._begin = time.monotonic()
        self._processes = [self._start("first", [], i) for i in range(args.shares)]

    def _start(self, turn: str, only: list[str], share: int = 0) -> subprocess.Popen[bytes]:
        file = self.suite.file_in(self.folder)
        assert file is not None
        told = {
            "suite": self.suite.name, "folder": str(self.folder),
            "sample": self.args.sample * self.suite.times,
            "seconds": self.args.seconds, "only": only, "alone": turn == "again",
            "share": share, "shares": self.args.shares,
            "result": str(self.out / f"{self.suite.name}-{turn}-{share}.json"),
        }  # fmt: skip
        ini = self.out / "pytest.ini"
        ini.write_text("[pytest]\naddopts =\n")
        paths = [str(self.folder / x) for x in self.suite.paths]
        python = [str(ROOT), *paths, *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "tests.others.plugin",
             "-p", "no:cacheprovider", "--noconftest", "-c", str(ini), "--rootdir", str(self.out),
             "--import-mode", self.suite.import_mode, "--tb", "short", "--color", "no", str(file)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(python),
                 "ARCHFLASH_OTHERS": json.dumps(told)},
            stdout=(self.out / f"{self.suite.name}-{turn}-{share}.log").open("wb"),
            stderr=subprocess.STDOUT,
            cwd=self.out,
        )  # fmt: skip

    def wait(self) -> None:
        """Until all have ended; a test that hangs is ended."""
        end = self._begin + self.args.seconds + self.args.grace
        for process in self._processes:
            try:
                process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _result(self, turn: str) -> dict[str, Any]:
        counts: collections.Counter[str] = collections.Counter()
        failures: dict[str, str] = {}
        for share in range(self.args.shares if turn == "first" else 1):
            name = f"{self.suite.name}-{turn}-{share}"
            path = self.out / f"{name}.json"
            found = json.loads(path.read_text()) if path.exists() else {}
            failures |= found.pop("failures", {"the file": "it ran no test"})
            counts.update(found)
        if not failures and not counts.total():
            failures["the file"] = "it ran no test"
        if "the file" in failures:
            log = (self.out / f"{name}.log").read_text(errors="replace")
            print(f"{name}:\n" + "\n".join(log.splitlines()[-25:]))
        return {**{x: counts[x] for x in COUNTED}, "failures": failures}

    def again(self) -> None:
        """Begins what has failed once more, without archflash, where there is something else."""
        self.wait()
        failures = self._result("first")["failures"]
        self._again = bool(failures) and self.suite.can_be_alone
        if self._again:
            self._begin = time.monotonic()
            self._processes = [self._start("again", list(failures))]

    def row(self) -> dict[str, Any]:
        self.wait()
        found = self._result("first")
        failures: dict[str, str] = found["failures"]
        also = set(self._result("again")["failures"]) if self._again else set[str]()
        self.why = [
            f"{'also without archflash: ' if name in also else ''}{name}: {what}"
            for name, what in failures.items()
        ]
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        return {
            "date": str(datetime.datetime.now(datetime.timezone.utc).date()),
            "commit": environment.git_state()[0][:8],
            "machine": gpu.removeprefix("NVIDIA "),
            "torch": torch.__version__,
            "suite": self.suite.name,
            "theirs": _commit_of(self.folder),
            "passed": found["passed"],
            "failed": len(failures) - len(also),
            "alone": len(also),
            **{name: found[name] for name in ("refused", "skipped", "left")},
        }


def _commit_of(folder: Path) -> str:
    """What a folder says of its version: a file COMMIT, or git."""
    if (folder / "COMMIT").exists():
        return (folder / "COMMIT").read_text().strip()
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short=8", "HEAD"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as docs/reliability.md has them."""
    described = {suite.name: suite.what for suite in SUITES}
    first = rows[0]
    lines = [
        f"{first['machine']}, torch {first['torch'].split('+')[0]}, {first['date']}, archflash "
        f"{first['commit']}:",
        "",
        "| tests, and their commit | passed | failed | alone | refused | skipped | left |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [f"{described[row['suite']]} ({row['theirs']})"]
        lines.append("| " + " | ".join([*cells, *(str(row[name]) for name in COUNTED)]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
