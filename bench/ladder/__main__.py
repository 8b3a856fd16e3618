"""Runs ladders: python -m bench.ladder [NAME ...]

On a GPU that runs the rungs it compiles each of them with nvcc, compares it with float64, times all
of them, our kernel and PyTorch's round-robin, prints TFLOP/s for each shape, and appends rows to
bench/results/ladder-<gpu>.csv. Without such a GPU, or with --simulate, it runs each rung on the
simulator, compares it with float64, and prints what the simulator counts.

Exit status: 0 when every rung is right (and timed), 1 otherwise, 2 when nothing can be run (no
nvcc, no archflash).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import environment
from bench.candidates import Candidate, our_candidates, torch_candidates
from bench.ladder import page
from bench.ladder.definitions import BY_NAME, LADDERS, Ladder, Rung
from bench.ladder.rungs import Counters, Launcher, simulate
from bench.on_the_spot import find_nvcc
from bench.results import RESULTS_FOLDER, append_rows, check_header
from bench.run import MIN_ROUNDS, CaseResult, align, reason_lines, run_case
from bench.timing import CudaLab

NO_NVCC = (
    "nvcc is not found: it compiles the rungs. Install a CUDA toolkit of 13.0 or newer and put its "
    "bin folder on PATH"
)


def candidates(ladder: Ladder, nvcc: str) -> list[Candidate]:
    """The rungs, our kernels, and the peers."""

    def rung_candidate(rung: Rung) -> Candidate:
        launcher = Launcher(ladder, rung, nvcc)
        return Candidate(
            page.row_name(ladder, rung), "", True, lambda case: launcher.bind(case.causal)
        )

    ours = [item for item in our_candidates() if item.name in ladder.ours]
    peers = [item for item in torch_candidates() if item.name in ladder.peers]
    return [*map(rung_candidate, ladder.rungs), *ours, *peers]


def measure(ladder: Ladder, nvcc: str, rounds: int, output: Path) -> int:
    """Checks, times and prints one ladder on the current GPU; the exit status."""
    import torch

    lab = CudaLab()
    facts = lab.facts()
    path = output / f"ladder-{environment.gpu_slug(facts['gpu'])}.csv"
    check_header(path)
    print(" ".join(f"{name}={value}" for name, value in facts.items()), flush=True)
    every = candidates(ladder, nvcc)
    results: dict[str, CaseResult] = {}
    with torch.no_grad():
        for case in ladder.cases():
            result = run_case(lab, case, every, facts, rounds=rounds)
            lab.release()
            if rounds >= MIN_ROUNDS:
                append_rows(path, result.rows)  # at once, so that an interruption loses no result
            results[case.name] = result
            print(f"{case.name}: done", flush=True)
    rows = [row for result in results.values() for row in result.rows]
    print(f"\n{ladder.name}: TFLOP/s (4*B*H*N*N*D operations, half when causal)\n")
    print("\n".join(align(page.speeds(ladder, rows, list(results)))))
    refused = {name: result.refused for name, result in results.items()}
    wrong = {name: result.wrong for name, result in results.items()}
    print("\n".join(reason_lines("Did not run", refused) + reason_lines("WRONG RESULT", wrong)))
    if rounds >= MIN_ROUNDS:
        print(f"{len(rows)} rows appended to {path}")
        print(f"Its page takes them: python -m bench.ladder {ladder.name} --write")
    else:
        print(f"Nothing is kept of fewer than {MIN_ROUNDS} rounds.")
    timed = {(row["implementation"], case) for case, r in results.items() for row in r.rows}
    missing = [
        rung.name
        for rung in ladder.rungs
        for case in results
        if (page.row_name(ladder, rung), case) not in timed
    ]
    return 1 if missing or any(wrong.values()) else 0


def count(ladder: Ladder, nvcc: str) -> tuple[int, dict[str, Counters]]:
    """Runs one ladder on the simulator and prints it; the exit status and the counters."""
    counters = {rung.name: simulate(ladder, rung, nvcc) for rung in ladder.rungs}
    heads, n = ladder.simulated
    size = f"{heads} heads" if heads > 1 else "1 head"
    print(f"\n{ladder.name} on the simulator, {size} of {n} rows\n")
    print("\n".join(align(page.counter_lines(ladder, counters))))
    for name, found in counters.items():
        if found.problem:
            print(f"WRONG: {name}: {found.problem}")
    return int(any(found.problem for found in counters.values())), counters


def why_simulate(ladder: Ladder, asked: bool) -> str | None:
    """Why a ladder runs on the simulator; None if it runs on this machine's GPU."""
    if asked:
        return "--simulate"
    problem = environment.why_no_gpu()
    if problem is None:
        import torch

        problem = ladder.why_no_gpu(torch.cuda.get_device_capability())
    return problem


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ladders; see the top of this file."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.ladder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(BY_NAME)} (default: all)"
    )
    parser.add_argument("--simulate", action="store_true", help="on the simulator, also with a GPU")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="default: 20, the fewest "
                        "that are kept")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="writes an SVG of one ladder")
    parser.add_argument(
        "--output", type=Path, default=RESULTS_FOLDER, metavar="FOLDER",
        help="where ladder-<gpu>.csv is appended to (default: bench/results)",
    )  # fmt: skip
    parser.add_argument(
        "--write", action="store_true",
        help="writes docs/ladders.md and the plot anew, with counters of the simulator",
    )  # fmt: skip
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in BY_NAME]
    if unknown:
        parser.error(f"no ladder {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
    ladders = [BY_NAME[name] for name in options.names] or list(LADDERS)
    if options.plot and len(ladders) != 1:
        parser.error("--plot draws one ladder: name it")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    problem, nvcc = environment.why_no_archflash(), find_nvcc()
    if problem is None and nvcc is None:
        problem = NO_NVCC
    if problem or nvcc is None:
        print(problem, file=sys.stderr)
        return 2

    status = 0
    for ladder in ladders:
        counters = page.load_counters(ladder)
        reason = why_simulate(ladder, options.simulate or options.write)
        if reason is None:
            options.output.mkdir(parents=True, exist_ok=True)
            status |= measure(ladder, nvcc, options.rounds, options.output)
        else:
            print(f"Not on a GPU: {reason}.")
            wrong, counters = count(ladder, nvcc)
            status |= wrong
        if options.write:
            page.save_counters(ladder, counters, nvcc)
            page.write(ladder)
        if options.plot:
            options.plot.write_text(page.plot(ladder, counters, options.output))
            print(f"plot: {options.plot}")
    return status


if __name__ == "__main__":
    sys.exit(main())
