"""Shares of the keys of few query rows that are a cluster, whose CTAs join what they have found
(mma_sync/decode_join.cuh). GPUs of compute capability 9.0 have such kernels.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import archflash

from .executors import executor
from .test_mask_data import attn_mask_of

on = executor()
NAME = "ampere"
pytestmark = [
    pytest.mark.skipif(NAME not in on.kernels(), reason=f"{NAME} has no code for this GPU"),
    pytest.mark.skipif(
        on.name == "gpu"
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] != 9,
        reason="the kernels are for 9.0",
    ),
]


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHFLASH_SIM_DEVICE", "H200")


# (rows, keys, d, dv), the heads of q and k, shares, the kind of mask, the other options, the tile.
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, int], int, str | None, dict[str, Any], str]] = {
    "two": ((1, 300, 64, 64), (2, 2), 2, None, {}, "d64_decode_joined"),
    "packed": ((2, 330, 128, 128), (4, 1), 3, None, {"causal": True}, "d128_decode_joined"),
    "sinks": ((1, 140, 256, 200), (2, 1), 4, None, {"sinks": True}, "d256_decode_joined"),
    "most": ((3, 520, 104, 128), (1, 1), 8, None, {"window": (90, 5)}, "d128_decode_joined"),
    "bool": ((1, 400, 64, 56), (2, 1), 3, "bool", {}, "d64_decode_joined_masked"),
    "added": ((4, 280, 128, 128), (2, 2), 4, "own", {}, "d128_decode_joined_masked"),
    "float32": ((1, 140, 256, 256), (2, 1), 2, "float32", {}, "d256_decode_joined_masked"),
}


@pytest.mark.parametrize("name", CALLS)
def test_shares_of_a_cluster_agree_with_float64(name: str) -> None:
    number = list(CALLS).index(name)
    (nq, nk, d, dv), heads, shares, mask, options, tile = CALLS[name]
    dtype = ("float16", "bfloat16")[number % 2]
    call = {**options, "num_splits": shares}
    if "sinks" in call:
        call["sinks"] = on.rand(heads[0], seed=9)
    if mask is not None:
        call["attn_mask"] = attn_mask_of(mask, dtype, 1, 1, nq, nk)
    q, k, v = on.qkv(nq, nk, d, dv, dtype=dtype, heads=heads)
    plan = archflash.explain(q, k, v, implementation=NAME, device="H200", **call).plan
    assert plan is not None
    assert plan.tile is not None
    (launch,) = plan.to_dict()["launches"]
    assert (plan.tile.name, plan.tile.splits) == (tile, shares)
    assert launch["cluster"] == [1, 1, shares] == [1, 1, launch["grid"][2]]
    on.attend_and_check(NAME, q, k, v, schedules=[number], **call)


def test_shares_without_keys_and_rows_without_any_count_nothing() -> None:
    q, k, v = on.qkv(2, 520, dtype="bfloat16", heads=(1, 1))
    mask = torch.ones(2, 520, dtype=torch.bool, device=on.device)
    mask[:, 128:384] = False  # all keys of two of the shares
    mask[1] = False
    out, lse = on.attend(NAME, q, k, v, attn_mask=mask, num_splits=4)
    assert not out[:, :, 1].any()
    assert bool((lse[:, :, 1] == -math.inf).all())
    on.attend_and_check(NAME, q[:, :, :1], k, v, attn_mask=mask[:1], num_splits=4)
