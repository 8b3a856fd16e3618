"""approximate="int8", "fp16_accumulate" and "int8_pv": features in pairs, what must not matter,
extremes, and how far the result is from that of exact kernels. approximate="int8_qk": test_int8.py.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import reference

from .checks import assert_close, relative_rms_error
from .executors import approximate_factors, executor
from .memory import transposed
from .pairs import all_pairs, row_id

on = executor()

NAMES = ["int8", "fp16_accumulate", "int8_pv"]
KINDS = [(kernel, name) for name in NAMES for kernel in on.kernels(name)]
every_kind = pytest.mark.parametrize(("kernel", "name"), KINDS)
RANDOM = [2]  # one of the simulator's schedules: random, with seed 2

ROWS = all_pairs(
    {"name": NAMES}
    | approximate_factors(on, dims=[(64, 64), (128, 128), (24, 40), (72, 72), (56, 96)])
)
if on.name == "simulator":  # it has time for some, and for CALLS
    ROWS = ROWS[::4]


def inputs(
    nq: int, nk: int, d: int, dv: int, dtype: str, heads: tuple[int, int] = (2, 1), batch: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The keys have a mean that is large beside what tells them apart, and a large column."""
    kind = getattr(torch, dtype)
    k = on.rand(batch, heads[1], nk, d, seed=2) + 3 * on.rand(1, heads[1], 1, d, seed=4)
    k[..., 5] *= 20
    q = on.rand(batch, heads[0], nq, d, seed=1, dtype=kind)
    return q, k.to(kind), on.rand(batch, heads[1], nk, dv, seed=3, dtype=kind)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_pairs_of_features_agree_with_float64(row: dict[str, Any]) -> None:
    (nq, nk), (d, dv) = row["lengths"], row["dims"]
    tensors = list(inputs(nq, nk, d, dv, row["dtype"], row["heads"], batch=2))
    if row["layout"] == "bnhd":
        tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    if row["transposed"]:
        tensors = [transposed(x) for x in tensors]
    call = {name: row[name] for name in ("causal", "window", "q_offset", "scale", "layout")}
    if row["q_offset"] == "tensor":
        call["q_offset"] = on.int32(7, -13)
    if row["sinks"]:
        call["sinks"] = on.rand(row["heads"][0], seed=9, dtype=row["sinks"])
    call |= {"approximate": row["name"]}
    for kernel in on.kernels(row["name"]):
        on.attend_and_check(kernel, *tensors, out_pad=row["out_pad"], schedules=RANDOM, **call)


def ranges(nq: int) -> Tensor:
    """Two ranges of keys, which leave out a block of them."""
    both = on.int32(3, 40, 70, 130).reshape(1, 1, 1, 2, 2)
    return both.expand(1, 1, nq, 2, 2)


# nq, nk, d, dv, options
CALLS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "no-keys": (5, 0, 64, 64, {"sinks": [0.5, -1.0]}),
    "one-row": (1, 300, 64, 64, {}),
    "d256": (20, 130, 256, 256, {"window": (70, 5)}),
    "d192": (33, 70, 192, 128, {"causal": True}),
    "softcap": (33, 70, 72, 24, {"softcap": 3.0}),
    "negative-scale": (33, 70, 64, 64, {"scale": -0.1}),
    "bool-mask": (40, 200, 64, 64, {"attn_mask": "bool"}),
    "added-mask": (40, 140, 128, 128, {"attn_mask": "float32"}),
    "same-mask": (40, 140, 64, 64, {"attn_mask": "same"}),
    "same-mask-bf16": (33, 100, 64, 64, {"attn_mask": "same"}),
    "ranges": (40, 140, 256, 256, {"key_ranges": "two"}),
    "blocks": (70, 200, 64, 64, {"block_mask": "some", "causal": True}),
    "dropout": (40, 100, 64, 64, {"dropout_p": 0.3}),
}


