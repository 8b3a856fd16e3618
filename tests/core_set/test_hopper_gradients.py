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

from ..sim.schedules import MODES
from . import gradients
from .executors import executor
from .gradients import NAMES, forward

on = executor()
pytestmark = pytest.mark.skipif("hopper" not in on.kernels(), reason="kernels for 9.0")
GROUP_HEADS_OFFSET = 524  # of BackwardKernelParams::group_heads, and then upward_heads

inputs = functools.partial(gradients.inputs, on)


def gradients_in_groups(
    request: _gradients.Request, heads: int, upward: int = 0, seed: int = 0
) -> _gradients.Gradients:
    """Deterministic gradients in fp32 of CTAs that go over the five heads of k in groups of
    `heads`, and over the tiles of the first `upward` ones from the last tile to the first.
    """
    like = _gradients.Gradients.like(request)
    dq, dk, dv = (x.float() for x in (like.dq, like.dk, like.dv))
    into = _gradients.Gradients(dq, dk, dv, None)
    plan = _gradients.decide(request, into, None, "hopper", deterministic=True).plan
    assert plan is not None
    fields = plan.to_dict()
    for launch in fields["launches"]:
        params = bytearray.fromhex(launch["params"])
        assert struct.unpack_from("<2i", params, GROUP_HEADS_OFFSET) == (5, 0)
        struct.pack_into("<2i", params, GROUP_HEADS_OFFSET, heads, upward)
        launch["params"] = params.hex()
    plan = native.LaunchPlan.unchecked_from_dict(fields)
    settings = simulator.Settings(mode=MODES[seed % len(MODES)], seed=seed)
    simulator.simulate(plan, _gradients.operands(request, into, plan), settings)
    return into


@pytest.mark.skipif(on.name != "simulator", reason="it changes a plan's parameters")
@pytest.mark.parametrize("d", [64, 256])
def test_tiles_of_keys_in_any_groups_of_heads(d: int) -> None:
    """Five heads of k all together, in groups of two (the last one smaller), and each alone: a CTA
    works on another tile, and the sum of dq in turns is the same.
    """
    dout, q, k, v = inputs(70, 150, d, d, "bfloat16", heads=(5, 5))
    out, lse = forward(q, k, v, {})
    request = _gradients.Request(dout, q, k, v, out, lse, None, _options.complete({}))
    expected, *found = (gradients_in_groups(request, heads) for heads in (5, 2, 1))
    for into in found:
        for name in NAMES:
            assert torch.equal(getattr(into, name), getattr(expected, name))


@pytest.mark.skipif(on.name != "simulator", reason="it changes a plan's parameters")
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (170, 40)}], ids=str)
@pytest.mark.parametrize(("d", "nq", "nk"), [(64, 300, 390), (256, 150, 200)])
def test_tiles_of_keys_from_the_last_to_the_first(
    d: int, nq: int, nk: int, options: dict[str, Any]
) -> None:
    """Two groups of two heads go upwards, the fifth head does not. The same bits in every schedule;
    gradients summed up in another order differ from those of tiles in order by rounding alone.
    """
    dout, q, k, v = inputs(nq, nk, d, d, "bfloat16", heads=(5, 5))
    out, lse = forward(q, k, v, options)
    request = _gradients.Request(dout, q, k, v, out, lse, None, _options.complete(options))
    in_order = gradients_in_groups(request, 2)
    found = [gradients_in_groups(request, 2, upward=4, seed=seed) for seed in range(3)]
    for name in NAMES:
        first = getattr(found[0], name)
        assert all(torch.equal(getattr(into, name), first) for into in found)
        expected = getattr(in_order, name)
        assert torch.equal(first[:, 4], expected[:, 4])
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(found[0].dq[:, :4], in_order.dq[:, :4])


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
