"""What to run on the first day with a B200, B300 or Jetson Thor: `python -m bench.day_one`.

    python -m bench.day_one [--output FILE] [--only REGEX] [--continue] [--implementation NAME]
        [--simulate]

Checks blackwell_dc against float64, first on CTAs alone and then in pairs, and runs it under
compute-sanitizer. Times every switch of its kernel on and off, its walks over tiles, and it and its
peers on the shapes of bench/cases.toml. Writes what came of it to one file. Every job has a process
of its own; one that fails, hangs or dies is recorded, and the others go on, but for a second one
that hangs in the comparisons with float64: it ends the day, because each would use up its limit. A
second start continues where the first one ended, and tries again what failed. docs/day_one.md says
what to look at.

Exit status: 0 when all went well, 1 when a job failed, 2 when there is nothing to run on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import environment
from bench.day_one import jobs as day
from bench.day_one import machine, record
from bench.day_one.setup import WITH_SWITCHES, Job, Setup, WrongError
from bench.results import COLUMNS, RESULTS_FOLDER, Row, is_peer
from bench.run import align

DEFAULT = "blackwell_dc"
ENVIRONMENT_LIMIT = 120  # seconds
KILL_WAIT = 30
HANGS = 2  # jobs of correctness that run into their limits, after which the day ends


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.day_one", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE",
        help="the record (default: bench/results/<gpu>-day-one.csv)",
    )  # fmt: skip
    parser.add_argument(
        "--only", type=pattern, metavar="REGEX", help="jobs whose 'part: name' matches"
    )
    parser.add_argument(
        "--implementation", default=DEFAULT, metavar="NAME",
        help="whose day it is; only blackwell_dc has switches",
    )  # fmt: skip
    parser.add_argument(
        "--simulate", action="store_true",
        help="the same way on the simulator: tiny problems, no times, no GPU",
    )  # fmt: skip
    parser.add_argument(
        "--continue", action="store_true", dest="go_on",
        help=f"go on after {HANGS} jobs of correctness that ran into their limits",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="name the jobs and stop")
    # The process of one job.
    parser.add_argument("--job", nargs=2, metavar=("PART", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--setup", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def pattern(text: str) -> str:
    """A regular expression of the command line."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the day; see the top of this file."""
    options = parse(argv)
    if options.job:
        return answer(options)
    facts, problem = ask_environment(options)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    every = day.make_jobs(options.implementation, tuple(facts["dtypes"].split()), options.simulate)
    chosen = [x for x in every if re.search(options.only or "", f"{x.part}: {x.name}")]
    if not chosen or options.list:
        for job in chosen:
            print(f"{job.part}: {job.name}")
        if not chosen:
            print(f"no job matches --only {options.only!r}", file=sys.stderr)
        return 0 if chosen else 2
    if problem := machine.why_no_nvcc(chosen):
        print(problem, file=sys.stderr)
        return 2
    path = options.output or default_output(facts, options.simulate)
    _, facts["dirty"] = environment.git_state(results=path)
    try:
        rows = record.load(path)
        check_environment(path, rows, facts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    path.parent.mkdir(parents=True, exist_ok=True)
    record.append(path, [record.make_row("environment", "", "note", json.dumps(facts))])
    if options.implementation != WITH_SWITCHES:
        note = f"{options.implementation} has none: they are those of {WITH_SWITCHES}"
        record.append(path, [record.make_row("switches", "", "note", note)])
    print(f"{facts['gpu']}, {options.implementation}: {len(chosen)} jobs, recorded in {path}")

    shared = {name: facts[name] for name in COLUMNS if name in facts}
    statuses = record.status_of_jobs(rows)
    hung = 0
    for number, job in enumerate(chosen, 1):
        key = (job.part, job.name)
        head = f"[{number}/{len(chosen)}] {job.part}: {job.name}"
        if statuses.get(key) == record.OK:
            print(f"{head}: done before", flush=True)
            continue
        failed = [key for key, status in statuses.items() if status != record.OK]
        without = tuple(name for part, name in failed if part == "switches")
        pairs = all(part != "pairs" for part, _ in failed)
        setup = Setup(options.implementation, options.simulate, shared, without, pairs)
        new = run_job(job, setup)
        record.append(path, new)
        statuses[key] = new[-1]["status"]
        print(
            f"{head}: {new[-1]['status']}, {new[-1]['seconds']} s {new[-1]['detail']}", flush=True
        )
        hung += job.part == "correctness" and statuses[key] == record.TIMEOUT
        if hung == HANGS and not options.go_on and number < len(chosen):
            note = (
                f"{hung} jobs of correctness hung: the other {len(chosen) - number} are left out; "
                "--continue goes on"
            )
            record.append(path, [record.make_row("environment", "", "note", note)])
            print(note)
            break

    print()
    print("\n".join(summary(record.load(path))))
    bad = [job for job in chosen if statuses.get((job.part, job.name)) != record.OK]
    print(f"\n{len(chosen) - len(bad)} of {len(chosen)} jobs went well; the record is {path}")
    return 1 if bad else 0


def default_output(facts: dict[str, str], simulate: bool) -> Path:
    """Simulated runs never enter bench/results."""
    if simulate:
        return environment.REPOSITORY / "build" / "day-one-simulated.csv"
    return RESULTS_FOLDER / f"{environment.gpu_slug(facts['gpu'])}-day-one.csv"


def check_environment(path: Path, rows: Sequence[Row], facts: dict[str, str]) -> None:
    """Raises ValueError if the file is of another commit, GPU, driver or implementation."""
    for row in rows:
        if row["part"] == "environment":
            differs = record.difference(json.loads(row["detail"]), facts)
            if differs:
                raise ValueError(f"{path} is of another run: {differs}; choose another --output")
            return


# --- processes ---


def run_process(command: list[str], limit_s: float) -> tuple[int | None, str]:
    """Runs a command in a process group of its own.

    Args:
        command: program and arguments.
        limit_s: seconds, after which the group is killed.

    Returns:
        The exit status, None where the limit ended it, and the end of what it printed.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            command, cwd=environment.REPOSITORY, stdout=said, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        status: int | None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also ends processes that it started
        if status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_WAIT)  # a process may hang in the driver
        said.seek(0)
        return status, said.read()[-400:]


def ask(arguments: list[str], limit_s: float) -> tuple[list[Row], str, str]:
    """Runs one job of this program in a process.

    Returns:
        Its rows, its status and detail.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer_file = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "bench.day_one", *arguments, "--answer", str(answer_file)]
        status, said = run_process(command, limit_s)
        rows: list[Row] = []
        lines = answer_file.read_text().splitlines() if answer_file.exists() else []
        for line in lines:
            try:
                told = json.loads(line)
            except ValueError:  # the process died while it wrote
                break
            if "row" not in told:
                return rows, told["status"], told["detail"]
            rows.append(told["row"])
    if status is None:
        return rows, record.TIMEOUT, f"no end after {limit_s:.0f} s: {said}"
    return rows, "crashed", f"exit status {status}: {said}"


