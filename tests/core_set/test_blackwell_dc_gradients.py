"""Gradients by blackwell_dc's kernels: what hopper's do not have (test_rounds_gradients.py has the
others).
"""

from __future__ import annotations

import functools

import pytest
from bench import on_the_spot
from bench.switches import gradients as switch

import archflash
from archflash import _gradients, _options
from archflash.sim import _attention as simulator

from ..sim.explained import unexplained
from . import gradients
from .executors import executor
from .gradients import forward

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
    request = switch.request_of(*inputs(400, 200, d, d, "bfloat16", heads=(1, 1)))

    def is_right(seed: int, wheel: bool) -> bool:
        settings = simulator.Settings(mode="shuffled", seed=seed)
        into, reports = switch.compute(request, "" if wheel else nvcc, settings)
        assert not any(unexplained("blackwell_dc", report) for report in reports), reports
        found = {finding.kind for report in reports for finding in report.findings}
        assert found == ({"tcgen05-order"} if wheel else set())
        return switch.problem_of(request, into) == ""

    assert all(is_right(seed, wheel=False) for seed in range(4))
    assert not all(is_right(seed, wheel=True) for seed in range(4))
