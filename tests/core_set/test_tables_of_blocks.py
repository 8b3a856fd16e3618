"""The kernels of hopper and blackwell_consumer for a table of blocks without another mask as data,
and of hopper for one with a mask of keys. hopper has others for calls of few row tiles
(test_mask_data.py), so plans are made for a GPU with few SMs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native

from ..replanned import plan_with
from .executors import executor

on = executor()

NAME = "hopper"
CONSUMER = "blackwell_consumer"
KERNELS = [name for name in (NAME, CONSUMER) if name in on.kernels()]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
of_hopper = pytest.mark.skipif(NAME not in KERNELS, reason=f"{NAME} has no code for this GPU")
every_dim = pytest.mark.parametrize("dim", [64, 128])


def plan_on(
    sms: int, q: Tensor, k: Tensor, v: Tensor, kernel: str = NAME, **call: Any
) -> native.LaunchPlan:
    newer = kernel == CONSUMER and on.name == "simulator"
    device = "RTX 5090" if newer else "H200"
    return plan_with({"sm_count": sms}, q, k, v, device=device, implementation=kernel, **call)


def check(
    dim: int,
    sms: int,
    schedules: range,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: str = NAME,
    **call: Any,
) -> None:
    plan = plan_on(sms, q, k, v, kernel, **call)
    launch = plan.to_dict()["launches"][-1]
    assert launch["kernel"].endswith(f"_d{dim}_table" + "_keys" * ("attn_mask" in call))
    on.attend_and_check(kernel, q, k, v, plan=plan, schedules=schedules, **call)


def table_of(heads: int, nq: int, nk: int, limit: float = -0.2) -> Tensor:
    """Noise, in which one row of blocks sees nothing, one everything, and some blocks are full."""
    rows, keys = -(-nq // 64), -(-nk // 64)
    table = (on.rand(1, heads, rows, keys, seed=7) < limit).to(torch.int8)
    table[:, :, 1] = 0
    table[:, :, rows // 2] = 1
    table[:, :, :, 1] *= 2
    return table


CALLS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": True},
    "window": {"window": (70, 30)},
    "offsets": {"causal": True, "q_offset": (-70, 90)},
    "sinks": {"sinks": True},
}


@each_kernel
@every_dim
@pytest.mark.parametrize("name", CALLS)
def test_a_table_of_blocks_agrees_with_float64(name: str, dim: int, kernel: str) -> None:
    number = list(CALLS).index(name)
    dtype = ("float16", "bfloat16")[number % 2]
    options = dict(CALLS[name])
    batch = 2 if "q_offset" in options else 1
    q, k, v = on.qkv(450, 330, dim - 8, dtype=dtype, batch=batch, heads=(2, 1))
    if "q_offset" in options:
        options["q_offset"] = on.int32(*options["q_offset"])
    if "sinks" in options:
        options["sinks"] = on.rand(2, seed=9)
    table = table_of(1 + number % 2, 450, 330)
    schedule = number % 4
    one = range(schedule, schedule + 1)
    check(dim, 3, one, q, k, v, kernel, block_mask=table, **options)


@each_kernel
@every_dim
def test_a_cta_goes_from_tile_to_tile_in_every_schedule(dim: int, kernel: str) -> None:
    q, k, v = on.qkv(400, 460, dim, dtype="bfloat16", heads=(2, 2))
    check(dim, 1, range(4), q, k, v, kernel, block_mask=table_of(2, 400, 460))


@each_kernel
def test_more_blocks_than_the_producer_looks_at_at_once(kernel: str) -> None:
    q, k, v = on.qkv(200, 2500, 64, dtype="float16", heads=(1, 1))
    check(64, 1, range(1), q, k, v, kernel, block_mask=table_of(1, 200, 2500, limit=-1.2))


@each_kernel
@pytest.mark.parametrize("state", [0, 1])
def test_tiles_that_see_nothing_or_everything(state: int, kernel: str) -> None:
    q, k, v = on.qkv(400, 200, 128, dtype="bfloat16", heads=(2, 1))
    table = torch.full((1, 1, 7, 4), state, dtype=torch.int8, device=on.device)
    check(128, 1, range(1), q, k, v, kernel, block_mask=table)
    mixed = table.clone()
    mixed[:, :, :3] = 1 - state
    check(128, 1, range(1), q, k, v, kernel, block_mask=mixed)


@of_hopper
@pytest.mark.parametrize(("dim", "batch", "heads"), [(64, 2, 1), (128, 1, 2)])
def test_a_mask_of_keys_beside_a_table(dim: int, batch: int, heads: int) -> None:
    q, k, v = on.qkv(330, 270, dim, dtype="bfloat16", batch=batch, heads=(2, 1))
    keys = on.rand(batch, heads, 1, 540, seed=8)[..., ::2] > -0.3
    keys[..., 64:128] = True  # whole blocks of the table
    keys[..., 128:192] = False
    options = {"attn_mask": keys, "causal": heads == 2}
    check(dim, 1, range(1), q, k, v, block_mask=table_of(heads, 330, 270), **options)


@of_hopper
@every_dim
def test_keys_are_not_split_where_streams_fill_the_gpu(dim: int) -> None:
    q, k, v = on.qkv(384, 4096, dim, dtype="bfloat16")
    rows = on.qkv(128, 4096, dim, dtype="bfloat16")[0]
    for tiles, given in ((12, q), (4, rows)):
        table = table_of(1, given.shape[2], 4096)
        launches = plan_on(4, given, k, v, block_mask=table).to_dict()["launches"]
        is_split = "_combine_" in launches[-1]["kernel"]
        assert is_split == (tiles == 4), launches


@of_hopper
def test_which_calls_go_to_them() -> None:
    q, k, v = on.qkv(330, 200, 128, dtype="bfloat16")
    table = table_of(1, 330, 200)

    def kernel(sms: int = 1, **call: Any) -> str:
        launches = plan_on(sms, q, k, v, block_mask=table, **call).to_dict()["launches"]
        return next(row["kernel"] for row in launches if "_fwd_" in row["kernel"])

    assert kernel().endswith("_d128_table")
    assert kernel(causal=True).endswith("_d128_table")
    assert kernel(sms=100).endswith("_d128_masked")  # few tiles
    slopes = torch.ones(2, device=on.device)
    for other in ({"softcap": 2.0}, {"scale": -1.0}, {"alibi_slopes": slopes}):
        assert kernel(**other).endswith("_d128_masked")
    for row, name in ((1, "table_keys"), (330, "masked")):
        mask = torch.ones(1, 2, row, 200, dtype=torch.bool, device=on.device)
        assert kernel(attn_mask=mask).endswith(f"_d128_{name}")
        assert kernel(attn_mask=mask.bfloat16()).endswith("_d128_masked")


@pytest.mark.skipif(CONSUMER not in KERNELS, reason=f"{CONSUMER} has no code for this GPU")
def test_which_tables_blackwell_consumer_refuses() -> None:
    def why_not(d: int = 128, **call: Any) -> str:
        q = torch.empty(1, 2, 300, d, dtype=torch.bfloat16, device="meta")
        table = torch.empty(1, 1, 5, 5, dtype=torch.int8, device="meta")
        try:
            archflash.explain(
                q, q, q, device="RTX 5090", implementation=CONSUMER, block_mask=table, **call
            )
        except archflash.ForcedImplementationError as error:
            return str(error)
        return ""

    assert why_not() == why_not(64, causal=True, softcap=2.0) == ""
    assert "block_mask with head dimensions above 128" in why_not(192)
    assert "block_mask with approximate='nvfp4'" in why_not(approximate="nvfp4")
    assert "num_splits" in why_not(num_splits=3)
    slopes = torch.empty(2, device="meta")
    assert "alibi_slopes" in why_not(alibi_slopes=slopes)
