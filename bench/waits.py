"""How long each warp of a kernel waits at each mbarrier, on this machine's GPU:

    python -m bench.waits --implementation hopper --shape 2,16,4096,128 --dtype bfloat16

It takes the arguments of ``archflash explain``; ``--gradients`` measures the backward pass. No
compiler is needed: the kernel's PTX comes from the wheel, each wait in it gets instructions that
add the cycles that it took to a table, and the driver compiles that. A share is that of the
warp's whole time from its first to its last instruction. The counting takes time itself, as the
last line says: on an H200 62% of a forward pass and 51% of a backward pass. The producer of the
first waits 77% of its time there, those of the second 73% and 37% (hopper, 2x16 4096 d128,
2026-11-29).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.sim.mutation.statements import kernel_module

from bench.on_the_spot import SOURCES, with_kernel

WARPS = 32  # of a row of the table; the first row has the warps' whole time
_WAIT = re.compile(r"^mbarrier\.try_wait\.parity.*;$")
_LOC = re.compile(r"\s*\.loc\s+(\d+) (\d+) \d+(?:.*inlined_at (\d+) (\d+))?")


def counting(text: str, kernel: str, address: int) -> tuple[str, list[str]]:
    """A module with one kernel, whose waits are counted.

    Args:
        text: a module.
        kernel: one of its kernels.
        address: of the table, (1 + number of waits, WARPS) int64.

    Returns:
        The text, and the place of each wait as "file:line".
    """
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', text, re.MULTILINE))
    start = re.search(rf"\.entry {kernel}\(", text)
    if start is None:
        raise ValueError(f"no kernel {kernel}")
    end = text.find(".entry ", start.end())
    places: list[str] = []
    callers: dict[tuple[str, ...], tuple[str, ...]] = {}  # where what a line is of was inlined
    at: tuple[str, ...] = ()
    lines = text[start.start() : end if end >= 0 else len(text)].split("\n")
    for number, line in enumerate(lines):
        if found := _LOC.match(line):
            at = found.groups()[:2]
            callers[at] = found.groups()[2:]
        elif _WAIT.match(line):
            while files[at[0]].startswith("common/ptx/"):  # what calls the wrapper
                at = callers[at]
            places.append(f"{files[at[0]]}:{at[1]}")
            # A wait is a loop of attempts, and lasts from the first of them to the one that is
            # complete: %since is 0 outside of it.
            before = ".reg .pred fresh;\n.reg .b64 cycles, then;\n"
            before += "setp.eq.u64 fresh, %since, 0;\n@fresh mov.u64 %since, %clock64;\n"
            # A warp issues in order: behind the vote on the result the clock is read when that is
            # there. Under its predicate alone the assembler reads it before.
            after = "\n.reg .b32 mask, done;\nactivemask.b32 mask;"
            after += "\nvote.sync.ballot.b32 done, complete, mask;\nmov.u64 cycles, %clock64;"
            after += "\nmov.u64 then, %since;\n@complete mov.u64 %since, 0;"
            adding = _add(address, len(places), "brev.b32 first, done;\nclz.b32 first, first;")
            lines[number] = before + line + after + adding
        elif line.strip() == "ret;":
            block = "{\n.reg .b64 cycles, then;\nmov.u64 then, %born;\nmov.u64 cycles, %clock64;"
            block += _add(address, 0)
            lines[number] = f"{block}\n}}\n{line}"
    body = re.sub(
        r"\n\{\n((?:\s*\.reg.*\n)+)",
        r"\n{\n\1.reg .b64 %born, %since;\nmov.u64 %born, %clock64;\nmov.u64 %since, 0;\n",
        "\n".join(lines),
        count=1,
    )
    rest = text[end:] if end >= 0 else ""
    return kernel_module(text[: start.start()] + body + rest, kernel), places


def _add(address: int, row: int, of_lane: str = "mov.u32 first, 0;") -> str:
    """PTX by which one lane adds the cycles from `then` to `cycles` to the table."""
    return f"""
