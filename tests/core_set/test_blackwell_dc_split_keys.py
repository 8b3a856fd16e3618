"""blackwell_dc's split keys beyond test_few_rows.py: huge scores, what is not finite, and the same
bits however the keys are split.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash

from ..replanned import replanned
from .checks import same_bits
from .executors import executor
from .few_rows import FEW_ROWS, kernels_of, plan_of

on = executor()

NAME = "blackwell_dc"
KERNELS = FEW_ROWS[NAME].kernels

pytestmark = pytest.mark.skipif(
    NAME not in on.kernels("num_splits"), reason=f"{NAME} has no code for this GPU"
)
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def qkv(
    kernel: str, nq: int, nk: int, dtype: str = "bfloat16", heads: tuple[int, int] = (2, 2)
) -> tuple[Tensor, Tensor, Tensor]:
    return on.qkv(nq, nk, *KERNELS[kernel][0], dtype=dtype, heads=heads)


# --- what is computed ---


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
    assert kernels_of(plan_of(NAME, q, k, v, num_splits=2))[0].endswith("d96_few")
    on.attend_and_check(NAME, q, k, v, num_splits=2)


def test_rows_of_more_than_one_tile_are_split_where_that_is_asked_for() -> None:
    q, k, v = qkv("d128_few", 300, 310)
    assert kernels_of(plan_of(NAME, q, k, v, num_splits=2, causal=True))[0].endswith("d128_few")
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
    plan = replanned(plan_of(NAME, q, k, v, **call), sm_count=1)
    out, lse = on.attend_and_check(NAME, q, k, v, schedules=[2], **call)
    in_turn, in_turn_lse = on.attend(NAME, q, k, v, plan=plan, schedules=range(4), **call)
    assert same_bits(in_turn, out)
    assert same_bits(in_turn_lse, lse)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "d256"])
def test_few_rows_get_the_bits_that_they_get_among_many(kernel: str) -> None:
    q, k, v = qkv(kernel, 256, 290, heads=(1, 1))
    many, many_lse = on.attend(NAME, q, k, v)
    assert kernels_of(plan_of(NAME, q, k, v))[0].endswith(kernel.removesuffix("_few"))
    last = q[:, :, 128:]
    few, few_lse = on.attend(NAME, last, k, v)
    assert kernels_of(plan_of(NAME, last, k, v))[0].endswith(kernel)
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
