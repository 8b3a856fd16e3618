"""What warps have read of a stage is there before they hand the stage back to TMA.

A stage is read between the wait for it and the arrival that hands it back. The machine code says
whether the reads are there: a load from shared memory sets a scoreboard, and an instruction between
the load and the arrival waits for that; or a fence lies there, which waits for all loads.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import archflash
from archflash import _archflash as native

from .conftest import built_of
from .machine_code import Flow, controls_of, instructions_of

# Folders in which arrivals of threads hand memory back to TMA. Of blackwell_dc one target, one of
# two types that differ in a few conversions, and not 10.3, whose kernels differ in exponentials. To
# hopper's gradients of lists cp.async brings rows, and what converts caches or reads masks before a
# call copies none.
IMAGES = [
    (image, target.name)
    for image in native.image_names()
    for target in native.targets(image)
    if (
        image.startswith(("blackwell_consumer/", "hopper/"))
        and not image.startswith(("hopper/bwd_lists", "hopper/convert_cache", "hopper/summarize"))
        and target.name.startswith("sm_")
    )
    or (target.name == "sm_100f" and re.fullmatch(r"blackwell_dc/(?!fwd_103).*(?<!_f16)", image))
]
LOADS = ("LDS", "LDSM")
ARRIVAL, WAIT = "SYNCS.ARRIVE", "SYNCS.PHASECHK"
FENCE = "FENCE.VIEW.ASYNC"  # fence.proxy.async, behind MEMBAR.ALL.CTA
KNOWN = re.compile(rf"\b(?:{'|'.join(LOADS)}|{ARRIVAL}|{WAIT}|{FENCE})")
NO_SCOREBOARD = 7
LINE = 16  # bytes: the longest load
BACKWARD_WORK_BYTES = 128  # hopper::BackwardConfig::WORK_BYTES
# In hopper's gradients above 128 columns (wide_bwd.cuh) lanes read P, which threads of the other
# warpgroup store: as `stored_by_threads` says. Of what TMA writes they read 8 bytes at a time.
WIDE = re.compile(r"hopper_attention_bwd_[^_]+_d(192|256)")
READS_P = re.compile(r"LDS\.128 R\d+, \[R\d+\+UR")
STATS_BYTES = 1024  # of a tile: blackwell_dc's Config::STATS_BYTES
# A load under way: its place in the kernel, and the scoreboard that it sets.
Pending = set[tuple[int, int]]


def loads_under_way(texts: list[str], controls: list[int]) -> dict[int, list[str]]:
    """The loads from shared memory since the last wait that may be under way at each arrival, by
    the arrival's place.

    Args:
        texts: a kernel's instructions.
        controls: what each of them waits for and sets, as `controls_of` reads it.
    """
    flow = Flow(texts)
    found: dict[int, list[str]] = {}
    waits = [control >> 11 & 0x3F for control in controls]
    # The instructions of each block that wait for loads, or that are asked for below.
    blocks = [
        [(x.index, x.opcode) for x in block if waits[x.index] or KNOWN.search(x.text)]
        for block in flow.blocks
    ]

    def behind(block: int, before: Pending) -> Pending:
        pending = before
        for index, opcode in blocks[block]:
            pending = {(load, board) for load, board in pending if not waits[index] >> board & 1}
            if opcode.startswith((FENCE, WAIT)):
                pending = set()
            if opcode.startswith(ARRIVAL):
                found[index] = sorted({texts[load] for load, _ in pending})
            if opcode.partition(".")[0] in LOADS and not texts[index].startswith("@!PT"):
                sets = controls[index] >> 5 & 7
                if sets != NO_SCOREBOARD:  # loads come back in order: so do those that set none
                    pending = {(x, sets if b == NO_SCOREBOARD else b) for x, b in pending}
                pending = pending | {(index, sets)}
        return pending

    before: list[Pending] = [set() for _ in flow.blocks]
    todo = set(range(len(flow.blocks)))
    while todo:
        block = todo.pop()
        after = behind(block, before[block])
        for following in flow.next[block]:
            if not after <= before[following]:
                before[following] |= after
                todo.add(following)
    for block, pending in enumerate(before):
        behind(block, pending)
    return found


@pytest.mark.parametrize(("image", "target"), IMAGES)
def test_no_load_is_under_way_when_a_stage_is_handed_back(
    image: str, target: str, cuobjdump: Path, nvdisasm: Path
) -> None:
    built_of([target])
    cubin = native.code_of(image, target)
    codes, controls = instructions_of(cuobjdump, cubin), controls_of(cuobjdump, cubin)
    arrivals = 0
    for kernel, texts in codes.items():
        found = loads_under_way(texts, controls[kernel])
        arrivals += len(found)
        kept, stored = kept_from(kernel, texts), stored_by_threads(texts)
        of_stages = [
            load
            for loads in found.values()
            for load in loads
            if offset_of(load) < kept
            and offset_of(load) // LINE not in stored
            and not (WIDE.match(kernel) and READS_P.match(load))
        ]
        assert not of_stages, (kernel, found)
    assert arrivals


def kept_from(kernel: str, texts: list[str]) -> int:
    """The offset in shared memory behind which TMA writes nothing while the kernel runs: the work
    of a CTA, at the end, of hopper's backward kernels, and the statistics of rows, in front of the
    barriers, of blackwell_dc's forward kernels, which threads store.
    """
    if kernel.startswith("blackwell_dc_attention_fwd"):
        tiles = 1 if re.search(r"_few$|_d256", kernel) else 2
        return first_barrier(texts) // STATS_BYTES * STATS_BYTES - tiles * STATS_BYTES
    # The kernels with a softcap, with dropout, of exact sums and for parts have the same memory as
    # the others.
    variants = "_softcap|_dropout|_exact|_parts"
    main = re.fullmatch(rf"hopper_attention_bwd_[^_]+_d(\d+)({variants})?", kernel)
    if main is None:
        return sys.maxsize
    tile = main[1]
    # Fewer rows, and fewer tiles, have kernels of their own.
    q = torch.empty(4, 16, 1100, int(tile), dtype=torch.bfloat16, device="meta")
    v = q[..., :128] if tile == "192" else q
    plan = archflash.explain(q, q, v, device="H200", implementation="hopper", backward=True).plan
    assert plan is not None
    (launch,) = (x for x in plan.to_dict()["launches"] if "_attention_bwd_" in x["kernel"])
    assert re.search(rf"_d{tile}(_parts)?$", launch["kernel"])
    return int(launch["shared_bytes"]) - BACKWARD_WORK_BYTES


def stored_by_threads(texts: list[str]) -> set[int]:
    """The lines of shared memory behind the first barrier in which a kernel's threads store: of
    messages between warps. Such a store queues behind the loads before the arrival that it waited
    for. In front of the barriers lies what TMA writes.
    """
    first = first_barrier(texts)
    stores = {offset_of(text) for text in texts if "STS" in text and re.search(r"\bSTS\b", text)}
    return {offset // LINE for offset in stores if offset >= first}


def first_barrier(texts: list[str]) -> int:
    """The lowest offset of a barrier that an instruction states."""
    barriers = [offset_of(text) for text in texts if "SYNCS." in text]
    return min((offset for offset in barriers if offset >= STATS_BYTES), default=sys.maxsize)


def offset_of(load: str) -> int:
    """Of "LDS R3, [UR4+0x388a0]"."""
    match = re.search(r"\+(0x[0-9a-f]+)\]", load)
    return int(match[1], 16) if match else 0


def test_a_load_that_nothing_waits_for_is_found() -> None:
    def control(waits: int = 0, sets: int = NO_SCOREBOARD) -> int:
        return waits << 11 | sets << 5

    load = ("LDSM.16.M88.4 R4, [R0]", control(sets=2))
    unmarked = ("LDS R8, [R1]", control())
    product = ("HMMA.16816.F32 R8, R4, R6, R8", control(waits=0b100))
    arrival = ("@P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2], RZ", control())
    fence = ("FENCE.VIEW.ASYNC.S", control())
    wait = ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3", control())
    back = ("@P1 BRA 0x0", control())
    end = ("EXIT", control())
    for code, expected in (
        ([load, arrival, end], [[load[0]]]),
        ([load, product, arrival, end], [[]]),
        ([load, fence, arrival, end], [[]]),
        ([load, wait, arrival, end], [[]]),  # of something else
        ([wait, load, arrival, end], [[load[0]]]),
        ([arrival, load, end], [[]]),
        ([unmarked, arrival, end], [[unmarked[0]]]),
        ([unmarked, load, product, arrival, end], [[]]),
        ([arrival, load, back, end], [[load[0]]]),  # in the next turn of the loop
        ([product, arrival, load, back, end], [[]]),
    ):
        texts, controls = map(list, zip(*code, strict=True))
        assert list(loads_under_way(texts, controls).values()) == expected, code
