"""Every rung of every ladder (bench/ladder) computes attention, on the simulator."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

# The benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.ladder import page, rungs
from bench.ladder.definitions import BY_NAME, LADDERS, Ladder, Rung
from bench.on_the_spot import find_nvcc

EVERY = [(ladder, rung) for ladder in LADDERS for rung in ladder.rungs]
SAME_COMPILER, OTHER_COMPILER = 1e-6, 0.15  # how far counters may be from those of the page


@pytest.mark.rest
@pytest.mark.parametrize(("ladder", "rung"), EVERY, ids=[f"{x.name}-{y.name}" for x, y in EVERY])
def test_a_rung_computes_attention_with_the_counters_of_its_page(
    ladder: Ladder, rung: Rung
) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not found: it compiles the rungs")
    found = rungs.simulate(ladder, rung, nvcc)
    assert found.problem == ""
    kept = page.load_counters(ladder)[rung.name]
    compiler = json.loads(page.counters_file(ladder).read_text())["nvcc"]
    limit = SAME_COMPILER if compiler == page.nvcc_version(nvcc) else OTHER_COMPILER
    hint = f"python -m bench.ladder {ladder.name} --write"
    assert found.instructions == pytest.approx(kept.instructions, rel=limit), hint
    assert found.conflicts == pytest.approx(kept.conflicts, rel=limit), hint


@pytest.mark.rest
@pytest.mark.parametrize("rung", BY_NAME["simt"].rungs, ids=lambda rung: rung.name)
def test_rungs_of_any_length_and_mask_stop_at_the_diagonal_and_at_the_end(rung: Rung) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not found: it compiles the rungs")
    assert rungs.simulate(BY_NAME["simt"], rung, nvcc, causal=True, n=67).problem == ""


def test_swizzle_and_padding_leave_no_bank_conflicts() -> None:
    """Of ldmatrix, where the rows of a matrix would otherwise lie in the same banks."""
    conflicts = {
        (ladder.name, rung.name): page.load_counters(ladder)[rung.name].conflicts_of
        for ladder, rung in EVERY
    }
    with_conflicts = {key for key, worst in conflicts.items() if "ldmatrix" in worst}
    assert with_conflicts == {("ampere", "01_base"), ("blackwell_consumer", "4_tma")}