def run_job(job: Job, setup: Setup) -> list[Row]:
    """Runs a job and returns its rows; the last one has its status."""
    began = time.perf_counter()
    told = json.dumps({"facts": setup.facts, "without": setup.without, "pairs": setup.pairs})
    rows, status, detail = ask(
        [
            "--job", job.part, job.name, "--setup", told, "--implementation", setup.implementation,
            *(["--simulate"] if setup.simulate else []),
        ],
        job.limit_s,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    return [*rows, record.make_row(job.part, job.name, status, detail, seconds)]


def ask_environment(options: argparse.Namespace) -> tuple[dict[str, str], str]:
    """The description of this machine, or why the day cannot begin here."""
    arguments = ["--job", "environment", "", "--implementation", options.implementation]
    # The jobs can be named without the card.
    arguments += ["--simulate"] if options.simulate or options.list else []
    _, status, detail = ask(arguments, ENVIRONMENT_LIMIT)
    if status != record.OK:
        return {}, detail
    facts: dict[str, str] = json.loads(detail)
    return facts, ""


def answer(options: argparse.Namespace) -> int:
    """Runs one job in this process. Prints each row as it comes, and its status at the end."""
    part, name = options.job
    with options.answer.open("w") as file:

        def tell(told: object) -> None:
            file.write(json.dumps(told) + "\n")
            file.flush()  # what is known survives a crash

        try:
            facts = {}
            if part == "environment":
                facts = machine.describe_environment(options.implementation, options.simulate)
            else:
                run_one(part, name, options, tell)
        except WrongError as error:
            tell({"status": "failed", "detail": str(error)})
            return 1
        except Exception as error:  # any exception is the job's result
            tell({"status": "failed", "detail": f"{type(error).__name__}: {error}"[:800]})
            return 1
        tell({"status": record.OK, "detail": json.dumps(facts) if facts else ""})
        return 0


def run_one(
    part: str, name: str, options: argparse.Namespace, tell: Callable[[object], None]
) -> None:
    """Runs a job in this process."""
    import archflash

    told = json.loads(options.setup)
    found = {item.name: item.dtypes for item in archflash.implementations()}
    dtypes = tuple(found[options.implementation])
    job = day.find(day.make_jobs(options.implementation, dtypes, options.simulate), part, name)
    setup = Setup(
        options.implementation, options.simulate, told["facts"], tuple(told["without"]),
        told["pairs"],
    )  # fmt: skip
    for row in job.run(setup):
        tell({"row": row})


# --- results ---


def summary(rows: Sequence[Row]) -> list[str]:
    """Tables of the times in a record: switches against the wheel, peers against ours."""
    lines: list[str] = []
    latest: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        if row["status"] == "timed":
            latest[row["part"], row["item"], row["implementation"]] = row
    for part, of_ours in (("switches", False), ("walks", False), ("peers", True)):
        table = [["case", "kernel", "p50 us", "TFLOP/s", "time against ours"]]
        for (of_part, case, name), row in latest.items():
            if of_part != part:
                continue
            base = reference_row(latest, part, case, of_ours)
            ratio = "-"
            if base is not None and base["run_id"] == row["run_id"]:
                ratio = f"{float(row['p50_us']) / float(base['p50_us']):.3f}"
            table.append([case, name, row["p50_us"], row["tflops"], ratio])
        if len(table) > 1:
            lines += [f"{part}:", *align(table), ""]
    statuses = record.status_of_jobs(rows)
    details = {(row["part"], row["item"]): row["detail"] for row in rows if row["seconds"]}
    bad = [key for key, status in statuses.items() if status != record.OK]
    lines += [f"{statuses[key].upper()}: {key[0]}: {key[1]}: {details[key]}" for key in bad]
    return lines


def reference_row(
    latest: dict[tuple[str, str, str], Row], part: str, case: str, fastest: bool
) -> Row | None:
    """The row that the others of a case are compared with: the wheel's kernel, or our fastest."""
    ours = [
        row
        for (of_part, of_case, name), row in latest.items()
        if (of_part, of_case) == (part, case) and not is_peer(name) and ":" not in name
    ]
    if not ours:
        return None
    return min(ours, key=lambda row: float(row["p50_us"])) if fastest else ours[0]


if __name__ == "__main__":
    sys.exit(main())
