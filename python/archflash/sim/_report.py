"""What a simulated launch did and what was wrong with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from archflash._errors import LaunchError


class SimulationError(LaunchError):
    """A simulated kernel did something wrong: `report` says what and where.

    Attributes:
        report: the whole `Report`.
    """

    def __init__(self, report: Report) -> None:
        errors = report.errors
        shown = "\n".join(str(finding) for finding in errors[:8])
        more = f"\nand {len(errors) - 8} more" if len(errors) > 8 else ""
        super().__init__(f"the simulator found errors in {report.kernel}:\n{shown}{more}")
        self.report = report

    def __reduce__(self) -> tuple[type[SimulationError], tuple[Report]]:
        return SimulationError, (self.report,)  # a process pool hands it to its parent


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong (severity "error") or that hardware tolerates (severity "lint").

    Attributes:
        severity: "error" or "lint".
        kind: one word, such as "race", "out-of-bounds", "uninitialised" or "deadlock".
        message: a sentence.
        kernel: the kernel's name.
        cta: index of the CTA in the grid, x fastest; -1 if it concerns no single CTA.
        warp: index of the warp in the CTA; -1 if it concerns no single warp.
        lane: lane of the warp; -1 if it concerns no single lane.
        line: line of the instruction in the PTX text; 0 if it concerns no instruction.
        instruction: the PTX statement.
        source: "file:line" of the CUDA source, followed by the calls into which it is inlined;
            empty without line information.
        address: the address, for a memory access.
        count: how often it was found at that instruction.
        fatal: whether the CTA stopped here.
    """

    severity: str
    kind: str
    message: str
    kernel: str
    cta: int
    warp: int
    lane: int
    line: int
    instruction: str
    source: str
    address: int
    count: int
    fatal: bool

    def __str__(self) -> str:
        where = f"{self.kernel}"
        if self.cta >= 0:
            where += f", CTA {self.cta}"
        if self.warp >= 0:
            where += f", warp {self.warp}"
        if self.lane >= 0:
            where += f", lane {self.lane}"
        text = f"{self.severity}: {self.kind}: {self.message}\n  in {where}"
        if self.line:
            text += f"\n  PTX line {self.line}: {self.instruction}"
        if self.source:
            text += f"\n  {self.source}"
        if self.count > 1:
            text += f"\n  {self.count} times"
        return text


@dataclass(frozen=True)
class TraceEvent:
    """A period in which one track did one thing. Times are warp-instructions that the CTA has run:
    they order events and are not time on a GPU.

    Attributes:
        kind: "run" (a warp executed instructions from `pc` on, one after the other), "wait" (a
            warp waited for `label`) or "async" (asynchronous work).
        track: index in `Trace.tracks`.
        begin: time of its first instruction; for "async", the time of its issue.
        end: time after its last instruction; for "async", when it was complete. A wait for
            something that was complete already ends when it begins.
        pc: index of the (first) instruction in `Report.listing`.
        bytes: bytes that "async" work moves; 0 for products.
        seen: when a warp had waited for the "async" work.
        cause: track that ended a wait; -1 if none did or the waiting track did.
        label: what a wait waited for ("barrier 0"); for "async" work the name of the buffer that
            it reads, or the warp whose product it is.
        operands: for a product by tcgen05.mma, D, A, B and the instruction descriptor as in the
            instruction: addresses in tensor memory or matrix descriptors.
    """

    kind: str
    track: int
    begin: int
    end: int
    pc: int
    bytes: int
    seen: int
    cause: int
    label: str
    operands: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """What one CTA did.

    Attributes:
        tracks: names of the tracks. Warp w is track w; units that work asynchronously follow.
        events: in the order in which they ended.
    """

    tracks: tuple[str, ...]
    events: tuple[TraceEvent, ...]


