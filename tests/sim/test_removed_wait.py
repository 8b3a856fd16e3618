"""A wait taken out of the ampere kernel is reported with the line of CUDA that it protected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from archflash import sim
from archflash.sim import _attention

SOURCE = Path(__file__).parents[2] / "src" / "common" / "mma_sync" / "main_loop.cuh"
LOADS_Q = "load_q<C>(q_rmem[column / 16], q_smem, column);"


def line_of(text: str) -> int:
    """Number of the only line of the kernel's source that has a text."""
    lines = SOURCE.read_text().splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if text in line]
    return found


def without(ptx: str, kernel: str, opcode: str, which: int) -> str:
    """The module with one instruction of a kernel deleted."""
    begin = ptx.index(f".entry {kernel}(")
    body = ptx[begin : ptx.index("\n}", begin)]
    found = list(re.finditer(rf"^\s*{re.escape(opcode)}[^;]*;", body, re.MULTILINE))[which]
    return ptx[: begin + found.start()] + ptx[begin + found.end() :]


@pytest.mark.parametrize("mode", ["lazy", "eager", "random", "priority"])
@pytest.mark.parametrize(
    ("opcode", "which", "kinds", "text"),
    [
        # The wait for Q, K and V at the head of the loop. The load of Q is the first to read them.
        ("cp.async.wait_all", 0, {"in-flight"}, LOADS_Q),
        # The barrier behind it, which covers the copies of other warps.
        ("bar.sync", 1, {"race", "lane-order", "in-flight", "uninitialised"}, LOADS_Q),
        # The barrier after the context of the CTA is written.
        ("bar.sync", 0, {"race", "uninitialised"}, "min(cta.work.first_row + C::BLOCK_Q"),
    ],
    ids=["wait", "barrier-behind-wait", "first-barrier"],
)
def test_a_removed_wait_is_reported_with_the_line_that_needs_it(
    opcode: str,
    which: int,
    kinds: set[str],
    text: str,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.randn(1, 2, 100, 64).bfloat16()
    k = torch.randn(1, 1, 300, 64).bfloat16()
    whole = sim.run(q, k, k, implementation="ampere", mode=mode)
    assert not whole.report.findings
    (launch,) = whole.plan.to_dict()["launches"]
    ptx = _attention.ptx_text(launch["image"], whole.plan.device.capability)
    program = sim.load(without(ptx, launch["kernel"], opcode, which))
    monkeypatch.setattr(_attention, "find_program", lambda *_: program)
    with pytest.raises(sim.SimulationError) as caught:
        sim.run(q, k, k, implementation="ampere", mode=mode)
    errors = caught.value.report.errors
    assert errors[0].kind in kinds
    place = f"common/mma_sync/main_loop.cuh:{line_of(text)}"
    at = [error for error in errors if re.search(rf"{re.escape(place)}\b", error.source)]
    assert {error.kind for error in at} & kinds
    assert place in str(caught.value.report)
