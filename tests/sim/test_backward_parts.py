"""The order of CTAs in hopper's backward pass, which small calls have on a GPU of few SMs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from archflash import _api, _gradients, _options, reference
from archflash import _archflash as native
from archflash.sim import _attention

from .hashed import hashed


def gradients(
    shapes: list[tuple[int, ...]], sm_count: int, deterministic: bool, **options: Any
) -> native.LaunchPlan:
    """Simulates the gradients of a call of dout, q, k and v and checks them; its plan."""
    inputs = [hashed(shape, stream).half() for stream, shape in enumerate(shapes, 1)]
    dout, q, k, v = inputs
    out, lse = reference.attention(q, k, v, **options)
    request = _gradients.Request(
        dout, q, k, v, out.half(), lse.float().contiguous(), None, _options.complete(options)
    )
    into = _gradients.Gradients.like(request)
    facts = _api.find_device("H200").to_dict() | {"sm_count": sm_count}
    device = native.Device.from_dict(facts)
    plan = _gradients.decide(request, into, device, "hopper", deterministic=deterministic).plan
    assert plan is not None
    tensors = _gradients.operands(request, into, plan)
    _attention.simulate(plan, tensors, _attention.Settings())
    exact = reference.attention_backward(*inputs, **options)
    rounded = reference.baseline_backward(*inputs, **options)
    for name in ("dq", "dk", "dv"):
        expected, base = getattr(exact, name), getattr(rounded, name)
        report = reference.check(tensors[name].reshape(expected.shape), expected, base.double())
        assert report.ok, f"{name} {report}"
    return plan


def main_grid(plan: native.LaunchPlan) -> int:
    (grid,) = [
        launch["grid"][0]
        for launch in plan.to_dict()["launches"]
        if "attention_bwd" in launch["kernel"]
    ]
    return int(grid)


@pytest.mark.parametrize(
    ("nq", "nk", "d", "sm_count", "tiles", "deterministic"),
    [(420, 180, 64, 4, 3, False), (420, 200, 64, 5, 2, True), (390, 180, 104, 8, 2, False)],
    ids=["few-keys", "in-turns", "sums-of-fewer-columns"],
)
def test_the_parts_of_a_tile_are_merged(
    nq: int, nk: int, d: int, sm_count: int, tiles: int, deterministic: bool
) -> None:
    shapes = [(1, 1, nq, d)] * 2 + [(1, 1, nk, d)] * 2
    plan = gradients(shapes, sm_count, deterministic)
    assert main_grid(plan) > tiles
    if d > 64:
        assert "hopper_attention_bwd_f16_d128_parts" in plan.kernels
        assert "hopper_backward_dq_f16_d128_exact" in plan.kernels


def test_packed_sequences_come_in_groups_in_turns() -> None:
    lengths = [70, 0, 130, 60]
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    shapes = [(int(ends[-1]), 1, 64)] * 4
    gradients(shapes, 16, True, cu_seqlens_q=ends, cu_seqlens_k=ends)
