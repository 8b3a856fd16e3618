"""Plans made for other GPUs, run here: so every compiled kernel runs, whoever would choose it."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest
import torch
from gpu_cases import kernels, no_gpu, serves

import archflash
from archflash import _archflash as _native
from archflash import reference
from archflash.cli.replay import make_inputs, run_plan

pytestmark = pytest.mark.gpu

DEVICES = ("T4", "A100", "RTX 4090", "RTX 5090", "H200", "B200")
# batch, query heads, key heads, queries, keys, causal: few rows, some, and enough to fill each of
# the GPUs; few rows of many keys, and rows long enough for pairs of CTAs
SHAPES = {
    "few": (1, 4, 2, 65, 129, True),
    "some": (2, 24, 12, 193, 321, True),
    "many": (4, 40, 20, 193, 321, True),
    "most": (12, 48, 24, 193, 321, True),
    "unmasked": (4, 40, 20, 193, 321, False),
    "split": (1, 4, 2, 5, 4100, True),
    "long": (1, 10, 5, 4096, 4096, False),
}
IN_PAIRS = ("blackwell_dc",)  # for the others the long rows would only take time
HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256))


def plan_for(
    kernel: str, device: str, dtype: str, dims: tuple[int, int], shape: str, **options: Any
) -> _native.LaunchPlan:
    batch, heads, heads_kv, nq, nk, causal = SHAPES[shape]
    kind = getattr(torch, dtype)
    q = torch.empty(batch, heads, nq, dims[0], dtype=kind, device="meta")
    k, v = (torch.empty(batch, heads_kv, nk, dim, dtype=kind, device="meta") for dim in dims)
    with torch.no_grad():
        decision = archflash.explain(
            q, k, v, device=device, implementation=kernel, causal=causal, **options
        )
    plan = decision.plan
    assert plan is not None
    return plan


def capability_of(device: str) -> tuple[int, int]:
    known = _native.find_known_device(device)
    assert known is not None
    return known.device.capability


def every_entry(kernel: str) -> set[str]:
    """The kernels that the build compiled for an implementation."""
    names: set[str] = set()
    for file in (files("archflash") / "_kernels" / kernel).iterdir():
        if file.name.endswith(".json"):
            for entries in json.loads(file.read_text()).values():
                names |= set(entries)
    return names


EVERY = [
    pytest.param(
        kernel, device, dtype, (d, dv), shape, id=f"{kernel}-{device}-{dtype}-d{d}-{dv}-{shape}"
    )
    for kernel in kernels()
    for device in DEVICES
    if serves(kernel, capability_of(device))
    for dtype in next(i.dtypes for i in archflash.implementations() if i.name == kernel)
    for d, dv in HEAD_DIMS
    for shape in SHAPES
    if shape != "long" or kernel in IN_PAIRS
]


def one_of_each(cases: list[Any]) -> list[Any]:
    """The first case for each (compiled kernels, head dims, shape) that the plans come to: two GPUs
    with the same plan need no second run.
    """
    chosen: dict[Any, Any] = {}
    for case in cases:
        plan = plan_for(*case.values)
        launches = tuple(launch["kernel"] for launch in plan.to_dict()["launches"])
        chosen.setdefault((launches, *case.values[3:]), case)
    return list(chosen.values())


CASES = (
    EVERY if no_gpu() else one_of_each(EVERY)
)  # planning takes seconds, for tests that would skip


@pytest.mark.parametrize(("kernel", "device", "dtype", "dims", "shape"), CASES)
def test_a_plan_for_another_gpu_is_right_here(
    kernel: str, device: str, dtype: str, dims: tuple[int, int], shape: str
) -> None:
    plan = plan_for(kernel, device, dtype, dims, shape, return_lse=True)
    inputs = make_inputs(plan.problem.to_dict(), torch.device("cuda"))
    assert inputs.out is not None
    inputs.out.fill_(float("nan"))
    out, lse = run_plan(plan, inputs)
    call = {"causal": SHAPES[shape][-1], "scale": plan.problem.to_dict()["scale"]}
    expected, expected_lse = reference.attention(inputs.q, inputs.k, inputs.v, **call)
    if dtype.startswith("float8"):
        report = reference.check_fp8(out, expected, inputs.q, inputs.k, inputs.v, **call)
    else:
        baseline = reference.baseline(inputs.q, inputs.k, inputs.v, **call)
        report = reference.check(out, expected, baseline)
    assert report.ok, report
    lse_report = reference.check_lse(lse, expected_lse)
    assert lse_report.ok, lse_report


@pytest.mark.parametrize("kernel", kernels())
def test_the_plans_above_run_every_compiled_kernel(kernel: str) -> None:
    ran = set()
    for case in CASES:
        name, device, dtype, dims, shape = case.values
        if name == kernel:
            plan = plan_for(kernel, device, dtype, dims, shape)
            ran |= {launch["kernel"] for launch in plan.to_dict()["launches"]}
    assert ran == {
        name for name in every_entry(kernel) if "_quantize_" not in name and "int8_" not in name
    }
