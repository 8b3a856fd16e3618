"""ampere's kernels for calls in which every query sees every key, and those in which two warps
share out the keys of the same rows. Plans are made for a GPU with one SM, which small calls fill,
or with few.
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

NAME = "ampere"
pytestmark = pytest.mark.skipif(NAME not in on.kernels(), reason=f"{NAME} has no code for this GPU")

# Kernels: (d, dv), keys of a step. A call has two row tiles, the last of which leaves warps without
# rows, and as many keys as END says behind two whole steps: none, a last step that is computed 16
# keys at a time, and one that is computed at once.
KERNELS = {
    "d32_dense": ((32, 24), 64),
    "d32_dense_medium": ((24, 32), 128),
    "d32_dense_few": ((32, 24), 128),
    "d64_dense_short": ((64, 64), 32),
    "d64_dense": ((64, 40), 128),
    "d64_dense_few": ((48, 64), 128),
    "d80_dense": ((72, 80), 64),
    "d80_dense_few": ((80, 72), 64),
    "d96_dense": ((96, 88), 64),
    "d96_dense_few": ((88, 96), 64),
    "d128_dense": ((128, 104), 64),
    "d128_dense_few": ((112, 128), 64),
    "d160_dense": ((160, 136), 64),
    "d64_dense_small": ((64, 48), 128),
    "d80_dense_small": ((80, 72), 64),
    "d96_dense_small": ((88, 96), 64),
    "d128_dense_small": ((128, 112), 32),
    "d128_dense_medium": ((112, 128), 64),
    "d256_dense_medium": ((216, 256), 64),
}
# What a CTA may have of shared memory on the GPUs that take these kernels.
KILOBYTES = {
    "d64_dense_small": 99, "d80_dense_small": 99, "d96_dense_small": 99, "d128_dense_small": 99,
    "d128_dense_medium": 163, "d256_dense_medium": 163,
}  # fmt: skip
END = {"none": 0.0, "one key": 0.01, "half a step": 0.5, "more": 0.75}


def plan_of(
    q: Tensor, k: Tensor, v: Tensor, sms: int = 1, kilobytes: int = 227, **call: Any
) -> native.LaunchPlan:
    """kilobytes: of shared memory, as another GPU has."""
    shared = {"shared_per_block": kilobytes * 1024, "shared_per_sm": (kilobytes + 1) * 1024}
    facts = {"sm_count": sms} | shared
    return plan_with(facts, q, k, v, device="H200", implementation=NAME, **call)


def name_of(plan: native.LaunchPlan) -> str:
    assert plan.tile is not None
    return plan.tile.name


@pytest.mark.parametrize("end", END)
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_number_of_keys_agrees_with_float64(kernel: str, end: str) -> None:
    (d, dv), step = KERNELS[kernel]
    dtype = ("float16", "bfloat16")[list(END).index(end) % 2]
    few = kernel.endswith("_few")  # at most as many tiles of 128 rows as SMs, and more keys
    keys = (4 if few else 2) * step + max(round(END[end] * step), end != "none")
    batch = 4 if kernel == "d32_dense" else 1
    # So many tiles of 128 rows that those of 64 would come in more than three rounds, or so many
    # that no CTAs share out keys.
    rows, heads = (250 if few else 161), (2, 1)
    if kernel == "d32_dense_medium":
        rows, heads = 200, (3, 3)
    elif kernel == "d64_dense":
        heads = (4, 2)
    elif kernel == "d256_dense_medium":  # as many rows as two of its tiles have
        rows = 250
    q, k, v = on.qkv(rows, keys, d, dv, dtype=dtype, batch=batch, heads=heads)
    kilobytes = KILOBYTES.get(kernel, 227)
    plan = plan_of(q, k, v, sms=4 if few else 1, kilobytes=kilobytes)
    if kernel in ("d64_dense", "d64_dense_few") and keys <= 224:  # both kernels serve few keys
        kernel = "d64_dense_short"
    assert name_of(plan) == kernel
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=[list(END).index(end)])


@pytest.mark.parametrize("kernel", ["d64_dense", "d128_dense"])
def test_scores_become_huge_from_block_to_block(kernel: str) -> None:
    """Blocks are visited from the last one on. Scores beyond 2^24 are rounded as their base is."""
    (d, _), step = KERNELS[kernel]
    q, k, v = on.qkv(150, 3 * step + 20, d, dtype="bfloat16", heads=(4, 4))
    q[:, :, 70, 0] = 1e12  # one row of a warp; the others are as always
    k[:, :, 2 * step :, 0] = 0
    k[:, :, :step, 0] *= 1.5  # the base of the row rises again in the last block
    plan = plan_of(q, k, v)
    assert name_of(plan) == kernel
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=[3])


def test_rows_may_lie_anywhere() -> None:
    """Heads of k and v behind rows, with other numbers in between."""
    wide = on.rand(2, 140, 2, 3, 72, seed=1, dtype="bfloat16")
    q, k, v = (wide[:, :, :, i, :].transpose(1, 2) for i in range(3))
    q = q.contiguous()  # as the output
    plan = plan_of(q, k, v)
    assert name_of(plan) == "d80_dense"
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=[1])


@pytest.mark.parametrize("causal", [False, True])
def test_two_warps_share_out_the_keys_of_32_rows(causal: bool) -> None:
    dtype = ("float16", "bfloat16")[causal]
    q, k, v = on.qkv(101, 2085, 128, 72, dtype=dtype, heads=(1, 1))
    call: dict[str, Any] = {"causal": causal, "sinks": on.tensor([0.5])}
    plan = plan_of(q, k, v, **call)
    assert name_of(plan) == "d128_groups"
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=[2], **call)


@pytest.mark.parametrize(
    ("rows", "keys", "heads", "call"),
    [
        (131, 300, (2, 1), {"sinks": [0.5, 1.0]}),  # the last tile has three rows
        (200, 270, (1, 1), {"softcap": 3.0}),
        (160, 258, (2, 2), {"q_offset": [60]}),
        (330, 257, (1, 1), {"out_dtype": torch.float32}),  # rows that see no key
    ],
)
def test_two_warps_share_out_the_keys_of_16_rows(
    rows: int, keys: int, heads: tuple[int, int], call: dict[str, Any]
) -> None:
    """A few causal tiles, which take unequal time."""
    q, k, v = on.qkv(rows, keys, 104, 128, dtype="bfloat16", heads=heads)
    call = {"causal": True} | on.with_tensors(call)
    plan = plan_of(q, k, v, sms=3, **call)
    assert name_of(plan) == "d128_groups_few"
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=[1, 4], **call)


@pytest.mark.parametrize(
    "call",
    [
        {"causal": True},
        {"window": (300, 300)},
        {"softcap": 5.0},
        {"scale": -0.5},
        {"sinks": [0.5, 1.0]},
        {"num_splits": 2},
        {"out_dtype": torch.float32},
        {"batch_invariant": True},
    ],
    ids=lambda call: next(iter(call)),
)
def test_calls_that_ask_for_more_have_other_kernels(call: dict[str, Any]) -> None:
    q, k, v = on.qkv(300, 250, 64, dtype="float16", heads=(2, 2))
    assert "dense" in name_of(plan_of(q, k, v))
    assert "dense" not in name_of(plan_of(q, k, v, **on.with_tensors(call)))


def test_a_grid_has_no_more_heads_and_sequences_than_cuda_allows() -> None:
    def chosen(batch: int, heads: int) -> str:
        q = torch.empty(batch, heads, 130, 64, dtype=torch.float16, device="meta")
        return name_of(plan_of(q, q, q, sms=132))

    assert chosen(65535, 1) == chosen(1, 65535) == "d64_dense_short"
    assert "dense" not in chosen(65536, 1)
    assert "dense" not in chosen(1, 65536)
