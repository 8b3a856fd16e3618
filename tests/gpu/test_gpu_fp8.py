"""FP8 inputs: every feature with every kind of descale, lengths, head dims, and how far the result
is from that of the tensors before they were quantised.
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
    cu_seqlens,
    dense_strides,
    int32,
    kernel_dtypes,
    kernels,
    rand,
    same_bits,
    transposed,
)
from torch import Tensor

import archflash
from archflash import reference

pytestmark = pytest.mark.gpu

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
KERNELS = [
    name
    for name in kernels()
    if "float8_e4m3fn" in next(i.dtypes for i in archflash.implementations() if i.name == name)
]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_kernel_and_dtype = pytest.mark.parametrize(("kernel", "dtype"), kernel_dtypes(LARGEST))

FACTORS: dict[str, list[Any]] = {
    "dtype": list(LARGEST),
    "descale": ["none", "tensor", "head", "batch", "block", "kv_head", "expanded"],
    "out_dtype": [None, torch.float16, torch.bfloat16],
    "layout": ["bhnd", "bnhd", "packed"],
    "lengths": [(113, 203), (203, 113), (9, 799), (64, 64)],
    "dims": [(64, 64), (128, 128), (32, 32), (48, 80), (192, 128), (256, 256)],
    "heads": [(2, 2), (6, 2), (4, 1)],
    "causal": [False, True],
    "window": [None, (17, None), (None, 5), (16, 9), (0, 0)],
    "q_offset": [None, 0, -5, 90, "tensor"],
    "softcap": [None, 5.0],
    "sinks": [None, "float32", "bfloat16"],
    "scale": [None, 0.05, -0.3, 0.0],
    "transposed": [False, True],
    "out_pad": [0, 24],
}  # fmt: skip
ROWS = all_pairs(FACTORS)
MORE_Q, MORE_K = (0, 30, 1), (9, 0, 1)  # of packed sequences: no query, no key, one of each


def quantised(x: Tensor, dtype: str, kind: str, kv_heads: int) -> tuple[Tensor, Tensor | None]:
    """bhnd, with its descale."""
    batch, heads, rows, _ = x.shape
    kind = "head" if kind == "kv_head" and heads == kv_heads else kind
    if kind == "none":
        return x.to(getattr(torch, dtype)), None
    sizes = {
        "tensor": (1, 1, 1),
        "head": (1, heads, 1),
        "kv_head": (1, kv_heads, 1),
        "batch": (batch, heads, 1),
        "expanded": (batch, 1, 1),
        "block": (batch, heads, math.ceil(rows / 64)),
    }[kind]
    largest = x.abs().max() / LARGEST[dtype]
    # Of different sizes on purpose, some of them so small that values saturate.
    descale = largest * (0.5 + torch.arange(math.prod(sizes), device=x.device).view(sizes) % 7)
    by_row = descale.repeat_interleave(heads // sizes[1], 1)
    if kind == "block":
        by_row = by_row.repeat_interleave(64, 2)[:, :, :rows]
    limit = LARGEST[dtype]
    values = (x / by_row[..., None]).clamp(-limit, limit).to(getattr(torch, dtype))
    if kind == "expanded":
        return values, descale[:, :, 0].expand(batch, heads)
    shape = {"tensor": (1,), "batch": sizes[:2], "block": sizes}.get(kind, (-1,))
    return values, descale.reshape(shape)


def check_call(kernel: str, q: Tensor, k: Tensor, v: Tensor, out_pad: int, **call: Any) -> None:
    out_dtype = call.get("out_dtype") or torch.bfloat16
    shape = (*q.shape[:-1], v.shape[-1])
    guarded = Guarded(shape, dense_strides(shape, out_pad), out_dtype)
    out, lse = archflash.attention(
        q, k, v, implementation=kernel, out=guarded.view, return_lse=True, **call
    )
    guarded.assert_untouched_outside()
    again = archflash.attention(q, k, v, implementation=kernel, **call)
    assert same_bits(again, out), "not the same bits the second time"
    expected, expected_lse = reference.attention(q, k, v, **call)
    report = reference.check_fp8(out, expected, q, k, v, **call)
    assert report.ok, report
    lse_report = reference.check_lse(lse, expected_lse)
    assert lse_report.ok, f"log-sum-exp {lse_report}"


@every_kernel
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_features_and_descales_meet_the_fp8_error_rule_in_pairs(
    kernel: str, row: dict[str, Any]
) -> None:
    if (kernel, row["dtype"]) not in kernel_dtypes(LARGEST):
        row = row | {"dtype": "float8_e4m3fn"}  # which every kernel here takes
    (nq, nk), (d, dv), (hq, hkv) = row["lengths"], row["dims"], row["heads"]
    packed = row["layout"] == "packed"
    q_lengths, k_lengths = (nq, *MORE_Q), (nk, *MORE_K)
    sequences = len(q_lengths) if packed else 2
    batch, nq, nk = (1, sum(q_lengths), sum(k_lengths)) if packed else (2, nq, nk)
    kind = row["descale"]
    if packed and kind in ("batch", "block", "expanded"):
        kind = "head"  # of packed sequences those of a batch are made below
    tensors, call = [], {}
    for number, (name, heads, rows, dim) in enumerate(
        (("q", hq, nq, d), ("k", hkv, nk, d), ("v", hkv, nk, dv))
    ):
        x = rand(batch, heads, rows, dim, seed=number)
        of = kind if name == "q" or kind != "kv_head" else "head"
        values, descale = quantised(x, row["dtype"], of, hkv)
        if packed:
            values = values[0].transpose(0, 1).contiguous()
        elif row["layout"] == "bnhd":
            values = values.transpose(1, 2).contiguous()
        tensors.append(transposed(values) if row["transposed"] else values)
        if descale is not None:
            if packed and row["descale"] in ("batch", "block", "expanded"):
                descale = (
                    descale.expand(sequences, -1)
                    * (1 + torch.arange(sequences, device=DEVICE))[:, None]
                )
            call[f"{name}_descale"] = descale
    call |= {
        name: row[name]
        for name in ("causal", "window", "q_offset", "softcap", "scale", "out_dtype")
    }
    if row["q_offset"] == "tensor":
        call["q_offset"] = int32(*(7 - 20 * sequence for sequence in range(sequences)))
    if row["sinks"]:
        call["sinks"] = rand(hq, seed=9, dtype=row["sinks"])
    if packed:
        call |= {"cu_seqlens_q": cu_seqlens(q_lengths), "cu_seqlens_k": cu_seqlens(k_lengths)}
    else:
        call["layout"] = row["layout"]
    check_call(kernel, *tensors, row["out_pad"], **call)


@every_kernel_and_dtype
@pytest.mark.parametrize("nq", [0, 1, 63, 65, 129, 799])
@pytest.mark.parametrize("nk", [0, 1, 31, 64, 127, 1023])
def test_lengths_of_any_parity_meet_the_fp8_error_rule(
    kernel: str, dtype: str, nq: int, nk: int
) -> None:
    for d, causal in itertools.product((64, 128), (False, True)):
        q, k, v = (
            rand(2, 2, rows, d, seed=i).to(getattr(torch, dtype))
            for i, rows in enumerate((nq, nk, nk))
        )
        check_call(kernel, q, k, v, 0, causal=causal)


@every_kernel_and_dtype
@pytest.mark.parametrize("d", range(16, 257, 16))
def test_head_dims_meet_the_fp8_error_rule(kernel: str, dtype: str, d: int) -> None:
    for dv in (d, 272 - d):
        q, k, v = (
            rand(1, 2, rows, dim, seed=i).to(getattr(torch, dtype))
            for i, (rows, dim) in enumerate(((113, d), (239, d), (239, dv)))
        )
        check_call(kernel, q, k, v, 0, causal=True)


@every_kernel
def test_rows_beyond_a_sequence_and_masked_ones_never_matter(kernel: str) -> None:
    q, k, v = (rand(1, 2, 200, 64, seed=i).to(torch.float8_e4m3fn) for i in range(3))
    clean = archflash.attention(q, k[:, :, :130], v[:, :, :130], implementation=kernel)
    poisoned_k, poisoned_v = k.clone(), v.clone()
    for x in (poisoned_k, poisoned_v):
        x.view(torch.uint8)[:, :, 130:] = 0x7F  # NaN
    out = archflash.attention(
        q, poisoned_k[:, :, :130], poisoned_v[:, :, :130], implementation=kernel
    )
    assert same_bits(out, clean)
    query = q.clone()
    query.view(torch.uint8)[:, :, 7] = 0x7F
    out = archflash.attention(query, k, v, implementation=kernel)
    assert out[:, :, 7].isnan().all()
    assert out.isnan().sum() == out[:, :, 7].numel()


@every_kernel
@pytest.mark.parametrize("rise", [0.5, 0.7, 0.74, 0.749, 0.76, 1.5, 3.0])
def test_no_weight_saturates_however_scores_rise(kernel: str, rise: float) -> None:
    """A key of the last block visited is 2^rise above all others: its weight is right to 2^-4."""
    q, k, v = (torch.zeros(1, 1, n, 64, device=DEVICE) for n in (16, 128, 128))
    q[..., 0] = 1
    k[:, :, :64, 0] = -448
    k[:, :, 5, 0] = 1
    v[:, :, 5] = 1
    stored = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    call = {"scale": rise / math.log2(math.e), "out_dtype": torch.float16}
    out = archflash.attention(*stored, implementation=kernel, **call).double()
    exact = 2**rise / (64 + 2**rise)
    assert (out - exact).abs().max() <= (2**-4 + 2**-10) * exact


# --- the whole way from unquantised tensors ---


@every_kernel
@pytest.mark.parametrize("kind", ["tensor", "head", "block"])
def test_error_against_the_tensors_before_quantisation(kernel: str, kind: str) -> None:
    """Root mean square errors, relative; PyTorch's own at fp16 are about 0.0005."""
    outliers = torch.ones(128, device=DEVICE)
    outliers[5::40] = 20.0
    for channels, limit in ((torch.ones(128, device=DEVICE), 0.07), (outliers, 0.15)):
        q, k, v = (rand(2, 4, 700, 128, seed=i) for i in range(3))
        k = k * channels
        q = q / channels.sqrt()
        pairs = [archflash.quantize_fp8(x, per=kind) for x in (q, k, v)]
        out = archflash.attention(
            *(values for values, _ in pairs),
            **{f"{name}_descale": d for name, (_, d) in zip("qkv", pairs, strict=True)},
            implementation=kernel,
        )
        expected = reference.attention(q, k, v, return_lse=False)
        error = (out.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < limit
