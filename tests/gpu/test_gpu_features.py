"""Every feature with every other one, and the rows that see nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu_cases import (
    DTYPES,
    all_pairs,
    attend_and_check,
    cu_seqlens,
    inside_nan,
    int32,
    kernel_dtypes,
    one_head_for_all,
    qkv,
    rand,
    transposed,
)
from torch import Tensor

import archflash

pytestmark = pytest.mark.gpu

FACTORS: dict[str, list[Any]] = {
    "layout": ["bhnd", "bnhd", "packed"],
    "lengths": [(113, 203), (203, 113), (9, 799), (64, 64)],
    "dims": [(64, 64), (128, 128), (32, 32), (40, 72), (192, 128)],
    "heads": [(2, 2), (6, 2), (4, 1)],
    "causal": [False, True],
    "window": [None, (17, None), (None, 5), (16, 9), (0, 0), (None, None), (0, None)],
    "q_offset": [None, 0, -5, 90, 1 << 40, -(1 << 40), "tensor"],
    "softcap": [None, 5.0, 0.0],
    "sinks": [None, "float32", "float16", "bfloat16"],
    "scale": [None, 0.05, -0.3, 0.0, 1.0],
    "memory": ["dense", "transposed", "inside_nan", "expanded"],
    "out_pad": [0, 24],
}  # fmt: skip
ROWS = all_pairs(FACTORS)
# Of four packed sequences: the lengths of the row, no query, no key, and one of each.
MORE_Q, MORE_K = (0, 30, 1), (9, 0, 1)


def row_id(row: dict[str, Any]) -> str:
    """Such as d64-causal-q113-k1023-window17_None-gqa: what differs from a plain call."""
    (d, dv), (nq, nk), (hq, hkv) = row["dims"], row["lengths"], row["heads"]
    parts = [
        f"d{d}" if d == dv else f"d{d}_{dv}",
        "causal" if row["causal"] else "",
        f"q{nq}-k{nk}",
    ]
    parts.append(f"h{hq}_{hkv}" if hq != hkv else "")
    parts += [
        f"{name}{row[name]}".replace(" ", "").replace(",", "_").strip("()").replace("(", "")
        for name in ("window", "q_offset", "softcap", "sinks", "scale")
        if row[name] is not None
    ]
    parts += [row["layout"], row["memory"], f"pad{row['out_pad']}" if row["out_pad"] else ""]
    return "-".join(part for part in parts if part)


def make_call(row: dict[str, Any], dtype: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """(q, k, v) and the keywords that a row of the table stands for."""
    (nq, nk), (d, dv), (hq, hkv) = row["lengths"], row["dims"], row["heads"]
    q_lengths, k_lengths = (nq, *MORE_Q), (nk, *MORE_K)
    packed, layout = row["layout"] == "packed", row["layout"]
    batch = len(q_lengths) if packed else 2
    if packed:
        q, k, v = qkv(sum(q_lengths), sum(k_lengths), d, dv, dtype=dtype, heads=(hq, hkv))
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    else:
        q, k, v = qkv(nq, nk, d, dv, dtype=dtype, batch=batch, heads=(hq, hkv))
        if layout == "bnhd":
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    if row["memory"] == "transposed":
        q, k, v = transposed(q), transposed(k), transposed(v)
    elif row["memory"] == "inside_nan":
        q, k, v = inside_nan(q), inside_nan(k), inside_nan(v)
    elif row["memory"] == "expanded":
        heads_dim = 1 if packed or layout == "bhnd" else 2
        k, v = one_head_for_all(k, heads_dim), one_head_for_all(v, heads_dim)

    call = {name: row[name] for name in ("causal", "window", "q_offset", "softcap", "scale")}
    if row["q_offset"] == "tensor":
        call["q_offset"] = int32(*(7 - 20 * sequence for sequence in range(batch)))
    if row["sinks"]:
        call["sinks"] = rand(hq, seed=9, dtype=row["sinks"])
    if packed:
        call |= {"cu_seqlens_q": cu_seqlens(q_lengths), "cu_seqlens_k": cu_seqlens(k_lengths)}
    else:
        call["layout"] = layout
    return (q, k, v), call


@pytest.mark.parametrize(
    ("kernel", "dtype", "row"),
    [
        pytest.param(*served, row, id=f"{'-'.join(served)}-{row_id(row)}")
        for served in kernel_dtypes()
        for row in ROWS
    ],
)
def test_features_meet_the_error_rule_in_pairs(
    kernel: str, dtype: str, row: dict[str, Any]
) -> None:
    tensors, call = make_call(row, dtype)
    attend_and_check(kernel, *tensors, out_pad=row["out_pad"], **call)


# --- what pairs do not say ---


@pytest.mark.parametrize(("kernel", "dtype"), kernel_dtypes())
@pytest.mark.parametrize("sinks", [None, *DTYPES])
@pytest.mark.parametrize(
    "blind",
    [
        {"nk": 0},
        {"causal": True, "q_offset": -(1 << 33)},
        {"window": (3, None), "q_offset": 5000},
        {"window": (3, 3), "q_offset": -200},
    ],
    ids=["no-keys", "causal-far-left", "window-far-right", "window-far-left"],
)
def test_rows_that_see_no_key_are_zero_with_lse_of_the_sink(
    kernel: str, dtype: str, blind: dict[str, Any], sinks: str | None
) -> None:
    call = dict(blind)
    q, k, v = qkv(70, call.pop("nk", 65), dtype=dtype, heads=(4, 2))
    if sinks:
        call["sinks"] = rand(4, seed=1, dtype=sinks)
    out, lse = attend_and_check(kernel, q, k, v, **call)
    assert torch.equal(out, torch.zeros_like(out))
    if sinks is None:  # with one, the rule has compared the log-sum-exp with the sink
        assert torch.equal(lse, torch.full_like(lse, -math.inf))


@pytest.mark.parametrize(("kernel", "dtype"), kernel_dtypes())
def test_only_the_rows_that_see_no_key_are_zero(kernel: str, dtype: str) -> None:
    q, k, v = qkv(200, 70, dtype=dtype)
    out, lse = attend_and_check(
        kernel, q, k, v, causal=True
    )  # the first 130 queries come before key 0
    assert torch.equal(out[:, :, :130], torch.zeros_like(out[:, :, :130]))
    assert bool((lse[:, :, :130] == -math.inf).all())
    assert bool(lse[:, :, 130:].isfinite().all())


@pytest.mark.parametrize(("kernel", "dtype"), kernel_dtypes())
def test_sinks_far_above_and_far_below_the_scores(kernel: str, dtype: str) -> None:
    q, k, v = qkv(65, 129, dtype=dtype, heads=(4, 2))
    sinks = torch.tensor([60.0, -60.0, 0.0, -math.inf], device=q.device)
    out, _ = attend_and_check(kernel, q, k, v, sinks=sinks)
    plain, _ = archflash.attention(q, k, v, implementation=kernel, return_lse=True)
    assert torch.equal(out[:, 3], plain[:, 3])  # a sink of -inf is none


@pytest.mark.parametrize(("kernel", "dtype"), kernel_dtypes())
@pytest.mark.parametrize("size", [1e-4, 100.0])
def test_finite_inputs_never_give_nan(kernel: str, dtype: str, size: float) -> None:
    q, k, v = qkv(113, 129, dtype=dtype)
    attend_and_check(kernel, q * size, k * size, v, causal=True)


@pytest.mark.parametrize(("kernel", "dtype"), kernel_dtypes())
@pytest.mark.parametrize("causal", [False, True])
def test_huge_finite_scores_give_finite_outputs(kernel: str, dtype: str, causal: bool) -> None:
    # Scores of 1e9 and more: every softmax is one-hot, and rounding decides between close keys.
    size = 5e3 if dtype == "float16" else 1e5
    q, k, v = qkv(113, 129, dtype=dtype)
    out, lse = archflash.attention(
        q * size, k * size, v, causal=causal, return_lse=True, implementation=kernel
    )
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert out.abs().max() <= v.abs().max() * 1.001


@pytest.mark.parametrize("kernel", sorted({kernel for kernel, _ in kernel_dtypes()}))
@pytest.mark.parametrize("memory", ["bhnd", "bnhd", "packed-qkv", "wide-rows"])
def test_outputs_are_dense_in_the_stride_order_of_q(kernel: str, memory: str) -> None:
    dtype = next(dtype for name, dtype in kernel_dtypes() if name == kernel)
    q, k, v = qkv(33, 33, dtype=dtype, batch=2, heads=(3, 3))
    if memory == "bnhd":
        q = transposed(q)
    elif memory == "packed-qkv":
        q = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)[:, :, 0].transpose(1, 2)
    elif memory == "wide-rows":
        q = inside_nan(q)
    out = archflash.attention(q, k, v, implementation=kernel)
    n, h, d = 33, 3, 64
    rows_first = memory in ("bnhd", "packed-qkv")
    assert out.stride() == ((n * h * d, d, h * d, 1) if rows_first else (h * n * d, n * d, d, 1))
