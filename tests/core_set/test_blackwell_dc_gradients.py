"""Gradients by blackwell_dc's kernels: what hopper's do not have (test_rounds_gradients.py has the
others).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from bench import on_the_spot

import archflash
from archflash import _gradients, _options, reference, sim
from archflash.sim import _attention as simulator

from ..sim.explained import unexplained
from . import gradients
from .executors import executor
from .gradients import NAMES, forward

on = executor()
pytestmark = pytest.mark.skipif("blackwell_dc" not in on.kernels(), reason="kernels for 10.x")

inputs = functools.partial(gradients.inputs, on)


def test_head_dimensions_that_it_does_not_take_have_a_reason() -> None:
    dout, q, k, v = inputs(4, 4, 192, 192, "bfloat16")
    out, lse = forward(q, k, v, {})
    request = _gradients.Request(dout, q, k, v, out, lse, None, _options.complete({}))
    into = _gradients.Gradients.like(request)
    with pytest.raises(archflash.ForcedImplementationError, match="up to 128"):
        _gradients.decide(request, into, None, "blackwell_dc")


@pytest.mark.skipif(on.name != "simulator", reason="a GPU has its own order")
@pytest.mark.parametrize("d", [64, 128])
def test_without_trust_in_the_issue_order_products_may_run_in_any_order(d: int) -> None:
    """The mode shuffled carries out products in any order that the ISA's text allows. The wheel's
    kernel relies on the order of issue, and a finding says where; the variant waits instead.
    """
    nvcc = on_the_spot.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not found: it compiles the variant")
    tensors = inputs(400, 200, d, d, "bfloat16", heads=(1, 1))
    out, lse = forward(*tensors[1:], {})
    request = _gradients.Request(tensors[0], *tensors[1:], out, lse, None, _options.complete({}))
    exact = reference.attention_backward(*tensors)
    rounded = reference.baseline_backward(*tensors)
    kernel = f"blackwell_dc_attention_bwd_bf16_d{d}"
    config = f"BackwardD{d}<DType::BF16>"
    source = Path(on_the_spot.__file__).parent / "switches" / "backward_in_any_order.cu"
    made = on_the_spot.compiled(
        source, nvcc, "ptx", "compute_100f", (f"KERNEL={kernel}", f"WHEEL_CONFIG={config}")
    )
    variant = sim.load(made.decode())

    def is_right(program: Any, seed: int, lint: bool) -> bool:
        into = _gradients.Gradients.like(request)
        plan = _gradients.decide(request, into, None, "blackwell_dc").plan
        assert plan is not None
        settings = simulator.Settings(mode="shuffled", seed=seed, program=program)
        found = set()
        for report in simulator.simulate(plan, _gradients.operands(request, into, plan), settings):
            assert not unexplained("blackwell_dc", report), report
            found |= {finding.kind for finding in report.findings}
        assert found == ({"tcgen05-order"} if lint else set())
        return all(
            reference.check(
                getattr(into, name), getattr(exact, name), getattr(rounded, name).double()
            ).ok
            for name in NAMES
        )

    assert all(is_right(variant, seed, lint=False) for seed in range(4))
    assert not all(is_right(None, seed, lint=True) for seed in range(4))
