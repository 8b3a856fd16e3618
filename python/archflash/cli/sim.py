"""`archflash sim run` and `archflash sim trace`: an attention call on the PTX simulator, with a
report of what its kernel did, or with traces and pictures of it.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from archflash import _dispatch, _registry, reference
from archflash._errors import LaunchError
from archflash.cli.explain import Call, add_call_arguments, parse_indices, parse_pair, read_call

MODES = ("lazy", "eager", "random", "priority", "shuffled")
SUFFIXES = (".json", ".svg", ".png")
# Small enough that warps seem to run side by side in a picture.
TRACE_STRETCH = 16
MAX_STRETCH = (1 << 31) - 1
SEEDS = 1 << 64
# The most elements of q, k, v and the scores of the reference together: 4 GB in float64.
MOST_NUMBERS = 1 << 29


def add_parser(commands: Any) -> None:
    """Adds the commands to the parser of `archflash`."""
    parser = commands.add_parser("sim", help="run a call on the PTX simulator: no GPU needed")
    kinds = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    report = kinds.add_parser("run", help="report what the kernel did and check its output")
    add_run_arguments(report)
    trace = kinds.add_parser(
        "trace", help="write what the warps of some CTAs did, as a trace or as a picture"
    )
    _add_arguments(trace)
    trace.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help=".json: a trace of every CTA in --ctas for ui.perfetto.dev; "
        ".svg, .png: a picture of the first one",
    )
    trace.add_argument("--ctas", default="0", metavar="I,J,...", help="indices in the grid")
    trace.add_argument(
        "--stretch",
        type=int,
        default=TRACE_STRETCH,
        metavar="N",
        help="a warp's longest turn, in instructions; 0: as the mode has it (default: %(default)s)",
    )
    trace.add_argument(
        "--part",
        metavar="BEGIN,END",
        help="what a picture shows, in warp-instructions; either side may be empty",
    )
    trace.add_argument("--title", help="of a picture")
    trace.set_defaults(run=trace_call, no_race_check=True, program=None)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `archflash sim run`. `program` of what they are parsed into may be set
    to a program whose kernels run in place of those of the installed package.
    """
    _add_arguments(parser)
    parser.add_argument("--no-race-check", action="store_true", help="faster")
    parser.set_defaults(run=run, ctas="", stretch=0, program=None)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_call_arguments(parser)
    parser.add_argument("--implementation", required=True, help="whose kernel to run")
    parser.add_argument(
        "--device", help="the GPU to plan for, such as 'RTX 5090'; default the implementation's own"
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="random",
        help="when warps run and copies land (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--data-seed", type=int, default=0, help="of the random inputs")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; exit status 1 after errors or when the output breaks the error rule."""
    call = read_call(arguments)
    tensors, options = _inputs(call, arguments)
    result = _simulate(tensors, options, arguments, 0)
    print(_describe(result))
    for report in result.reports:
        print(report)
    if not all(report.complete for report in result.reports):
        return 1
    named = {name: value for name, value in options.items() if name != "return_lse"}
    expected, expected_lse = reference.attention(*tensors, **named)
    if call.dtype.itemsize == 1:
        check = reference.check_fp8(result.out, expected, *tensors, **named)
    else:
        check = reference.check(result.out, expected, reference.baseline(*tensors, **named))
    print(check)
    ok = check.ok and not any(report.errors for report in result.reports)
    if result.lse is not None:
        plan = result.plan
        more = reference.fp8_score_error(
            plan.implementation, plan.device.capability, *tensors, **named
        )
        check_lse = reference.check_lse(result.lse, expected_lse, more)
        print(f"log-sum-exp: {check_lse}")
        ok = ok and check_lse.ok
    return 0 if ok else 1


def trace_call(arguments: argparse.Namespace) -> int:
    """Writes the files; exit status 1 when the kernel did something wrong."""
    from archflash.sim import _picture, _trace

    call = read_call(arguments)
    kinds = [file.suffix.lower() for file in arguments.files]
    for file, kind in zip(arguments.files, kinds, strict=True):
        if kind not in SUFFIXES:
            raise ValueError(f"{file}: its name must end in {', '.join(SUFFIXES)}")
    if ".png" in kinds:
        _picture.require_pillow()
    ctas = parse_indices("--ctas", arguments.ctas)
    begin, end = parse_pair("--part", "BEGIN,END", arguments.part or ",")
    if not 0 <= arguments.stretch <= MAX_STRETCH:
        raise ValueError(f"--stretch {arguments.stretch}: it must be >= 0 and at most 2^31 - 1")
    tensors, options = _inputs(call, arguments)
    result = _simulate(tensors, options, arguments, ctas)
    if not result.reports:
        raise ValueError("there is nothing to compute, so no kernel runs: give sizes of at least 1")
    report = result.report
    lines = [_trace.timeline(report, cta) for cta in ctas if cta in report.traces]
    if not lines:
        raise LaunchError(f"an error stopped the run before CTA {ctas[0]}:\n{report}")
    drawing = None
    if kinds != [".json"] * len(kinds):
        drawing = _picture.draw(
            lines[0],
            arguments.title or _title(result),
            _notes(arguments, lines[0]),
            begin or 0,
            end,
        )
    for file, kind in zip(arguments.files, kinds, strict=True):
        if kind == ".json":
            file.write_text(json.dumps(_trace.chrome_trace(lines, report.listing)) + "\n")
        elif drawing is not None:
            file.write_bytes(drawing.png() if kind == ".png" else drawing.svg().encode())
    print(_describe(result))
    for line in lines:
        copies = sum(len(batch.copies) for batch in line.batches if batch.bytes)
        print(
            f"CTA {line.cta} of {report.kernel}: {line.warps} warps, {line.end:,} "
            f"warp-instructions, {copies} asynchronous copies, "
            f"{sum(wait.end > wait.begin for wait in line.waits)} waits"
        )
    for finding in report.findings:
        print(finding)
    print("written: " + ", ".join(str(file) for file in arguments.files))
    return 1 if report.errors else 0


def _check_size(call: Call) -> None:
    q, k, _ = call.shapes
    rows = 2 if call.options["layout"] == "bhnd" else 1
    scores = q[0] * call.heads * q[rows] * k[rows]
    numbers = sum(map(math.prod, call.shapes)) + scores
    if numbers > MOST_NUMBERS:
        raise ValueError(
            f"q, k, v and their scores are {numbers} numbers: the simulator's commands take at "
            "most 2^29; give a smaller --shape, --keys or --dv"
        )


def _inputs(call: Call, arguments: argparse.Namespace) -> tuple[list[torch.Tensor], dict[str, Any]]:
    for name, seed in (("--seed", arguments.seed), ("--data-seed", arguments.data_seed)):
        if not 0 <= seed < SEEDS:
            raise ValueError(f"{name} {seed}: it must be an integer from 0 to 2^64 - 1")
    if arguments.implementation == _registry.TORCH:
        raise ValueError(
            "--implementation torch: PyTorch's kernels are not simulated; choose from "
            + ", ".join(_registry.kernel_names())
        )
    _check_size(call)
    generator = torch.Generator().manual_seed(arguments.data_seed)
    tensors = [torch.randn(shape, generator=generator).to(call.dtype) for shape in call.shapes]
    options = dict(call.options)
    if arguments.sinks:
        options["sinks"] = torch.randn(call.heads, generator=generator)
    return tensors, options


def _simulate(
    tensors: list[torch.Tensor],
    options: dict[str, Any],
    arguments: argparse.Namespace,
    ctas: int | list[int],
) -> Any:
    from archflash import sim

    return sim.run(
        *tensors, implementation=arguments.implementation, device=arguments.device,
        mode=arguments.mode, seed=arguments.seed, race_check=not arguments.no_race_check,
        traced_ctas=ctas, stretch=arguments.stretch, check=False, program=arguments.program,
        **options,
    )  # fmt: skip


def _describe(result: Any) -> str:
    return (
        f"{result.plan.implementation}: {_dispatch.describe_problem(result.plan.problem)}\n"
        f"as on {_dispatch.describe_device(result.plan.device)}, simulated"
    )


def _title(result: Any) -> str:
    problem = result.plan.problem.to_dict()
    return (
        f"{result.plan.implementation}, {problem['dtype']}, head dim {problem['d']}: "
        f"one CTA and {problem['nk']} keys on the PTX simulator"
    )


def _notes(arguments: argparse.Namespace, line: Any) -> list[str]:
    below = "; below it, bytes of its asynchronous copies in flight" if line.batches else ""
    stretch = f", turns of at most {arguments.stretch}" if arguments.stretch else ""
    return [
        f"A bar is a warp, coloured by the function of the CUDA source that it is in{below}.",
        f"Schedule: {arguments.mode}, seed {arguments.seed}{stretch}; "
        f"CTA {line.cta} of {line.kernel}.",
    ]
