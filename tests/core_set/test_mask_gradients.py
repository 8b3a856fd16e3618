"""Gradients of calls with masks as data and dropout, and of an added attn_mask."""

from __future__ import annotations

import json
import math
from importlib.resources import files
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _gradients, _options

from .executors import executor
from .gradients import (
    differentiate,
    differentiate_and_check,
    dtypes_with_gradients,
    forward,
    inputs,
    kernels_with_gradients,
)
from .pairs import all_pairs, row_id
from .test_mask_data import attn_mask_of, ranges_of

on = executor()
KERNELS = [
    (kernel, dtype)
    for kernel in kernels_with_gradients(on)
    for dtype in dtypes_with_gradients(on, kernel)
]
each_kernel = pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
DIMS = [(64, 64), (40, 72), (128, 128), (192, 128)]

FACTORS: dict[str, list[Any]] = {
    "attn_mask": [None, "bool", "own", "float32", "odd"],
    "ranges": [None, "one", "per-head"],
    "blocks": [None, "table"],
    "alibi": [False, True],
    "dropout": [None, 0.2],
    "dims": DIMS,
    "lengths": on.pick(simulator=[(70, 101), (40, 140)], gpu=[(113, 203), (300, 290)]),
    "position": ["none", "causal", "window"],
    "more": [None, "softcap", "sinks"],
    "heads": [(2, 2), (2, 1)],
}
BATCH = on.pick(simulator=1, gpu=2)