@dataclass(frozen=True)
class Report:
    """What a launch did.

    Attributes:
        kernel: the kernel's name.
        ctas: how many CTAs ran; 0 when the run was stopped by an error.
        findings: errors and lints, in the order of CTAs.
        instructions: warp-instructions executed, by class ("float", "matrix", "load", ...).
        opcodes: warp-instructions executed, by opcode with its modifiers.
        transactions: for "global" and "local", 32-byte sectors moved; for "shared", wavefronts.
        bank_conflicts: for each opcode that touched shared memory (wavefronts, wavefronts without
            conflicts).
        barrier_waits: how often a warp waited at a barrier.
        executed: warp-instructions executed, by index of the instruction in the kernel.
        seconds: how long the simulation took.
        complete: whether every CTA ran to its end, without an error that stopped it.
        dropped: further findings that were counted but not kept.
        overlaps_checked: whether writes of different CTAs were compared; False when a launch wrote
            too much for that.
        traces: what each traced CTA did, by its index in the grid.
    """

    kernel: str
    ctas: int
    findings: tuple[Finding, ...]
    instructions: dict[str, int]
    opcodes: dict[str, int]
    transactions: dict[str, int]
    bank_conflicts: dict[str, tuple[int, int]]
    barrier_waits: int
    executed: tuple[int, ...]
    seconds: float
    complete: bool
    dropped: int = 0
    overlaps_checked: bool = True
    traces: dict[int, Trace] = field(default_factory=dict, repr=False)
    _listing: Callable[[], list[dict[str, Any]]] = field(default=list, repr=False, compare=False)

    @property
    def listing(self) -> list[dict[str, Any]]:
        """The kernel's instructions in order, each with its line in the PTX text, opcode,
        statement, source, class and calls (function, file, line; innermost first).
        """
        return self._listing()

    @property
    def errors(self) -> list[Finding]:
        """The findings that are errors."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def lints(self) -> list[Finding]:
        """The findings that are lints."""
        return [finding for finding in self.findings if finding.severity == "lint"]

    @property
    def total_instructions(self) -> int:
        """All warp-instructions executed."""
        return sum(self.executed)

    def __getstate__(self) -> dict[str, Any]:
        # The listing is made when it is asked for, by what no other process has.
        return self.__dict__ | {"_listing": functools.partial(list, self._listing())}

    def __str__(self) -> str:
        errors, lints = len(self.errors), len(self.lints)
        lines = [
            f"{self.kernel}: {self.ctas} CTAs, {errors or 'no'} errors, {lints or 'no'} lints, "
            f"{self.seconds:.2f} s"
        ]
        if not self.complete:
            lines[0] += "; stopped by an error, so what was done was not counted"
        total = self.total_instructions
        if total:
            lines.append(f"  {'warp-instructions':<28}{total:>14,}")
        for name, count in sorted(self.instructions.items(), key=lambda item: -item[1]):
            lines.append(f"    {name:<26}{count:>14,}{count / total:>8.1%}")
        if total:
            units = {
                "global": "32-byte sectors",
                "shared": "wavefronts",
                "local": "32-byte sectors",
            }
            lines.append("  memory transactions")
            lines += [
                f"    {space:<26}{count:>14,}  {units[space]}"
                for space, count in self.transactions.items()
            ]
        if self.bank_conflicts:
            width = max(26, *(len(opcode) for opcode in self.bank_conflicts))
            lines.append(
                f"  {'wavefronts of shared memory':<{width + 2}}{'taken':>14}{'least':>14}"
            )
            for opcode, (taken, least) in sorted(self.bank_conflicts.items()):
                note = f"  bank conflicts: {taken / least:.2f} times" if taken > least else ""
                lines.append(f"    {opcode:<{width}}{taken:>14,}{least:>14,}{note}")
        if total:
            lines.append(f"  {'waits at barriers':<28}{self.barrier_waits:>14,}")
        lines += [str(finding) for finding in self.findings]
        if self.dropped:
            lines.append(f"and {self.dropped} findings more, not kept")
        if not self.overlaps_checked:
            lines.append("writes of different CTAs were too many to be compared")
        return "\n".join(lines)


# These kinds of findings are lints in kernels that compilers make. Compilers leave out waits and
# fences where ptxas or the order of the hardware makes up for them.
LENIENT_KINDS = (
    "tcgen05-fence",
    "tcgen05-wait",
    "lane-order",
    "lane-release",
    "proxy-read",
    "scope",
    "tmem-permit",
)
# Lints that are reported only for this library's kernels.
STRICT_LINTS = ("pending-copy", "lane-release", "tmem-permit")


def make_report(
    kernel: str,
    listing: Callable[[], list[dict[str, Any]]],
    result: dict[str, Any],
    *,
    strict: bool,
) -> Report:
    """Makes a `Report` of the extension module's answer. `listing` gives the kernel's instructions.

    With `strict`, findings of LENIENT_KINDS are errors and not lints, and lints of STRICT_LINTS are
    reported.
    """
    if not strict:
        result["findings"] = [
            row
            for row in result["findings"]
            if row["severity"] != "lint" or row["kind"] not in STRICT_LINTS
        ]
    for row in result["findings"]:
        if strict and row["kind"] in LENIENT_KINDS:
            row["severity"] = "error"
    findings = tuple(
        Finding(
            kernel=kernel,
            **{
                name: row[name]
                for name in (
                    "severity", "kind", "message", "cta", "warp", "lane", "line", "instruction",
                    "source", "address", "count", "fatal",
                )
            },
        )
        for row in result["findings"]
    )  # fmt: skip
    return Report(
        kernel=kernel,
        ctas=result["ctas"],
        findings=findings,
        instructions=result["instructions"],
        opcodes=result["opcodes"],
        transactions={
            "global": result["transactions"],
            "shared": result["wavefronts"],
            "local": result["local"],
        },
        bank_conflicts=result["bank_conflicts"],
        barrier_waits=result["barrier_waits"],
        executed=result["executed"],
        seconds=result["seconds"],
        complete=result["complete"],
        dropped=result["dropped"],
        overlaps_checked=result["overlaps_checked"],
        traces={
            cta: Trace(tuple(tracks), tuple(TraceEvent(*event) for event in events))
            for cta, (tracks, events) in result["traces"].items()
        },
        _listing=listing,
    )
