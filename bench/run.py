"""Measures every case with every implementation of ours and every peer, and appends result rows.

    python -m bench.run [--only REGEX] [--group NAME] [--candidates NAME,...] [--rounds N]
                        [--sustained [NAME,...]] [--time-limit S] [--as-on-12x] [--output FOLDER]

Exit status: 0 when all is measured or refused with a reason, 1 when an implementation of ours gave
a wrong result, 2 when nothing can be measured.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import environment
from bench.candidates import (
    Candidate,
    chosen_candidates,
    consumer_as_on_12x,
    flash_attention_candidates,
    int8_candidate,
    our_candidates,
    reason_of,
    refusals,
    torch_candidates,
)
from bench.cases import BYTES_RULE, FLOPS_RULE, Case, choose_cases, load_cases
from bench.correctness import Checker, Verdict
from bench.results import (
    EAGER,
    POWER,
    RESULTS_FOLDER,
    SUSTAINED,
    Row,
    append_rows,
    check_header,
    figure,
    is_peer,
    is_sustained,
    make_row,
    speedup,
)
from bench.timing import CudaLab, Timed, back_to_back, median_clock, round_robin, warm_up

MIN_ROUNDS = 20  # results of fewer rounds are not committed
WARM_SECONDS = 0.1  # the clocks settle under load in less time than this
# Seconds of warming and of measuring when a candidate is timed alone. The power limit acts on the
# mean over some tenths of a second.
SUSTAINED_SECONDS = 1.0


@dataclass
class CaseResult:
    """The results of one case.

    Args:
        rows: result rows of the candidates that were timed.
        refused: reason by candidate, for those that do not serve the case.
        wrong: what was wrong, by candidate.
        notes: remarks on valid rows, by candidate.
    """

    rows: list[Row] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def run_case(
    lab: Any, case: Case, candidates: Sequence[Candidate], facts: Mapping[str, str], *, rounds: int,
    warm_seconds: float = WARM_SECONDS, sustained: Sequence[str] = (),
    check: Callable[..., Verdict] | None = None,
) -> CaseResult:  # fmt: skip
    """Checks and times one case.

    Args:
        lab: a CudaLab, or a stand-in with its methods.
        case: the shape.
        candidates: what to measure.
        facts: the columns that all rows of the run share.
        rounds: measured rounds.
        warm_seconds: seconds of load before them.
        sustained: names of candidates that afterwards also run alone, SUSTAINED_SECONDS to warm up
            and as long while they are measured.
        check: compares the output that a candidate's timed calls wrote with float64; a Checker by
            default.

    Returns:
        Rows, refusals, wrong results and notes.
    """
    result = CaseResult()
    timed: dict[str, Timed] = {}
    verdicts: dict[str, Verdict] = {}
    sets = lab.inputs(case)
    check = check or Checker(case)
    for candidate in candidates:
        refusal = candidate.refuses(case)
        if refusal is not None:
            result.refused[candidate.name] = refusal
            continue
        try:
            with refusals() as warned:
                lab.try_call(candidate, case, sets)
        except Exception as error:  # any exception is the candidate's reason for not running
            result.refused[candidate.name] = reason_of(error, warned)
            lab.release()
            continue
        try:
            prepared, eager_reason = lab.prepare(candidate, case, sets)
            (q, k, v), out = prepared.last_output()
        except RuntimeError as error:  # out of memory, mostly
            result.refused[candidate.name] = reason_of(error, [])
            lab.release()
            continue
        try:
            verdict = check(q, k, v, out, ours=candidate.ours and candidate.exact)
        except Exception as error:  # a check that could not run must not count as passed
            verdict = Verdict(float("nan"), False, f"could not be checked: {reason_of(error, [])}")
        del q, k, v, out
        if verdict.problem:
            result.wrong[candidate.name] = verdict.problem
            continue
        if not verdict.meets_rule:
            result.notes[candidate.name] = "misses the error rule (a peer is timed all the same)"
        if eager_reason:
            result.notes[candidate.name] = f"timed eagerly, {eager_reason}"
        timed[candidate.name] = prepared
        verdicts[candidate.name] = verdict

    if not timed:
        return result
    served = [candidate for candidate in candidates if candidate.name in timed]
    hosts = {candidate.name: host_us(lab, candidate, case) for candidate in served}

    def add_row(
        candidate: Candidate, samples_us: list[float], clocks: list[int | None], *how: str
    ) -> None:
        eager = "" if timed[candidate.name].captured else EAGER
        result.rows.append(
            make_row(
                facts,
                case,
                implementation=candidate.name,
                version=candidate.version,
                features=";".join(word for word in (candidate.features, eager, *how) if word),
                clocks_mhz=median_clock(clocks),
                samples_us=samples_us,
                max_err=verdicts[candidate.name].max_err,
                host_us=hosts[candidate.name],
            )
        )

    clocks: list[int | None] = []
    warm_up(timed, warm_seconds)
    samples = round_robin(timed, rounds, lambda: clocks.append(lab.clock_mhz()))
    for candidate in served:
        add_row(candidate, samples[candidate.name], clocks)
    for candidate in random.Random(case.name).sample(served, len(served)):
        if candidate.name in sustained:
            alone = run_alone(lab, timed[candidate.name], SUSTAINED_SECONDS)
            add_row(candidate, alone.samples_us, alone.clocks, SUSTAINED, alone.power)
    return result


@dataclass
class Alone:
    """What was measured while a candidate ran alone.

    Args:
        samples_us: microseconds per call, one number per section.
        clocks: SM clock in MHz, one number per section.
        power: word for `features` about the mean power; "" where it is not known.
    """

    samples_us: list[float]
    clocks: list[int | None]
    power: str


def run_alone(lab: Any, timed: Timed, seconds: float) -> Alone:
    """Runs a candidate alone for `seconds` to warm up, and for `seconds` to be measured."""
    clocks: list[int | None] = []
    back_to_back(timed, seconds)
    start, before = time.perf_counter(), lab.energy_j()
    samples = back_to_back(timed, seconds, lambda: clocks.append(lab.clock_mhz()))
    after, end = lab.energy_j(), time.perf_counter()
    if before is None or after is None:
        return Alone(samples, clocks, "")
    return Alone(samples, clocks, f"{POWER}{(after - before) / (end - start):.0f}W")


def host_us(lab: Any, candidate: Candidate, case: Case) -> float:
    """Host cost of one call in microseconds; NaN if the candidate refuses the tiny case."""
    try:
        return float(lab.host_us(candidate, case))
    except RuntimeError:
        return float("nan")


def summary(cases: Sequence[Case], results: Mapping[str, CaseResult]) -> str:
    """The table at the end of a run.

    Args:
        cases: measured cases, in the order of the table.
        results: their results, by name.

    Returns:
        One line for each case and implementation of ours, with the ratio to each peer, and the
        reasons of whatever did not run.
    """
    rows = [row for case in cases for row in results[case.name].rows]
    peers = list(dict.fromkeys(r["implementation"] for r in rows if is_peer(r["implementation"])))
    head = ["case", "implementation", "p50 us", "p20-p80", "speed", "max err", "host us", *peers]
    lines = [head]
    for case in cases:
        for word in ("", SUSTAINED):
            here = [row for row in results[case.name].rows if is_sustained(row) == bool(word)]
            if here or not word:
                lines += summary_lines(f"{case.name} {word}".strip(), here, peers)
    text = [
        f"Speed in TFLOP/s, in GB/s where Nq is 1 ({FLOPS_RULE}; {BYTES_RULE}).",
        "Columns of peers: times that ours is faster (speed of the peer); * timed eagerly.",
        "",
        *align(lines),
    ]
    text += published_lines(cases, results)
    text += reason_lines("Did not run", {n: r.refused for n, r in results.items()})
    text += reason_lines("Note", {n: r.notes for n, r in results.items()})
    text += reason_lines("WRONG RESULT", {n: r.wrong for n, r in results.items()})
    return "\n".join(text)


def summary_lines(name: str, rows: Sequence[Row], peers: Sequence[str]) -> list[list[str]]:
    """The lines of one case and way of timing: one for each implementation of ours."""
    by_name = {row["implementation"]: row for row in rows}
    ours = [row for row in rows if not is_peer(row["implementation"])]
    lines = []
    for row in ours:
        start = [name, row["implementation"], f"{float(row['p50_us']):.1f}"]
        spread = f"{float(row['p20_us']):.1f}-{float(row['p80_us']):.1f}"
        start += [spread, figure(row), row["max_err"], row["host_us"]]
        ratios = [
            f"{speedup(row, by_name[p]):.2f}x ({figure(by_name[p])})" if p in by_name else "-"
            for p in peers
        ]
        lines.append(start + ratios)
    if not ours:
        speeds = [f"({figure(by_name[p])})" if p in by_name else "-" for p in peers]
        lines.append([name, "-", "-", "-", "-", "-", "-", *speeds])
    return lines


def published_lines(cases: Sequence[Case], results: Mapping[str, CaseResult]) -> list[str]:
    """Ratios to torch-math beside those that the ancestor of simt was published with."""
    lines = [["case", "implementation", "x torch-math", "published (A10G)"]]
    for case in cases:
        here = [row for row in results[case.name].rows if not is_sustained(row)]
        by_name = {row["implementation"]: row for row in here}
        if case.published_vs_math is None or "torch-math" not in by_name:
            continue
        for name, row in by_name.items():
            if not is_peer(name):
                ratio = f"{speedup(row, by_name['torch-math']):.2f}"
                lines.append([case.name, name, ratio, f"{case.published_vs_math:.2f}"])
    return ["", *align(lines)] if len(lines) > 1 else []


def reason_lines(title: str, reasons: Mapping[str, Mapping[str, str]]) -> list[str]:
    """One line for each candidate and reason, with the cases that it holds for."""
    cases_of: dict[tuple[str, str], list[str]] = {}
    for case_name, by_candidate in reasons.items():
        for candidate, reason in by_candidate.items():
            cases_of.setdefault((candidate, reason), []).append(case_name)
    lines = [""] if cases_of else []
    for (candidate, reason), names in cases_of.items():
        which = ", ".join(names) if len(names) <= 3 else f"{len(names)} cases"
        lines.append(f"{title}: {candidate} ({which}): {reason}")
    return lines


def align(lines: Sequence[Sequence[str]]) -> list[str]:
    """Pads columns to equal width: the first two to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def choose_candidates(candidates: list[Candidate], names: str | None) -> list[Candidate]:
    """Filters candidates by name.

    Args:
        candidates: what to choose from.
        names: names joined by commas; None keeps all.

    Returns:
        The chosen candidates, in their order.

    Raises:
        ValueError: no candidate has one of the names; the message lists those that there are.
    """
    if names is None:
        return candidates
    wanted = names.split(",")
    known = [candidate.name for candidate in candidates]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no candidate {', '.join(unknown)}; there are {', '.join(known)}")
    return [candidate for candidate in candidates if candidate.name in wanted]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.run", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", metavar="REGEX", help="cases whose name matches")
    parser.add_argument(
        "--group", metavar="NAME", help="cases of one group, such as fp32 or decode"
    )
    parser.add_argument(
        "--candidates", metavar="NAME,...",
        help="only these, as the column implementation names them (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--sustained", nargs="?", const="all", metavar="NAME,...",
        help="afterwards these (default: all) also run alone, a second to warm up, one measured",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="at least 20 (default: 20)")
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="start no case after S seconds"
    )
    parser.add_argument(
        "--as-on-12x",
        action="store_true",
        help="also blackwell_consumer with the CTAs that fit on an SM of 12.x",
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS_FOLDER, metavar="FOLDER",
        help="where <gpu>.csv is appended to (default: bench/results)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if options.rounds < MIN_ROUNDS:
        parser.error(f"--rounds {options.rounds}: results need at least {MIN_ROUNDS} rounds")
    return options


def short_parser(
    program: str, doc: str | None, only: str = "cases whose name matches"
) -> argparse.ArgumentParser:
    """The options of a benchmark of its own cases: `--only`, which is for `only`, `--rounds` and
    `--output`. `doc` is its module's docstring.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}", description=(doc or "").split("\n")[0]
    )
    parser.add_argument("--only", metavar="REGEX", help=only)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="default: 20")
    parser.add_argument("--output", type=Path, default=RESULTS_FOLDER, metavar="FOLDER")
    return parser


def cases_to_run(choose: Callable[[], list[Case]]) -> list[Case] | None:
    """The cases that `choose` gives. None, with the reason on stderr, if it raises a ValueError or
    this machine cannot run the benchmark.
    """
    try:
        cases = choose()
    except ValueError as error:
        print(error, file=sys.stderr)
        return None
    return None if environment.measures_nothing() else cases


def open_results(lab: CudaLab, folder: Path, prefix: str = "") -> tuple[dict[str, str], Path]:
    """The facts of a run, which are printed, and the file in `folder` to which its rows go: that of
    the GPU, behind `prefix`.

    Raises:
        ValueError: the file is there and has other columns.
    """
    facts = lab.facts()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{prefix}{environment.gpu_slug(facts['gpu'])}.csv"
    check_header(path)
    print(" ".join(f"{name}={value}" for name, value in facts.items()), flush=True)
    return facts, path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see the top of this file."""
    options = parse(argv)
    began = time.perf_counter()
    cases = cases_to_run(lambda: choose_cases(load_cases(), options.only, options.group))
    if cases is None:
        return 2

    import torch

    lab = CudaLab()
    try:
        facts, path = open_results(lab, options.output)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2

    candidates = [
        *our_candidates(), int8_candidate(), *torch_candidates(), *flash_attention_candidates(),
        *chosen_candidates(),
    ]  # fmt: skip
    if options.as_on_12x:
        candidates.append(consumer_as_on_12x())
    try:
        candidates = choose_candidates(candidates, options.candidates)
        alone = [] if options.sustained is None else candidates
        if options.sustained != "all":
            alone = choose_candidates(alone, options.sustained)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    results: dict[str, CaseResult] = {}
    with torch.no_grad():
        for number, case in enumerate(cases, 1):
            start = time.perf_counter()
            if options.time_limit is not None and start - began > options.time_limit:
                left = ", ".join(c.name for c in cases[number - 1 :])
                print(f"time limit of {options.time_limit:g} s: not measured: {left}")
                break
            result = run_case(
                lab, case, candidates, facts, rounds=options.rounds,
                sustained=[candidate.name for candidate in alone],
            )  # fmt: skip
            lab.release()
            append_rows(path, result.rows)  # at once, so that an interruption loses no result
            results[case.name] = result
            seconds = time.perf_counter() - start
            print(f"[{number}/{len(cases)}] {case.name}: {seconds:.1f} s", flush=True)
    print()
    print(summary([case for case in cases if case.name in results], results))
    print(f"\n{sum(len(r.rows) for r in results.values())} rows appended to {path}")
    return 1 if any(not is_peer(n) for r in results.values() for n in r.wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
