"""Gradients by the kernels whose CTAs own keys and add to dq in any order, or in turns: those of
hopper and blackwell_dc. What only one of them has is in test_hopper_gradients.py and
test_blackwell_dc_gradients.py.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from archflash import _dispatch, _gradients, _options
from archflash.sim import _attention as simulator

from ..sim.schedules import MODES
from . import gradients
from .executors import executor
from .gradients import (
    NAMES,
    FeatureCase,
    assert_every_kernel_is_planned,
    differentiate,
    differentiate_and_check,
    feature_call,
    forward,
)

on = executor()
DTYPES = ("float16", "bfloat16")
# The head dimensions of each folder that together run every kernel of it, and some that TMA fills
# up with zeros.
HEAD_DIMS = {
    "hopper": (
        (32, 24), (64, 64), (40, 24), (96, 96), (72, 88), (128, 128), (72, 120), (192, 128),
        (136, 104), (256, 256), (192, 136),
    ),
    "blackwell_dc": ((64, 64), (40, 24), (128, 128), (72, 120)),
}  # fmt: skip

inputs = functools.partial(gradients.inputs, on)


def has_code(kernel: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        kernel not in on.kernels(), reason=f"{kernel} has no code for this GPU"
    )


def of_each_kernel(name: str, cases: dict[str, Any]) -> pytest.MarkDecorator:
    """Parametrises a test by a folder, as `kernel`, and by its cases, as `name`."""
    return pytest.mark.parametrize(
        ("kernel", name),
        [
            pytest.param(kernel, case, id=f"{kernel}-{case}", marks=has_code(kernel))
            for kernel in HEAD_DIMS
            for case in cases[kernel]
        ],
    )


each_kernel = pytest.mark.parametrize(
    "kernel", [pytest.param(kernel, marks=has_code(kernel)) for kernel in HEAD_DIMS]
)


@of_each_kernel("dims", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel(dtype: str, kernel: str, dims: tuple[int, int]) -> None:
    """Three tiles of keys, the last one ragged, and more blocks of queries than there are stages,
    of two heads that share one of k. On the simulator both types of a kernel, whose code is one,
    share out the masks, and float16 has one schedule.
    """
    # The tiles of hopper's kernels for more than 128 columns have 64 keys, the others 128.
    wide = kernel == "hopper" and max(dims) > 128
    nq, nk = on.pick(simulator=(200, 170) if wide else (330, 300), gpu=(1350, 1300))
    number = HEAD_DIMS[kernel].index(dims)
    own = (number + (dtype == "bfloat16")) % 2 == 0
    tensors = inputs(nq, nk, *dims, dtype)
    for causal in on.pick(simulator=(own,), gpu=(False, True)):
        first = number + 4 * causal
        schedules = (first, first + 1) if dtype == "bfloat16" or on.name == "gpu" else (first,)
        differentiate_and_check(
            on, kernel, *tensors, deterministic=False, schedules=schedules, causal=causal
        )


@of_each_kernel("dtype", dict.fromkeys(HEAD_DIMS, DTYPES))
def test_the_calls_above_run_every_compiled_kernel(kernel: str, dtype: str) -> None:
    device = None if on.name == "simulator" else _dispatch.query_device(0)
    options: dict[str, Any] = {
        # Which have kernels of their own; and rows that CTAs share out.
        "hopper": {
            "with_softcap": ((64, 64), (128, 128)),
            "heads": ((1, 1), (2, 1), (4, 1)),
            "chains": True,
            "keys": (4, 128, 130, 384),
        },
        "blackwell_dc": {"deterministic": (False, True)},
    }[kernel]
    assert_every_kernel_is_planned(on, kernel, dtype, HEAD_DIMS[kernel], [device], **options)


# Each row is one launch that meets several features at once: name -> (nq, nk, d, dv, batch, heads,
# options).
FEATURES: dict[str, FeatureCase] = {
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
    "96-window-sinks-lse-added": (
        (145, 183, 96, 80, 1, (4, 2)),
        {"window": (20, 3), "sinks": True, "dlse": True, "add_to": 0.5, "pad": 8},
    ),
    "96-softcap": ((70, 140, 96, 96, 1, (2, 2)), {"softcap": 0.7}),
    "softcap": ((70, 140, 64, 64, 1, (2, 2)), {"softcap": 0.7, "scale": -0.3}),
    "causal-softcap-sinks": (
        (140, 150, 128, 96, 1, (2, 1)), {"causal": True, "softcap": 3.0, "sinks": True},
    ),
    "no-query": ((0, 9, 64, 64, 1, (2, 2)), {"sinks": True}),
    "no-key": ((9, 0, 64, 64, 1, (2, 2)), {"sinks": True, "dlse": True}),
}  # fmt: skip
# Head dimensions that only hopper takes.
WIDE_FEATURES: dict[str, FeatureCase] = {
    "wide-window-sinks-lse-fp32": (
        (100, 200, 256, 200, 1, (2, 1)),
        {
            "window": (40, 5), "sinks": True, "dlse": True,
            "gradient_dtype": "float32",
        },
    ),
    "192-bnhd-offsets-added-window": (
        (90, 150, 184, 120, 2, (2, 1)),
        {"layout": "bnhd", "window": (30, 20), "add_to": 0.5, "pad": 8, "dlse": True},
    ),
    "wide-bnhd-offsets-added": (
        (20, 61, 136, 256, 2, (2, 1)),
        {"layout": "bnhd", "q_offset": (3, 50), "causal": True, "add_to": 0.5, "pad": 8},
    ),
}  # fmt: skip
ALL_FEATURES = FEATURES | WIDE_FEATURES


@of_each_kernel("name", {"hopper": ALL_FEATURES, "blackwell_dc": FEATURES})
def test_features(kernel: str, name: str) -> None:
    number = list(ALL_FEATURES).index(name)
    tensors, options = feature_call(on, ALL_FEATURES[name], DTYPES[number % 2], number)
    differentiate_and_check(
        on, kernel, *tensors, deterministic=False, schedules=(number, number + 1), **options
    )


# Several tiles of keys, which add to a round of queries one after another. With a window some of
# them have rounds that the tile before does not see. Each with the same bits in every schedule.
IN_TURNS: dict[str, FeatureCase] = {
    "full": ((150, 400, 64, 64, 1, (2, 2)), {}),
    "shared-heads": ((130, 300, 128, 128, 1, (2, 1)), {"softcap": 2.0}),
    "causal": ((390, 390, 64, 64, 1, (2, 1)), {"causal": True}),
    "window": ((300, 500, 128, 128, 1, (1, 1)), {"window": (100, 60)}),
    "96": ((390, 390, 96, 96, 1, (2, 1)), {"causal": True}),
    "chains": ((30, 900, 64, 64, 1, (2, 1)), {"window": (880, 20)}),  # one for each tile
    "one-sum": ((700, 200, 64, 64, 1, (3, 1)), {"causal": True}),  # core::sums_of_round()
}
WIDE_IN_TURNS: dict[str, FeatureCase] = {
    "192": ((150, 300, 192, 128, 1, (2, 1)), {"causal": True}),
    "wide": ((150, 300, 256, 256, 1, (2, 1)), {"causal": True}),
    "32-chains": ((30, 900, 24, 32, 1, (1, 1)), {}),
    "96-chains": ((20, 900, 72, 96, 1, (1, 1)), {"causal": True}),
    "128-chains": ((70, 900, 128, 96, 1, (1, 1)), {}),
    "120-chains": ((20, 900, 120, 120, 1, (1, 1)), {}),
    "192-chains": ((30, 450, 184, 120, 1, (1, 1)), {}),
    "wide-chains": ((30, 450, 256, 256, 1, (1, 1)), {"causal": True}),
}
ALL_IN_TURNS = IN_TURNS | WIDE_IN_TURNS


@of_each_kernel("name", {"hopper": ALL_IN_TURNS, "blackwell_dc": IN_TURNS})
def test_deterministic_gradients_have_the_same_bits(kernel: str, name: str) -> None:
    (nq, nk, d, dv, batch, heads), options = ALL_IN_TURNS[name]
    number = list(ALL_IN_TURNS).index(name)
    tensors = inputs(nq, nk, d, dv, DTYPES[number % 2], batch=batch, heads=heads, seed=number)
    schedules = range(number, number + (4 if name in IN_TURNS else 2))
    differentiate_and_check(
        on, kernel, *tensors, deterministic=True, schedules=schedules, **options
    )


@pytest.mark.skipif(on.name != "simulator", reason="it is about schedules of the simulator")
@of_each_kernel("in_turns", dict.fromkeys(HEAD_DIMS, (True, False)))
def test_without_turns_the_bits_of_dq_depend_on_the_schedule(kernel: str, in_turns: bool) -> None:
    """The schedules are such that tiles of keys come to a round of queries in more than one
    order.
    """
    dout, q, k, v = inputs(150, 400, 128, 128, "float16", heads=(1, 1))
    out, lse = forward(q, k, v, {})
    request = _gradients.Request(dout, q, k, v, out, lse, None, _options.complete({}))
    found = []
    for number, mode in enumerate(MODES):
        into = _gradients.Gradients.like(request)
        plan = _gradients.decide(request, into, None, kernel, deterministic=in_turns).plan
        assert plan is not None
        settings = simulator.Settings(mode=mode, seed=number, race_check=False)
        simulator.simulate(plan, _gradients.operands(request, into, plan), settings)
        found.append(into.dq)
    assert all(torch.equal(x, found[0]) for x in found) == in_turns


Q_LENGTHS, K_LENGTHS = (5, 0, 40, 150), (9, 12, 0, on.pick(simulator=200, gpu=600))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@of_each_kernel("d", {"hopper": (64, 96, 128, 256), "blackwell_dc": (64, 128)})
def test_packed_sequences_with_rows_of_none_behind_them(kernel: str, d: int, causal: bool) -> None:
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
    differentiate_and_check(on, kernel, *whole, deterministic=False, schedules=(2,), **options)
    tensors = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, spare), value=math.nan) for x in whole]
    found = differentiate(on, kernel, *tensors, deterministic=False, schedules=(3,), **options)
    for name, without in zip(NAMES, whole[1:], strict=True):
        x = getattr(found, name)
        assert x.isfinite().all()
        assert not x[len(without) :].any()


@each_kernel
def test_inputs_that_lie_between_others_in_memory(kernel: str) -> None:
    """q, k, v are parts of one tensor, and dout rows lie apart; their neighbours hold NaN."""
    wide = torch.full((1, 50, 5, 64), math.nan, dtype=torch.bfloat16, device=on.device)
    for head in range(4):
        wide[:, :, head] = on.rand(1, 50, 64, seed=head, dtype="bfloat16")
    q, k, v = (wide[:, :, first:end].transpose(1, 2) for first, end in ((0, 2), (2, 3), (3, 4)))
    dout = torch.full((1, 2, 50, 80), math.nan, dtype=q.dtype, device=on.device)[..., :64]
    dout.copy_(on.rand(1, 2, 50, 64, seed=8, dtype="bfloat16"))
    differentiate_and_check(
        on, kernel, dout, q, k, v, deterministic=False, causal=True, schedules=(1,)
    )


@each_kernel
def test_scores_beyond_what_their_log_sum_exp_can_say_give_finite_gradients(kernel: str) -> None:
    dout, q, k, v = inputs(1, 1, 64, 64, "bfloat16")
    filled = (q.fill_(1.6e4), k.fill_(1.6e4))
    found = differentiate(on, kernel, dout, *filled, v, deterministic=False)
    assert all(bool(x.isfinite().all()) for x in (found.dq, found.dk, found.dv))


@of_each_kernel("d", {"hopper": (64, 128, 256), "blackwell_dc": (64, 128)})
def test_keys_behind_the_end_do_not_matter_where_delta_is_huge(kernel: str, d: int) -> None:
    gradients.assert_keys_behind_the_end_do_not_matter(on, kernel, d)


@each_kernel
def test_a_dout_that_repeats_one_row_is_copied(kernel: str) -> None:
    """Tensor maps have no row stride of 0."""
    dout, q, k, v = inputs(4, 4, 64, 64, "bfloat16")
    repeated = dout[:, :, :1].expand_as(dout)
    out, lse = forward(q, k, v, {})
    request = _gradients.Request(repeated, q, k, v, out, lse, None, _options.complete({}))
    chosen = _gradients.decide(request, _gradients.Gradients.like(request), None, kernel)
    assert chosen.plan is not None
    assert "copy_gather" in chosen.plan.kernels
