"""Wrong calls raise the right error with what was given and what to do, and the next call works."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import reference

BEYOND_64_BITS = 1 << 70


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def padded(**options: Any) -> dict[str, Any]:
    """A good call of 2 batches, 4 heads over 2, 7 queries, 9 keys, head dims 16 and 8."""
    good = {"q": rand(2, 4, 7, 16), "k": rand(2, 2, 9, 16), "v": rand(2, 2, 9, 8)}
    return good | options


def ends(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def packed(**options: Any) -> dict[str, Any]:
    """A good call of two packed sequences."""
    good: dict[str, Any] = {"q": rand(7, 4, 16), "k": rand(9, 2, 16), "v": rand(9, 2, 8)}
    return good | {"cu_seqlens_q": ends(0, 3, 7), "cu_seqlens_k": ends(0, 9, 9)} | options


def fp8(**options: Any) -> dict[str, Any]:
    good = padded()
    return {name: x.to(torch.float8_e4m3fn) for name, x in good.items()} | options


def sharing(name: str) -> dict[str, Any]:
    """A call whose output begins where k or v does."""
    memory = torch.randn(1000, generator=torch.Generator().manual_seed(7))
    good = padded()
    return good | {
        name: memory[: good[name].numel()].view(good[name].shape),
        "out": memory[: 2 * 4 * 7 * 8].view(2, 4, 7, 8),
    }


NAN, INF = float("nan"), float("inf")

# id: (the call, what it raises, parts of the message)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    # the tensors themselves
    "q-rank": (
        padded(q=rand(4, 7, 16)),
        ValueError,
        ("q has shape (4, 7, 16)", "4 dimensions, (batch, heads, rows, dim)", "cu_seqlens_q"),
    ),
    "k-rank": (padded(k=rand(1, 2, 2, 9, 16)), ValueError, ("k has shape (1, 2, 2, 9, 16)",)),
    "v-rank": (padded(v=rand(8)), ValueError, ("v has shape (8,)", "4 dimensions")),
    "q-rank-packed": (
        packed(q=rand(1, 7, 4, 16)),
        ValueError,
        ("q has shape (1, 7, 4, 16)", "3 dimensions (tokens, heads, dim)"),
    ),
    "rank-9": (padded(q=rand(*[1] * 9)), ValueError, ("q has", "dimensions")),
    "q-not-a-tensor": (padded(q=[[1.0]]), TypeError, ("q is [[1.0]]", "it must be a torch.Tensor")),
    "k-none": (padded(k=None), TypeError, ("k is None", "torch.Tensor")),
    "v-numpy": (
        padded(v=rand(2, 2, 9, 8).numpy()),
        TypeError,
        ("v is a numpy.ndarray", "torch.Tensor"),
    ),
    "dtype-mix": (
        padded(k=rand(2, 2, 9, 16, dtype=torch.float16)),
        TypeError,
        ("torch.float32, torch.float16 and torch.float32", "must be the same", ".to(q.dtype)"),
    ),
    "dtype-mix-v": (
        padded(v=rand(2, 2, 9, 8, dtype=torch.bfloat16)),
        TypeError,
        ("torch.float32, torch.float32 and torch.bfloat16", "must be the same"),
    ),
    "int-dtype": (
        {name: x.int() for name, x in padded().items()},
        TypeError,
        ("q has dtype torch.int32", "float32, float16, bfloat16, float64"),
    ),
    "complex-dtype": (
        {name: x.to(torch.complex64) for name, x in padded().items()},
        TypeError,
        ("q has dtype torch.complex64", "attention takes float32"),
    ),
    "device-mix-k": (
        padded(k=rand(2, 2, 9, 16).to("meta")),
        TypeError,
        ("k is on ", "but q is on cpu", "move them to one device"),
    ),
    "device-mix-v": (
        padded(v=rand(2, 2, 9, 8).to("meta")),
        TypeError,
        ("v is on ", "but q is on cpu", "move them to one device"),
    ),
    # shapes that disagree
    "heads-do-not-divide": (
        padded(q=rand(2, 3, 7, 16)),
        ValueError,
        ("q has 3 heads and k has 2", "must be a multiple", "(batch, heads, rows, dim)"),
    ),
    "more-kv-heads": (
        padded(q=rand(2, 1, 7, 16)),
        ValueError,
        ("q has 1 heads and k has 2", "must be a multiple"),
    ),
    "no-kv-heads": (
        padded(k=rand(2, 0, 9, 16), v=rand(2, 0, 9, 8)),
        ValueError,
        ("q has 4 heads and k has 0", "must be a multiple"),
    ),
    "batch-of-k": (
        padded(k=rand(3, 2, 9, 16)),
        ValueError,
        ("k has shape (3, 2, 9, 16)", "batch 3", "must be 2 as in q"),
    ),
    "batch-of-v": (padded(v=rand(1, 2, 9, 8)), ValueError, ("v has shape", "batch 1", "2 as in q")),
    "head-dim-of-k": (
        padded(k=rand(2, 2, 9, 8)),
        ValueError,
        ("k has shape (2, 2, 9, 8)", "head dim 8", "must be 16 as in q"),
    ),
    "heads-of-v": (padded(v=rand(2, 4, 9, 8)), ValueError, ("v has shape", "heads 4", "2 as in k")),
    "rows-of-v": (padded(v=rand(2, 2, 8, 8)), ValueError, ("v has shape", "rows 8", "9 as in k")),
    "rows-of-v-bnhd": (
        {"q": rand(2, 7, 4, 16), "k": rand(2, 9, 2, 16), "v": rand(2, 8, 2, 8), "layout": "bnhd"},
        ValueError,
        ("v has shape (2, 8, 2, 8)", "rows 8", "9 as in k"),
    ),
    "head-dim-0": (
        {"q": rand(2, 4, 7, 0), "k": rand(2, 4, 9, 0), "v": rand(2, 4, 9, 8)},
        ValueError,
        ("head dim is 0 for q and k", "at least 1"),
    ),
    # options
    "window-int": (padded(window=5), TypeError, ("window is 5", "pair (left, right)")),
    "window-of-3": (padded(window=(1, 2, 3)), TypeError, ("window is (1, 2, 3)", "pair")),
    "window-float": (padded(window=(1.5, None)), TypeError, ("window left is 1.5", "an int")),
    "window-text": (padded(window="ab"), TypeError, ("window is 'ab'", "pair (left, right)")),
    "window-too-large": (
        padded(window=(BEYOND_64_BITS, None)),
        ValueError,
        (f"window left is {BEYOND_64_BITS}", "between -2^60 and 2^60"),
    ),
    "softcap-negative": (
        padded(softcap=-2.0),
        ValueError,
        ("softcap is -2", "must be > 0, or None"),
    ),
    "softcap-nan": (padded(softcap=NAN), ValueError, ("softcap is nan", "finite")),
    "softcap-inf": (padded(softcap=INF), ValueError, ("softcap is inf", "finite")),
    "softcap-text": (padded(softcap="high"), TypeError, ("softcap is 'high'", "a number or None")),
    "scale-nan": (padded(scale=NAN), ValueError, ("scale is nan", "must be finite")),
    "scale-beyond-float32": (
        padded(scale=1e39),
        ValueError,
        ("scale is 1e+39", "finite in float32"),
    ),
    "scale-inf": (padded(scale=-INF), ValueError, ("scale is -inf", "must be finite")),
    "scale-text": (padded(scale="auto"), TypeError, ("scale is 'auto'", "a number or None")),
    "causal-int": (padded(causal=1), TypeError, ("causal", "bool")),
    "causal-none": (padded(causal=None), TypeError, ("causal", "bool")),
    "return_lse-int": (padded(return_lse=1), TypeError, ("return_lse", "bool")),
    "layout-unknown": (
        padded(layout="bhdn"),
        ValueError,
        ("layout is 'bhdn'", "'bhnd' for (batch, heads, rows, dim)", "'bnhd'"),
    ),
    "layout-none": (padded(layout=None), (ValueError, TypeError), ("layout", "None")),  # type: ignore[dict-item]
    "layout-int": (padded(layout=1), ValueError, ("layout is 1", "'bhnd'", "'bnhd'")),
    # packed sequences
    "cu_seqlens_k-missing": (
        packed(cu_seqlens_k=None),
        ValueError,
        ("cu_seqlens_k is missing", "both cu_seqlens_q and cu_seqlens_k"),
    ),
    "cu_seqlens_q-missing": (
        packed(cu_seqlens_q=None),
        ValueError,
        ("cu_seqlens_q is missing", "both cu_seqlens_q and cu_seqlens_k"),
    ),
    "cu_seqlens_q-int64": (
        packed(cu_seqlens_q=ends(0, 3, 7, dtype=torch.int64)),
        TypeError,
        ("cu_seqlens_q has dtype torch.int64", "must be torch.int32"),
    ),
    "cu_seqlens_k-float": (
        packed(cu_seqlens_k=torch.tensor([0.0, 9.0, 9.0])),
        TypeError,
        ("cu_seqlens_k has dtype torch.float32", "must be torch.int32"),
    ),
    "cu_seqlens_q-list": (
        packed(cu_seqlens_q=[0, 3, 7]),
        TypeError,
        ("cu_seqlens_q is [0, 3, 7]", "torch.Tensor"),
    ),
    "cu_seqlens-lengths-differ": (
        packed(cu_seqlens_k=ends(0, 9)),
        ValueError,
        ("cu_seqlens_q has 3 entries and cu_seqlens_k 2", "one more entry than"),
    ),
    "cu_seqlens_q-empty": (
        packed(cu_seqlens_q=ends()),
        ValueError,
        ("cu_seqlens_q has shape (0,)", "(sequences + 1,)"),
    ),
    "cu_seqlens_k-empty": (
        packed(cu_seqlens_k=ends()),
        ValueError,
        ("cu_seqlens_k has shape (0,)", "(sequences + 1,)"),
    ),
    "cu_seqlens_q-rank": (
        packed(cu_seqlens_q=ends(0, 3, 7)[None]),
        ValueError,
        ("cu_seqlens_q has shape (1, 3)", "(sequences + 1,)"),
    ),
    "cu_seqlens_k-strided": (
        packed(cu_seqlens_k=ends(0, 0, 9, 9, 9, 9)[::2]),
        ValueError,
        ("cu_seqlens_k is not contiguous", ".contiguous()"),
    ),
    "cu_seqlens_q-device": (
        packed(cu_seqlens_q=ends(0, 3, 7).to("meta")),
        TypeError,
        ("cu_seqlens_q is on ", "but q is on cpu", "one device"),
    ),
    "max_seqlen_q-padded": (
        padded(max_seqlen_q=7),
        ValueError,
        ("max_seqlen_q", "without cu_seqlens", "packed sequences"),
    ),
    "max_seqlen_k-padded": (padded(max_seqlen_k=9), ValueError, ("max_seqlen_k", "cu_seqlens")),
    "max_seqlen_q-negative": (
        packed(max_seqlen_q=-1),
        ValueError,
        ("max_seqlen_q", "must be >= 0, or None"),
    ),
    "max_seqlen_k-negative": (packed(max_seqlen_k=-5), ValueError, ("max_seqlen_k", ">= 0")),
    "max_seqlen_q-float": (packed(max_seqlen_q=4.0), TypeError, ("max_seqlen_q is 4.0", "an int")),
    # positions
    "q_offset-int64": (
        padded(q_offset=ends(1, 2, dtype=torch.int64)),
        TypeError,
        ("q_offset has dtype torch.int64", "must be torch.int32"),
    ),
    "q_offset-shape": (
        padded(q_offset=ends(1, 2, 3)),
        ValueError,
        ("q_offset has shape (3,)", "an int or (2,)"),
    ),
    "q_offset-scalar-tensor": (
        padded(q_offset=torch.tensor(1, dtype=torch.int32)),
        ValueError,
        ("q_offset has shape ()", "an int or (2,)"),
    ),
    "q_offset-float": (
        padded(q_offset=1.5),
        TypeError,
        ("q_offset is 1.5", "an int, an int32 tensor"),
    ),
    "q_offset-too-large": (
        padded(q_offset=BEYOND_64_BITS),
        ValueError,
        (f"q_offset is {BEYOND_64_BITS}", "between -2^60 and 2^60"),
    ),
    "q_offset-at-the-limit": (
        padded(q_offset=1 << 60),
        ValueError,
        (f"q_offset is {1 << 60}", "between -2^60 and 2^60"),
    ),
    "q_offset-at-the-lower-limit": (
        padded(q_offset=-(1 << 60)),
        ValueError,
        (f"q_offset is {-(1 << 60)}", "between -2^60 and 2^60"),
    ),
    "q_offset-of-5000-digits": (
        padded(q_offset=10**5000),
        ValueError,
        ("q_offset is a very long int", "between -2^60 and 2^60"),
    ),
    "q_offset-bool": (padded(q_offset=True), TypeError, ("q_offset is True", "an int32 tensor")),
    "window-right-at-the-limit": (
        padded(window=(None, 1 << 60)),
        ValueError,
        (f"window right is {1 << 60}", "between -2^60 and 2^60"),
    ),
    "window-left-of-64-bits": (
        padded(window=((1 << 63) - 1, None)),
        ValueError,
        (f"window left is {(1 << 63) - 1}", "between -2^60 and 2^60"),
    ),
    "scale-of-5000-digits": (padded(scale=10**5000), TypeError, ("scale is a very long int",)),
    "implementation-list": (
        padded(implementation=["simt"]),
        archflash.ForcedImplementationError,
        ("no implementation is called ['simt']",),
    ),
    "q_offset-device": (
        padded(q_offset=ends(1, 2).to("meta")),
        TypeError,
        ("q_offset is on ", "but q is on cpu"),
    ),
    # sinks
    "sinks-shape": (
        padded(sinks=rand(2)),
        ValueError,
        ("sinks has shape (2,)", "must be (4,), one per query head"),
    ),
    "sinks-rank": (padded(sinks=rand(4, 1)), ValueError, ("sinks has shape (4, 1)", "(4,)")),
    "sinks-int": (
        padded(sinks=ends(1, 2, 3, 4)),
        TypeError,
        ("sinks has dtype torch.int32", "float32, float16"),
    ),
    "sinks-fp8": (
        padded(sinks=rand(4).to(torch.float8_e5m2)),
        TypeError,
        ("sinks has dtype torch.float8_e5m2", "float32, float16"),
    ),
    "sinks-float64": (
        padded(sinks=rand(4).double()),
        TypeError,
        ("sinks has dtype torch.float64", "float32, float16"),
    ),
    "sinks-strided": (padded(sinks=rand(8)[::2]), ValueError, ("sinks is not contiguous",)),
    "sinks-device": (padded(sinks=rand(4).to("meta")), TypeError, ("sinks is on ", "q is on cpu")),
    "sinks-list": (
        padded(sinks=[0.0] * 4),
        TypeError,
        ("sinks is [0.0, 0.0, 0.0, 0.0]", "torch.Tensor"),
    ),
    # the mask
    "attn_mask-int": (
        padded(attn_mask=torch.ones(7, 9, dtype=torch.int32)),
        TypeError,
        ("attn_mask has dtype torch.int32", "torch.bool (True keeps) or a floating dtype"),
    ),
    "attn_mask-shape": (
        padded(attn_mask=torch.ones(7, 8, dtype=torch.bool)),
        ValueError,
        ("attn_mask has shape (7, 8)", "broadcast to (batch, heads, nq, nk) = (2, 4, 7, 9)"),
    ),
    "attn_mask-rank": (
        padded(attn_mask=torch.ones(1, 1, 1, 7, 9, dtype=torch.bool)),
        ValueError,
        ("attn_mask has shape (1, 1, 1, 7, 9)", "(2, 4, 7, 9)"),
    ),
    "attn_mask-kv-heads": (
        padded(attn_mask=torch.ones(2, 2, 7, 9, dtype=torch.bool)),
        ValueError,
        ("attn_mask has shape (2, 2, 7, 9)", "(2, 4, 7, 9)"),
    ),
    "attn_mask-packed": (
        packed(attn_mask=torch.ones(7, 9, dtype=torch.bool)),
        ValueError,
        ("attn_mask is given with cu_seqlens", "use causal or window"),
    ),
    "attn_mask-device": (
        padded(attn_mask=torch.ones(7, 9, dtype=torch.bool, device="meta")),
        TypeError,
        ("attn_mask is on ", "but q is on cpu"),
    ),
    # descales
    "descale-of-float32": (
        padded(q_descale=torch.ones(1)),
        ValueError,
        ("q_descale is given but q is float32", "float8 inputs"),
    ),
    "descale-shape": (
        fp8(k_descale=torch.ones(4)),
        ValueError,
        ("k_descale has shape (4,)", "it must be (), (1,), (2,), (2, 2) or (2, 2, 1), the last"),
    ),
    "descale-shape-2d": (
        fp8(q_descale=torch.ones(2, 3)),
        ValueError,
        ("q_descale has shape (2, 3)", "it must be (), (1,), (4,) (or 2), (2, 4) (or 2)"),
    ),
    "descale-shape-3d": (
        fp8(v_descale=torch.ones(2, 2, 2)),
        ValueError,
        ("v_descale has shape (2, 2, 2)", "(2, 2, 1)", "block of 64 rows"),
    ),
    "descale-blocks-packed": (
        {
            name: x.to(torch.float8_e4m3fn) if name in ("q", "k", "v") else x
            for name, x in packed().items()
        }
        | {"k_descale": torch.ones(2, 2, 1)},
        ValueError,
        ("k_descale has shape (2, 2, 1)", "packed sequences take no descales of blocks"),
    ),
    "descale-dtype": (
        fp8(v_descale=torch.ones(1, dtype=torch.float16)),
        TypeError,
        ("v_descale has dtype torch.float16", "torch.float32"),
    ),
    "descale-number": (fp8(q_descale=2.0), TypeError, ("q_descale is 2.0", "torch.Tensor")),
    "descale-device": (
        fp8(q_descale=torch.ones(1, device="meta")),
        TypeError,
        ("q_descale is on ", "but q is on cpu"),
    ),
    # the output
    "out-shape": (
        padded(out=torch.empty(2, 4, 7, 16)),
        ValueError,
        ("out has shape (2, 4, 7, 16)", "must be (2, 4, 7, 8)"),
    ),
    "out-rank": (
        padded(out=torch.empty(4, 7, 8)),
        ValueError,
        ("out has shape (4, 7, 8)", "must be (2, 4, 7, 8)"),
    ),
    "out-dtype": (
        padded(out=torch.empty(2, 4, 7, 8, dtype=torch.float16)),
        TypeError,
        ("out has dtype torch.float16", "must be torch.float32"),
    ),
    "out-dtype-against-out_dtype": (
        padded(out=torch.empty(2, 4, 7, 8), out_dtype=torch.bfloat16),
        TypeError,
        ("out has dtype torch.float32", "must be torch.bfloat16"),
    ),
    "out-overlaps-itself": (
        padded(out=torch.empty(2, 1, 7, 8).expand(2, 4, 7, 8)),
        ValueError,
        ("out has strides (56, 0, 8, 1)", "overlap"),
    ),
    "out-is-k": (sharing("k"), ValueError, ("out begins where k does", "pass another tensor")),
    "out-is-v": (sharing("v"), ValueError, ("out begins where v does", "pass another tensor")),
    "out-device": (
        padded(out=torch.empty(2, 4, 7, 8, device="meta")),
        TypeError,
        ("out is on ", "but q is on cpu"),
    ),
    "out-list": (padded(out=[]), TypeError, ("out is []", "torch.Tensor")),
    "out_dtype-int": (
        padded(out_dtype=torch.int32),
        TypeError,
        ("out_dtype is torch.int32", "torch.float32, torch.float16, torch.bfloat16"),
    ),
    "out_dtype-fp8": (
        padded(out_dtype=torch.float8_e4m3fn),
        TypeError,
        ("out_dtype is torch.float8_e4m3fn", "torch.bfloat16"),
    ),
    "out_dtype-text": (
        padded(out_dtype="float16"),
        TypeError,
        ("out_dtype is 'float16'", "torch."),
    ),
    "alibi_slopes-dtype": (
        padded(alibi_slopes=rand(4, dtype=torch.float16)),
        TypeError,
        ("alibi_slopes has dtype torch.float16", "torch.float32"),
    ),
    "alibi_slopes-shape": (
        padded(alibi_slopes=rand(2)),
        ValueError,
        ("alibi_slopes has shape (2,)", "(4,) or (2, 4)", "(heads_q,) or (batch, heads_q)"),
    ),
    "key_ranges-dtype": (
        padded(key_ranges=torch.zeros(1, 1, 7, 1, 2, dtype=torch.int64)),
        TypeError,
        ("key_ranges has dtype torch.int64", "torch.int32"),
    ),
    "key_ranges-shape": (
        padded(key_ranges=torch.zeros(2, 2, 7, 1, 2, dtype=torch.int32)),
        ValueError,
        ("key_ranges has shape (2, 2, 7, 1, 2)", "(2 or 1, 4 or 1, 7 or 1, n, 2), with n from 1"),
    ),
    "key_ranges-too-many": (
        padded(key_ranges=torch.zeros(1, 1, 7, 5, 2, dtype=torch.int32)),
        ValueError,
        ("key_ranges has shape (1, 1, 7, 5, 2)", "n from 1 to 4"),
    ),
    "key_ranges-strided": (
        padded(key_ranges=torch.zeros(1, 1, 7, 2, 2, dtype=torch.int32).mT),
        ValueError,
        ("key_ranges has strided ranges", "call .contiguous()"),
    ),
    "key_ranges-packed": (
        packed(key_ranges=torch.zeros(1, 1, 7, 1, 2, dtype=torch.int32)),
        ValueError,
        ("key_ranges is given with cu_seqlens", "use causal or window"),
    ),
    "block_mask-dtype": (
        padded(block_mask=torch.zeros(1, 1, 1, 1)),
        TypeError,
        ("block_mask has dtype torch.float32", "torch.bool or torch.int8"),
    ),
    "block_mask-shape": (
        padded(block_mask=torch.zeros(1, 1, 7, 9, dtype=torch.bool)),
        ValueError,
        ("block_mask has shape (1, 1, 7, 9)", "(2 or 1, 4 or 1, 1, 1)", "64 rows and 64 keys"),
    ),
    "block_mask-packed": (
        packed(block_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool)),
        ValueError,
        ("block_mask is given with cu_seqlens",),
    ),
    "approximate": (
        padded(approximate="fast"),
        ValueError,
        ("approximate is 'fast'", "it must be 'int8_qk', 'int8', "),
    ),
    "num_splits": (
        padded(num_splits=0),
        ValueError,
        ("num_splits is 0", "it must be at least 1, or None for the plan to choose"),
    ),
    "num_splits-negative": (padded(num_splits=-4), ValueError, ("num_splits is -4", "at least 1")),
    "num_splits-huge": (padded(num_splits=1 << 60), ValueError, ("num_splits is ", "2^60")),
    "num_splits-bool": (padded(num_splits=True), TypeError, ("num_splits is True", "an int")),
    "num_splits-float": (padded(num_splits=2.0), TypeError, ("num_splits is 2.0", "an int")),
    "num_splits-tensor": (
        padded(num_splits=torch.tensor(2)),
        TypeError,
        ("num_splits is a torch.Tensor", "an int"),
    ),
    "num_splits-invariant": (
        padded(num_splits=2, batch_invariant=True),
        ValueError,
        ("num_splits is given with batch_invariant=True", "splits keys by their"),
    ),
    "dropout-invariant": (
        padded(dropout_p=0.1, rng_state=torch.zeros(2, dtype=torch.int64), batch_invariant=True),
        ValueError,
        ("dropout_p is 0.1 with batch_invariant=True", "depends on the place in the batch"),
    ),
    "rng_state-dtype": (
        padded(dropout_p=0.1, rng_state=torch.zeros(2)),
        TypeError,
        ("rng_state has dtype torch.float32", "must be torch.int64"),
    ),
    "rng_state-shape": (
        padded(dropout_p=0.1, rng_state=torch.zeros(3, dtype=torch.int64)),
        ValueError,
        ("rng_state has shape (3,)", "(2,), contiguous, seed and offset"),
    ),
    "key_indices-fp8": (
        fp8(key_indices=torch.zeros(2, 7, 16, dtype=torch.int32)),
        TypeError,
        ("float8_e4m3fn with key_indices", "must not be float8; convert them"),
    ),
    "num_splits-forced": (
        padded(num_splits=2, implementation="simt"),
        archflash.ForcedImplementationError,
        ("num_splits 2: simt does not split the keys", "leave num_splits out or pass 1"),
    ),
    # the implementation
    "implementation-unknown": (
        padded(implementation="volta"),
        archflash.ForcedImplementationError,
        ("no implementation is called 'volta'", "simt, torch"),
    ),
    "implementation-of-the-wrong-kind": (
        padded(implementation=7),
        archflash.ForcedImplementationError,
        ("no implementation is called 7", "simt, torch"),
    ),
}

every_wrong_call = pytest.mark.parametrize("name", WRONG)


def assert_the_next_good_call_works() -> None:
    for good in (padded(), packed()):
        out = archflash.attention(**good)
        expected, _ = reference.attention(**good)
        assert reference.check(out, expected, reference.baseline(**good)).ok


@every_wrong_call
def test_a_wrong_call_raises_and_says_what_to_do(name: str) -> None:
    call, error, parts = WRONG[name]
    for _ in range(2):
        with pytest.raises(error) as caught:
            archflash.attention(**call)
        for part in parts:
            assert part in str(caught.value)
        # What the binding layer says of its own signature helps no user.
        assert "incompatible function arguments" not in str(caught.value)
        assert not re.search(r"0x[0-9a-f]{6,}|nanobind|std::", str(caught.value))
        assert_the_next_good_call_works()


# explain has no addresses.
@pytest.mark.parametrize("name", [name for name in WRONG if name not in ("out-is-k", "out-is-v")])
def test_explain_refuses_the_same_calls(name: str) -> None:
    call, error, parts = WRONG[name]
    with pytest.raises(error) as caught:
        archflash.explain(**call, device="H200")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "name", [name for name in WRONG if "implementation" not in name and "forced" not in name]
)
def test_a_wrong_call_is_refused_before_anything_is_decided(name: str) -> None:
    call, error, _ = WRONG[name]
    asked: list[object] = []
    native.set_decide(lambda *arguments: asked.append(arguments))
    try:
        with pytest.raises(error):
            archflash.attention(**call)
    finally:
        native.set_decide(archflash._dispatch.decide)
        native.clear_cache()
    assert asked == []


def test_float64_calls_take_float64_sinks() -> None:
    call = {name: x.double() for name, x in padded(sinks=rand(4)).items()}
    out = archflash.attention(**call)
    expected, _ = reference.attention(**call)
    assert reference.check(out, expected, reference.baseline(**call)).ok


def test_the_errors_are_of_one_family() -> None:
    for error in (
        archflash.UnsupportedError,
        archflash.NotCompiledError,
        archflash.ForcedImplementationError,
        archflash.LaunchError,
    ):
        assert issubclass(error, archflash.ArchflashError)
        assert not issubclass(error, (ValueError, TypeError))


def test_a_misspelt_argument_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="is_causal"):
        archflash.attention(**padded(is_causal=True))
    with pytest.raises(TypeError, match="is_causal"):
        archflash.explain(**padded(is_causal=True), device="H200")


# --- what kernels refuse and torch serves ---


def half_aligned() -> Tensor:
    """Rows of 16 bytes that start 4 bytes past an aligned address."""
    return torch.empty(2 * 2 * 5 * 64 + 1)[1:].view(2, 2, 5, 64)


def narrow_rows() -> Tensor:
    """Rows whose stride is no multiple of 16 bytes."""
    return torch.empty(2, 2, 5, 66)[..., :64]


def strided_columns() -> Tensor:
    return torch.empty(2, 2, 5, 128)[..., ::2]


def plain(d: int = 64) -> Tensor:
    return torch.empty(2, 2, 5, d)


# id: (the call, the start of every reason that simt gives)
LIMITS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "softcap-tiny": (
        {"q": plain(), "k": plain(), "v": plain(), "softcap": 1e-40},
        ("softcap 1e-40 with this scale: simt computes in fp32",),
    ),
    "D-520": (
        {"q": plain(520), "k": plain(520), "v": plain(520)},
        ("head_dim 520: simt takes", "value head_dim 520: simt takes"),
    ),
    "D-999": (
        {"q": plain(999), "k": plain(999), "v": strided_columns()},
        ("head_dim 1000 (999 and columns of zeros): simt takes multiples of 8 up to ",),
    ),
    "attn_mask": (
        {"q": plain(), "k": plain(), "v": plain(), "attn_mask": torch.ones(5, 5).double()},
        ("attn_mask of dtype float64 with float32 inputs: simt takes bool, float32",),
    ),
    "out_dtype": (
        {"q": plain(), "k": plain(), "v": plain(), "out_dtype": torch.bfloat16},
        ("out_dtype bfloat16 with float32 inputs",),
    ),
}

every_limit = pytest.mark.parametrize("name", LIMITS)


@every_limit
def test_beyond_a_kernels_limits_torch_serves_with_the_reason(name: str) -> None:
    call, starts = LIMITS[name]
    decision = archflash.explain(**call, device="H200")
    assert decision.chosen == "torch"
    assert decision.fallback
    reasons = decision.reasons["simt"]
    assert len(reasons) == len(starts)
    for reason, start in zip(reasons, starts, strict=True):
        assert reason.startswith(start)
        assert "torch" in reason
        assert f"  not     simt: {reason}" in str(decision)


@every_limit
def test_beyond_its_limits_a_forced_kernel_raises_with_the_reason(name: str) -> None:
    call, starts = LIMITS[name]
    with pytest.raises(archflash.ForcedImplementationError) as caught:
        archflash.explain(**call, device="H200", implementation="simt")
    for start in starts:
        assert f"\n  {start}" in str(caught.value)


@every_limit
def test_beyond_a_kernels_limits_torch_gives_the_right_answer(name: str) -> None:
    call, _ = LIMITS[name]
    for operand in "qkv":  # in place: the strides and addresses are what matters
        call[operand].detach().copy_(rand(*call[operand].shape))
    out = archflash.attention(**call)
    if "out" in call:
        assert out is call["out"]
    options = {key: value for key, value in call.items() if key != "out"}
    options |= {operand: call[operand].detach() for operand in "qkv"}
    expected, _ = reference.attention(**options)
    assert reference.check(out.detach(), expected, reference.baseline(**options)).ok


# id: (the call, what explain says of its copies)
COPIED: dict[str, tuple[dict[str, Any], str]] = {
    "D-44": (
        {"q": plain(44), "k": plain(44), "v": plain()},
        "q (rows of 176 bytes as 192) and k (rows of 176 bytes as 192) into the workspace: ",
    ),
    "Dv-44": (
        {"q": plain(), "k": plain(), "v": plain(44)},
        "v (rows of 176 bytes as 192) into the workspace, out (rows of 176 bytes as 192) from ",
    ),
    "D-4": (
        {"q": plain(4), "k": plain(4), "v": plain()},
        "q (rows of 16 bytes as 32) and k (rows of 16 bytes as 32) into the workspace: ",
    ),
    "q-strided": (
        {"q": strided_columns(), "k": plain(), "v": plain()},
        "q (a strided last dimension) into the workspace: ",
    ),
    "v-transposed": (
        {"q": plain(), "k": plain(), "v": torch.empty(2, 2, 64, 5).mT},
        "v (a strided last dimension) into the workspace: ",
    ),
    "out-strided": (
        {"q": plain(), "k": plain(), "v": plain(), "out": strided_columns()},
        "out (a strided last dimension) from there: ",
    ),
    "q-misaligned": (
        {"q": half_aligned(), "k": plain(), "v": plain()},
        "q (rows at no multiples of 16 bytes) into the workspace: ",
    ),
    "k-row-stride": (
        {"q": plain(), "k": narrow_rows(), "v": plain()},
        "k (rows at no multiples of 16 bytes) into the workspace: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIED)
def test_what_a_kernel_cannot_read_is_copied_and_explain_says_so(name: str) -> None:
    call, said = COPIED[name]
    decision = archflash.explain(**call, device="H200")
    assert decision.chosen == "simt"
    plan = decision.plan
    assert plan is not None
    facts = dict(plan.notes)
    assert facts["copies"].startswith(said)
    assert facts["copies"].endswith("0 MB are read and written beside the call's own")
    assert f"copies: {said}" in str(decision)
    assert ("copy_gather" in plan.kernels) == ("into the workspace" in said)
    assert ("copy_scatter" in plan.kernels) == ("out (" in said)
    assert plan.workspace_bytes > 0
    whole = archflash.explain(plain(), plain(), plain(), device="H200").plan
    assert whole is not None
    assert "copies" not in dict(whole.notes)


def test_a_copy_repeats_no_head_and_no_batch() -> None:
    """K and V of one head and one sequence, which others see by strides of 0."""
    q = torch.empty(4, 8, 100, 44)
    k = torch.empty(1, 1, 100, 44).expand(4, 8, -1, -1)
    plans = [
        archflash.explain(q, x, x, device="H200", implementation="simt").plan
        for x in (k, torch.empty(4, 8, 100, 44))
    ]
    shared, apart = (plan.workspace_bytes for plan in plans if plan is not None)
    assert apart - shared == 2 * (4 * 8 - 1) * 100 * 48 * 4


def test_caches_are_never_copied() -> None:
    q, cache = torch.empty(2, 1, 2, 44), torch.empty(2, 64, 2, 44)
    lengths = torch.zeros(2, dtype=torch.int32)
    decision = archflash.explain(q, cache, cache, cache_seqlens=lengths, device="H200")
    assert decision.chosen == "torch"
    assert any(reason.startswith("head_dim 44: ") for reason in decision.reasons["simt"])


def test_negative_sides_of_a_window_are_unbounded() -> None:
    problems = [
        archflash.explain(**padded(window=window), device="H200").problem
        for window in ((-1, 0), (None, 0), (-7, 0))
    ]
    assert problems[0] == problems[1] == problems[2]
    q, k, v = (padded()[name] for name in "qkv")
    for window, same in (((-1, -1), None), ((2, -1), (2, None)), ((-3, 1), (None, 1))):
        one, other = (archflash.attention(q, k, v, window=w) for w in (window, same))
        assert torch.equal(one, other)
        exact, _ = reference.attention(q, k, v, window=window)
        assert reference.check(one, exact, reference.baseline(q, k, v, window=same)).ok


def test_the_layout_of_keys_matters_only_where_there_are_keys() -> None:
    def misaligned(rows: int) -> Tensor:
        return torch.empty(2, 2, rows, 66)[..., :64]

    none, some = (
        archflash.explain(plain(), misaligned(rows), misaligned(rows), device="H200").plan
        for rows in (0, 5)
    )
    assert none is not None
    assert some is not None
    assert "copy_gather" not in none.kernels
    assert "copy_gather" in some.kernels


def test_without_grad_mode_a_kernel_serves_tensors_that_require_grad() -> None:
    q = plain().requires_grad_()
    with torch.no_grad():
        assert archflash.explain(q, q, q, device="H200").chosen == "simt"
    assert archflash.explain(q, q, q, device="H200").chosen == "torch"


@pytest.mark.parametrize("option", ["block_mask", "attn_mask"])
def test_who_passes_flex_attentions_block_mask_is_told_what_to_pass(option: str) -> None:
    from torch.nn.attention.flex_attention import BlockMask  # not at once: it takes a second

    blocks = torch.zeros(1, 1, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(blocks, blocks[..., None], BLOCK_SIZE=64)
    with pytest.raises(TypeError, match=rf"{option} is a .*BlockMask.* archflash.masks.from_flex"):
        archflash.attention(**padded(**{option: mask}))
