"""Gradients of calls with key_indices by kernels that read the lists: what no list names is NaN and
has the gradient 0.
"""

from __future__ import annotations

import json
import math
from importlib.resources import files
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as native
from archflash import _gradients, reference

from .executors import executor
from .gradients import NAMES, differentiate, inputs
from .test_key_indices import lists_of, poisoned

here = executor()
DTYPES = ("float16", "bfloat16")
KERNELS = [name for name in ("ampere", "hopper", "simt") if name in here.kernels()]
KINDS = [
    (name, dtype) for name in KERNELS for dtype in (("float32",) if name == "simt" else DTYPES)
]


def dtype_of(kernel: str) -> str:
    return "float32" if kernel == "simt" else "bfloat16"


# (batch, (heads of q, of k), nq, nk, d, dv), the lists' shape, options. Each tile of each size is
# taken: few rows (up to 16), 64 and 128. In hopper these are calls of at least 65 rows.
CALLS: dict[str, tuple[tuple[Any, ...], tuple[int, int, int, int], dict[str, Any]]] = {
    "a-head": ((1, (1, 1), 3, 70, 64, 64), (1, 1, 3, 40), {}),
    "gqa-lists-of-heads-dlse": (
        (2, (6, 2), 2, 90, 64, 40), (2, 2, 2, 150), {"lengths": (2, 2, 2), "dlse": True}
    ),
    "many-heads": ((1, (72, 1), 1, 150, 40, 64), (1, 1, 1, 140), {"dtype": "float32"}),
    "causal-sinks-lists-of-a-batch": (
        (2, (4, 2), 5, 40, 128, 128), (1, 1, 5, 33),
        {"causal": True, "sinks": True, "lengths": (2, 1, 1)},
    ),
    "lists-of-64-rows": ((1, (2, 1), 66, 150, 64, 56), (1, 1, 2, 70), {"causal": True}),
    "lists-of-64-rows-window-added": (
        (1, (2, 1), 70, 80, 96, 128), (1, 1, 2, 50),
        {"window": (30, 20), "q_offset": 4, "add_to": 0.5, "pad": 8},
    ),
    "64-heads": ((1, (64, 1), 2, 90, 128, 104), (1, 1, 2, 70), {}),
    "100-heads-window-sinks": (
        (1, (100, 1), 2, 90, 128, 120), (1, 1, 2, 130), {"window": (20, 9), "sinks": True}
    ),
    "narrow-128-rows-lse-added": (
        (2, (4, 2), 70, 90, 64, 48), (2, 1, 2, 80),
        {"lengths": (2, 1, 2), "dlse": True, "add_to": 0.5, "causal": True},
    ),
    "128-rows-softcap-lists-of-heads": (
        (1, (4, 2), 130, 70, 104, 128), (1, 2, 3, 64), {"softcap": 2.0, "scale": -0.3}
    ),
    "narrow-128-rows": ((1, (3, 1), 64, 200, 40, 64), (1, 1, 1, 190), {"dtype": "float32"}),
    "128-rows-bnhd": ((1, (2, 1), 66, 150, 128, 128), (1, 1, 2, 130), {"layout": "bnhd"}),
    "mla-heads": ((1, (20, 1), 2, 70, 192, 128), (1, 1, 2, 66), {"causal": True}),
    "mla-few": ((1, (8, 1), 2, 70, 184, 120), (1, 1, 2, 66), {}),
    "mla-128-rows": ((1, (128, 1), 1, 70, 192, 128), (1, 1, 1, 66), {}),
    "wide-softcap-bnhd": (
        (1, (20, 1), 2, 80, 256, 256), (1, 1, 2, 70), {"softcap": 3.0, "layout": "bnhd"}
    ),
    "wide-few": ((2, (1, 1), 3, 80, 256, 200), (2, 1, 3, 70), {"scale": -0.2}),
    "nobody-sees-a-key": ((1, (2, 2), 2, 8, 64, 64), (1, 2, 2, 4), {"lengths": 0}),
}  # fmt: skip


# In which order CTAs add to dK and dV: any; one after another, as planned for a GPU of two SMs; in
# several chains with sums of their own; or a launch behind adds up what they keep, in hopper.
ORDERS: dict[str, dict[str, Any]] = {
    "any-order": {"deterministic": False},
    "a-chain": {"deterministic": True, "sms": 2},
    "chains": {"deterministic": True},
    "kept": {"deterministic": True},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("kernel", "dtype"), KINDS)
