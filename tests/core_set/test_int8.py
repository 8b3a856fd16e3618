"""approximate="int8_qk": every feature in pairs, lengths, head dims, what must not matter, and how
far the result is from that of exact kernels.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import reference

from .checks import assert_close, relative_rms_error
from .executors import approximate_factors, executor
from .memory import transposed
from .pairs import all_pairs, row_id

on = executor()

INT8 = {"approximate": "int8_qk"}
every_kernel = pytest.mark.parametrize("kernel", on.kernels("int8_qk"))
RANDOM = [2]  # one of the simulator's schedules: random, with seed 2

ROWS = all_pairs(
    approximate_factors(on, dims=[(64, 64), (128, 128), (24, 40), (72, 72), (192, 128), (256, 256)])
)
if on.name == "simulator":  # it has time for some, and for CALLS
    ROWS = ROWS[::4]


@every_kernel
@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_pairs_of_features_agree_with_float64(kernel: str, row: dict[str, Any]) -> None:
    (nq, nk), (d, dv), (hq, hkv) = row["lengths"], row["dims"], row["heads"]
    tensors = []
    for seed, (heads, rows, dim) in enumerate(((hq, nq, d), (hkv, nk, d), (hkv, nk, dv))):
        x = on.rand(2, heads, rows, dim, seed=seed)
        if seed == 1:
            x = x + 2 * on.rand(2, heads, 1, dim, seed=7)
        x = x.to(getattr(torch, row["dtype"]))
        if row["layout"] == "bnhd":
            x = x.transpose(1, 2).contiguous()
        tensors.append(transposed(x) if row["transposed"] else x)
    call = {name: row[name] for name in ("causal", "window", "q_offset", "scale", "layout")}
    if row["q_offset"] == "tensor":
        call["q_offset"] = on.int32(7, -13)
    if row["sinks"]:
        call["sinks"] = on.rand(hq, seed=9, dtype=row["sinks"])
    on.attend_and_check(kernel, *tensors, out_pad=row["out_pad"], schedules=RANDOM, **INT8, **call)


def inputs(
    nq: int, nk: int, d: int, dv: int, dtype: str, size: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Two heads over one; the keys have a mean that is large beside what tells them apart."""
    q = on.rand(1, 2, nq, d, seed=1) * size
    k = (on.rand(1, 1, nk, d, seed=2) + 3 * on.rand(1, 1, 1, d, seed=4)) * size
    kind = getattr(torch, dtype)
    return q.to(kind), k.to(kind), on.rand(1, 1, nk, dv, seed=3, dtype=dtype)


# nq, nk, d, dv, size of the scores, options
CALLS: dict[str, tuple[int, int, int, int, float, dict[str, Any]]] = {
    "causal": (70, 130, 128, 128, 1, {"causal": True}),
    "d64": (70, 200, 64, 64, 1, {}),
    "d256": (20, 130, 256, 256, 1, {"window": (70, 5)}),
    "odd-dims": (33, 70, 24, 40, 1, {"sinks": [0.5, -1.0]}),
    "offset": (65, 100, 72, 72, 1, {"q_offset": [20]}),
    "peaked": (40, 200, 64, 64, 6, {}),
    "huge": (40, 200, 64, 64, 1, {"scale": 1e6}),
    "decode": (1, 300, 64, 64, 1, {"sinks": [20.0, 1.0]}),
    "no-keys": (5, 0, 64, 64, 1, {"sinks": [0.5, -1.0]}),
}


@every_kernel
@pytest.mark.parametrize("name", CALLS)
def test_a_call_agrees_with_float64(kernel: str, name: str) -> None:
    nq, nk, d, dv, size, options = CALLS[name]
    call = on.with_tensors(options)
    dtype = "float16" if name in ("d64", "peaked") else "bfloat16"
    tensors = inputs(nq, nk, d, dv, dtype, size)
    out, lse = on.attend(kernel, *tensors, schedules=RANDOM, **INT8, **call)
    # The rounding of the shift of scores of 1e7 alone is more than the rule for the log-sum-exp.
    assert_close(out, None if name == "huge" else lse, *tensors, **INT8, **call)


@every_kernel
@pytest.mark.parametrize("nq", on.pick(simulator=[63], gpu=[1, 63, 65, 300]))
@pytest.mark.parametrize("nk", on.pick(simulator=[31], gpu=[0, 1, 31, 64, 511, 1537]))
def test_lengths_of_any_kind(kernel: str, nq: int, nk: int) -> None:
    for d, causal in itertools.product((64, 128), (False, True)):
        tensors = on.qkv(nq, nk, d, dtype="bfloat16", batch=2)
        on.attend_and_check(kernel, *tensors, schedules=RANDOM, causal=causal, **INT8)