.reg .pred counts;
.reg .b32 first, number;
.reg .b64 entry;
sub.s64 cycles, cycles, then;
{of_lane}
mov.u32 number, %laneid;
setp.eq.u32 counts, number, first;
mov.u32 number, %tid.x;
shr.u32 number, number, 5;
mul.wide.u32 entry, number, 8;
add.s64 entry, entry, {address + 8 * WARPS * row};
@counts red.relaxed.gpu.global.add.u64 [entry], cycles;"""


def shares(table: torch.Tensor, places: Sequence[str]) -> list[tuple[float, str, str]]:
    """(share, warps, place) of every wait of every warp, the longest first. Neighbouring warps are
    one row if they wait at the same place.
    """
    whole, waits = table[0].double(), {}
    for row, place in zip(table[1:].double(), places, strict=True):  # copies of a statement are one
        waits[place] = waits.get(place, 0) + row
    rows = []
    for place, cycles in waits.items():
        there = (cycles > 0).nonzero().flatten().tolist()
        runs: list[list[int]] = []
        for warp in there:
            if runs and runs[-1][-1] == warp - 1:
                runs[-1].append(warp)
            else:
                runs.append([warp])
        for run in runs:
            share = float(cycles[run].sum() / whole[run].sum())
            rows.append((share, str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}", place))
    return sorted(rows, reverse=True)


def statement(place: str) -> str:
    """The line of this checkout, which need not be the wheel's."""
    file, _, line = place.partition(":")
    lines = (SOURCES / file).read_text().split("\n")
    return lines[int(line) - 1].partition("  //")[0].strip() if int(line) <= len(lines) else ""


def milliseconds(run: Callable[[], None]) -> float:
    """The median of 9 runs, after one."""
    run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(9)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[4]


def planned(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The plan of the call or of its gradients, and the tensors to launch it with."""
    import archflash
    from archflash import _archflash as native
    from archflash import _gradients, _options
    from archflash.cli.explain import read_call

    call = read_call(arguments)
    q, k, v = (torch.randn(shape, device="cuda").to(call.dtype) for shape in call.shapes)
    options = call.options | {"implementation": arguments.implementation}
    if not arguments.gradients:
        plan = archflash.explain(q, k, v, **options).plan
        complete = _options.complete(call.options | {"return_lse": arguments.lse})
        if plan is None:
            raise SystemExit("no kernel of archflash serves this call (archflash explain says why)")
        return plan, native.operands(plan, q, k, v, tuple(complete.values()))
    out, lse = archflash.attention(q, k, v, **options | {"return_lse": True})
    options = _options.complete({**call.options, "return_lse": False})
    request = _gradients.Request(torch.randn_like(out), q, k, v, out, lse, None, options)
    into = _gradients.Gradients.like(request)
    decision = _gradients.decide(request, into, None, arguments.implementation)
    if decision.plan is None:
        raise SystemExit("no kernel of archflash computes these gradients")
    return decision.plan, _gradients.operands(request, into, decision.plan)


def main(argv: Sequence[str] | None = None) -> int:
    from archflash import _archflash as native
    from archflash.cli.explain import add_call_arguments
    from archflash.sim._attention import ptx_text

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_call_arguments(parser)
    parser.add_argument("--implementation", help="whose kernel; the chosen one by default")
    parser.add_argument("--gradients", action="store_true", help="those of the backward pass")
    plan, tensors = planned(parser.parse_args(argv))
    launches = plan.to_dict()["launches"]
    row = next(row for row in launches if re.search("_attention_(fwd|bwd)", row["kernel"]))
    kernel = row["kernel"]
    text = ptx_text(row["image"], torch.cuda.get_device_capability())
    if not counting(text, kernel, 0)[1]:
        raise SystemExit(f"{kernel} waits at no mbarrier")
    table = torch.zeros(1 + len(counting(text, kernel, 0)[1]), WARPS, dtype=torch.int64).cuda()
    module, places = counting(text, kernel, table.data_ptr())
    counted = with_kernel(plan, kernel, module.encode())
    plain = milliseconds(lambda: native.launch(plan, tensors))
    slower = milliseconds(lambda: native.launch(counted, tensors))
    print(f"{kernel} on {torch.cuda.get_device_name()}\n  share  warps  wait")
    for share, warps, place in shares(table.cpu(), places):
        if share >= 0.001:
            print(f"  {share:5.1%}  {warps:>5}  {place}: {statement(place)}")
    print(f"{plain:.3f} ms, with counting {slower:.3f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
