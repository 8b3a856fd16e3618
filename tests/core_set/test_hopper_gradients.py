"""Gradients by hopper's kernels, whose CTAs add to dq in any order, or in turns."""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import _dispatch, _gradients, _options
from archflash.sim import _attention as simulator

from ..sim.schedules import MODES
from . import gradients
from .executors import executor
from .gradients import (
    NAMES,
    assert_every_kernel_is_planned,
    differentiate,
    differentiate_and_check,
    forward,
)

on = executor()
pytestmark = pytest.mark.skipif("hopper" not in on.kernels(), reason="kernels for 9.0")
DTYPES = ("float16", "bfloat16")
# The kernels of head dimensions up to 64, 128 and 256, and dimensions that TMA fills up.
HEAD_DIMS = ((64, 64), (40, 24), (128, 128), (72, 120), (256, 256), (192, 128))
TURNS_OFFSET = 504  # of BackwardKernelParams::turns_gmem
GROUP_HEADS_OFFSET = 520  # of BackwardKernelParams::group_heads


inputs = functools.partial(gradients.inputs, on)


def check(*tensors: Tensor, **options: Any) -> None:
    differentiate_and_check(on, "hopper", *tensors, deterministic=False, **options)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel(dtype: str, dims: tuple[int, int], causal: bool) -> None:
    """Three tiles of keys, the last one ragged, and more blocks of queries than there are stages,
    of two heads that share one of k.
    """
    nq, nk = on.pick(simulator=(330, 300), gpu=(1350, 1300))
    number = HEAD_DIMS.index(dims) + 4 * causal
    check(*inputs(nq, nk, *dims, dtype), schedules=(number, number + 1), causal=causal)


def test_the_calls_above_run_every_compiled_kernel() -> None:
    device = None if on.name == "simulator" else _dispatch.query_device(0)
    for dtype in DTYPES:
        assert_every_kernel_is_planned(
            on, "hopper", dtype, HEAD_DIMS, [device], with_softcap=((64, 64), (128, 128))
        )


# Each row is one launch that meets several features at once: name -> (nq, nk, d, dv, batch, heads,
# options).
FEATURES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "window-sinks-lse": (
        (145, 183, 64, 64, 1, (4, 2)), {"window": (20, 3), "sinks": True, "dlse": True},
    ),
    "keys-that-no-query-sees": ((20, 300, 128, 128, 1, (2, 2)), {"window": (150, 0)}),
    "causal-sinks-rows-without-keys": (
        (90, 37, 64, 48, 1, (2, 2)), {"causal": True, "sinks": True, "gradient_dtype": "float32"},
    ),
    "bnhd-offsets-negative-scale-added": (
        (20, 61, 128, 64, 2, (2, 1)),
        {
            "layout": "bnhd", "q_offset": (3, 50), "causal": True, "scale": -0.2, "add_to": 0.5,
            "pad": 8,
        },
    ),
    "lse-added-in-fp32": (
        (33, 17, 96, 128, 1, (3, 1)),
        {"dlse": True, "gradient_dtype": "float32", "add_to": -2.0, "pad": 4},
    ),
    "softcap": ((70, 140, 64, 64, 1, (2, 2)), {"softcap": 0.7, "scale": -0.3}),
    "causal-softcap-sinks": (
        (140, 150, 128, 96, 1, (2, 1)), {"causal": True, "softcap": 3.0, "sinks": True},
    ),
    "wide-window-sinks-lse-fp32": (
        (100, 200, 256, 200, 1, (2, 1)),
        {
            "window": (40, 5), "sinks": True, "dlse": True,
            "gradient_dtype": "float32",
        },
    ),
    "wide-bnhd-offsets-added": (
        (20, 61, 136, 256, 2, (2, 1)),
        {"layout": "bnhd", "q_offset": (3, 50), "causal": True, "add_to": 0.5, "pad": 8},
    ),
    "no-query": ((0, 9, 64, 64, 1, (2, 2)), {"sinks": True}),
    "no-key": ((9, 0, 64, 64, 1, (2, 2)), {"sinks": True, "dlse": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str) -> None:
    (nq, nk, d, dv, batch, heads), options = FEATURES[name]
    options = dict(options)
    number = list(FEATURES).index(name)
    tensors = inputs(nq, nk, d, dv, DTYPES[number % 2], batch=batch, heads=heads, seed=number)
    if options.get("layout") == "bnhd":
        tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    if options.pop("sinks", False):
        options["sinks"] = on.rand(heads[0], seed=5)
    if options.pop("dlse", False):
        options["dlse"] = on.rand(batch, heads[0], nq, seed=6)
    if "q_offset" in options:
        options["q_offset"] = on.int32(*options["q_offset"])
    if "gradient_dtype" in options:
        options["gradient_dtype"] = getattr(torch, options["gradient_dtype"])
    check(*tensors, schedules=(number, number + 1), **options)


# Several tiles of keys, which add to a round of queries one after another. With a window some of
# them have rounds that the tile before does not see. Each with the same bits in every schedule.
IN_TURNS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "full": ((150, 400, 64, 64, 1, (2, 2)), {}),
    "shared-heads": ((130, 300, 128, 128, 1, (2, 1)), {"softcap": 2.0}),
    "causal": ((390, 390, 64, 64, 1, (2, 1)), {"causal": True}),
    "window": ((300, 500, 128, 128, 1, (1, 1)), {"window": (100, 60)}),
    "wide": ((150, 300, 256, 256, 1, (2, 1)), {"causal": True}),
}


