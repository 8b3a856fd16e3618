"""Gradients by hopper's kernels: what blackwell_dc's do not have (test_rounds_gradients.py has the
others).
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as native
from archflash import _gradients, _options, reference
from archflash._api import find_device
from archflash.sim import _attention as simulator

from ..sim.schedules import MODES
from . import gradients
from .executors import executor
from .gradients import NAMES, forward

on = executor()
pytestmark = pytest.mark.skipif("hopper" not in on.kernels(), reason="kernels for 9.0")
# Where BackwardKernelParams::group_heads lies, behind which come upward_heads, tiles_in_a_row,
# packed_rows, packed_tiles and upward_work.
ORDER_OFFSET = 524

inputs = functools.partial(gradients.inputs, on)


@dataclasses.dataclass
class Order:
    """In which order the tiles of keys come: fields of BackwardKernelParams."""

    group_heads: int = 5
    upward_heads: int = 0
    tiles_in_a_row: int = 1
    packed_rows: int = 2**31 - 1
    packed_tiles: int = 0
    upward_work: int = 0


def run(
    plan: native.LaunchPlan, request: _gradients.Request, into: _gradients.Gradients, seed: int
) -> None:
    """Simulates a plan, in one of the schedules."""
    settings = simulator.Settings(mode=MODES[seed % len(MODES)], seed=seed)
    simulator.simulate(plan, _gradients.operands(request, into, plan), settings)


def gradients_in_order(
    request: _gradients.Request, order: Order, seed: int = 0
) -> _gradients.Gradients:
    """Deterministic gradients in fp32."""
    like = _gradients.Gradients.like(request)
    dq, dk, dv = (x.float() for x in (like.dq, like.dk, like.dv))
    into = _gradients.Gradients(dq, dk, dv, None)
    plan = _gradients.decide(request, into, None, "hopper", deterministic=True).plan
    assert plan is not None
    fields = plan.to_dict()
    for launch in fields["launches"]:
        if "_shares_" in launch["kernel"]:
            continue
        params = bytearray.fromhex(launch["params"])
        struct.pack_into("<6i", params, ORDER_OFFSET, *dataclasses.astuple(order))
        launch["params"] = params.hex()
    plan = native.LaunchPlan.unchecked_from_dict(fields)
    run(plan, request, into, seed)
    return into


def assert_same(found: _gradients.Gradients, expected: _gradients.Gradients) -> None:
    for name in NAMES:
        assert torch.equal(getattr(found, name), getattr(expected, name))


def assert_close(
    found: _gradients.Gradients, exact: reference.Gradients, rounded: reference.Gradients
) -> None:
    """As close to exact gradients as `rounded` of them allow (reference.check)."""
    for name in NAMES:
        base = getattr(rounded, name).double()
        report = reference.check(getattr(found, name), getattr(exact, name), base)
        assert report.ok, f"{name}: {report}"


@pytest.mark.skipif(on.name != "simulator", reason="it changes a plan's parameters")
@pytest.mark.parametrize("d", [64, 256])
def test_tiles_of_keys_in_any_groups_of_heads(d: int) -> None:
    """Five heads of k all together, in groups of two (the last one smaller), and each alone: a CTA
    works on another tile, and the sum of dq in turns is the same.
    """
    dout, q, k, v = inputs(70, 150, d, d, "bfloat16", heads=(5, 5))
    out, lse = forward(q, k, v, {})
    request = _gradients.Request(dout, q, k, v, out, lse, None, _options.complete({}))
    expected, *found = (gradients_in_order(request, Order(heads)) for heads in (5, 2, 1))
    for into in found:
        assert_same(into, expected)


@pytest.mark.skipif(on.name != "simulator", reason="it changes a plan's parameters")
@pytest.mark.parametrize(
    ("d", "nq", "nk", "options"),
    [
        (64, 390, 450, {"causal": True}),
        pytest.param(64, 300, 390, {"window": (170, 40)}, marks=pytest.mark.rest),
        pytest.param(256, 150, 200, {"causal": True}, marks=pytest.mark.rest),
        (256, 90, 150, {"window": (110, 40)}),
    ],
    ids=str,
)
def test_tiles_of_keys_from_the_last_to_the_first(
    d: int, nq: int, nk: int, options: dict[str, Any]
) -> None:
    """Two groups of two heads go upwards, the fifth head does not. The same bits in every schedule;
    gradients summed up in another order differ from those of tiles in order by rounding alone.
    """
    shared = 2 if d == 256 else 1  # query heads of a head of k
    dout, q, k, v = inputs(nq, nk, d, d, "bfloat16", heads=(5 * shared, 5))
    out, lse = forward(q, k, v, options)
    request = _gradients.Request(dout, q, k, v, out, lse, None, _options.complete(options))
    in_order = gradients_in_order(request, Order(2))
    found = [gradients_in_order(request, Order(2, 4), seed) for seed in (0, 2)]
    for name in NAMES:
        first = getattr(found[0], name)
        assert all(torch.equal(getattr(into, name), first) for into in found)
        expected = getattr(in_order, name)
        last = 4 * first.shape[1] // 5
        assert torch.equal(first[:, last:], expected[:, last:])
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)
    upwards = 4 * shared
    assert not torch.equal(found[0].dq[:, :upwards], in_order.dq[:, :upwards])


@pytest.mark.skipif(on.name != "simulator", reason="it changes a plan's parameters")
@pytest.mark.parametrize(("d", "n"), [(64, 330), (256, 150)])
def test_tiles_of_a_head_in_a_row(d: int, n: int) -> None:
    """Of heads that share a head of K; the last row, and the last group, may be smaller."""
    dout, q, k, v = inputs(n, n, d, d, "bfloat16", heads=(6, 3))
    out, lse = forward(q, k, v, {"causal": True})
    request = _gradients.Request(dout, q, k, v, out, lse, None, _options.complete({"causal": True}))
    expected = gradients_in_order(request, Order(3), 1)
    for order in (Order(3, 0, 2), Order(2, 0, 3), Order(1, 0, 4)):
        assert_same(gradients_in_order(request, order), expected)


# Calls of more tiles of keys than the GPU has SMs, which CTAs take one after another; some tiles
# are seen by no query. name -> (nq, nk, d, dv, batch, heads), options.
ONE_AFTER_ANOTHER: dict[str, gradients.FeatureCase] = {
    "full": ((200, 300, 64, 64, 1, (2, 2)), {}),
    "causal-shared-heads": ((330, 330, 64, 40, 1, (4, 2)), {"causal": True, "sinks": True}),
    "exact": ((70, 300, 24, 64, 2, (2, 1)), {"add_to": 0.5, "pad": 8}),
    "window": ((60, 560, 64, 64, 1, (2, 2)), {"window": (90, 10), "dlse": True}),
    "96": ((200, 300, 96, 80, 1, (4, 2)), {"causal": True}),
    "96-window": ((60, 560, 72, 96, 1, (2, 2)), {"window": (90, 10), "dlse": True}),
    "softcap": ((140, 300, 40, 64, 1, (2, 1)), {"softcap": 2.0, "layout": "bnhd"}),
    "dropout": ((140, 300, 64, 64, 1, (2, 1)), {"dropout_p": 0.3}),
    "192": ((130, 200, 192, 128, 1, (4, 2)), {"causal": True}),
    "192-window": ((60, 330, 160, 128, 1, (2, 2)), {"window": (90, 10), "dlse": True}),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ONE_AFTER_ANOTHER)
def test_tiles_that_a_cta_takes_one_after_another(name: str, deterministic: bool) -> None:
    number = list(ONE_AFTER_ANOTHER).index(name)
    tensors, options = gradients.feature_call(on, ONE_AFTER_ANOTHER[name], "bfloat16", number)
    if "dropout_p" in options:
        options["rng_state"] = on.tensor([7, 0], dtype=torch.int64)
    schedules = range(number, number + 3) if deterministic else (number + 3,)
    gradients.differentiate_and_check(
        on, "hopper", *tensors, sms=2, schedules=schedules, deterministic=deterministic, **options
    )


# Calls whose tiles of keys start apart, and the SMs that they are planned for. name -> (nq, nk, d,
# dv, batch, heads), options, SMs.
START_APART: dict[str, tuple[tuple[Any, ...], dict[str, Any], int]] = {
    "full": ((520, 700, 64, 64, 1, (1, 1)), {}, 5),
    "shared-heads": ((130, 700, 128, 128, 1, (8, 2)), {"causal": True}, 10),
    "chains": ((70, 900, 128, 128, 1, (2, 1)), {"causal": True}, 7),
    "shared-out": ((300, 1300, 64, 64, 1, (6, 1)), {"causal": True}, 24),
    "dropout": ((140, 700, 64, 64, 1, (4, 1)), {"dropout_p": 0.3}, 6),
    "stays": ((330, 1100, 96, 96, 1, (2, 2)), {}, 6),
    "wide": ((150, 600, 256, 256, 1, (2, 1)), {}, 8),
}
# Where BackwardKernelParams::turn_tiles lies.
TURN_TILES_OFFSET = ORDER_OFFSET + 84


@pytest.mark.parametrize("name", START_APART)
def test_tiles_that_start_apart_take_turns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = list(START_APART).index(name)
    *case, sms = START_APART[name]
    tensors, options = gradients.feature_call(on, (case[0], case[1]), "bfloat16", number)
    if "dropout_p" in options:
        options["rng_state"] = on.tensor([7, 0], dtype=torch.int64)
    plans = gradients.note_plans(monkeypatch)
    gradients.differentiate_and_check(
        on, "hopper", *tensors, sms=sms, schedules=(number, number + 1), **options
    )
    (main,) = (x for x in plans[0].to_dict()["launches"] if "_attention_bwd_" in x["kernel"])
    assert struct.unpack_from("<i", bytes.fromhex(main["params"]), TURN_TILES_OFFSET)[0] > 1


@pytest.mark.skipif(on.name != "simulator", reason="a GPU has more SMs")
def test_ctas_that_stay_take_turns_in_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tiles of a head run together, in four chains."""
    tensors = inputs(64, 1100, 96, 96, "bfloat16", heads=(4, 2))
    plans = gradients.note_plans(monkeypatch)
    gradients.differentiate_and_check(on, "hopper", *tensors, sms=12, schedules=(0, 3))
    (main,) = (x for x in plans[0].to_dict()["launches"] if "_attention_bwd_" in x["kernel"])
    assert main["kernel"].endswith("_d128_stays")
    assert struct.unpack_from("<i", bytes.fromhex(main["params"]), ORDER_OFFSET - 4)[0] == 4


