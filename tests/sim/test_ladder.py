"""Every rung of the ladder (bench/ladder) computes attention, on the simulator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from archflash import reference, sim

# The benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.ladder import rungs
from bench.on_the_spot import find_nvcc

N = 192  # three blocks of keys: a buffer is used a second time


@pytest.mark.parametrize("rung", rungs.RUNGS, ids=lambda rung: rung.name)
def test_a_rung_computes_attention(rung: rungs.Rung) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not found: it compiles the rungs")
    program = sim.load(rungs.compiled(rung, nvcc, "ptx", "compute_90").decode())
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, N, 64, generator=generator).bfloat16() for _ in range(3))
    out = torch.full_like(q, float("nan"))
    maps = [sim.TensorMap(x, (64, 64, 1, 1), rung.swizzle or 0, writable=False) for x in (q, k, v)]
    (launch,) = rungs.launch_plan(rung, q).to_dict()["launches"]
    inputs = [sim.Buffer(x, writable=False) for x in (q, k, v)]
    report = sim.launch(
        program,
        rungs.KERNEL,
        [*inputs, out, rungs.scalars(N), *maps],
        grid=launch["grid"],
        block=launch["block"],
    )
    assert not report.findings, report
    expected, _ = reference.attention(q, k, v)
    result = reference.check(out, expected, reference.baseline(q, k, v))
    assert result.ok, result
    assert rungs.why_not(q, k, v, False) is None
    # Padding and swizzle put eight rows at one chunk into different banks.
    ldmatrix = [x for opcode, x in report.bank_conflicts.items() if opcode.startswith("ldmatrix")]
    factor = 8 if rung.swizzle == 0 else 1
    assert all(taken == factor * least for taken, least in ldmatrix)
    assert bool(ldmatrix) == (rung.threads < 256)
