"""The switch of the backward pass of blackwell_dc: `trust_issue_order=off`, in which products wait
for one another where the wheel's kernel relies on the order in which they are issued.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from archflash import _archflash as native
from archflash import _dispatch, _gradients, _options, reference, sim
from archflash.sim import _attention as simulator
from bench import on_the_spot
from bench.switches.variants import NAME

SOURCE = Path(__file__).with_name("backward_in_any_order.cu")
DIMS = (64, 128)


def request_of(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> _gradients.Request:
    """The gradients of a call whose output is the exact one."""
    out, lse = reference.attention(q, k, v, **options)
    lse = lse.float().contiguous()
    complete = _options.complete(options)
    return _gradients.Request(dout, q, k, v, out.to(q.dtype), lse, None, complete)


def compiled(d: int, nvcc: str, kind: str, target: str) -> tuple[str, bytes]:
    """The name and the code of the bf16 kernel of a head dimension; kind: "ptx" or "cubin"."""
    kernel = f"{NAME}_attention_bwd_bf16_d{d}"
    macros = ("ARCHFLASH_DTYPE=BF16", f"KERNEL={kernel}", f"WHEEL_CONFIG=BackwardD{d}")
    architecture = target.replace("sm_", "compute_") if kind == "ptx" else target
    return kernel, on_the_spot.compiled(SOURCE, nvcc, kind, architecture, macros)


def compute(
    request: _gradients.Request, nvcc: str, settings: simulator.Settings | None = None
) -> tuple[_gradients.Gradients, list[sim.Report]]:
    """The gradients, by the GPU or, of CPU tensors, by the simulator, with its reports; without a
    compiler those of the wheel's kernel.
    """
    into, q = _gradients.Gradients.like(request), request.q
    device = _dispatch.query_device(q.device.index) if q.is_cuda else None
    plan: Any = _gradients.decide(request, into, device, NAME).plan
    tensors = _gradients.operands(request, into, plan)
    settings = settings or simulator.Settings()
    if nvcc:
        kernel, code = compiled(q.shape[-1], nvcc, "cubin" if q.is_cuda else "ptx", plan.code)
        if q.is_cuda:
            plan = on_the_spot.with_kernel(plan, kernel, code)
        else:
            settings = dataclasses.replace(settings, program=sim.load(code.decode()))
    if q.is_cuda:
        native.launch(plan, tensors)
        return into, []
    return into, simulator.simulate(plan, tensors, settings)


def problem_of(request: _gradients.Request, into: _gradients.Gradients, **options: Any) -> str:
    """What is wrong with gradients by the error rule; empty: nothing."""
    given = (request.dout, request.q, request.k, request.v)
    exact = reference.attention_backward(*given, **options)
    rounded = reference.baseline_backward(*given, **options)
    for name in ("dq", "dk", "dv"):
        base = getattr(rounded, name).double()
        report = reference.check(getattr(into, name), getattr(exact, name), base)
        if not report.ok:
            return f"{name}: {report}"
    return ""