@pytest.mark.parametrize("name", IN_TURNS)
def test_deterministic_gradients_have_the_same_bits(name: str) -> None:
    (nq, nk, d, dv, batch, heads), options = IN_TURNS[name]
    number = list(IN_TURNS).index(name)
    tensors = inputs(nq, nk, d, dv, DTYPES[number % 2], batch=batch, heads=heads, seed=number)
    differentiate_and_check(
        on, "hopper", *tensors, deterministic=True, schedules=range(number, number + 4), **options
    )


@pytest.mark.skipif(on.name != "simulator", reason="it changes a plan's parameters")
@pytest.mark.parametrize("in_turns", [True, False], ids=["in-turns", "in-any-order"])
def test_without_turns_the_bits_of_dq_depend_on_the_schedule(in_turns: bool) -> None:
    """The kernel that takes turns, and the same one told that there are none: the schedules are
    such that tiles of keys come to a round of queries in more than one order.
    """
    dout, q, k, v = inputs(150, 400, 64, 64, "float16", heads=(1, 1))
    out, lse = forward(q, k, v, {})
    request = _gradients.Request(dout, q, k, v, out, lse, None, _options.complete({}))
    found = []
    for number, mode in enumerate(MODES):
        into = _gradients.Gradients.like(request)
        plan = _gradients.decide(request, into, None, "hopper", deterministic=True).plan
        assert plan is not None
        if not in_turns:
            fields = plan.to_dict()
            for launch in fields["launches"]:
                turns = launch["pointers"].pop()  # the kernel gets null
                assert (turns["operand"], turns["offset"]) == ("workspace", TURNS_OFFSET)
            plan = native.LaunchPlan.unchecked_from_dict(fields)
        settings = simulator.Settings(mode=mode, seed=number)
        simulator.simulate(plan, _gradients.operands(request, into, plan), settings)
        found.append(into.dq)
    assert all(torch.equal(x, found[0]) for x in found) == in_turns


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


Q_LENGTHS, K_LENGTHS = (5, 0, 40, 150), (9, 12, 0, on.pick(simulator=200, gpu=600))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_packed_sequences_with_rows_of_none_behind_them(d: int, causal: bool) -> None:
    """Sequences without queries and without keys; rows behind the last one hold NaN, and so do
    those of the next sequence in a block that ends behind its own.
    """
    spare = 3
    totals = (sum(Q_LENGTHS), sum(Q_LENGTHS), sum(K_LENGTHS), sum(K_LENGTHS))
    whole = [
        on.rand(total, heads, d, seed=seed, dtype=DTYPES[causal])
        for seed, (total, heads) in enumerate(zip(totals, (4, 4, 2, 2), strict=True))
    ]
    ends = {"cu_seqlens_q": on.cu_seqlens(Q_LENGTHS), "cu_seqlens_k": on.cu_seqlens(K_LENGTHS)}
    options: dict[str, Any] = {"causal": causal, "sinks": on.rand(4, seed=9), **ends}
    options["schedules"] = (2, 3)
    check(*whole, **options)
    tensors = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, spare), value=math.nan) for x in whole]
    found = differentiate(on, "hopper", *tensors, deterministic=False, **options)
    for name, without in zip(NAMES, whole[1:], strict=True):
        x = getattr(found, name)
        assert x.isfinite().all()
        assert not x[len(without) :].any()


def test_inputs_that_lie_between_others_in_memory() -> None:
    """q, k, v are parts of one tensor, and dout rows lie apart; their neighbours hold NaN."""
    wide = torch.full((1, 50, 5, 64), math.nan, dtype=torch.bfloat16, device=on.device)
    for head in range(4):
        wide[:, :, head] = on.rand(1, 50, 64, seed=head, dtype="bfloat16")
    q, k, v = (wide[:, :, first:end].transpose(1, 2) for first, end in ((0, 2), (2, 3), (3, 4)))
    dout = torch.full((1, 2, 50, 80), math.nan, dtype=q.dtype, device=on.device)[..., :64]
    dout.copy_(on.rand(1, 2, 50, 64, seed=8, dtype="bfloat16"))
    check(dout, q, k, v, causal=True, schedules=(1,))


def test_scores_beyond_what_their_log_sum_exp_can_say_give_finite_gradients() -> None:
    dout, q, k, v = inputs(1, 1, 64, 64, "bfloat16")
    filled = (q.fill_(1.6e4), k.fill_(1.6e4))
    found = differentiate(on, "hopper", dout, *filled, v, deterministic=False)
    assert all(bool(x.isfinite().all()) for x in (found.dq, found.dk, found.dv))


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