@pytest.mark.skipif(on.name != "simulator", reason="a GPU has more SMs")
def test_tiles_for_few_keys_take_turns_in_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tiles of a head run together, each with sums of its own."""
    tensors = inputs(60, 310, 64, 64, "bfloat16", heads=(2, 1))
    plans = gradients.note_plans(monkeypatch)
    gradients.differentiate_and_check(on, "hopper", *tensors, sms=8, schedules=(0, 3))
    (main,) = (x for x in plans[0].to_dict()["launches"] if "_attention_bwd_" in x["kernel"])
    assert main["kernel"].endswith("_d64_short")
    assert struct.unpack_from("<i", bytes.fromhex(main["params"]), ORDER_OFFSET - 4)[0] == 5


# Calls of few and long tiles, whose query rows several CTAs share out. Under a mask some of them
# have no row of their tile.
SHARED_OUT: dict[str, gradients.FeatureCase] = {
    "causal": ((300, 300, 64, 64, 1, (7, 1)), {"causal": True}),
    "sinks-lse": ((150, 150, 128, 96, 2, (4, 1)), {"sinks": True, "dlse": True}),
    "unseen-keys": ((200, 300, 128, 128, 1, (4, 1)), {"window": (50, 0)}),
    "added-in-fp32": (
        (200, 140, 40, 64, 1, (8, 2)),
        {"layout": "bnhd", "gradient_dtype": "float32", "add_to": -2.0, "pad": 4},
    ),
    "wide": ((200, 100, 136, 256, 1, (4, 1)), {"causal": True, "add_to": 0.5}),
    "dropout": ((300, 140, 64, 64, 1, (5, 1)), {"dropout_p": 0.3}),
    "few-keys": ((2000, 40, 64, 64, 1, (1, 1)), {}),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SHARED_OUT)
def test_query_rows_that_ctas_share_out(
    name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dk and dv are sums of shares in an order that is always the same."""
    number = list(SHARED_OUT).index(name)
    tensors, options = gradients.feature_call(on, SHARED_OUT[name], "bfloat16", number)
    if "dropout_p" in options:
        options["rng_state"] = on.tensor([7, 0], dtype=torch.int64)
    plans = gradients.note_plans(monkeypatch)
    schedules = (number, number + 1) if deterministic else (number + 2,)
    gradients.differentiate_and_check(
        on, "hopper", *tensors, sms=132, schedules=schedules, deterministic=deterministic, **options
    )
    assert all("hopper_backward_shares_bf16" in plan.kernels for plan in plans)


