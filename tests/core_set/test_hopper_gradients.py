"""Gradients by hopper's kernels: what blackwell_dc's do not have (test_rounds_gradients.py has the
others).
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as native
from archflash import _gradients, _options
from archflash.sim import _attention as simulator

from . import gradients
from .executors import executor
from .gradients import NAMES, forward

on = executor()
pytestmark = pytest.mark.skipif("hopper" not in on.kernels(), reason="kernels for 9.0")
GROUP_HEADS_OFFSET = 524  # of BackwardKernelParams::group_heads

inputs = functools.partial(gradients.inputs, on)


@pytest.mark.skipif(on.name != "simulator", reason="it changes a plan's parameters")
@pytest.mark.parametrize("d", [64, 256])
def test_tiles_of_keys_in_any_groups_of_heads(d: int) -> None:
    """Five heads of k all together, in groups of two (the last one smaller), and each alone: a CTA
    works on another tile, and the sum of dq in turns is the same.
    """
    dout, q, k, v = inputs(70, 150, d, d, "bfloat16", heads=(5, 5))
    out, lse = forward(q, k, v, {})
    request = _gradients.Request(dout, q, k, v, out, lse, None, _options.complete({}))
    found = []
    for heads in (5, 2, 1):
        into = _gradients.Gradients.like(request)
        plan = _gradients.decide(request, into, None, "hopper", deterministic=True).plan
        assert plan is not None
        fields = plan.to_dict()
        for launch in fields["launches"]:
            params = bytearray.fromhex(launch["params"])
            assert struct.unpack_from("<i", params, GROUP_HEADS_OFFSET) == (5,)
            struct.pack_into("<i", params, GROUP_HEADS_OFFSET, heads)
            launch["params"] = params.hex()
        plan = native.LaunchPlan.unchecked_from_dict(fields)
        simulator.simulate(plan, _gradients.operands(request, into, plan), simulator.Settings())
        found.append(into)
    for into in found[1:]:
        for name in NAMES:
            assert torch.equal(getattr(into, name), getattr(found[0], name))


@pytest.mark.parametrize(
    ("d", "options", "words"),
    [
        (264, {}, "up to 256"),
        (192, {"softcap": 2.0}, "softcap"),
    ],
    ids=["head-dim", "wide-softcap"],
)
def test_what_is_left_to_ampere(d: int, options: dict[str, Any], words: str) -> None:
    dout, q, k, v = inputs(4, 4, d, d, "bfloat16")
    out, lse = forward(q, k, v, options)
    call = _options.complete(options)
    request = _gradients.Request(dout, q, k, v, out, lse, None, call)
    into = _gradients.Gradients.like(request)
    with pytest.raises(archflash.ForcedImplementationError, match=words):
        _gradients.decide(request, into, None, "hopper")