@every_kernel
@pytest.mark.parametrize("d", on.pick(simulator=[8, 256], gpu=range(8, 257, 8)))
def test_head_dims_of_any_size(kernel: str, d: int) -> None:
    nq, nk = on.pick(simulator=(33, 70), gpu=(113, 239))
    tensors = on.qkv(nq, nk, d, 264 - d, dtype="float16")
    on.attend_and_check(kernel, *tensors, schedules=RANDOM, causal=True, **INT8)


@every_kernel
@pytest.mark.parametrize("device", ["RTX 4090", "H200"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_a_plan_for_another_gpu_is_right_here(
    kernel: str, device: str, dims: tuple[int, int]
) -> None:
    """The H200 has room for two CTAs on an SM."""
    nq, nk = on.pick(simulator=(20, 130), gpu=(333, 777))
    tensors = on.qkv(nq, nk, *dims, dtype="float16", heads=(4, 2))
    plan = archflash.explain(
        *tensors, device=device, implementation=kernel, return_lse=True, causal=True, **INT8
    ).plan
    on.attend_and_check(kernel, *tensors, plan=plan, schedules=RANDOM, causal=True, **INT8)


# --- what must not matter ---


@every_kernel
@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("tail", [6e4, math.nan])
def test_what_lies_behind_the_last_visible_key_never_matters(
    kernel: str, tail: float, per_batch: bool
) -> None:
    """A cache of 300 keys of which 100 are in use, and one with 150 in use beside it."""
    used = [100, 150 if per_batch else 100]
    q, k, v = inputs(20, 300, 64, 64, "float16")
    q, k, v = (torch.cat([x, x.flip(2)]) for x in (q, k, v))
    offset = on.int32(*(keys - 20 for keys in used)) if per_batch else 80
    call: dict[str, Any] = {"causal": True, "q_offset": offset}
    results = []
    for behind in (0.0, tail):
        for batch, keys in enumerate(used):
            k[batch, :, keys:] = behind
        results.append(on.attend(kernel, q, k, v, schedules=RANDOM, **INT8, **call))
    (clean, clean_lse), (out, lse) = results
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)
    assert_close(out, lse, q, k.nan_to_num(nan=0.0), v, **INT8, **call)


@every_kernel
def test_rows_that_are_not_finite_spoil_what_sees_them_alone(kernel: str) -> None:
    q, k, v = inputs(40, 130, 64, 64, "float16")
    q[0, 0, 7, 3] = math.nan
    k[0, 0, 100, 5] = math.inf
    call: dict[str, Any] = {"q_offset": 80, "causal": True}
    out, lse = on.attend(kernel, q, k, v, schedules=RANDOM, **INT8, **call)
    spoiled = torch.zeros(2, 40, dtype=torch.bool, device=on.device)
    spoiled[0, 7] = True
    spoiled[:, 20:] = True  # these see key 100
    assert torch.equal(out[0].isnan().all(-1), spoiled)
    assert torch.equal(out[0].isnan().any(-1), spoiled)
    assert torch.equal(lse[0].isnan(), spoiled)
    clean_q, clean_k = q.nan_to_num(nan=0.0), k.nan_to_num(posinf=0.0)
    exact = reference.attention(clean_q, clean_k, v, return_lse=False, **call)[0]
    assert (out[0].double() - exact)[~spoiled].abs().max() < 0.2


# --- beside exact attention ---


@every_kernel
def test_a_mean_of_the_keys_costs_no_accuracy(kernel: str) -> None:
    """All keys share a mean that is 100 times as large as they are, or none: the error is equal."""
    q = on.rand(1, 1, 64, 64, seed=1, dtype="float16")
    v = on.rand(1, 1, 128, 64, seed=3, dtype="float16")
    k = (on.rand(1, 1, 128, 64, seed=2) * 8).round() / 8
    errors = []
    for mean in (0.0, 100.0):
        keys = (k + mean).half()
        assert torch.equal(keys - mean, k.half())  # nothing is lost before
        out, _ = on.attend(kernel, q, keys, v, schedules=RANDOM, scale=0.125, **INT8)
        expected = reference.attention(q, keys, v, return_lse=False, scale=0.125)
        errors.append(relative_rms_error(out, expected))
    assert errors[1] < 1.2 * errors[0]


@every_kernel
@pytest.mark.parametrize(("outliers", "limit"), [(False, 0.02), (True, 0.16)])
def test_error_against_exact_attention(kernel: str, outliers: bool, limit: float) -> None:
    """PyTorch's own error at fp16 is about 0.0005."""
    nq, nk, batch, heads = on.pick(simulator=(128, 256, 1, 1), gpu=(700, 700, 2, 4))
    channels = torch.ones(128, device=on.device)
    if outliers:
        channels[5::40] = 20.0
    q, k, v = on.qkv(nq, nk, 128, batch=batch, heads=(heads, heads))
    q, k, v = (q / channels.sqrt()).half(), (k * channels).half(), v.half()
    out, _ = on.attend(kernel, q, k, v, schedules=RANDOM, **INT8)
    expected = reference.attention(q, k, v, return_lse=False)
    assert 0.001 < relative_rms_error(out, expected) < limit
