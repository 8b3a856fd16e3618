"""The sample kernels of tcgen05: right on every schedule, and reported where they are broken.

A card with tcgen05 has run none of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import pytest
import torch

from archflash import sim

from . import tcgen05_samples as samples
from .mutation.mutants import Mutant, is_sync, mutants
from .mutation.runner import SCHEDULES
from .mutation.statements import Statement, split

MODES = ("lazy", "eager", "random", "priority")
GEMMS = [
    ("ss", 64), ("ss", 128), ("ts", 64), ("ts", 128), ("relay", 128), ("pair", 128), ("pair", 256),
]  # fmt: skip
NAMES = ["attention", *(f"{form}-{m}" for form, m in GEMMS)]
# The bound for attention against float64. P is rounded to bf16, whose relative error is at most
# 2^-9, and the exponentials' arguments are float32. Outputs are below 4; the bound is twice their
# error.
TOLERANCE = 2 * 4 * 2.0**-9


@cache
def launch_of(name: str) -> samples.Launch:
    if name == "attention":
        return samples.attention()
    form, m = name.split("-")
    return samples.gemm(form, int(m))


def wrong(launch: samples.Launch, out: torch.Tensor) -> bool:
    """Whether an output is not what it should be; products of small integers are exact."""
    tolerance = TOLERANCE if launch is launch_of("attention") else 0.0
    return not bool(((out - launch.expected).abs() <= tolerance).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_right_on_every_schedule(name: str, mode: str) -> None:
    launch = launch_of(name)
    for seed in range(3):
        report, out = launch.run(mode=mode, seed=seed)
        assert not report.findings
        assert not wrong(launch, out)


# ---- Ten bugs ----

# Pieces of the text of attention's softmax after it has P, found by the comments before them.
PIECES = ("// The product of the tile before is done.\n", "// P\n", "// O\n", "// Written.\n")


def change(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new)


def before_the_wait(text: str, piece: int) -> str:
    """Moves the writing of P (1) or the rescaling of O (2) to before the wait for the product."""
    places = [text.index(mark) for mark in PIECES]
    cut = [text[a:b] for a, b in itertools.pairwise(places)]
    cut.insert(0, cut.pop(piece))
    return text[: places[0]] + "".join(cut) + text[places[-1] :]


def without_wait(text: str, name: str, parity: str) -> str:
    """Without a wait for an mbarrier of two stages."""
    place = samples.BARS[name]
    wait = f"mbarrier.try_wait.parity.shared::cta.b64 %p15, [%r14+{place}], {parity};"
    return change(text, wait, "mov.pred %p15, 1;")


# The change of the text, the kind of a finding that must be there, and what it must say.
BUGS: dict[str, tuple[Callable[[str], str], str, str]] = {
    "tensor memory over-used": (
        lambda t: change(change(t, "[%r0], 512", "[%r0], 256"), "%tmem0, 512", "%tmem0, 256"),
        "out-of-bounds",
        "is not allocated; allocated are columns 256-511",
    ),
    "tensor memory not freed": (
        lambda t: change(t, "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem0, 512;", ""),
        "tmem",
        "columns 0-511 of tensor memory are not deallocated",
    ),
    "a wrong bit of the instruction descriptor": (
        lambda t: change(t, f"{samples.QK_INSTRUCTION:#x}", f"{samples.QK_INSTRUCTION ^ 16:#x}"),
        "descriptor",
        "the type of D (bits 4-5) is f16",
    ),
    "stride offset of K": (
        lambda t: change(t, f"add.u64 %rd12, %rd12, {samples.K_PLACE >> 4};\nor.b64 %rd12, %rd12, "
                         f"{samples.K_DESCRIPTOR:#x}", f"add.u64 %rd12, %rd12, "
                         f"{samples.K_PLACE >> 4};\nor.b64 %rd12, %rd12, 0x4000402000010000"),
        "descriptor",
        "matrix B of tcgen05.mma has a stride offset of 512 bytes",
    ),
    "leading offset of V": (
        lambda t: change(t, f"{samples.V_DESCRIPTOR:#x}", "0x4000404001000000"),
        "descriptor",
        "matrix B of tcgen05.mma has a leading offset of 4096 bytes",
    ),
    "lanes of another warp": (
        lambda t: change(t, "and.b32 %window0, %warp0, 3;", "xor.b32 %window0, %warp0, 1;"),
        "tmem",
        "whose window is lanes",
    ),
    "P overwritten before its product has read it": (
        lambda t: before_the_wait(t, 1),
        "race",
        f"tensor memory, columns {samples.P_COLUMN}-",
    ),
    "S read before its commit": (
        lambda t: without_wait(t, "s_full", "%r12"),
        "race",
        f"tensor memory, columns {samples.S_COLUMN}-",
    ),
    "O rescaled while a product adds to it": (
        lambda t: before_the_wait(t, 2),
        "race",
        f"tensor memory, columns {samples.O_COLUMN}-",
    ),
    "no wait::st": (
        lambda t: change(t, "tcgen05.wait::st.sync.aligned;", ""),
        "race",
        "by tcgen05.st of warp",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_reported_with_its_cause(bug: str, mode: str) -> None:
    break_it, kind, words = BUGS[bug]
    launch = launch_of("attention")
    text = break_it(launch.text)
    assert text != launch.text
    report, _ = launch.run(text, mode=mode)
    named = [f.message for f in report.errors if f.kind == kind]
    assert any(words in message for message in named), report.findings


# ---- Mutants ----

MOST_EXCUSED = 0.10
ALLOCATION = ("tcgen05.alloc", "ld.shared")  # from the one to the other
EXCUSES = {
    "delete bar.warp.sync": "a simulated warp's lanes meet where their ways do",
    "delete tcgen05.fence::": "around the barrier behind tcgen05.alloc it orders nothing more: "
    "the address is in shared memory",
    "delete tcgen05.relinquish_alloc_permit": "these launches have no second CTA on an SM that "
    "waits to allocate",
    "or.b64: 0x4000404000010000 -> ": "the leading offset means nothing where 128 bytes along K "
    "are swizzled",
}


def excuse(mutant: Mutant, statements: list[Statement]) -> str:
    """Why a mutant that no run notices is none; empty: no excuse."""
    for start, reason in EXCUSES.items():
        if not mutant.change.startswith(start):
            continue
        if "fence::" in start:
            first, last = (
                next(s.index for s in statements if s.opcode.startswith(opcode))
                for opcode in ALLOCATION
            )
            return reason if first < mutant.statement < last else ""
        if start.startswith("or.b64"):
            old, new = (int(x, 0) for x in mutant.change.split(": ")[1].split(" -> "))
            return reason if (old ^ new) & ~(0x3FFF << 16) == 0 else ""
        return reason
    return ""


def survivors(launch: samples.Launch, found: list[Mutant]) -> list[Mutant]:
    """The mutants that no run notices: no finding, and the same bits."""
    bits = {}
    limit = 0
    for mode, seed, race in {run for runs in SCHEDULES.values() for run in runs}:
        report, out = launch.run(mode=mode, seed=seed, race_check=race)
        assert not report.findings
        assert not wrong(launch, out)
        bits[mode] = out
        limit = max(limit, 8 * report.total_instructions + 10_000)

    def caught(mutant: Mutant) -> bool:
        text = mutant.apply(launch.text)
        for mode, seed, race in SCHEDULES[mutant.kind]:
            report, out = launch.run(
                text, mode=mode, seed=seed, race_check=race, max_instructions=limit
            )
            if report.findings or not torch.equal(out, bits[mode]):
                return True
        return False

    return [mutant for mutant in found if not caught(mutant)]


@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_is_caught(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    launch = launch_of(name)
    statements = split(launch.text)
    loaded = sim.load(launch.text).instructions("test")[: len(statements)]
    assert [s.text.split() for s in statements] == [row["statement"].split() for row in loaded]
    report, _ = launch.run(mode="eager")
    executed = [count > 0 for count in report.executed]
    assert all(executed[s.index] for s in statements if is_sync(s))
    found = mutants(statements, executed, launch.block, seed=0, protocols=True)
    found = [mutant for mutant in found if not mutant.equivalent]
    left = survivors(launch, found)
    with capsys.disabled():
        print(f"\n{name}: {len(found) - len(left)} of {len(found)} mutants caught")
    assert len(left) <= MOST_EXCUSED * len(found)
    unexcused = [m for m in left if not excuse(m, statements)]
    assert not unexcused, [(m.change, statements[m.statement].text) for m in unexcused]
