"""`archflash replay plan.json`: runs a saved plan on random data and checks the output against
float64.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _dispatch, _options, reference
from archflash._errors import LaunchError
from archflash.cli import gpus

SEED = 20240731
MOST_BYTES = 1 << 20  # most bytes of a file; no plan has a tenth of them


def add_parser(commands: Any) -> None:
    """Adds the command to the parser of `archflash`."""
    parser = commands.add_parser(
        "replay", help="run a plan saved by `explain --plan` on random data and check it"
    )
    parser.add_argument("plan", type=Path, help="a plan as JSON")
    gpus.add_argument(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Inputs:
    """Random tensors and options whose call has exactly a plan's problem."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    out: Tensor | None = None


def load_plan(path: Path) -> _native.LaunchPlan:
    """Reads a plan. It returns what this version plans for the problem, device and implementation
    that the file names, and uses nothing else of the file.

    Raises:
        ValueError: the file is not a plan, or differs from what this version plans.
    """
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    try:
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        plan = _native.LaunchPlan.from_dict(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a plan of this version of archflash ({error}); make it again with "
            "`archflash explain --plan`"
        ) from None
    if plan.problem.kv_cache:
        raise ValueError(
            f"{path} is the plan of a call with a KV cache: replay makes tensors for calls of "
            "archflash.attention only"
        )
    return plan


def bytes_needed(problem: dict[str, Any]) -> int:
    """A lower bound of the bytes of the tensors that `make_inputs` makes, without sinks, and of the
    float64 tensors that the output is compared with.
    """
    batch = 1 if problem["varlen"] else problem["batch"]
    total = 8 * problem["batch"]
    for name, heads, rows, dim in (
        ("q", problem["heads_q"], problem["nq"], problem["d"]),
        ("k", problem["heads_kv"], problem["nk"], problem["d"]),
        ("v", problem["heads_kv"], problem["nk"], problem["dv"]),
        ("out", problem["heads_q"], problem["nq"], problem["dv"]),
    ):
        steps = problem[name]
        sizes = ((batch, steps["batch"]), (heads, steps["head"]), (rows, steps["row"]))
        last = sum((size - 1) * step for size, step in sizes if size > 1)
        if batch * heads * rows:
            total += max(4 * (last + dim), 8 * batch * heads * rows * dim)
    return int(total)


