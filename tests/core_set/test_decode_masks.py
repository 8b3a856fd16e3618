"""attn_mask in calls of few query rows by the decoding kernels of ampere, whose warps load their
elements of the mask a group of keys ahead.
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
pytestmark = pytest.mark.skipif(NAME not in on.kernels(), reason=f"{NAME} has no code for this GPU")

# The kind of mask and its heads, (rows, keys, d, dv), the heads of q and k, the other options, and
# the tile.
CALLS: dict[str, tuple[str, int, tuple[int, ...], tuple[int, int], dict[str, Any], int]] = {
    "bool": ("bool", 2, (1, 300, 64, 64), (2, 2), {}, 64),
    "padding": ("keys", 1, (1, 333, 128, 128), (4, 1), {}, 128),
    "own": ("own", 4, (4, 200, 64, 56), (4, 1), {"causal": True}, 64),
    "own-split": ("own", 1, (2, 260, 128, 128), (8, 1), {"num_splits": 2}, 128),
    "float32": ("float32", 3, (5, 190, 120, 128), (3, 3), {"sinks": True}, 128),
    "float32-split": ("float32", 1, (1, 140, 256, 200), (2, 1), {"num_splits": 2}, 256),
    "odd": ("odd", 1, (16, 150, 64, 64), (1, 1), {"window": (90, 5)}, 64),
    "bool-wide": ("bool", 6, (2, 171, 256, 256), (6, 1), {"softcap": 3.0}, 256),
    "unaligned": ("own", 1, (3, 137, 40, 72), (2, 2), {"scale": -0.2}, 128),
}


def tile_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any) -> str:
    plan = archflash.explain(q, k, v, implementation=NAME, device="A100", **call).plan
    assert plan is not None
    assert plan.tile is not None
    return plan.tile.name


@pytest.mark.parametrize("name", CALLS)
def test_few_rows_with_each_kind_of_mask_agree_with_float64(name: str) -> None:
    number = list(CALLS).index(name)
    kind, of_mask, (nq, nk, d, dv), heads, options, tile = CALLS[name]
    dtype = ("float16", "bfloat16")[number % 2]
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = on.rand(heads[0], seed=9)
    batch = 1 if kind == "odd" else 2
    q, k, v = on.qkv(nq, nk, d, dv, dtype=dtype, batch=batch, heads=heads)
    options["attn_mask"] = attn_mask_of(kind, dtype, batch, of_mask, nq, nk)
    assert tile_of(q, k, v, **options) == f"d{tile}_decode_masked"
    on.attend_and_check(NAME, q, k, v, schedules=[number % 4], **options)


def test_rows_without_keys_and_rows_of_the_lowest_number() -> None:
    """Their log-sum-exps, too, and those of rows that warps share."""
    mask = torch.zeros(3, 150, device=on.device)
    mask[0] = -math.inf
    mask[1] = torch.finfo(torch.float32).min
    q, k, v = on.qkv(3, 150, dtype="bfloat16")
    out, lse = on.attend(NAME, q, k, v, attn_mask=mask)
    assert not out[:, :, 0].any()
    assert bool((lse[:, :, 0] == -math.inf).all())
    torch.testing.assert_close(out[:, :, 1].float(), v.float().mean(2), atol=1e-2, rtol=1e-2)
    assert bool((lse[:, :, 1] < -2e38).all())
    plain, _ = on.attend(NAME, q[:, :, 2:], k, v)
    torch.testing.assert_close(out[:, :, 2:], plain, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_keys_that_are_not_finite_and_that_no_row_sees_do_not_matter(kind: str) -> None:
    q, k, v = on.qkv(2, 170, dtype="bfloat16")
    mask = torch.ones(1, 1, 1, 170, dtype=torch.bool, device=on.device)
    mask[..., 40:90:3] = False
    mask[..., 96:128] = False  # all keys of a warp
    if kind != "bool":
        mask = torch.where(mask, 0.25, -math.inf)
    right, _ = on.attend(NAME, q, k, v, attn_mask=mask)
    for keys in (slice(40, 90, 3), slice(96, 128)):
        k[:, :, keys] = v[:, :, keys] = math.nan
    out, _ = on.attend(NAME, q, k, v, attn_mask=mask)
    assert torch.equal(out, right)