@pytest.mark.parametrize("call_name", CALLS)
@every_kind
def test_a_call_agrees_with_float64(kernel: str, name: str, call_name: str) -> None:
    nq, nk, d, dv, options = CALLS[call_name]
    if name == "int8_pv" and "dropout_p" in options:
        pytest.skip("it takes no dropout")
    dtype = "bfloat16" if call_name in ("d256", "bool-mask", "same-mask-bf16") else "float16"
    call = {"approximate": name} | on.with_tensors(options)
    if call.get("attn_mask") == "bool":
        call["attn_mask"] = on.rand(nq, nk, seed=8) > -0.5
        call["attn_mask"][7] = False
    elif "attn_mask" in call:
        kind = {"same": dtype}.get(call["attn_mask"], "float32")
        call["attn_mask"] = on.rand(nq, nk, seed=8, dtype=kind)
        call["attn_mask"][:, 5] = -3e38 if kind != "float16" else -6e4
    if "key_ranges" in call:
        call["key_ranges"] = ranges(nq)
    if "block_mask" in call:
        call["block_mask"] = on.tensor([[1, 0, 1, 0], [1, 1, 0, 1]]).bool()[None, None]
    if "dropout_p" in call:
        call["rng_state"] = on.tensor([5, 4]).long()
    on.attend_and_check(kernel, *inputs(nq, nk, d, dv, dtype), schedules=RANDOM, **call)


@every_kind
@pytest.mark.parametrize("shared", [False, True])
def test_packed_sequences(kernel: str, name: str, shared: bool) -> None:
    """Of unlike lengths, one of them empty; or two that share keys, with one without queries in
    between.
    """
    ends_q, ends_k = (
        ([0, 12, 12, 60], [0, 70, 40, 100]) if shared else ([0, 5, 70, 70], [0, 9, 80, 99])
    )
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in inputs(75, 104, 64, 64, "float16"))
    call = {"cu_seqlens_q": on.int32(*ends_q), "cu_seqlens_k": on.int32(*ends_k), "causal": True}
    on.attend_and_check(kernel, q, k, v, schedules=RANDOM, approximate=name, **call)


# --- what must not matter ---


@every_kind
@pytest.mark.parametrize("tail", [6e4, math.nan])
def test_what_lies_behind_the_last_visible_key_never_matters(
    kernel: str, name: str, tail: float
) -> None:
    """A cache of 300 keys of which 100 are in use, and one with 150 in use beside it."""
    used = [100, 150]
    q, k, v = inputs(20, 300, 64, 64, "float16", batch=2)
    call: dict[str, Any] = {"causal": True, "q_offset": on.int32(80, 130), "approximate": name}
    results = []
    for behind in (0.0, tail):
        for batch, keys in enumerate(used):
            k[batch, :, keys:] = v[batch, :, keys:] = behind
        results.append(on.attend(kernel, q, k, v, schedules=RANDOM, **call))
    (clean, clean_lse), (out, lse) = results
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)
    assert_close(out, lse, q, k.nan_to_num(nan=0.0), v.nan_to_num(nan=0.0), **call)


@every_kind
def test_rows_that_are_not_finite_spoil_what_sees_them_alone(kernel: str, name: str) -> None:
    q, k, v = inputs(40, 130, 64, 64, "float16")
    q[0, 0, 7, 3] = math.nan
    k[0, 0, 100, 5] = math.nan
    call: dict[str, Any] = {"q_offset": 80, "causal": True, "approximate": name}
    out, lse = on.attend(kernel, q, k, v, schedules=RANDOM, **call)
    spoiled = torch.zeros(2, 40, dtype=torch.bool, device=on.device)
    spoiled[0, 7] = True
    spoiled[:, 20:] = True  # these see key 100
    assert torch.equal(out[0].isnan().all(-1), spoiled)
    assert torch.equal(out[0].isnan().any(-1), spoiled)
    assert torch.equal(lse[0].isnan(), spoiled)


@every_kind
def test_values_that_are_not_finite_do_not_matter_where_a_mask_hides_them(
    kernel: str, name: str
) -> None:
    q, k, v = inputs(40, 130, 64, 64, "float16")
    mask = torch.ones(1, 130, dtype=torch.bool, device=on.device)
    mask[0, 37:45] = False
    v[:, :, 40] = math.nan
    call: dict[str, Any] = {"attn_mask": mask, "approximate": name}
    out, lse = on.attend(kernel, q, k, v, schedules=RANDOM, **call)
    assert_close(out, lse, q, k, v.nan_to_num(nan=0.0), **call)


# --- extremes ---


