"""Traces of simulated CTAs: which part of the source each warp was in, what it waited for, and
which copies were in flight. They can be written as a file for ui.perfetto.dev.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from archflash.sim._report import Report, Trace, TraceEvent

# A function with at least this share of the code counts as the body of the kernel, not as a part.
BODY_SHARE = 0.8
# Instructions without a source line belong to the code around them.
NO_LINE = 0


@dataclass(frozen=True)
class Region:
    """A part of a kernel's source.

    Attributes:
        name: the function that the kernel's body calls there, inlined; without names in the line
            information, a group of instruction classes.
        role: purpose of its instructions: "matrix", "copies" (asynchronous), "load",
            "exponential", "store", "arithmetic" (on CUDA cores) or "other".
    """

    name: str
    role: str


@dataclass(frozen=True)
class Slice:
    """A period in which a warp is in one region. Other warps run in between.

    Attributes:
        warp: index of the warp in the CTA.
        begin, end: in warp-instructions of the CTA.
        region: the region.
        executed: warp-instructions of this warp.
        classes: its warp-instructions by instruction class.
        first: index in the listing of its first instruction.
    """

    warp: int
    begin: int
    end: int
    region: Region
    executed: int
    classes: dict[str, int]
    first: int


@dataclass(frozen=True)
class Batch:
    """Asynchronous work of one track that the same wait waited for: copies from one buffer, or
    products.

    Attributes:
        track: the track's name.
        label: the buffer's name; for products, the name of their row in the track.
        begin, end: from the first issue to the last completion.
        seen: when a warp had waited for it.
        copies: the events.
    """

    track: str
    label: str
    begin: int
    end: int
    seen: int
    copies: tuple[TraceEvent, ...]

    @property
    def bytes(self) -> int:
        """Bytes that it moves; 0 for products."""
        return sum(copy.bytes for copy in self.copies)


@dataclass(frozen=True)
class Timeline:
    """One CTA's trace, put together.

    Attributes:
        kernel: the kernel's name.
        cta: index of the CTA in the grid.
        warps: how many warps.
        end: warp-instructions of the CTA.
        slices: where warps were, by warp and time.
        waits: what warps waited for.
        batches: asynchronous copies, products of the tensor cores, and contents of tensor memory.
    """

    kernel: str
    cta: int
    warps: int
    end: int
    slices: tuple[Slice, ...]
    waits: tuple[TraceEvent, ...]
    batches: tuple[Batch, ...]
    trace: Trace = field(repr=False)


# --- regions ---

_CLASS_REGIONS = {
    "matrix": Region("matrix", "matrix"),
    "matrix_load": Region("matrix", "matrix"),
    "async_copy": Region("copies", "copies"),
    "load": Region("loads", "load"),
    "store": Region("stores", "store"),
    "special": Region("exponentials", "exponential"),
}
_OTHER = Region("arithmetic and control", "other")


def regions(listing: Sequence[dict[str, Any]]) -> list[Region]:
    """The region of each instruction of a kernel.

    If the names of inlined functions are known, it is the function that the kernel's body calls:
    the outermost one that does not have nearly all of the code. Otherwise it is the instruction
    class.

    Args:
        listing: as in `Report.listing`.
    """
    chains = _call_chains(listing)
    if not any(chains):
        return [_CLASS_REGIONS.get(row["class"], _OTHER) for row in listing]
    depth, body = 0, ""
    while True:
        heads = Counter(chain[depth] for chain in chains if len(chain) > depth)
        if not heads:
            break
        name, count = heads.most_common(1)[0]
        if count < BODY_SHARE * len(chains):
            break
        depth, body = depth + 1, name
    names = [
        next((name for name in chain[depth:] if name != "lambda"), body or "kernel")
        for chain in chains
    ]
    members: dict[str, list[dict[str, Any]]] = {}
    for name, row in zip(names, listing, strict=True):
        members.setdefault(name, []).append(row)
    named = {
        name: Region(name, "other" if name == body else _role(rows))
        for name, rows in members.items()
    }
    return [named[name] for name in names]


def _call_chains(listing: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The names of inlined functions of each instruction, outermost first. An instruction without a
    line has those of its predecessor.
    """
    chains: list[tuple[str, ...]] = []
    for row in listing:
        calls = row["calls"]
        if (not calls or calls[0][2] == NO_LINE) and chains:
            chains.append(chains[-1])
        else:
            chains.append(tuple(name for name, _, _ in reversed(calls) if name))
    return chains


