"""hopper's packed sequences of unequal lengths: a launch before lists their row tiles, those of the
sequence with the most keys first, and sequences of few rows may have a kernel of their own. Plans
are made for a GPU with few SMs, so that there are several rounds of tiles.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import _archflash as native

from ..replanned import plan_with
from .executors import executor

on = executor()

NAME = "hopper"
pytestmark = pytest.mark.skipif(NAME not in on.kernels(), reason=f"{NAME} has no code for this GPU")

Lengths = tuple[int, ...]


def packed(
    q_lengths: Lengths,
    k_lengths: Lengths,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: str,
) -> tuple[list[Tensor], dict[str, Any]]:
    """Packed sequences with rows of no sequence before the first and behind the last one, which are
    NaN.
    """
    q = on.rand(sum(q_lengths) + 7, heads[0], dims[0], seed=1, dtype=dtype)
    k = on.rand(sum(k_lengths) + 7, heads[1], dims[0], seed=2, dtype=dtype)
    v = on.rand(sum(k_lengths) + 7, heads[1], dims[1], seed=3, dtype=dtype)
    for x in (k, v):
        x[:2], x[-5:] = torch.nan, torch.nan
    call = {
        "cu_seqlens_q": on.cu_seqlens(q_lengths) + 4, "cu_seqlens_k": on.cu_seqlens(k_lengths) + 2,
        "max_seqlen_q": max(q_lengths), "max_seqlen_k": max(k_lengths),
    }  # fmt: skip
    return [q, k, v], call


def planned(sms: int, tensors: list[Tensor], **call: Any) -> tuple[native.LaunchPlan, list[str]]:
    """The plan of a GPU with so many SMs, and its kernels without "hopper_" and the dtype."""
    plan = plan_with({"sm_count": sms}, *tensors, device="H200", implementation=NAME, **call)
    names = [launch["kernel"] for launch in plan.to_dict()["launches"]]
    return plan, [name.replace("_bf16", "").replace("_f16", "")[7:] for name in names]


def check(plan: native.LaunchPlan, tensors: list[Tensor], seeds: int, **call: Any) -> None:
    out, _ = on.attend_and_check(NAME, *tensors, plan=plan, schedules=range(seeds), **call)
    assert torch.equal(out[:4], torch.zeros_like(out[:4]))
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))


@pytest.mark.parametrize(
    ("dims", "dtype", "call"),
    [
        ((64, 64), "bfloat16", {"causal": True}),
        ((96, 96), "float16", {"window": (300, 20)}),
        ((128, 128), "bfloat16", {}),
        ((192, 128), "bfloat16", {}),
        ((256, 256), "float16", {"causal": True}),
    ],
    ids=str,
)
def test_listed_tiles_agree_with_float64(
    dims: tuple[int, int], dtype: str, call: dict[str, Any]
) -> None:
    q_lengths, k_lengths = (150, 390, 0, 200, 130, 9), (70, 580, 64, 0, 200, 150)
    tensors, ends = packed(q_lengths, k_lengths, (2, 1), dims, dtype)
    call = call | ends
    plan, names = planned(1, tensors, **call)
    assert names[0] == "order_packed"
    check(plan, tensors, 2, **call)


@pytest.mark.parametrize(
    ("d", "dtype", "heads", "call"),
    [
        (96, "bfloat16", (4, 2), {}),
        (72, "float16", (2, 2), {"causal": True}),
        (128, "bfloat16", (2, 1), {"softcap": 3.0}),
    ],
    ids=str,
)
def test_sequences_of_few_rows_have_a_kernel_of_their_own(
    d: int, dtype: str, heads: tuple[int, int], call: dict[str, Any]
) -> None:
    few = (5, 1, 64, 0, 17, 30, 9, 2, 40, 3, 11, 8)
    lengths = (*few[:7], 640, *few[7:])
    tensors, ends = packed(lengths, (*lengths[:4], 90, *lengths[5:]), heads, (d, d), dtype)
    call = call | ends
    plan, names = planned(1, tensors, **call)
    order, many, own = names
    assert order == "order_packed"
    assert not many.endswith("_short")
    assert own.endswith("_short")
    check(plan, tensors, 2, **call)
