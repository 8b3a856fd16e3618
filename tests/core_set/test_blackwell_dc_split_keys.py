"""Keys split over CTAs, and the kernels for few query rows: num_splits changes how a call is
computed, never what it means.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native

from .checks import assert_close, same_bits
from .executors import executor

on = executor()

NAME = "blackwell_dc"
# The head dimensions (d, dv) and the keys of a block, for each kernel for few query rows.
KERNELS = {
    "d64_few": ((64, 64), 128),
    "d96_few": ((96, 96), 128),
    "d128_few": ((128, 128), 128),
    "d192_few": ((192, 128), 128),
    "d256": ((256, 256), 64),
}
BLOCKS = 6
SPLITS = (1, 2, 5, 100)  # the last is more than there are blocks

pytestmark = pytest.mark.skipif(
    NAME not in on.kernels("num_splits"), reason=f"{NAME} has no code for this GPU"
)
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def qkv(
    kernel: str, nq: int, nk: int, dtype: str = "bfloat16", heads: tuple[int, int] = (2, 2)
) -> tuple[Tensor, Tensor, Tensor]:
    return on.qkv(nq, nk, *KERNELS[kernel][0], dtype=dtype, heads=heads)


def plan_of(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> native.LaunchPlan:
    plan = archflash.explain(q, k, v, implementation=NAME, return_lse=True, **call).plan
    assert plan is not None
    return plan


def kernels_of(plan: native.LaunchPlan) -> list[str]:
    return [launch["kernel"] for launch in plan.to_dict()["launches"]]


# --- what is computed ---


@pytest.mark.parametrize("splits", SPLITS)
@every_kernel
def test_shares_together_give_what_one_gives(kernel: str, splits: int) -> None:
    dtype = "float16" if splits % 2 else "bfloat16"
    q, k, v = qkv(kernel, 3, (BLOCKS - 1) * KERNELS[kernel][1] + 9, dtype)
    call: dict[str, Any] = {"num_splits": splits, "causal": True}
    plan = plan_of(q, k, v, **call)
    word = "f16" if dtype == "float16" else "bf16"
    expected = [f"{NAME}_attention_fwd_{word}_{kernel}", f"{NAME}_combine_{word}"]
    assert kernels_of(plan) == (expected if splits > 1 else expected[:1])
    # The first launch has a CTA for each share of each head.
    assert plan.to_dict()["launches"][0]["grid"][0] == 2 * min(splits, BLOCKS)
    on.attend_and_check(NAME, q, k, v, schedules=[splits], **call)


# Each call leaves some shares with few keys or none, and its rows end in different blocks.
CALLS: dict[str, dict[str, Any]] = {
    "causal-from-the-start": {"causal": True, "q_offset": 250},
    "window": {"window": (150, 20)},
    "window-in-one-block": {"window": (3, 0), "q_offset": 130},
    "q_offset-tensor": {"causal": True, "q_offset": [300]},
    "rows-that-see-no-key": {"causal": True, "q_offset": -20},
    "rows-that-see-no-key-but-a-sink": {"causal": True, "q_offset": -20, "sinks": True},
    "no-row-sees-a-key": {"window": (2, 2), "q_offset": 5000, "sinks": True},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 3.0, "causal": True},
    "negative-scale": {"scale": -0.3},
}


@pytest.mark.parametrize("name", CALLS)
def test_every_share_sees_what_its_rows_see(name: str) -> None:
    number = list(CALLS).index(name)
    kernel = list(KERNELS)[number % len(KERNELS)]
    heads = (4, 2) if number % 2 else (2, 2)
    call = dict(CALLS[name])
    if call.get("sinks"):
        call["sinks"] = on.tensor([0.7, -30.0, 40.0, -math.inf][: heads[0]])
    if isinstance(call.get("q_offset"), list):
        call["q_offset"] = on.int32(*call["q_offset"])
    q, k, v = qkv(kernel, 40, 5 * KERNELS[kernel][1] - 11, heads=heads)
    assert len(kernels_of(plan_of(q, k, v, num_splits=3, **call))) == 2
    out, lse = on.attend_and_check(NAME, q, k, v, num_splits=3, schedules=[number], **call)
    if "no-key" in name or "no-row" in name:
        blind = slice(0, 20 if "rows" in name else None)
        assert torch.equal(out[:, :, blind], torch.zeros_like(out[:, :, blind]))
        of_no_key = call.get("sinks", on.tensor([-math.inf] * heads[0]))
        assert torch.equal(lse[0, :, 0], of_no_key)


@pytest.mark.parametrize("kernel", ["d64_few", "d256"])
def test_packed_sequences_of_all_lengths(kernel: str) -> None:
    (d, dv), keys = KERNELS[kernel]
    q_lengths = (1, 0, 5, 1, 130, 2)
    k_lengths = (4 * keys + 3, 70, 0, 7, 3 * keys, 2 * keys)
    # Two rows lie before all sequences, four behind them.
    ends = [
        on.int32(2, *(2 + end for end in itertools.accumulate(lengths)))
        for lengths in (q_lengths, k_lengths)
    ]
    total_q, total_k = sum(q_lengths) + 6, sum(k_lengths) + 6
    shapes = ((total_q, 2, d), (total_k, 1, d), (total_k, 1, dv))
    q, k, v = (on.rand(*shape, seed=i, dtype="bfloat16") for i, shape in enumerate(shapes))
    for x in (k, v):
        x[:2], x[-4:] = math.nan, math.nan
    call: dict[str, Any] = {"causal": True, "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    call |= {"sinks": on.tensor([0.5, 3.0]), "num_splits": 3, "max_seqlen_q": 1}  # a wrong hint
    assert kernels_of(plan_of(q, k, v, **call))[0].endswith(kernel)
    out, lse = on.survive(NAME, q, k, v, **call)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.equal(out[-4:], torch.zeros_like(out[-4:]))
    assert_close(out, lse, q, k, v, **call)


def test_rows_of_no_sequence_are_zero() -> None:
    q, k, v = (on.rand(20, heads, 64, seed=heads, dtype="bfloat16") for heads in (4, 2, 2))
    k, v = (x.repeat(20, 1, 1) for x in (k, v))
    call = {"cu_seqlens_q": on.int32(3, 9, 11), "cu_seqlens_k": on.int32(0, 300, 400)}
    out, lse = on.attend_and_check(NAME, q, k, v, num_splits=2, **call)
    assert torch.equal(out[11:], torch.zeros_like(out[11:]))
    assert bool((lse[:, :3] == -math.inf).all())


def test_strides_of_the_output_are_followed() -> None:
    q, k, v = qkv("d64_few", 5, 300)
    q, k, v = (x.expand(2, -1, -1, -1).transpose(1, 2).contiguous() for x in (q, k, v))
    on.attend_and_check(NAME, q, k, v, num_splits=2, out_pad=24, layout="bnhd", causal=True)


def test_head_dims_between_those_of_the_kernels() -> None:
    q, k, v = on.qkv(9, 300, 40, 72, dtype="bfloat16", batch=2, heads=(1, 1))
    assert kernels_of(plan_of(q, k, v, num_splits=2))[0].endswith("d96_few")
    on.attend_and_check(NAME, q, k, v, num_splits=2)


def test_more_shares_than_a_warp_has_lanes() -> None:
    q, k, v = qkv("d256", 1, 35 * 64 - 7, heads=(1, 1))
    k[:, :, 64:128] *= 8  # one share has most of the weight
    plan = plan_of(q, k, v, num_splits=34)
    assert plan.to_dict()["launches"][0]["grid"] == [34, 1, 1]
    on.attend_and_check(NAME, q, k, v, num_splits=34)


def test_rows_of_more_than_one_tile_are_split_where_that_is_asked_for() -> None:
    q, k, v = qkv("d128_few", 300, 310)
    assert kernels_of(plan_of(q, k, v, num_splits=2, causal=True))[0].endswith("d128_few")
    on.attend_and_check(NAME, q, k, v, num_splits=2, causal=True)


def test_huge_scores_are_weighed_as_without_a_split() -> None:
    q, k, v = qkv("d64_few", 20, 500)
    q, k = q * 1e3, k * 1e3  # a log-sum-exp in fp32 has no digit left behind the point
    one, one_lse = on.attend(NAME, q, k, v, num_splits=1)
    three, three_lse = on.attend(NAME, q, k, v, num_splits=3)
    assert bool(one.isfinite().all())
    assert torch.equal(one, three)
    assert torch.equal(one_lse, three_lse)


# --- what is not finite ---


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_only_what_sees_it(value: float) -> None:
    q, k, v = qkv("d64_few", 20, 400)
    call: dict[str, Any] = {"num_splits": 3, "causal": True, "q_offset": 130}
    clean, clean_lse = on.attend(NAME, q, k, v, **call)
    spoiled_q, spoiled_k, spoiled_v = q.clone(), k.clone(), v.clone()
    spoiled_q[0, 0, 7, 3] = value
    spoiled_k[0, 1, 140] = value  # rows 10 and later see it, in the second share
    spoiled_k[0, :, 300] = value  # no row sees it
    spoiled_v[0, 0, 140, 5] = value
    out, lse = on.attend(NAME, spoiled_q, spoiled_k, spoiled_v, **call)
    assert bool(out[0, 0, 7].isnan().all())
    assert bool(out[0, 1, 10:].isnan().all())
    assert not bool(lse[0, 0, 7].isfinite())
    assert not bool(lse[0, 1, 10:].isfinite().any())
    assert not bool(out[0, 0, :, 5].isfinite().any())
    others = torch.ones(2, 20, 64, dtype=torch.bool, device=on.device)
    others[0, 7], others[1, 10:], others[0, :, 5] = False, False, False
    assert torch.equal(out[0][others], clean[0][others])
    assert torch.equal(lse[0, 1, :10], clean_lse[0, 1, :10])


# --- the same bits ---


@every_kernel
def test_shares_in_turn_in_one_cta_and_side_by_side_give_the_same_bits(kernel: str) -> None:
    q, k, v = qkv(kernel, 9, 3 * KERNELS[kernel][1] + 1)
    call: dict[str, Any] = {"causal": True, "num_splits": 3}
    planned = plan_of(q, k, v, **call)
    one_sm = native.Device.from_dict(planned.device.to_dict() | {"sm_count": 1})
    plan = native.plan(NAME, planned.problem, one_sm)
    assert isinstance(plan, native.LaunchPlan)
    out, lse = on.attend_and_check(NAME, q, k, v, schedules=[2], **call)
    in_turn, in_turn_lse = on.attend(NAME, q, k, v, plan=plan, schedules=range(4), **call)
    assert same_bits(in_turn, out)
    assert same_bits(in_turn_lse, lse)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "d256"])
def test_few_rows_get_the_bits_that_they_get_among_many(kernel: str) -> None:
    q, k, v = qkv(kernel, 256, 290, heads=(1, 1))
    many, many_lse = on.attend(NAME, q, k, v)
    assert kernels_of(plan_of(q, k, v))[0].endswith(kernel.removesuffix("_few"))
    last = q[:, :, 128:]
    few, few_lse = on.attend(NAME, last, k, v)
    assert kernels_of(plan_of(last, k, v))[0].endswith(kernel)
    assert torch.equal(few, many[:, :, 128:])
    assert torch.equal(few_lse, many_lse[:, :, 128:])


# --- other ways in ---


def test_the_operator_takes_num_splits() -> None:
    q, k, v = qkv("d64_few", 4, 300)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(
            q, k, v, num_splits=2, implementation=NAME, causal=True, return_lse=True
        )

    eager = call(q, k, v)
    assert torch.equal(eager[0], on.attend(NAME, q, k, v, num_splits=2, causal=True)[0])
    compiled = torch.compile(call, backend="eager", fullgraph=True)(q, k, v)
    for mine, other in zip(compiled, eager, strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(Exception, match="num_splits is 0"):
        torch.compile(
            lambda q: archflash.attention(q, k, v, num_splits=0), backend="eager", fullgraph=True
        )(q)