def extreme(kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    """70 rows of finite numbers, as large or as small as their type has them."""
    x = on.rand(1, 1, 70, 64, seed=seed)
    most = torch.finfo(dtype).max
    if kind == "one":
        x[0, 0, seed, seed] = most
    elif kind == "column":
        x[..., 7] = -most
    elif kind != "normal":
        x = {"largest": x.sign() * most, "equal": torch.full_like(x, most), "zero": 0 * x,
             "small": x * torch.finfo(dtype).tiny}[kind]  # fmt: skip
    return x.to(dtype)


EXTREMES = ("normal", "largest", "equal", "one", "column", "small", "zero")


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_no_finite_input_overflows(kernel: str, name: str, dtype: torch.dtype) -> None:
    """A row is a mean of rows of V, so no element is larger than the largest of V."""
    kinds = [(a, a, b) for a, b in itertools.product(EXTREMES[:4], EXTREMES)]
    kinds += [("normal", a, "normal") for a in EXTREMES] + [("column", "small", "largest")]
    for number, (of_q, of_k, of_v) in enumerate(kinds[:: on.pick(simulator=5, gpu=1)]):
        if (
            name == "fp16_accumulate"
            and dtype == torch.bfloat16
            and of_k not in ("normal", "small", "zero")
        ):
            continue  # scores overflow: below
        q, k, v = (extreme(kind, dtype, 3 + number % 7 + i)
                   for i, kind in enumerate((of_q, of_k, of_v)))  # fmt: skip
        out, lse = on.attend(kernel, q, k, v, schedules=RANDOM, approximate=name, causal=True)
        assert not lse.isnan().any(), (of_q, of_k, of_v)
        assert out.isfinite().all(), (of_q, of_k, of_v)
        assert out.double().abs().max() <= v.double().abs().max() * (1 + 2**-8)


@pytest.mark.parametrize("kernel", on.kernels("fp16_accumulate"))
@pytest.mark.parametrize("of_k", ["largest", "one"])
def test_scores_beyond_float32_are_those_of_exact_kernels(kernel: str, of_k: str) -> None:
    """fp16_accumulate computes them alike: where they are no numbers, so is the row in both."""
    q, k, v = (extreme(kind, torch.bfloat16, 3 + i)
               for i, kind in enumerate(("largest", of_k, "normal")))  # fmt: skip
    call: dict[str, Any] = {"causal": True}
    _, exact = on.attend(kernel, q, k, v, schedules=RANDOM, **call)
    out, lse = on.attend(kernel, q, k, v, schedules=RANDOM, approximate="fp16_accumulate", **call)
    assert exact.isnan().any()
    assert torch.equal(lse.isnan(), exact.isnan())
    assert torch.equal(out.isnan().any(-1), exact.isnan())


# --- beside exact attention ---


# The limits of the error: fp16_accumulate, int8, int8_pv.
OUTLIERS = {
    "none": (0.001, 0.02, 0.02),
    "in k": (0.001, 0.02, 0.02),
    "in both": (0.001, 0.02, 0.02),
    "one key": (0.001, 0.02, 0.02),
    "channels of v": (0.001, 0.02, 0.02),
    "one row of v": (0.001, 0.02, 0.06),
}


@every_kind
@pytest.mark.parametrize("outliers", OUTLIERS)
def test_error_against_exact_attention(kernel: str, name: str, outliers: str) -> None:
    """PyTorch's own error at fp16 is about 0.0005."""
    nq, nk, batch, heads = on.pick(simulator=(128, 256, 1, 1), gpu=(700, 700, 2, 4))
    channels = torch.ones(128, device=on.device)
    channels[5::40] = 20.0
    q, k, v = on.qkv(nq, nk, 128, batch=batch, heads=(heads, heads))
    if outliers == "in k":
        q, k = q / channels.sqrt(), k * channels
    elif outliers == "in both":
        q, k = q * channels.sqrt(), k * channels / 10
    elif outliers == "one key":
        k[:, :, 3] *= 20.0
    elif outliers == "channels of v":
        v = v * channels + 2
    elif outliers == "one row of v":
        v[:, :, 3] *= 20.0
    q, k, v = q.half(), k.half(), v.half()
    out, _ = on.attend(kernel, q, k, v, schedules=RANDOM, approximate=name)
    expected = reference.attention(q, k, v, return_lse=False)
    error = relative_rms_error(out, expected)
    limit = OUTLIERS[outliers][("fp16_accumulate", "int8", "int8_pv").index(name)]
    assert limit / 200 < error < limit
