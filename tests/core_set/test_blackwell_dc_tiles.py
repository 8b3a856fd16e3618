"""One CTA of blackwell_dc, or a pair of them, goes over many tiles of rows, in every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench.switches.plans import in_pairs
from torch import Tensor

import archflash

from ..sim.schedules import SEEDS
from .checks import assert_close
from .executors import executor
from .one_cta import CONFIGS, FP8_CONFIGS, NAME, one_after_another

on = executor()

pytestmark = pytest.mark.skipif(NAME not in on.kernels(), reason=f"{NAME} has no code for this GPU")
every_config = pytest.mark.parametrize("config", CONFIGS)


def check_every_schedule(config: str, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> None:
    plan = one_after_another(config, q, k, v, **call)
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=range(SEEDS), **call)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@every_config
def test_a_cta_goes_from_tile_to_tile(config: str, causal: bool) -> None:
    dims, rows, keys = CONFIGS[config]
    # Three tiles and more of each head, an odd number of blocks, the last ones ragged.
    q, k, v = on.qkv(2 * rows + 70, 4 * keys + 9, *dims, dtype="bfloat16", heads=(2, 1))
    check_every_schedule(config, q, k, v, causal=causal)


@every_config
def test_packed_sequences_with_and_without_keys_follow_each_other(config: str) -> None:
    (d, dv), rows, keys = CONFIGS[config]
    q_lengths = (5, rows, 0, 9, 130, 1, rows + 3)
    k_lengths = (keys + 3, 0, 7, 2 * keys, 1, 0, 3 * keys - 1)
    shapes = ((sum(q_lengths), 2, d), (sum(k_lengths) + 5, 1, d), (sum(k_lengths) + 5, 1, dv))
    q, k, v = (on.rand(*shape, seed=i, dtype="bfloat16") for i, shape in enumerate(shapes))
    k[-5:], v[-5:] = torch.nan, torch.nan  # rows that no sequence has
    ends = {"cu_seqlens_q": on.cu_seqlens(q_lengths), "cu_seqlens_k": on.cu_seqlens(k_lengths)}
    check_every_schedule(config, q, k, v, causal=True, **ends)


@pytest.mark.parametrize("config", FP8_CONFIGS)
def test_packed_sequences_of_fp8_follow_each_other(config: str) -> None:
    (d, dv), rows, keys = FP8_CONFIGS[config]
    q_lengths, k_lengths = (5, rows, 0, 130, 1), (keys + 3, 0, 7, 2 * keys - 1, 1)
    shapes = ((sum(q_lengths), 2, d), (sum(k_lengths) + 5, 1, d), (sum(k_lengths) + 5, 1, dv))
    call: dict[str, Any] = {"causal": True}
    tensors = []
    for seed, (name, shape) in enumerate(zip("qkv", shapes, strict=True)):
        tensors.append((on.rand(*shape, seed=seed) * 60).to(torch.float8_e4m3fn))
        sizes = 0.5 + torch.arange(5 * shape[1], device=on.device) * 3 % 7
        call[f"{name}_descale"] = (sizes / 200).view(5, shape[1])
    for x in tensors[1:]:
        x.view(torch.uint8)[-5:] = 0x7F  # NaN in rows that no sequence has
    ends = {"cu_seqlens_q": on.cu_seqlens(q_lengths), "cu_seqlens_k": on.cu_seqlens(k_lengths)}
    check_every_schedule(config, *tensors, **call, **ends)


# --- pairs of CTAs ---


@pytest.mark.parametrize("nq", [129, 200, 300, 900])
def test_a_pair_whose_rows_end_anywhere_serves_every_feature(nq: int) -> None:
    """The second CTA has no rows, or some; some see no keys; two heads share one of k."""
    q, k, v = on.qkv(nq, 650, 104, 120, dtype="bfloat16", batch=2, heads=(2, 1))
    call = {
        "window": (300, 40),
        "softcap": 3.0,
        "sinks": on.rand(2, seed=3),
        "q_offset": on.int32(-250, 130),
    }
    check_every_schedule("d128_pair", q, k, v, **call)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pairs_share_the_tiles_out(dtype: str) -> None:
    q, k, v = on.qkv(1200, 400, 128, dtype=dtype)
    call: dict[str, Any] = {"causal": True, "num_splits": 1}
    alone = one_after_another("d128", q, k, v, **call)
    many = archflash.explain(
        q, k, v, device="B200", implementation=NAME, return_lse=True, **call
    ).plan
    assert many is not None
    outs = [
        on.attend(NAME, q, k, v, plan=plan, schedules=[2], **call)
        for plan in (alone, in_pairs(alone), in_pairs(many))
    ]
    assert_close(*outs[2], q, k, v, causal=True)
    # Rows of one tile see the same keys in the same order, in whichever kernel.
    for out, lse in outs:
        assert torch.equal(out, outs[0][0])
        assert torch.equal(lse, outs[0][1])


# --- without polynomials ---


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pairs_on_10_3(dtype: str) -> None:
    q, k, v = on.qkv(700, 300, 128, dtype=dtype, heads=(2, 1))
    plan = one_after_another("d128_mufu_pair", q, k, v, causal=True)
    kernel = plan.to_dict()["launches"][0]["kernel"]
    assert kernel.endswith("_d128_mufu_pair")
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=[1], causal=True)
