"""approximate="int8_qk": every feature in pairs, lengths, head dims, rows that are not finite, and
how far the result is from that of exact kernels.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from gpu_cases import (
    DEVICE,
    Guarded,
    all_pairs,
    dense_strides,
    int32,
    kernels,
    rand,
    same_bits,
    transposed,
)
from torch import Tensor

import archflash
from archflash import reference
from archflash.cli.replay import make_inputs, run_plan

pytestmark = pytest.mark.gpu

KERNELS = [
    name
    for name in kernels()
    if "int8_qk" in next(i.features for i in archflash.implementations() if i.name == name)
]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)

FACTORS: dict[str, list[Any]] = {
    "dtype": ["float16", "bfloat16"],
    "layout": ["bhnd", "bnhd"],
    "lengths": [(113, 203), (203, 113), (9, 799), (64, 64)],
    "dims": [(64, 64), (128, 128), (24, 40), (72, 72), (192, 128), (256, 256)],
    "heads": [(2, 2), (6, 2), (4, 1)],
    "causal": [False, True],
    "window": [None, (17, None), (None, 5), (16, 9), (0, 0)],
    "q_offset": [None, 0, -5, 90, "tensor"],
    "sinks": [None, "float32", "bfloat16"],
    "scale": [None, 0.05],
    "transposed": [False, True],
    "out_pad": [0, 24],
}  # fmt: skip
ROWS = all_pairs(FACTORS)


def check_call(kernel: str, q: Tensor, k: Tensor, v: Tensor, out_pad: int, **call: Any) -> None:
    shape = (*q.shape[:-1], v.shape[-1])
    guarded = Guarded(shape, dense_strides(shape, out_pad), q.dtype)
    forced: dict[str, Any] = {"implementation": kernel, "approximate": "int8_qk"}
    out, lse = archflash.attention(q, k, v, out=guarded.view, return_lse=True, **forced, **call)
    guarded.assert_untouched_outside()
    again = archflash.attention(q, k, v, **forced, **call)
    assert same_bits(again, out), "not the same bits the second time"
    of_out, of_lse = reference.check_int8_qk(out, lse, q, k, v, **call)
    assert of_out.ok, of_out
    assert of_lse is not None
    assert of_lse.ok, f"log-sum-exp {of_lse}"


@every_kernel
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_features_meet_the_error_rule_in_pairs(kernel: str, row: dict[str, Any]) -> None:
    (nq, nk), (d, dv), (hq, hkv) = row["lengths"], row["dims"], row["heads"]
    tensors = []
    for number, (heads, rows, dim) in enumerate(((hq, nq, d), (hkv, nk, d), (hkv, nk, dv))):
        x = rand(2, heads, rows, dim, seed=number)
        if number == 1:
            x = x + 2 * rand(2, heads, 1, dim, seed=7)
        x = x.to(getattr(torch, row["dtype"]))
        if row["layout"] == "bnhd":
            x = x.transpose(1, 2).contiguous()
        tensors.append(transposed(x) if row["transposed"] else x)
    call = {name: row[name] for name in ("causal", "window", "q_offset", "scale", "layout")}
    if row["q_offset"] == "tensor":
        call["q_offset"] = int32(7, -13)
    if row["sinks"]:
        call["sinks"] = rand(hq, seed=9, dtype=row["sinks"])
    check_call(kernel, *tensors, row["out_pad"], **call)


@every_kernel
@pytest.mark.parametrize("nq", [1, 63, 65, 300])
@pytest.mark.parametrize("nk", [0, 1, 31, 64, 511, 1537])
def test_lengths_of_any_parity_meet_the_error_rule(kernel: str, nq: int, nk: int) -> None:
    for d, causal in itertools.product((64, 128), (False, True)):
        q, k, v = (
            rand(2, 2, rows, d, seed=i, dtype="bfloat16") for i, rows in enumerate((nq, nk, nk))
        )
        check_call(kernel, q, k, v, 0, causal=causal)


@every_kernel
@pytest.mark.parametrize("d", range(8, 257, 8))
def test_head_dims_meet_the_error_rule(kernel: str, d: int) -> None:
    q, k, v = (
        rand(1, 2, rows, dim, seed=i, dtype="float16")
        for i, (rows, dim) in enumerate(((113, d), (239, d), (239, 264 - d)))
    )
    check_call(kernel, q, k, v, 0, causal=True)


@every_kernel
def test_rows_that_are_not_finite_spoil_what_sees_them_alone(kernel: str) -> None:
    q, k, v = (rand(1, 2, 300, 64, seed=i, dtype="float16") for i in range(3))
    q[0, 0, 7, 3] = math.nan
    k[0, :, 200, 5] = math.inf
    out = archflash.attention(
        q, k, v, causal=True, implementation=kernel, approximate="int8_qk"
    )  # fmt: skip
    spoiled = torch.zeros(2, 300, dtype=torch.bool, device=DEVICE)
    spoiled[0, 7] = True
    spoiled[:, 200:] = True
    assert torch.equal(out[0].isnan().all(-1), spoiled)
    assert torch.equal(out[0].isnan().any(-1), spoiled)


@every_kernel
@pytest.mark.parametrize(("outliers", "limit"), [(False, 0.02), (True, 0.16)])
def test_error_against_exact_attention(kernel: str, outliers: bool, limit: float) -> None:
    """Root mean square errors, relative; PyTorch's own at fp16 are about 0.0005."""
    channels = torch.ones(128, device=DEVICE)
    if outliers:
        channels[5::40] = 20.0
    q, k, v = (rand(2, 4, 700, 128, seed=i) for i in range(3))
    q, k, v = ((q / channels.sqrt()).half(), (k * channels).half(), v.half())
    out = archflash.attention(q, k, v, implementation=kernel, approximate="int8_qk")
    expected = reference.attention(q, k, v, return_lse=False)
    error = (out.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 0.001 < error < limit


@every_kernel
@pytest.mark.parametrize("device", ["RTX 4090", "H200"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_a_plan_for_another_gpu_is_right_here(
    kernel: str, device: str, dims: tuple[int, int]
) -> None:
    q, k, v = (
        torch.empty(2, heads, rows, dim, dtype=torch.float16, device="meta")
        for heads, rows, dim in ((4, 333, dims[0]), (2, 777, dims[0]), (2, 777, dims[1]))
    )
    call: dict[str, Any] = {"causal": True}
    plan = archflash.explain(
        q, k, v, device=device, implementation=kernel, approximate="int8_qk", **call
    ).plan
    assert plan is not None
    inputs = make_inputs(plan.problem.to_dict(), torch.device("cuda"))
    out = run_plan(plan, inputs)
    report, _ = reference.check_int8_qk(out, None, inputs.q, inputs.k, inputs.v, **call)
    assert report.ok, report