def options_of_row(row: dict[str, Any], dtype: str) -> dict[str, Any]:
    (nq, nk), (heads, _) = row["lengths"], row["heads"]
    call: dict[str, Any] = {"none": {}, "causal": {"causal": True}, "window": {"window": (50, 9)}}[
        row["position"]
    ]
    call = dict(call)
    if row["attn_mask"]:
        call["attn_mask"] = attn_mask_of(row["attn_mask"], dtype, BATCH, heads, nq, nk)
        call["mask_gradient"] = call["attn_mask"].is_floating_point()
    if row["ranges"]:
        call["key_ranges"] = ranges_of(row["ranges"], BATCH, heads, nq, nk)
    if row["blocks"]:
        shape = (1, heads, -(-nq // 64), -(-nk // 64))
        call["block_mask"] = on.rand(*shape, seed=7) > -0.3
    if row["alibi"]:
        call["alibi_slopes"] = on.rand(heads, seed=6).abs() / 8
    if row["dropout"]:
        call |= {"dropout_p": row["dropout"], "rng_state": state()}
    if row["more"] == "softcap":
        call["softcap"] = 3.0
    if row["more"] == "sinks":
        call["sinks"] = on.rand(heads, seed=9)
    return call


def state(seed: int = 12345678901234567, offset: int = (5 << 32) + 77) -> Tensor:
    return on.tensor([seed, offset], torch.int64)


ROWS = all_pairs(FACTORS)
# The simulator runs each row with one of the kernels.
CASES = [
    (kernel, dtype, row)
    for number, row in enumerate(ROWS)
    for place, (kernel, dtype) in enumerate(KERNELS)
    if on.name == "gpu" or number % len(KERNELS) == place
]


@pytest.mark.parametrize(
    ("kernel", "dtype", "row"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}-{row_id(case[2])}") for case in CASES],
)
def test_gradients_with_masks_and_dropout_agree_with_float64(
    kernel: str, dtype: str, row: dict[str, Any]
) -> None:
    tensors = inputs(on, *row["lengths"], *row["dims"], dtype, batch=BATCH, heads=row["heads"])
    number = len(row_id(row))
    differentiate_and_check(
        on, kernel, *tensors, schedules=[number % 4],
        deterministic=number % 2 == 0, **options_of_row(row, dtype),
    )  # fmt: skip


@each_kernel
def test_the_calls_above_run_every_kernel_with_masks(kernel: str, dtype: str) -> None:
    planned: set[str] = set()
    for dims in DIMS:
        dout, q, k, v = inputs(on, 4, 4, *dims, dtype)
        call = _options.complete({"alibi_slopes": on.tensor([0.5, 0.5])})
        request = _gradients.Request(dout, q, k, v, *forward(q, k, v, {}), None, call)
        plan = _gradients.decide(request, _gradients.Gradients.like(request), None, kernel).plan
        assert plan is not None
        planned |= {x for x in plan.kernels if x.endswith("_masked")}
    word = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
    built = files("archflash") / "_kernels" / kernel / f"bwd_masked_{word}.json"
    for entries in json.loads(built.read_text()).values():
        assert set(entries) == planned


@each_kernel
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_gradient_of_a_mask_is_summed_over_what_it_is_broadcast_along(
    kernel: str, dtype: str, deterministic: bool
) -> None:
    tensors = inputs(on, 40, 70, 64, 64, dtype, batch=2)
    # Not along the keys: a number that is added to all scores of a row changes nothing.
    for shape in ((70,), (2, 1, 1, 70), (1, 2, 40, 70)):
        mask = on.rand(*shape, seed=4)
        differentiate_and_check(
            on, kernel, *tensors, attn_mask=mask, mask_gradient=True, schedules=(0, 1),
            deterministic=deterministic,
        )  # fmt: skip


@each_kernel
def test_packed_sequences_with_dropout_and_alibi(kernel: str, dtype: str) -> None:
    """The random bits are those of the row within its sequence."""
    lengths_q, lengths_k = (30, 0, 21), (60, 7, 40)
    tensors = [
        on.rand(sum(of), heads, 64, seed=seed, dtype=dtype)
        for seed, (of, heads) in enumerate(((lengths_q, 2),) * 2 + ((lengths_k, 1),) * 2)
    ]
    differentiate_and_check(
        on, kernel, *tensors, dropout_p=0.3, rng_state=state(), causal=True, schedules=[1],
        alibi_slopes=on.rand(3, 2, seed=2).abs(),
        cu_seqlens_q=on.cu_seqlens(lengths_q), cu_seqlens_k=on.cu_seqlens(lengths_k),
    )  # fmt: skip


@each_kernel
def test_rows_that_see_nothing_and_rows_of_the_lowest_number(kernel: str, dtype: str) -> None:
    mask = torch.zeros(4, 70, device=on.device)
    mask[0] = -math.inf
    mask[1] = torch.finfo(torch.float32).min
    tensors = inputs(on, 4, 70, 64, 64, dtype)
    found = differentiate(on, kernel, *tensors, attn_mask=mask, mask_gradient=True, schedules=[0])
    assert not found.dq[:, :, 0].any()
    assert found.dmask is not None
    assert not found.dmask[0].any()
    assert all(bool(x.isfinite().all()) for x in (found.dq, found.dk, found.dv, found.dmask))


@pytest.mark.skipif(on.name == "gpu", reason="the simulator counts instructions")
@each_kernel
@pytest.mark.parametrize("kind", ["ranges", "blocks"])
def test_blocks_that_no_query_sees_are_not_read(kernel: str, dtype: str, kind: str) -> None:
    from archflash.sim import _attention as simulator

    dout, q, k, v = inputs(on, 512, 64, 64, 64, dtype, heads=(1, 1))
    ranges = torch.zeros(1, 1, 512, 1, 2, dtype=torch.int32)
    ranges[:, :, 130:140, :, 1] = 64
    blocks = torch.zeros(1, 1, 8, 1, dtype=torch.bool)
    blocks[:, :, 2] = True
    hidden = {"key_ranges": ranges} if kind == "ranges" else {"block_mask": blocks}
    copied = []
    for call in (hidden, {"alibi_slopes": torch.zeros(1)}):
        options = _options.complete(call)
        request = _gradients.Request(dout, q, k, v, *forward(q, k, v, call), None, options)
        into = _gradients.Gradients.like(request)
        plan = _gradients.decide(request, into, None, kernel).plan
        assert plan is not None
        reports = simulator.simulate(
            plan, _gradients.operands(request, into, plan), simulator.Settings()
        )
        copied.append(sum(x.opcodes.get("cp.async.cg.shared.global", 0) for x in reports))
    assert copied[0] * 4 < copied[1]


@each_kernel
@pytest.mark.filterwarnings("ignore:archflash. tensors are on the CPU")
def test_autograd_differentiates_a_bias_in_its_own_dtype(kernel: str, dtype: str) -> None:
    q, k, v = on.qkv(6, 9, 32, dtype=dtype, heads=(2, 1))
    bias = on.rand(2, 6, 9, seed=3, dtype=dtype).requires_grad_()
    out = archflash.attention(q, k, v, attn_mask=bias, implementation=kernel)
    out.sum().backward()
    exact = archflash.reference.attention_backward(
        torch.ones_like(out), q, k, v, attn_mask=bias.detach()
    )
    rounded = archflash.reference.baseline_backward(
        torch.ones_like(out), q, k, v, attn_mask=bias.detach()
    )
    assert bias.grad is not None
    assert bias.grad.dtype == bias.dtype
    assert exact.dmask is not None
    assert rounded.dmask is not None
    report = archflash.reference.check(bias.grad, exact.dmask, rounded.dmask.double())
    assert report.ok, report


@each_kernel
def test_the_gradient_of_slopes_is_left_to_pytorch_with_a_reason(kernel: str, dtype: str) -> None:
    q, k, v = on.qkv(6, 9, 32, dtype=dtype)
    slopes = on.rand(2, seed=1).requires_grad_()
    with pytest.raises(archflash.ForcedImplementationError, match="gradient of alibi_slopes"):
        archflash.attention(q, k, v, alibi_slopes=slopes, implementation=kernel)
    archflash.attention(q, k, v, alibi_slopes=slopes, implementation="torch").sum().backward()
    assert slopes.grad is not None