@pytest.mark.parametrize(
    ("d", "batch", "deterministic"), [(64, 2, False), (96, 2, True), (192, 1, True)]
)
def test_query_heads_that_ctas_share_out_unevenly(
    d: int, batch: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five heads share one of K: two CTAs of a tile have two of them, and one has the last."""
    tensors = inputs(200, 200, d, min(d, 128), "bfloat16", batch=batch, heads=(5, 1), seed=d)
    plans = gradients.note_plans(monkeypatch)
    gradients.differentiate_and_check(
        on, "hopper", *tensors, causal=True, sms=12, schedules=range(2), deterministic=deterministic
    )
    (main,) = (x for x in plans[0].to_dict()["launches"] if "_attention_bwd_" in x["kernel"])
    assert main["grid"][0] == 12


@pytest.mark.skipif(on.name != "simulator", reason="it changes a plan's parameters")
@pytest.mark.parametrize(
    ("d", "nq", "nk"),
    [
        (64, (5, 300, 0, 140, 20, 130), (9, 300, 130, 200, 0, 20)),
        (256, (5, 150, 0, 70, 20, 65), (9, 150, 65, 100, 0, 20)),  # tiles of 64 keys, not 128
    ],
)
def test_order_of_packed_tiles(d: int, nq: tuple[int, ...], nk: tuple[int, ...]) -> None:
    """Groups and rows of tiles do not change the sums of dq. With sequences that go upwards, as
    far as one SM has work behind them, the same bits in every schedule.
    """
    ends = {"cu_seqlens_q": on.cu_seqlens(nq), "cu_seqlens_k": on.cu_seqlens(nk)}
    rows = (sum(nq), sum(nq), sum(nk), sum(nk))
    dout, q, k, v = (on.rand(n, 3, d, seed=seed, dtype="bfloat16") for seed, n in enumerate(rows))
    options = {"causal": True, **ends}
    out, lse = forward(q, k, v, options)
    request = _gradients.Request(dout, q, k, v, out, lse, None, _options.complete(options))
    in_order = gradients_in_order(request, Order())
    for order in (
        Order(packed_rows=3 * nq[3] - 20),  # two heads of the fourth sequence
        Order(packed_rows=1, packed_tiles=4),  # two heads of two tiles
        Order(packed_rows=1, tiles_in_a_row=2),
    ):
        assert_same(gradients_in_order(request, order), in_order)
    upwards = Order(packed_rows=nq[1], upward_work=1)
    found = [gradients_in_order(request, upwards, seed) for seed in (0, 2)]
    for into in found[1:]:
        assert_same(into, found[0])
    for name in NAMES:
        torch.testing.assert_close(
            getattr(found[0], name), getattr(in_order, name), rtol=1e-4, atol=1e-5
        )
    longest, last = slice(nq[0], nq[0] + nq[1]), slice(-nq[5], None)
    assert not torch.equal(found[0].dq[longest], in_order.dq[longest])
    assert torch.equal(found[0].dq[last], in_order.dq[last])  # one tile


@pytest.mark.parametrize(
    ("d", "options", "words"),
    [(264, {}, "up to 256"), (192, {"softcap": 2.0}, "softcap")],
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


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("rows", "d"),
    [
        (1, 8), (16, 40), (49, 64), (64, 24), (65, 40), (127, 56), (128, 8), (129, 48),
        (1, 128), (33, 72), (49, 120), (64, 96), (129, 80), (65, 104), (17, 136), (49, 200),
        (65, 192),
    ],
)  # fmt: skip
def test_sums_of_dq_without_rows_and_columns_that_dq_has_not(
    rows: int, d: int, deterministic: bool
) -> None:
    """Two tiles of keys add to one round, or to two: fewer rows and columns than those of a tile.
    The columns of V are those of the tile.
    """
    dtype = ("float16", "bfloat16")[rows % 2]
    dv = next(columns for columns in (64, 96, 128, 256) if d <= columns)
    tensors = inputs(rows, 130, d, dv, dtype, heads=(1, 1))
    gradients.differentiate_and_check(
        on, "hopper", *tensors, schedules=(rows,), deterministic=deterministic, causal=True
    )


@pytest.mark.skipif(on.name != "simulator", reason="it runs plans under schedules")
@pytest.mark.parametrize(
    ("d", "causal", "tile", "in_turns"),
    [
        (24, True, "d32_short", False), (64, False, "d64_short", True),
        (48, True, "d64_short", True), (80, True, "d96", True), (128, False, "d128", True),
    ],
)  # fmt: skip
def test_short_packed_sequences(d: int, causal: bool, tile: str, in_turns: bool) -> None:
    """Tiles of one warpgroup up to 64 columns. Where sequences have about one tile, and with more
    columns, they take turns: no launch has to clear sums of dq, and the bits are the same.
    """
    nq, nk = (65, 0, 128, 5, 30, 100), (70, 9, 64 if d <= 64 else 300, 0, 129, 40)
    call: dict[str, Any] = {
        "cu_seqlens_q": on.cu_seqlens(nq), "cu_seqlens_k": on.cu_seqlens(nk), "causal": causal,
    }  # fmt: skip
    rows = (sum(nq), sum(nq), sum(nk), sum(nk))
    dtype = "float16" if causal else "bfloat16"
    dout, q, k, v = (on.rand(n, 2, d, seed=seed, dtype=dtype) for seed, n in enumerate(rows))
    request = _gradients.Request(
        dout, q, k, v, *forward(q, k, v, call), None, _options.complete(call)
    )
    exact = reference.attention_backward(dout, q, k, v, **call)
    rounded = reference.baseline_backward(dout, q, k, v, **call)
    found = []
    for seed in range(2):
        into = _gradients.Gradients.like(request)
        plan = _gradients.decide(request, into, find_device("H200"), "hopper").plan
        assert plan is not None
        (main,) = (x for x in plan.to_dict()["launches"] if "_attention_" in x["kernel"])
        assert main["kernel"].endswith(f"_{tile}")
        run(plan, request, into, seed)
        assert_close(into, exact, rounded)
        found.append(into)
    if in_turns:
        assert_same(found[0], found[1])


@pytest.mark.skipif(on.name != "simulator", reason="it plans for a GPU with one SM")
@pytest.mark.parametrize(
    ("d", "dtype", "call"),
    [(32, "bfloat16", {}), (24, "float16", {"causal": True}), (64, "bfloat16", {"causal": True})],
    ids=str,
)
def test_few_keys_of_many_heads_have_tiles_of_one_warpgroup(
    d: int, dtype: str, call: dict[str, Any]
) -> None:
    dout, q, k, v = inputs(70, 130, d, d, dtype, heads=(4, 2))
    request = _gradients.Request(
        dout, q, k, v, *forward(q, k, v, call), None, _options.complete(call)
    )
    device = native.Device.from_dict(find_device("H200").to_dict() | {"sm_count": 1})
    exact = reference.attention_backward(dout, q, k, v, **call)
    rounded = reference.baseline_backward(dout, q, k, v, **call)
    found = []
    for seed, in_turns in enumerate((True, True, False, False)):
        into = _gradients.Gradients.like(request)
        plan = _gradients.decide(request, into, device, "hopper", deterministic=in_turns).plan
        assert plan is not None
        (main,) = (x for x in plan.to_dict()["launches"] if "_attention_" in x["kernel"])
        assert main["kernel"].endswith("d32_short" if d <= 32 else "d64_short")
        assert main["grid"] == [2, 1, 1]  # for six tiles
        run(plan, request, into, seed)
        assert_close(into, exact, rounded)
        found.append(into)
    assert_same(found[0], found[1])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("rows", "keys", "d", "heads", "causal"),
    [
        (128, 128, 32, (8, 4), False), (69, 70, 24, (8, 4), True), (100, 128, 64, (8, 4), True),
        (65, 77, 40, (4, 2), False), (128, 90, 96, (8, 4), False), (9, 100, 72, (8, 4), True),
        (100, 128, 128, (5, 5), True), (300, 77, 128, (5, 5), False), (400, 100, 64, (4, 2), False),
        (50, 50, 64, (5, 5), False), (49, 49, 32, (6, 3), True), (130, 40, 24, (5, 5), False),
    ],
    ids=str,
)  # fmt: skip
def test_the_only_tile_of_a_head_writes_dq(
    rows: int,
    keys: int,
    d: int,
    heads: tuple[int, int],
    causal: bool,
    deterministic: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CTAs take one tile after another. No launch comes behind. Rows of dq are further apart."""
    tensors = inputs(rows, keys, d, d, ("float16", "bfloat16")[rows % 2], heads=heads)
    plans = gradients.note_plans(monkeypatch)
    gradients.differentiate_and_check(
        on, "hopper", *tensors, sms=2, schedules=(rows,), deterministic=deterministic,
        causal=causal, pad=8,
    )  # fmt: skip
    assert all(plan.kernels[-1].endswith("_one") for plan in plans)


@pytest.mark.parametrize("d", [32, 64, 96, 128])
@pytest.mark.parametrize("sizes", [(128, 77, False), (70, 114, True)], ids=str)
def test_the_only_tile_of_few_heads_that_query_heads_share(
    sizes: tuple[int, int, bool], d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where SMs are idle, CTAs may share out the query heads or rows of the tile."""
    rows, keys, causal = sizes
    tensors = inputs(rows, keys, d, d, "float16", heads=(6, 2))
    plans = gradients.note_plans(monkeypatch)
    gradients.differentiate_and_check(
        on, "hopper", *tensors, sms=132, schedules=(rows,), causal=causal
    )
    main = "d128_one" if d == 128 else "_one"
    assert all(any(x.endswith(main) for x in plan.kernels) for plan in plans)


@pytest.mark.parametrize("options", [{"gradient_dtype": torch.float32}, {"add_to": 0.5}], ids=str)
def test_sums_of_the_only_tile_where_tma_cannot_write_dq(options: dict[str, Any]) -> None:
    tensors = inputs(100, 90, 64, 64, "bfloat16", heads=(3, 3))
    gradients.differentiate_and_check(on, "hopper", *tensors, schedules=(1,), **options)


# Calls whose last round of 128 rows has no row in its second block, or whose last tile has no key
# for its second warpgroup: tile -> (rows, keys, d, heads, causal).
LEFT_OUT: dict[str, tuple[int, int, int, tuple[int, int], bool]] = {
    "d64": (530, 180, 64, (2, 1), True),
    "d64_exact": (560, 300, 40, (1, 1), False),
    "d96": (150, 310, 80, (6, 1), False),
    "d96_one": (140, 60, 96, (3, 3), False),
    "d128": (70, 190, 128, (2, 1), True),
}


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("tile", LEFT_OUT)
def test_blocks_without_rows_and_warpgroups_without_keys(
    tile: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CTAs take one tile after another, of which the last ones have fewer keys."""
    rows, keys, d, heads, causal = LEFT_OUT[tile]
    dtype = ("float16", "bfloat16")[deterministic]
    tensors = inputs(rows, keys, d, d, dtype, heads=heads)
    plans = gradients.note_plans(monkeypatch)
    gradients.differentiate_and_check(
        on, "hopper", *tensors, sms=2, schedules=(0, 3), deterministic=deterministic, causal=causal
    )
    assert all(any(x.endswith(f"_{tile}") for x in plan.kernels) for plan in plans)


@pytest.mark.parametrize(("d", "causal"), [(64, False), (96, True), (128, False)])
def test_packed_sequences_whose_last_blocks_are_left_out(d: int, causal: bool) -> None:
    """Sequences without rows, without keys, and with NaN behind the rows and keys of one."""
    q_lengths, k_lengths = (70, 5, 150, 0, 520), (140, 30, 190, 20, 0)
    rows = sum(q_lengths) + 3, sum(k_lengths) + 5
    dout, q, k, v = (x[0].transpose(0, 1) for x in inputs(*rows, d, d, "bfloat16", heads=(2, 1)))
    for x, of_none in ((q, 3), (dout, 3), (k, 5), (v, 5)):
        x[-of_none:] = torch.nan
    gradients.differentiate_and_check(
        on, "hopper", dout, q, k, v, sms=2, schedules=range(2), causal=causal,
        cu_seqlens_q=on.cu_seqlens(q_lengths), cu_seqlens_k=on.cu_seqlens(k_lengths),
        max_seqlen_q=max(q_lengths), max_seqlen_k=max(k_lengths),
    )  # fmt: skip


# Calls of two tiles of keys: (rows, keys, d, dv).
LAST_IN_TURN = [
    (400, 197, 64, 64), (385, 256, 40, 64), (390, 200, 56, 48), (197, 197, 96, 96),
    (130, 200, 72, 80), (197, 197, 128, 128), (129, 130, 104, 128), (250, 129, 128, 112),
]  # fmt: skip


@pytest.mark.parametrize(
    "sizes",
    [
        # Each tile has one call here that only test-rest runs.
        pytest.param(sizes, marks=pytest.mark.rest if number in (2, 3, 6, 7) else ())
        for number, sizes in enumerate(LAST_IN_TURN)
    ],
    ids=str,
)
def test_the_last_tile_in_turn_writes_dq(
    sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CTAs go on with the sums of the tile before, and take one tile after another. No launch comes
    behind, and the bits are always the same, asked for or not. Rows of dq are further apart.
    """
    number = LAST_IN_TURN.index(sizes)
    tensors = inputs(*sizes, ("float16", "bfloat16")[number % 2], heads=(3, 3), seed=number)
    plans = gradients.note_plans(monkeypatch)
    for causal in (False, True) if sizes[0] <= sizes[1] else (False,):
        plans.clear()
        for asked, schedules in ((False, (number,)), (True, (number + 1, number + 2))):
            gradients.differentiate_and_check(
                on, "hopper", *tensors, sms=2, schedules=schedules, deterministic=asked, pad=8,
                causal=causal,
            )  # fmt: skip
        assert all(plan.to_dict() == plans[0].to_dict() for plan in plans)
        assert plans[0].kernels[-1].endswith("_turns")


# Where BackwardKernelParams::first_shared_head lies.
FIRST_SHARED_OFFSET = ORDER_OFFSET + 92
# Calls of few query rows and more keys: (rows, keys, d, dv), and the tile that has all rows.
FEW_ROWS = {
    (100, 400, 64, 64): "d64_rows", (128, 450, 40, 48): "d64_rows", (17, 490, 24, 32): "d32_rows",
    (200, 300, 64, 64): "d64_rows_two", (330, 400, 56, 64): "d64_rows_three",
    (129, 500, 32, 16): "d32_rows_two", (450, 530, 24, 32): "d32_rows_four",
    (77, 460, 96, 80): "d96_rows", (90, 450, 128, 104): "d128_rows",
}  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", FEW_ROWS, ids=str)
def test_a_cta_has_all_query_rows_of_a_head(
    sizes: tuple[int, int, int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One CTA, or several of them that share out the keys: the order of all sums is fixed, asked
    for or not.
    """
    number = list(FEW_ROWS).index(sizes)
    tensors = inputs(*sizes, ("float16", "bfloat16")[number % 2], heads=(3, 3), seed=number)
    dlse = torch.randn(1, 3, sizes[0], device=on.device)
    plans = gradients.note_plans(monkeypatch)
    for sms, deterministic in ((1, True), (132, False)):
        gradients.differentiate_and_check(
            on, "hopper", *tensors, dlse=dlse, sms=sms, schedules=range(number, number + 2),
            deterministic=deterministic, pad=8, causal=causal,
        )  # fmt: skip
    main, *behind = plans[0].kernels
    assert main.endswith(FEW_ROWS[sizes])
    assert not behind
    assert plans[-1].kernels[-1].endswith("_rows")
    assert plans[-1].kernels[-1].startswith("hopper_backward_dq_")


@pytest.mark.parametrize(
    ("sizes", "heads", "sms"), [((330, 256, 64, 56), 3, 2), ((90, 450, 128, 104), 5, 4)]
)
def test_ctas_share_out_the_keys_of_the_last_heads(
    sizes: tuple[int, int, int, int], heads: int, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many heads as there are SMs have a CTA each, and what is left several."""
    tensors = inputs(*sizes, "bfloat16", heads=(heads, heads))
    plans = gradients.note_plans(monkeypatch)
    gradients.differentiate_and_check(
        on, "hopper", *tensors, sms=sms, schedules=(0, 1), pad=8, add_to=0.5
    )
    if on.name == "simulator":  # a GPU has more SMs
        main, last = plans[0].to_dict()["launches"]
        (first_shared,) = struct.unpack_from(
            "<i", bytes.fromhex(main["params"]), FIRST_SHARED_OFFSET
        )
        assert first_shared == sms
        assert last["kernel"].endswith("_rows")


@pytest.mark.parametrize(
    ("d", "causal", "tile"),
    [
        (24, True, "d32_rows"), (64, False, "d64_rows"), (88, True, "d96_rows"),
        (128, False, "d128_rows"), (112, True, "d128_rows"),
    ],
)  # fmt: skip
def test_a_cta_has_all_query_rows_of_a_packed_sequence(
    d: int, causal: bool, tile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences without rows, without keys, and of fewer of either; rows of no sequence."""
    q_lengths, k_lengths = (60, 5, 128, 9, 0, 33), (70, 129, 128, 0, 20, 33)
    rows = sum(q_lengths) + 3, sum(k_lengths) + 5
    dtype = "float16" if causal else "bfloat16"
    dout, q, k, v = (x[0].transpose(0, 1) for x in inputs(*rows, d, d, dtype, heads=(2, 2)))
    for x, of_none in ((q, 3), (dout, 3), (k, 5), (v, 5)):
        x[-of_none:] = torch.nan
    plans = gradients.note_plans(monkeypatch)
    gradients.differentiate_and_check(
        on, "hopper", dout, q, k, v, sms=2, schedules=range(2), causal=causal,
        cu_seqlens_q=on.cu_seqlens(q_lengths), cu_seqlens_k=on.cu_seqlens(k_lengths),
        max_seqlen_q=max(q_lengths), max_seqlen_k=max(k_lengths),
    )  # fmt: skip
    assert all(plan.kernels[-1].endswith(f"_{tile}") for plan in plans)


@pytest.mark.parametrize("options", [{"gradient_dtype": torch.float32}, {"add_to": 0.5}], ids=str)
@pytest.mark.parametrize("sms", [1, 132])
def test_gradients_of_few_rows_in_fp32_and_added(sms: int, options: dict[str, Any]) -> None:
    tensors = inputs(60, 390, 64, 64, "bfloat16", heads=(3, 3))
    gradients.differentiate_and_check(on, "hopper", *tensors, schedules=(1,), sms=sms, **options)


@pytest.mark.skipif(on.name != "simulator", reason="it is about a GPU that is shared")
@pytest.mark.parametrize("d", [96, 128])
def test_a_tile_waits_for_no_cta_that_has_not_started(
    d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four CTAs two start when the others have ended: the others must not take the second tiles
    of heads whose first ones nobody has.
    """
    monkeypatch.setattr(simulator, "resident_ctas", lambda plan: 2)
    tensors = inputs(130, 200, d, d, "bfloat16", heads=(5, 5), seed=d)
    plans = gradients.note_plans(monkeypatch)
    gradients.differentiate_and_check(on, "hopper", *tensors, sms=4, schedules=range(3))
    for plan in plans:
        main = plan.to_dict()["launches"][-1]
        assert main["kernel"].endswith("_turns")
        assert main["grid"] == [4, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [
        ((140, 1024, 128, 128), (2, 2)),
        ((129, 1100, 104, 120), (2, 2)),
        ((130, 1030, 128, 128), (4, 2)),
    ],
    ids=str,
)
def test_ctas_that_stay_have_k_where_v_was(
    sizes: tuple[int, int, int, int], heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many keys of few rows, at more than 96 columns."""
    tensors = inputs(*sizes, "bfloat16", heads=heads, seed=sizes[0])
    plans = gradients.note_plans(monkeypatch)
    gradients.differentiate_and_check(
        on, "hopper", *tensors, sms=2, schedules=range(2), deterministic=False
    )
    assert all("hopper_attention_bwd_bf16_d128_stays" in plan.kernels for plan in plans)
