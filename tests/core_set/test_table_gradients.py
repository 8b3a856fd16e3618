"""Gradients of calls with a table of blocks by hopper, whose CTAs list the rounds of queries that
see any of their keys.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import pytest
import torch

import archflash

from . import gradients
from .executors import executor
from .gradients import differentiate_and_check, note_plans
from .test_tables_of_blocks import table_of

on = executor()
NAME = "hopper"
pytestmark = pytest.mark.skipif(NAME not in on.kernels(), reason=f"{NAME} has no code for this GPU")
inputs = functools.partial(gradients.inputs, on)
SUMS_OFFSET = 520  # of BackwardKernelParams::sums_of_round
every_dim = pytest.mark.parametrize("dim", [64, 128])

CALLS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": True},
    "window": {"window": (70, 30)},
    "sinks": {"sinks": True},
    "offsets": {"causal": True, "q_offset": (-70, 90)},
}


@every_dim
@pytest.mark.parametrize("name", CALLS)
def test_gradients_with_a_table_of_blocks_agree_with_float64(
    name: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = list(CALLS).index(name)
    dtype = ("float16", "bfloat16")[number % 2]
    nq, nk, batch = 300, 330, 1
    options = dict(CALLS[name])
    if "q_offset" in options:
        options["q_offset"], batch = on.int32(*options["q_offset"]), 2
    if "sinks" in options:
        options["sinks"] = on.rand(2, seed=9)
    tensors = inputs(nq, nk, dim - 8, dim, dtype, batch=batch, heads=(2, 1 + number % 2))
    table = table_of(1 + number // 3, nq, nk)
    plans = note_plans(monkeypatch)
    differentiate_and_check(
        on, NAME, *tensors, schedules=(number % 4,), deterministic=False, planned_for="H200",
        block_mask=table, **options,
    )  # fmt: skip
    (main,) = (kernel for kernel in plans[0].kernels if "_attention_bwd_" in kernel)
    assert main.endswith(f"_d{dim}_table")


@every_dim
def test_gradients_with_a_table_in_every_schedule(dim: int) -> None:
    tensors = inputs(200, 200, dim, dim, "bfloat16", heads=(2, 2))
    differentiate_and_check(
        on, NAME, *tensors, schedules=range(4), block_mask=table_of(2, 200, 200)
    )


@pytest.mark.skipif(on.name != "simulator", reason="a GPU has more SMs")
@every_dim
def test_tiles_of_a_table_take_turns_in_chains(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than run at a time have two chains, each with sums of its own."""
    tensors = inputs(200, 700, dim, dim, "bfloat16", heads=(2, 2))
    table = table_of(2, 200, 700)
    plans = note_plans(monkeypatch)
    differentiate_and_check(
        on, NAME, *tensors, sms=5 if dim == 64 else 10, schedules=(0, 3), block_mask=table
    )
    (main,) = (x for x in plans[0].to_dict()["launches"] if "_attention_bwd_" in x["kernel"])
    assert struct.unpack_from("<i", bytes.fromhex(main["params"]), SUMS_OFFSET) == (2,)


@pytest.mark.parametrize("dim", [64, 128])
def test_keys_that_no_query_sees_and_heads_that_see_none(dim: int) -> None:
    """The first of the heads that share a head of K sees nothing of some keys; nobody sees others,
    whose NaN reaches no gradient.
    """
    dout, q, k, v = inputs(150, 400, dim, dim, "bfloat16", heads=(3, 1))
    table = torch.ones(1, 3, 3, 7, dtype=torch.int8, device=on.device)
    table[:, 0, :, 2:] = 0
    table[:, :, :, [0, 5]] = 0
    table[:, :, 1] = 0
    k[:, :, 320:384] = v[:, :, :64] = math.nan
    k[:, :, :64] = v[:, :, 320:384] = math.nan
    found = gradients.differentiate(
        on, NAME, dout, q, k, v, schedules=(0,), deterministic=False, block_mask=table
    )
    for name in gradients.NAMES:
        assert getattr(found, name).isfinite().all(), name
    kept_k, kept_v = k.nan_to_num(), v.nan_to_num()
    differentiate_and_check(on, NAME, dout, q, kept_k, kept_v, schedules=(1, 2), block_mask=table)


@every_dim
def test_tiles_are_taken_in_the_order_of_their_rounds(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with three SMs tiles follow one another. The table is that of heads which share a
    head of K in two sequences; some tiles have as many rounds as others, and one has none.
    """
    tensors = inputs(260, 470, dim, dim, "bfloat16", batch=2, heads=(4, 2))
    table = table_of(4, 260, 470)
    table[:, :, :, 2:4] = 0
    table[:, :, :, 6] = table[:, :, :, 0]
    for shown in (table, table[:, :1]):
        plans = note_plans(monkeypatch)
        differentiate_and_check(
            on, NAME, *tensors, schedules=(0,), deterministic=False, planned_for="H200", sms=3,
            block_mask=shown,
        )  # fmt: skip
        assert plans[0].kernels[0] == "hopper_backward_rows_bf16_table"


def test_which_tiles_are_ordered() -> None:
    def first(nk: int, deterministic: bool = False, **call: Any) -> str:
        q, k = (torch.empty(1, 40, n, 128, dtype=torch.bfloat16, device="meta") for n in (300, nk))
        table = torch.empty(1, 1, 5, -(-nk // 64), dtype=torch.int8, device="meta")
        torch.use_deterministic_algorithms(deterministic)
        try:
            plan = archflash.explain(
                q, k, k, device="H200", implementation=NAME, backward=True, block_mask=table, **call
            ).plan
        finally:
            torch.use_deterministic_algorithms(False)
        assert plan is not None
        return plan.kernels[0]

    assert first(600) == "hopper_backward_rows_bf16_table"
    assert first(384) == "hopper_backward_rows_bf16"  # all of them run at a time
    assert first(5000) == "hopper_backward_rows_bf16"  # more than ten times as many
    assert first(600, causal=True) == "hopper_backward_rows_bf16"
    assert first(600, deterministic=True) == "hopper_backward_rows_bf16"  # they wait for others


def test_which_gradients_of_tables_it_computes() -> None:
    def why_not(d: int = 128, **call: Any) -> str:
        q = torch.empty(1, 2, 300, d, dtype=torch.bfloat16, device="meta")
        table = torch.empty(1, 1, 5, 5, dtype=torch.int8, device="meta")
        try:
            archflash.explain(
                q, q, q, device="H200", implementation=NAME, backward=True, block_mask=table, **call
            )
        except archflash.ForcedImplementationError as error:
            return str(error)
        return ""

    assert why_not() == why_not(64) == why_not(causal=True) == ""
    assert "block_mask with head dimensions above 128" in why_not(192)
    assert "block_mask with a softcap" in why_not(softcap=2.0)
    slopes = torch.empty(2, device="meta")
    assert "alibi_slopes in a call whose gradients are needed" in why_not(alibi_slopes=slopes)