def make_inputs(problem: dict[str, Any], device: torch.device) -> Inputs:
    """Random normal tensors with the strides of the problem. Packed sequences have lengths as equal
    as possible.
    """
    generator = torch.Generator(device=device).manual_seed(SEED)

    def tensor(name: str, heads: int, rows: int, dim: int) -> Tensor:
        strides = problem[name]
        sizes = [heads, rows, dim] if problem["varlen"] else [problem["batch"], heads, rows, dim]
        steps = [strides["head"], strides["row"], 1]
        steps = steps if problem["varlen"] else [strides["batch"], *steps]
        data = torch.randn(_extent(sizes, steps), generator=generator, device=device)
        view = _strided(
            data.to(getattr(torch, problem["out_dtype" if name == "out" else "dtype"])),
            sizes, steps,
        )  # fmt: skip
        return view.transpose(0, 1) if problem["varlen"] else view

    q = tensor("q", problem["heads_q"], problem["nq"], problem["d"])
    k = tensor("k", problem["heads_kv"], problem["nk"], problem["d"])
    v = tensor("v", problem["heads_kv"], problem["nk"], problem["dv"])
    out = tensor("out", problem["heads_q"], problem["nq"], problem["dv"])
    batch = problem["batch"]
    options: dict[str, Any] = {
        "scale": problem["scale"],
        "softcap": problem["softcap"] or None,
        "window": (problem["window_left"], None if problem["causal"] else problem["window_right"]),
        **{
            name: bool(problem[field])
            for name, field in _options.FLAG_FIELDS.items()
            if name in _options.OF_ATTENTION
        },
    }
    if problem["q_offset_tensor"]:
        default = problem["nk"] - problem["nq"] if not problem["varlen"] else 0
        options["q_offset"] = torch.full((batch,), default, dtype=torch.int32, device=device)
    elif not problem["q_offset_default"]:
        options["q_offset"] = problem["q_offset"]
    if problem["sinks"]:
        codes = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16, 6: torch.float64}
        options["sinks"] = torch.randn(problem["heads_q"], generator=generator, device=device).to(
            codes[problem["sinks"]]
        )
    if problem["approximate"]:
        options["approximate"] = _native.approximations()[problem["approximate"] - 1][0]
    options["num_splits"] = problem["num_splits"] or None
    if problem["out_dtype"] != problem["dtype"]:
        options["out_dtype"] = getattr(torch, problem["out_dtype"])
    options |= _descales(problem, generator)
    if problem["varlen"]:
        for name, total in (("q", problem["nq"]), ("k", problem["nk"])):
            ends = [total * sequence // max(batch, 1) for sequence in range(batch + 1)]
            options[f"cu_seqlens_{name}"] = torch.tensor(ends, dtype=torch.int32, device=device)
            longest = problem[f"max_seqlen_{name}"]
            options[f"max_seqlen_{name}"] = None if longest == -1 else longest
    return Inputs(q, k, v, options, out)


def _extent(sizes: list[int], strides: list[int]) -> int:
    """How many numbers a tensor of these sizes and strides spans; at least one."""
    steps = zip(sizes, strides, strict=True)
    return max(1 + sum((size - 1) * stride for size, stride in steps if size > 1), 1)


def _strided(data: Tensor, sizes: list[int], strides: list[int]) -> Tensor:
    return data.as_strided(sizes, strides) if 0 not in sizes else data.new_empty(sizes)


def _descales(problem: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Random scales of q, k and v, for those that the problem has."""
    device = generator.device
    heads_of_q = problem["heads_kv" if problem["descale"] & 8 else "heads_q"]
    heads = {"q": heads_of_q, "k": problem["heads_kv"], "v": problem["heads_kv"]}
    scales = {}
    for bit, name in enumerate("qkv"):
        steps = problem[f"{name}_descale"]
        rows = problem["nq" if name == "q" else "nk"]
        sizes = [problem["batch"], heads[name]]
        strides = [steps["batch"], steps["head"], steps["row"]]
        if problem["descale"] & 16:  # block scales
            columns = problem["dv" if name == "v" else "d"]
            groups = -(-(rows if name == "v" else columns) // _native.SCALED_NUMBERS)
            sizes += [groups, columns] if name == "v" else [rows, groups]
            strides.append(1)
            exponents = torch.randint(
                122, 132, (_extent(sizes, strides),), generator=generator, device=device
            )
            data = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
        elif problem["descale"] >> bit & 1:
            if steps["row"]:
                sizes.append(-(-rows // _native.SCALE_ROWS))
            strides = strides[: len(sizes)]
            if not any(strides):
                sizes, strides = [1], [1]
            extent = _extent(sizes, strides)
            data = torch.rand(extent, generator=generator, device=device) + 0.5
        else:
            continue
        scales[f"{name}_descale"] = _strided(data, sizes, strides)
    return scales


def run(arguments: argparse.Namespace) -> int:
    """Runs the plan once; exit status 1 when its output breaks the error rule."""
    plan = load_plan(arguments.plan)
    problem = plan.problem.to_dict()
    if trouble := _dispatch.driver_problem():
        raise LaunchError(f"replay needs a GPU: {trouble}")
    here = _dispatch.query_device(arguments.device)
    device = torch.device("cuda", arguments.device)
    needed, (_, memory) = bytes_needed(problem), torch.cuda.mem_get_info(device)
    if needed > memory:
        raise ValueError(
            f"{arguments.plan}: its tensors take {needed} bytes, and {device} has {memory}"
        )
    print(f"{plan.implementation}: {_dispatch.describe_problem(plan.problem)}")
    print(f"planned for {_dispatch.describe_device(plan.device)}")
    print(f"runs on {_dispatch.describe_device(here)}")
    inputs = make_inputs(problem, device)
    result = run_plan(plan, inputs)
    out, lse = result if inputs.options["return_lse"] else (result, None)
    options = {
        name: value
        for name, value in inputs.options.items()
        if name != "return_lse" and name not in _options.ADVICE
    }
    if problem["approximate"]:
        of_out, of_lse = reference.check_approximate(
            inputs.options["approximate"], out, lse, inputs.q, inputs.k, inputs.v, **options
        )
        print(of_out if of_lse is None else f"{of_out}\nlog-sum-exp: {of_lse}")
        return 0 if of_out.ok and (of_lse is None or of_lse.ok) else 1
    expected, expected_lse = reference.attention(inputs.q, inputs.k, inputs.v, **options)
    if problem["dtype"].startswith("float8"):
        report = reference.check_fp8(out, expected, inputs.q, inputs.k, inputs.v, **options)
    else:
        baseline = reference.baseline(inputs.q, inputs.k, inputs.v, **options)
        report = reference.check(out, expected, baseline)
    print(report)
    if lse is None:
        return 0 if report.ok else 1
    more = reference.fp8_score_error(
        plan.implementation, here.capability, inputs.q, inputs.k, inputs.v, **options
    )
    lse_report = reference.check_lse(lse, expected_lse, more)
    print(f"log-sum-exp: {lse_report}")
    return 0 if report.ok and lse_report.ok else 1


def run_plan(plan: _native.LaunchPlan, inputs: Inputs) -> Any:
    """Executes a plan on tensors that have its problem. Returns what attention() would return."""
    options = _options.complete({**inputs.options, "out": inputs.out})
    return _native.execute(plan, inputs.q, inputs.k, inputs.v, tuple(options.values()))