def _role(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    opcodes = [row["opcode"] for row in rows]
    if any(row["class"] == "matrix" for row in rows):
        return "matrix"
    if any(row["class"] == "async_copy" and "wait" not in row["opcode"] for row in rows):
        return "copies"
    if any(opcode.startswith("st.global") for opcode in opcodes):
        return "store"
    if any(opcode.startswith(("ex2.", "tanh.")) for opcode in opcodes):
        return "exponential"
    if any(opcode.startswith("ld.global") for opcode in opcodes):
        return "load"
    arithmetic = sum(row["class"] in ("float", "half", "double") for row in rows)
    return "arithmetic" if 2 * arithmetic >= len(rows) else "other"


# --- one CTA, put together ---


def timeline(report: Report, cta: int) -> Timeline:
    """Puts the trace of a CTA together.

    Raises:
        ValueError: that CTA was not traced.
    """
    if cta not in report.traces:
        traced = ", ".join(str(index) for index in sorted(report.traces)) or "none"
        raise ValueError(f"CTA {cta} was not traced: {traced} of {report.ctas} were")
    trace = report.traces[cta]
    where = regions(report.listing)
    end = max((event.end for event in trace.events), default=0)
    warps = sum(1 for name in trace.tracks if name.removeprefix("warp ").isdigit())
    waits = tuple(
        sorted(
            (event for event in trace.events if event.kind == "wait"),
            key=lambda event: (event.begin, event.track),
        )
    )
    slices = [
        piece for warp in range(warps) for piece in _slices(trace, warp, where, report.listing)
    ]
    return Timeline(
        report.kernel, cta, warps, end, tuple(slices), waits, tuple(_batches(trace)), trace
    )


def _slices(
    trace: Trace, warp: int, where: Sequence[Region], listing: Sequence[dict[str, Any]]
) -> list[Slice]:
    runs = sorted(
        (event for event in trace.events if event.kind == "run" and event.track == warp),
        key=lambda event: event.begin,
    )
    waits = sorted(
        event.begin for event in trace.events if event.kind == "wait" and event.track == warp
    )
    result: list[Slice] = []
    classes: Counter[str] = Counter()
    region: Region | None = None
    begin = end = first = 0

    def finish() -> None:
        if region is not None and end > begin:
            executed = sum(classes.values())
            result.append(Slice(warp, begin, end, region, executed, dict(classes), first))

    for run in runs:
        waited = bool(waits) and waits[0] <= run.begin
        while waits and waits[0] <= run.begin:
            waits.pop(0)
        for step in range(run.end - run.begin):
            pc = run.pc + step
            if where[pc] != region or waited:
                finish()
                classes = Counter()
                region, begin, first = where[pc], run.begin + step, pc
                waited = False
            end = run.begin + step + 1
            classes[listing[pc]["class"]] += 1
    finish()
    return result


def _batches(trace: Trace) -> list[Batch]:
    groups: dict[tuple[int, str, int], list[TraceEvent]] = {}
    for event in trace.events:
        if event.kind == "async":
            groups.setdefault((event.track, event.label, event.seen), []).append(event)
    batches = [
        Batch(
            trace.tracks[track],
            label,
            min(event.begin for event in events),
            max(event.end for event in events),
            seen,
            tuple(sorted(events, key=lambda event: (event.begin, event.end))),
        )
        for (track, label, seen), events in groups.items()
    ]
    return sorted(batches, key=lambda batch: (batch.begin, batch.track, batch.label))


# --- ui.perfetto.dev ---


def chrome_trace(
    timelines: Sequence[Timeline], listing: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The traces of CTAs in the format of Chrome's trace viewer, which ui.perfetto.dev opens.

    A CTA is a process; a warp is a thread, and so is each row of asynchronous copies. One
    microsecond on the viewer's axis stands for one warp-instruction of the CTA.

    Args:
        timelines: one for each CTA.
        listing: the kernel's instructions, as in `Report.listing`.

    Returns:
        What `json.dump` takes: "traceEvents", sorted by time, and "otherData".
    """
    events: list[dict[str, Any]] = []
    metadata: list[dict[str, Any]] = []
    for line in timelines:
        pid = line.cta
        rows = _rows(line.batches)
        names = [f"warp {warp}" for warp in range(line.warps)] + list(rows)
        order = sorted(range(len(names)), key=lambda tid: (_warp_number(names[tid]), tid))
        metadata.append(_name("process_name", pid, 0, f"CTA {pid} of {line.kernel}"))
        for tid, name in enumerate(names):
            metadata.append(_name("thread_name", pid, tid, name))
            sort = {"sort_index": order.index(tid)}
            metadata.append(
                {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": sort}
            )
        for piece in line.slices:
            row = listing[piece.first]
            arguments: dict[str, Any] = {
                "warp-instructions": piece.executed,
                **dict(Counter(piece.classes).most_common()),
                "begins at": _place(row),
            }
            events.append(
                _complete(pid, piece.warp, piece.begin, piece.end, piece.region.name, arguments)
                | {"cat": piece.region.role}
            )
        for number, wait in enumerate(line.waits):
            name = f"waits for {wait.label}"
            arguments = {"at": _place(listing[wait.pc])}
            if wait.end == wait.begin:
                events.append(
                    {"ph": "i", "s": "t", "name": name, "cat": "wait", "pid": pid,
                     "tid": wait.track, "ts": wait.begin, "args": arguments}
                )  # fmt: skip
                continue
            if wait.cause >= 0:
                arguments["ended by"] = line.trace.tracks[wait.cause]
                arrow = {"name": "arrives last", "cat": "wait", "pid": pid, "id": f"{pid}.{number}"}
                events.append(arrow | {"ph": "s", "tid": wait.cause, "ts": wait.end - 1})
                events.append(arrow | {"ph": "f", "bp": "e", "tid": wait.track, "ts": wait.end - 1})
            events.append(
                _complete(pid, wait.track, wait.begin, wait.end, name, arguments) | {"cat": "wait"}
            )
        for tid, batches in enumerate(rows.values(), start=line.warps):
            for batch in batches:
                what = (
                    {"copies": len(batch.copies), "bytes": batch.bytes}
                    if batch.bytes
                    else {"products": len(batch.copies)}
                    if batch.track == "tensor pipe"
                    else {"uses": len(batch.copies)}
                )
                arguments = {
                    **what,
                    "waited for at": batch.seen,
                    "issued at": _place(listing[batch.copies[0].pc]),
                    "issue to landing": [[copy.begin, copy.end] for copy in batch.copies],
                }
                events.append(
                    _complete(pid, tid, batch.begin, batch.end, batch.label, arguments)
                    | {"cat": "async"}
                )
        for time, level in _in_flight(line.batches):
            events.append(
                {"ph": "C", "name": "bytes in flight", "pid": pid, "tid": 0, "ts": time,
                 "args": {"bytes": level}}
            )  # fmt: skip
    events.sort(key=lambda event: (event["ts"], event["pid"], event["tid"], -event.get("dur", 0)))
    return {
        "traceEvents": metadata + events,
        "displayTimeUnit": "ns",
        "otherData": {
            "time": "1 us stands for 1 warp-instruction of the CTA: an order, not time on a GPU",
            "kernels": sorted({line.kernel for line in timelines}),
        },
    }


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(
    pid: int, tid: int, begin: int, end: int, name: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": end - begin,
        "args": arguments,
    }  # fmt: skip


def _rows(batches: Iterable[Batch]) -> dict[str, list[Batch]]:
    """The batches by the row that shows them. Batches of a row do not overlap."""
    rows: dict[str, list[Batch]] = {}
    for batch in batches:
        for number in range(1, 1 << 16):
            row = rows.setdefault(
                f"{batch.track} {batch.label}" + (f" ({number})" if number > 1 else ""), []
            )
            if not row or row[-1].end <= batch.begin:
                row.append(batch)
                break
    return rows


def _warp_number(name: str) -> int:
    words = name.split()
    return (
        int(words[1]) if len(words) > 1 and words[0] == "warp" and words[1].isdigit() else 1 << 30
    )


def _in_flight(batches: Iterable[Batch]) -> list[tuple[int, int]]:
    """(time, bytes of copies issued but not complete), at each change."""
    changes: Counter[int] = Counter()
    for batch in batches:
        for copy in batch.copies:
            changes[copy.begin] += copy.bytes
            changes[copy.end] -= copy.bytes
    level = 0
    levels = []
    for time in sorted(changes):
        if changes[time]:
            level += changes[time]
            levels.append((time, level))
    return levels


def _place(row: dict[str, Any]) -> str:
    """ "multiply_qk, ampere/tile.cuh:150 (PTX line 911: ldmatrix...)" """
    source = row["source"].split(", inlined at ")[0]
    name: str = row["calls"][0][0] if row["calls"] else ""
    where = ", ".join(part for part in (name, source) if part)
    return f"{where} (PTX line {row['line']}: {row['opcode']})".strip()