def test_gradients_of_listed_keys(kernel: str, dtype: str, order: str, name: str) -> None:
    (batch, heads, nq, nk, d, dv), shape, given = CALLS[name]
    number = list(CALLS).index(name)
    of_list = heads[0] // heads[1] * (1 if shape[2] == nq else min(nq, 64))
    if kernel == "hopper" and (of_list <= 64 or d > 192 or dv > 128):
        return  # another folder's kernel, which is tested as such
    if here.name == "simulator" and dtype in DTYPES and (number + DTYPES.index(dtype)) % 2:
        return  # both types have one code
    orders = ["any-order", *(["kept"] if kernel == "hopper" else ["a-chain", "chains"])]
    if order not in orders:
        return
    turn = (number // 2 + len(kernel)) % len(orders)
    if here.name == "simulator" and turn != orders.index(order):
        return  # a call has one of them
    if here.name == "simulator" and kernel == "simt" and of_list > 64:
        return  # its tiles have at most 32 rows
    tensors = inputs(here, nq, nk, d, dv, dtype, batch=batch, heads=heads)
    call = dict(given)
    how = {word: call.pop(word) for word in ("add_to", "pad") if word in call}
    if "dtype" in call:
        how["gradient_dtype"] = getattr(torch, call.pop("dtype"))
    lengths = call.pop("lengths", None)
    if lengths == 0:
        lengths = torch.zeros(1, 1, 1, dtype=torch.int32)
    elif lengths is not None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(0, shape[3] + 9, lengths, generator=generator).int()
    lists = lists_of(shape, nk, lengths=lengths)
    if lengths is not None:
        call["topk_lengths"] = lengths.to(here.device)
    dlse = here.rand(batch, heads[0], nq, seed=6) if call.pop("dlse", False) else None
    if call.pop("sinks", False):
        call["sinks"] = here.rand(heads[0], seed=5)
    dout, q, k, v = tensors
    with_nan = poisoned(k, v, lists)
    if call.get("layout") == "bnhd":
        dout, q, k, v, *with_nan = (
            x.transpose(1, 2).contiguous() for x in (dout, q, k, v, *with_nan)
        )
    call["key_indices"] = lists
    compared = ORDERS[order]["deterministic"]
    count = 1 if kernel == "simt" and not compared else 2
    schedules = range(number, number + count) if here.name == "simulator" else (0,)
    found = differentiate(
        here, kernel, dout, q, *with_nan, dlse=dlse, schedules=schedules, **ORDERS[order], **how,
        **call,
    )  # fmt: skip
    exact = reference.attention_backward(dout, q, k, v, dlse=dlse, **call)
    rounded = reference.baseline_backward(dout, q, k, v, dlse=dlse, **call)
    more = how.get("add_to", 0.0)
    for what in (*NAMES, "dsinks"):
        x, expected, base = (getattr(of, what) for of in (found, exact, rounded))
        if x is None:
            assert expected is None
            continue
        added = more if what in NAMES else 0.0
        allowed = exact.sinks_rounding if what == "dsinks" else 0.0
        report = reference.check(x, expected + added, base.double() + added, allowed)
        assert report.ok, f"{what}: {report}"


# (batch, (heads of q, of k), nq, nk, d), the lists' shape, options, and how many of the first query
# rows see no key of their list.
BLIND: dict[str, tuple[tuple[Any, ...], tuple[int, int, int, int], dict[str, Any], int]] = {
    "causal-before-the-keys": (
        (1, (3, 1), 66, 40, 64), (1, 1, 2, 300), {"causal": True, "sinks": True}, 26
    ),
    "causal-list-of-later-keys": (
        (1, (2, 1), 64, 80, 128), (1, 1, 1, 40), {"causal": True, "later": 40}, 24
    ),
    "window-behind-the-keys": (
        (1, (2, 1), 64, 80, 64), (1, 1, 1, 33), {"window": (30, 5), "later": 60}, 39
    ),
    "a-list-of-nothing": ((1, (80, 1), 2, 30, 128), (1, 1, 2, 30), {"nothing": 1}, 1),
    "lists-without-length": ((1, (2, 1), 70, 50, 64), (1, 1, 2, 30), {"lengths": (0, 30)}, 64),
}  # fmt: skip


@pytest.mark.parametrize("name", BLIND)
@pytest.mark.parametrize("kernel", KERNELS)
def test_queries_that_see_no_key_of_their_list_may_hold_anything(kernel: str, name: str) -> None:
    (batch, heads, nq, nk, d), shape, given, blind = BLIND[name]
    dout, q, k, v = inputs(here, nq, nk, d, d, dtype_of(kernel), batch=batch, heads=heads)
    lists = lists_of(shape, nk).flip(-1)  # at the end of a list that is longer than a CTA
    call = dict(given)
    lists = torch.where(lists < call.pop("later", 0), -1, lists)
    lists[:, :, : call.pop("nothing", 0)] = -1
    if "lengths" in call:
        call["topk_lengths"] = here.int32(*call.pop("lengths")).reshape(1, 1, 2)
    if call.pop("sinks", False):
        call["sinks"] = here.rand(heads[0], seed=5)
    call["key_indices"] = lists
    dlse = here.rand(batch, heads[0], nq, seed=6)
    _, lse = reference.attention(q, k, v, **{**call, "sinks": None})
    assert bool((lse[:, :, :blind] == -math.inf).all())
    assert bool(lse[:, :, blind:].isfinite().any(-1).all())
    exact = reference.attention_backward(dout, q, k, v, dlse=dlse, **call)
    rounded = reference.baseline_backward(dout, q, k, v, dlse=dlse, **call)
    for x in (q, dout):
        x[:, :, :blind:2] = math.nan
        x[:, :, 1:blind:2] = math.inf
    with_nan = poisoned(k, v, lists)
    found = differentiate(
        here, kernel, dout, q, *with_nan, dlse=dlse, deterministic=False, schedules=(0,), **call
    )
    for what in NAMES:
        report = reference.check(*(getattr(of, what) for of in (found, exact, rounded)))
        assert report.ok, f"{what}: {report}"


@pytest.mark.parametrize("order", ["any-order", "a-chain", "kept"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_key_that_is_named_twice_counts_twice(kernel: str, order: str) -> None:
    dout, q, k, v = inputs(here, 1, 20, 64, 64, dtype_of(kernel), heads=(1, 1))
    lists = here.int32(3, 7, 3, 3, 11).reshape(1, 1, 1, 5)
    found = differentiate(
        here, kernel, dout, q, k, v, key_indices=lists, schedules=(0,), **ORDERS[order]
    )
    exact = reference.attention_backward(dout, q, k, v, key_indices=lists)
    for name in NAMES:
        torch.testing.assert_close(
            getattr(found, name).double(), getattr(exact, name), rtol=2e-2, atol=2e-2
        )


# Lists of several blocks that share keys: the last key of a block is often the first one of the
# next. Some lists name nothing, and the last one has fewer rows.
IN_TURNS: dict[str, tuple[tuple[Any, ...], tuple[int, int, int, int], dict[str, Any]]] = {
    "rows": ((1, (6, 2), 7, 40, 64), (1, 2, 7, 400), {"lengths": (150, 400, 0, 9, 390, 65, 320)}),
    "128-rows": (
        (1, (2, 1), 150, 90, 128), (1, 1, 3, 330), {"lengths": (330, 250, 330), "causal": True}
    ),
    "tiles-without-rows": ((1, (4, 1), 130, 60, 64), (1, 1, 3, 330), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_TURNS)
@pytest.mark.parametrize("order", ["a-chain", "kept"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sums_in_order_have_the_same_bits_each_time(kernel: str, order: str, name: str) -> None:
    (batch, heads, nq, nk, d), shape, given = IN_TURNS[name]
    if kernel == "hopper" and name == "rows":
        return  # another folder's
    if (kernel == "hopper") != (order == "kept"):
        return  # it has no such order
    dout, q, k, v = inputs(here, nq, nk, d, d, dtype_of(kernel), batch=batch, heads=heads)
    generator = torch.Generator().manual_seed(3)
    lists = torch.randint(-9, nk + 9, shape, generator=generator).int().to(here.device)
    call = dict(given)
    if "lengths" in call:
        call["topk_lengths"] = here.int32(*call.pop("lengths")).reshape(1, 1, -1)
    found = differentiate(
        here, kernel, dout, q, k, v, key_indices=lists, **ORDERS[order] | {"sms": 1},
        schedules=range(2 if here.name == "simulator" else 5), **call,
    )  # fmt: skip
    exact = reference.attention_backward(dout, q, k, v, key_indices=lists, **call)
    rounded = reference.baseline_backward(dout, q, k, v, key_indices=lists, **call)
    for what in NAMES:
        report = reference.check(*(getattr(of, what) for of in (found, exact, rounded)))
        assert report.ok, f"{what}: {report}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_calls_above_run_every_compiled_kernel(kernel: str) -> None:
    planned: set[str] = set()
    for (batch, heads, nq, nk, d, dv), shape, _ in CALLS.values():
        dtype = "float32" if kernel == "simt" else "float16"
        q, k, v = here.qkv(nq, nk, d, dv, dtype=dtype, batch=batch, heads=heads)
        for deterministic in (False, True):
            with _gradients.asked_for(deterministic):
                plan = archflash.explain(
                    q, k, v, key_indices=lists_of(shape, nk), backward=True, implementation=kernel,
                    device=native.describe(kernel).home_device,
                ).plan  # fmt: skip
            assert plan is not None
            planned |= {x for x in plan.kernels if x.startswith(kernel) and x.endswith("_lists")}
    word = "f32" if kernel == "simt" else "f16"
    text = files("archflash").joinpath(f"_kernels/{kernel}/bwd_lists_{word}.json").read_text()
    assert planned == {entry for entries in json.loads(text).values() for entry in entries}


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_without_keys_are_0(kernel: str) -> None:
    dout, q, k, v = inputs(here, 3, 0, 64, 64, dtype_of(kernel))
    lists = here.int32(*range(6)).reshape(1, 1, 3, 2)
    found = differentiate(
        here, kernel, dout, q, k, v, deterministic=False, key_indices=lists, schedules=(0,)
    )
    assert not found.dq.any()
