"""A wait or barrier taken out of a kernel is reported with the line of CUDA that it protected."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

from archflash import _archflash as native
from archflash import sim
from archflash.sim import _attention

from ..core_set.one_cta import one_after_another
from ..kvcache_cases import make

SOURCE = Path(__file__).parents[2] / "src" / "common" / "mma_sync" / "tile.cuh"
LOADS_Q = "load_q<C>(q_rmem[column / 16], q_smem, column);"


def line_of(text: str) -> int:
    """Number of the only line of the kernel's source that has a text."""
    lines = SOURCE.read_text().splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if text in line]
    return found


def without(ptx: str, kernel: str, opcode: str, which: int) -> str:
    """The module with one instruction of a kernel deleted."""
    begin = ptx.index(f".entry {kernel}(")
    body = ptx[begin:].partition("\n.visible")[0]
    found = list(re.finditer(rf"^\s*{re.escape(opcode)}[^;]*;", body, re.MULTILINE))[which]
    return ptx[: begin + found.start()] + ptx[begin + found.end() :]


def run_without(
    plan: native.LaunchPlan, opcodes: tuple[str, ...], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From here on the simulator runs a plan's kernel with instructions deleted."""
    (launch,) = plan.to_dict()["launches"]
    text = _attention.ptx_text(launch["image"], plan.device.capability)
    for opcode in opcodes:
        text = without(text, launch["kernel"], opcode, which)
    program = sim.load(text)
    monkeypatch.setattr(_attention, "find_program", lambda *_: program)


@pytest.mark.parametrize("mode", ["lazy", "eager", "random", "priority"])
@pytest.mark.parametrize(
    ("opcode", "which", "kinds", "text"),
    [
        # The wait for Q, K and V at the head of the loop. The load of Q is the first to read them.
        ("cp.async.wait_all", 0, {"in-flight"}, LOADS_Q),
        # The barrier behind it, which covers the copies of other warps and the context of the CTA.
        ("bar.sync", 1, {"race", "lane-order", "in-flight", "uninitialised"}, LOADS_Q),
    ],
    ids=["wait", "barrier-behind-wait"],
)
def test_a_removed_wait_is_reported_with_the_line_that_needs_it(
    opcode: str, which: int, kinds: set[str], text: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.randn(1, 2, 70, 128).bfloat16()
    k = torch.randn(1, 1, 150, 128).bfloat16()
    whole = sim.run(q, k, k, implementation="ampere", mode=mode, softcap=9.0)
    assert not whole.report.findings
    run_without(whole.plan, (opcode,), which, monkeypatch)
    with pytest.raises(sim.SimulationError) as caught:
        sim.run(q, k, k, implementation="ampere", mode=mode, softcap=9.0)
    errors = caught.value.report.errors
    assert errors[0].kind in kinds
    place = f"common/mma_sync/tile.cuh:{line_of(text)}"
    at = [error for error in errors if re.search(rf"{re.escape(place)}\b", error.source)]
    assert {error.kind for error in at} & kinds
    assert place in str(caught.value.report)


LATENT_WAITS = {
    "wait": ("cp.async.wait_all", 0),
    "barrier-behind-context": ("bar.sync", 0),
    "barrier-of-a-round": ("bar.sync", 2),
    "barrier-of-a-pair": ("bar.sync", 3),
}
LATENT_WAITS_FP8 = {
    "wait": ("cp.async.wait_all", 0),
    "barrier-before-conversion": ("bar.sync", 1),
    "barrier-behind-conversion": ("bar.sync", 2),
}


@pytest.mark.parametrize(
    ("cache_dtype", "opcode", "which"),
    [
        *((None, *x) for x in LATENT_WAITS.values()),
        *((torch.float8_e4m3fn, *x) for x in LATENT_WAITS_FP8.values()),
    ],
    ids=[*LATENT_WAITS, *(f"e4m3-{name}" for name in LATENT_WAITS_FP8)],
)
def test_each_wait_of_the_kernel_for_latent_caches_is_needed(
    cache_dtype: torch.dtype | None, opcode: str, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make(
        [90], heads=(20, 1), d=64, dv=512, qv=True, dtype=torch.bfloat16, cache_dtype=cache_dtype
    )
    tensors = (call.q, call.k_cache, call.v_cache)
    run = functools.partial(sim.run, *tensors, implementation="ampere", **call.options)
    whole = run(mode="random")
    assert not whole.report.findings
    run_without(whole.plan, (opcode,), which, monkeypatch)
    with pytest.raises(sim.SimulationError) as caught:
        run(mode="random")
    kinds = {error.kind for error in caught.value.report.errors}
    assert kinds & {"race", "in-flight", "uninitialised"}, caught.value.report


ARRIVE, WAIT = "barrier.cluster.arrive", "barrier.cluster.wait"
ALLOCATES = "tcgen05.alloc for a pair with CTA "


@pytest.mark.parametrize(
    ("opcodes", "which", "kind", "words", "modes"),
    [
        # The barrier before a pair of CTAs allocates tensor memory.
        ((ARRIVE, WAIT), 0, "unstarted-cta", ALLOCATES, ("lazy", "eager", "random", "priority")),
        ((ARRIVE,), 0, "barrier", "without having arrived", ("random",)),
        ((WAIT,), 0, "unstarted-cta", ALLOCATES, ("random",)),
        # The barrier before it is freed and the CTAs exit.
        ((ARRIVE, WAIT), -1, "tmem", "may not have come out of tcgen05.alloc", ("random",)),
        ((ARRIVE,), -1, "barrier", "without having arrived", ("random",)),
        ((WAIT,), -1, "tmem", "may not have come out of tcgen05.alloc", ("random",)),
    ],
)
def test_a_removed_barrier_of_a_pair_is_reported(
    opcodes: tuple[str, ...],
    which: int,
    kind: str,
    words: str,
    modes: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k = torch.randn(1, 1, 300, 128).bfloat16(), torch.randn(1, 1, 100, 128).bfloat16()
    plan = one_after_another("d128_pair", q, k, k)
    run_without(plan, opcodes, which, monkeypatch)
    for mode in modes:
        run = sim.run(
            q, k, k, implementation="blackwell_dc", plan=plan, mode=mode, return_lse=True,
            check=False,
        )  # fmt: skip
        found = [error for error in run.report.errors if error.kind == kind]
        assert any(words in error.message for error in found), run.report
        assert kind != "unstarted-cta" or "blackwell_dc/attention_fwd.cuh" in found[0].source
