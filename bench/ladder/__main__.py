"""Runs the ladder of blackwell_consumer on this machine's GPU: `python -m bench.ladder`.

Compiles each rung with nvcc, compares it with float64, times all of them and PyTorch's backends
round-robin, and prints TFLOP/s for each shape. Exit status: 0 when every rung is right and timed,
1 otherwise, 2 when nothing can be measured (no GPU of compute capability 9.0 or newer, no nvcc).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench import environment
from bench.candidates import Candidate, our_candidates, torch_candidates
from bench.cases import Case
from bench.ladder.rungs import HEAD_DIM, RUNGS, Launcher, Rung
from bench.on_the_spot import find_nvcc
from bench.run import MIN_ROUNDS, CaseResult, align, reason_lines, run_case
from bench.timing import CudaLab

SHAPES = ((2, 2, 512), (4, 8, 1024), (8, 16, 1024), (64, 64, 1024))  # batch, heads, length
OURS = "blackwell_consumer"


def cases() -> list[Case]:
    """The shapes that the published kernel was measured with."""
    return [
        Case(f"bf16 {b}x{h} {n} d64", "bf16", b, h, h, n, n, HEAD_DIM, HEAD_DIM, False)
        for b, h, n in SHAPES
    ]


def candidates(nvcc: str) -> list[Candidate]:
    """The rungs, ours, and PyTorch's two fused backends."""

    def rung_candidate(rung: Rung) -> Candidate:
        launcher = Launcher(rung, nvcc)
        return Candidate(rung.name, "", True, lambda case: launcher.bind(case.causal))

    ours = [item for item in our_candidates() if item.name == OURS]
    peers = [item for item in torch_candidates() if item.name in ("torch-flash", "torch-cudnn")]
    return [*map(rung_candidate, RUNGS), *ours, *peers]


def table(names: Sequence[str], results: dict[str, CaseResult]) -> list[str]:
    """TFLOP/s: a line for each kernel, a column for each shape."""
    ideas = {rung.name: rung.idea for rung in RUNGS}
    speeds = {
        case: {row["implementation"]: f"{float(row['tflops']):.1f}" for row in result.rows}
        for case, result in results.items()
    }
    lines = [["kernel", "what it adds", *results]]
    for name in names:
        cells = [speeds[case].get(name, "-") for case in results]
        lines.append([name, ideas.get(name, ""), *cells])
    return align(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ladder; see the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m bench.ladder", description=__doc__)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    options = parser.parse_args(argv)
    problem = environment.why_no_gpu() or environment.why_no_archflash()
    nvcc = find_nvcc()
    if problem is None and nvcc is None:
        problem = "nvcc is not found: it compiles the rungs"
    if problem is None:
        import torch

        capability = torch.cuda.get_device_capability()
        if capability < (9, 0):
            problem = f"compute capability {capability[0]}.{capability[1]}: TMA needs 9.0"
    if problem or nvcc is None:
        print(problem, file=sys.stderr)
        return 2

    lab = CudaLab()
    facts = lab.facts()
    print(" ".join(f"{name}={value}" for name, value in facts.items()), flush=True)
    every = candidates(nvcc)
    results: dict[str, CaseResult] = {}
    with torch.no_grad():
        for case in cases():
            results[case.name] = run_case(lab, case, every, facts, rounds=options.rounds)
            lab.release()
            print(f"{case.name}: done", flush=True)
    names = [candidate.name for candidate in every]
    print("\nTFLOP/s (4*B*H*N*N*D operations)\n")
    print("\n".join(table(names, results)))
    refused = {name: result.refused for name, result in results.items()}
    wrong = {name: result.wrong for name, result in results.items()}
    print("\n".join(reason_lines("Did not run", refused) + reason_lines("WRONG RESULT", wrong)))
    timed = {row["implementation"] for result in results.values() for row in result.rows}
    missing = [rung.name for rung in RUNGS if rung.name not in timed]
    return 1 if missing or any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
