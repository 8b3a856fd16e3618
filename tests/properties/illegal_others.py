"""Calls of other libraries' functions, each of whose arguments is spoiled in turn."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archflash.compat import flash_attn, flash_attn_interface, flash_mla, sageattention, sageattn3
from archflash.compat.flash_attn import bert_padding, cute
from archflash.compat.xformers.ops import fmha

Call = dict[str, Any]
Options = Mapping[str, Mapping[str, Any]]  # wrong values of arguments, by what is wrong


_OF_ALL = ("max_seqlen_q", "max_seqlen_k")  # such a function gives them itself


@dataclass(frozen=True)
class Legal:
    """A right call of a function.

    Attributes:
        function: what is called.
        given: its arguments.
        arguments: the names of all; of functions that hand `*args` on those of the other one.
    """

    function: Callable[..., Any]
    given: Call
    like: Callable[..., Any] | None = None

    def arguments(self, options: Iterable[str]) -> list[str]:
        """Those that are given, and those of `options`."""
        names = [*inspect.signature(self.function).parameters]
        if "args" in names and self.like is not None:
            others = inspect.signature(self.like).parameters
            names = [*self.given, *(x for x in others if x not in (*self.given, *_OF_ALL))]
        return [x for x in names if x in self.given or x in options]

    def call(self, **other: Any) -> Any:
        """The call with copies of the caches, which may be written, and with other arguments."""
        return self.function(**self.given | other)


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def legal_calls() -> dict[str, Legal]:
    """By name."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16)
    qv, wide_v = torch.randn(2, 5, 4, 32), torch.randn(2, 7, 2, 32)
    packed = {
        "q": torch.randn(5, 4, 16), "k": torch.randn(7, 2, 16), "v": torch.randn(7, 2, 16),
        "cu_seqlens_q": int32(0, 3, 5), "cu_seqlens_k": int32(0, 3, 7), "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }  # fmt: skip
    ends = {name: packed[name] for name in packed if name not in "qkv"}
    used = {"seqused_q": int32(2, 1), "seqused_k": int32(2, 1)}
    caches = {"k_cache": torch.randn(2, 16, 2, 16), "v_cache": torch.randn(2, 16, 2, 16)}
    pages = {"k_cache": torch.randn(6, 8, 2, 16), "v_cache": torch.randn(6, 8, 2, 16)}
    lengths, table = {"cache_seqlens": int32(5, 3)}, int32([0, 1], [2, 3])
    new = {"k": k[:, :5].contiguous(), "v": k[:, :5].contiguous()}
    turned = {"rotary_cos": torch.ones(32, 8), "rotary_sin": torch.zeros(32, 8)}
    rows = {"k": packed["k"], "v": packed["v"], "cu_seqlens_k_new": packed["cu_seqlens_k"]}
    latent, pool = torch.randn(2, 1, 2, 576), torch.randn(3, 8, 1, 576)
    halves = latent.bfloat16()  # which kernels serve
    lists, sink, counts = int32([[0, 1]], [[3, -1]]), torch.zeros(2), int32(1, 2)
    bytes_ = torch.zeros(3, 8, 1, 656, dtype=torch.uint8).view(torch.float8_e4m3fn)
    of_k = {"k": k, "v": k}
    fa2, fa3 = flash_attn, flash_attn_interface
    three, heads_first = torch.stack([k, k, k], 2), q.transpose(1, 2)
    return {
        "2": Legal(fa2.flash_attn_func, {"q": q, **of_k}),
        "2, kv": Legal(
            fa2.flash_attn_kvpacked_func, {"q": q, "kv": three[:, :, 1:]}, fa2.flash_attn_func
        ),
        "2, qkv": Legal(fa2.flash_attn_qkvpacked_func, {"qkv": three}, fa2.flash_attn_func),
        "2, packed": Legal(fa2.flash_attn_varlen_func, packed),
        "2, packed kv": Legal(
            fa2.flash_attn_varlen_kvpacked_func,
            {"q": packed["q"], "kv": torch.stack([packed["k"], packed["v"]], 1), **ends},
            fa2.flash_attn_varlen_func,
        ),
        "2, packed qkv": Legal(
            fa2.flash_attn_varlen_qkvpacked_func,
            {"qkv": three[0], "cu_seqlens": int32(0, 3, 7), "max_seqlen": 4},
            fa2.flash_attn_varlen_func,
        ),
        "2, packed pages": Legal(
            fa2.flash_attn_varlen_func,
            {**packed, "k": pages["k_cache"], "v": pages["v_cache"], "block_table": table},
        ),
        "2, cache": Legal(fa2.flash_attn_with_kvcache, {"q": q, **caches, **new, **lengths}),
        "2, cache, turned": Legal(
            fa2.flash_attn_with_kvcache,
            {"q": q, **caches, **new, **lengths, **turned, "cache_leftpad": int32(0, 0)},
        ),
        "2, pages": Legal(
            fa2.flash_attn_with_kvcache, {"q": q, **pages, **lengths, "block_table": table}
        ),
        "3": Legal(fa3.flash_attn_func, {"q": q, **of_k}),
        "3, qv": Legal(fa3.flash_attn_func, {"q": q, "k": k, "v": wide_v, "qv": qv}),
        "3, qkv": Legal(fa3.flash_attn_qkvpacked_func, {"qkv": three}),
        "3, heads": Legal(
            fa3.flash_attn_qkvpacked_func, {"qkv": torch.randn(2, 7, 6, 16), "num_heads_q": 2}
        ),
        "3, packed": Legal(fa3.flash_attn_varlen_func, packed),
        "3, packed, qv": Legal(
            fa3.flash_attn_varlen_func, {**packed, "v": wide_v[0], "qv": qv.flatten(0, 1)[:5]}
        ),
        "3, packed, used": Legal(fa3.flash_attn_varlen_func, {**packed, **used}),
        "3, cache": Legal(fa3.flash_attn_with_kvcache, {"q": q, **caches, **new, **lengths}),
        "3, cache, qv": Legal(
            fa3.flash_attn_with_kvcache,
            {"q": q, **caches, "v_cache": torch.randn(2, 16, 2, 32), "qv": qv, **lengths},
        ),
        "3, pages": Legal(
            fa3.flash_attn_with_kvcache,
            {"q": q, **pages, **lengths, "page_table": table, "cache_batch_idx": int32(1, 0)},
        ),
        "3, cache, packed": Legal(
            fa3.flash_attn_with_kvcache,
            {
                "q": packed["q"], **caches, **rows, **lengths, **turned,
                "cu_seqlens_q": packed["cu_seqlens_q"], "max_seqlen_q": 3,
                "rotary_seqlens": int32(5, 3),
            },
        ),
        "3, combine": Legal(
            fa3.flash_attn_combine,
            {"out_partial": torch.randn(2, 2, 5, 4, 16), "lse_partial": torch.randn(2, 2, 5, 4)},
        ),
        "4": Legal(cute.flash_attn_func, {"q": q, **of_k}),
        "4, qv": Legal(cute.flash_attn_func, {"q": q, "k": k, "v": wide_v, "qv": qv}),
        "4, lists": Legal(
            cute.flash_attn_func,
            {
                "q": torch.randn(2, 5, 4, 64), "k": torch.randn(2, 7, 1, 64),
                "v": torch.randn(2, 7, 1, 512), "qv": torch.randn(2, 5, 4, 512),
                "gather_kv_indices": torch.zeros(2, 5, 3, dtype=torch.int32),
            },
        ),
        "4, packed": Legal(cute.flash_attn_varlen_func, packed),
        "4, sizes": Legal(cute.flash_attn_varlen_func, {"q": q, **of_k, **used}),
        "4, pages": Legal(
            cute.flash_attn_varlen_func,
            {
                "q": packed["q"], "k": pages["k_cache"], "v": pages["v_cache"],
                "cu_seqlens_q": packed["cu_seqlens_q"], "max_seqlen_q": 3, "page_table": table,
                "seqused_k": int32(5, 3),
            },
        ),
        "MLA": Legal(
            flash_mla.flash_mla_with_kvcache,
            {
                "q": latent, "k_cache": pool, "block_table": int32([0, 1], [2, 0]), **lengths,
                "head_dim_v": 512,
            },
        ),
        "MLA, lists": Legal(
            flash_mla.flash_mla_with_kvcache,
            {
                "q": halves, "k_cache": pool.bfloat16(), "block_table": None, "cache_seqlens": None,
                "head_dim_v": 512, "indices": lists, "attn_sink": sink, "topk_length": counts,
                "extra_k_cache": pool.bfloat16(), "extra_indices_in_kvcache": lists,
                "extra_topk_length": counts,
            },
        ),
        "MLA, bytes": Legal(
            flash_mla.flash_mla_with_kvcache,
            {
                "q": halves, "k_cache": bytes_, "block_table": None,
                "cache_seqlens": None, "head_dim_v": 512, "indices": lists,
                "is_fp8_kvcache": True,
            },
        ),
        "MLA, prefill": Legal(
            flash_mla.flash_mla_sparse_fwd,
            {
                "q": latent[:, 0], "kv": pool.flatten(0, 1), "indices": lists, "sm_scale": 0.1,
                "attn_sink": sink, "topk_length": counts,
            },
        ),
        "sage": Legal(sageattention.sageattn, dict.fromkeys("qkv", heads_first)),
        "sage, packed": Legal(sageattention.sageattn_varlen, packed),
        "sage 3": Legal(sageattn3.sageattn3_blackwell, dict.fromkeys("qkv", heads_first)),
        "xformers": Legal(
            fmha.memory_efficient_attention,
            {**dict.fromkeys(("query", "key", "value"), q), "p": 0.0, "scale": 0.3},
        ),
        "unpad": Legal(
            bert_padding.unpad_input,
            {
                "hidden_states": torch.randn(2, 5, 3),
                "attention_mask": torch.ones(2, 5, dtype=torch.int64),
            },
        ),
        "pad": Legal(
            bert_padding.pad_input,
            {
                "hidden_states": torch.randn(4, 3), "indices": torch.tensor([0, 2, 5, 6]),
                "batch": 2, "seqlen": 5,
            },
        ),
    }  # fmt: skip


_NUMBER = {"text": "a", "NaN": math.nan, "list": [1.0]}
_COUNT = {"text": "a", "below 0": -2, "fraction": 1.5, "list": [1], "huge": 1 << 70}
_BOOL = {"text": "yes", "list": [1], "two": torch.ones(2)}
_HEADS = {"list": [1.0], "of too many heads": torch.ones(5), "of another rank": torch.ones(1, 1, 4)}
_LENGTHS = {"list": [0, 1], "of 64 bits": torch.tensor([0, 1]), "of three": int32(0, 1, 1)}
# Wrong values of arguments that are no tensors, or that most calls leave out.
OPTIONS: Options = {
    "softmax_scale": _NUMBER,
    "sm_scale": _NUMBER,
    "causal": _BOOL,
    "is_causal": _BOOL,
    "window_size": {
        "number": 4, "three": (1, 2, 3), "text": "ab", "texts": ("a", "b"), "fraction": (1.5, 2),
        "none": None, "tensor of three": torch.tensor([1, 2, 3]),
    },
    "softcap": {**_NUMBER, "below 0": -1.0},
    "dropout_p": {**_NUMBER, "below 0": -0.5, "one": 1.0},
    "alibi_slopes": {**_HEADS, "halves": torch.ones(4, dtype=torch.float16)},
    "s_aux": {**_HEADS, "integers": torch.ones(4, dtype=torch.int64)},
    "learnable_sink": _HEADS,
    "num_splits": _COUNT,
    "attention_chunk": _COUNT,
    "deterministic": _BOOL,
    "return_attn_probs": {"text": "yes", "list": [1]},
    "return_softmax_lse": {"text": "yes"},
    "return_lse": {"text": "yes"},
    "qv": {
        "list": [1.0], "of other columns": torch.randn(2, 5, 4, 3), "of one dimension":
        torch.randn(3), "of other heads": torch.randn(2, 5, 3, 32),
        "of integers": torch.zeros(2, 5, 4, 32, dtype=torch.int32),
    },
    "q_descale": {"list": [1.0], "of seven": torch.ones(7)},
    "k_descale": {"list": [1.0], "of seven": torch.ones(7)},
    "v_descale": {"list": [1.0], "of seven": torch.ones(7)},
    "sm_margin": {"one": 1, "text": "a"},
    "rotary_interleaved": {"text": "a"},
    "cache_batch_idx": _LENGTHS,
    "cache_leftpad": _LENGTHS,
    "max_seqlen_q": _COUNT,
    "max_seqlen_k": _COUNT,
    "max_seqlen": _COUNT,
    "head_dim_v": {"text": "a", "too large": 900, "huge": 1 << 70, "below 0": -1, "fraction": 1.5},
    "num_heads_q": {"text": "a", "too large": 9, "huge": 1 << 70, "below 0": -2, "odd": 1},
    "is_fp8_kvcache": {"text": "yes"},
    "cache_seqlens": {"below 0": -1, "text": "a", "fraction": 1.5, "huge": 1 << 40},
    "out": {"list": [1.0], "of another shape": torch.zeros(3)},
    "out_dtype": {"text": "a", "of integers": torch.int32},
    "gather_kv_indices": {
        "list": [1], "of 64 bits": torch.zeros(2, 5, 3, dtype=torch.int64), "of two dimensions":
        torch.zeros(5, 3, dtype=torch.int32),
    },
    "tensor_layout": {"unknown": "XYZ"},
    "batch": {"text": "a", "below 0": -1, "huge": 1 << 40},
    "seqlen": {"text": "a", "below 0": -1, "huge": 1 << 80},
    "seqused_q": {"list": [1, 2]},
    "seqused_k": {"list": [1, 2]},
    "page_table": {"list": [1, 2]},
    "block_table": {"list": [1, 2]},
    "attn_sink": {"list": [1.0, 2.0], "of three": torch.zeros(3)},
    "topk_length": {"list": [1]},
    "d_v": {"other": 256},
}  # fmt: skip

# What some calls do not read: hints, and what other arguments take the place of.
UNREAD = {
    ("2, packed pages", "max_seqlen_k"), ("4, pages", "max_seqlen_k"), ("4, sizes", "max_seqlen_k"),
    ("4, sizes", "max_seqlen_q"), ("MLA", "num_splits"), ("MLA, lists", "num_splits"),
    ("MLA, bytes", "num_splits"), ("MLA, lists", "block_table"), ("MLA, bytes", "block_table"),
    ("MLA, lists", "cache_seqlens"), ("MLA, bytes", "cache_seqlens"), ("3, qkv", "num_heads_q"),
}  # fmt: skip
# Changed tensors that make another right call.
RIGHT: set[tuple[str, ...]] = {
    *((x, "other columns") for x in ("v", "v_cache", "qkv", "out_partial", "hidden_states")),
    ("value", "other columns"),
    *((x, "float64") for x in ("qkv", "rotary_cos", "rotary_sin", "lse_partial", "out_partial")),
    *(("hidden_states", x) for x in ("complex", "integers", "meta", "float64")),
    ("qkv", "meta"), ("attn_sink", "float64"), ("attention_mask", "integers"),
    ("page_table", "one more"), ("cu_seqlens", "one more"), ("indices", "meta"),
    ("pad", "indices", "integers"),
    ("sage, packed", "cu_seqlens_q", "of 64 bits"), ("sage, packed", "cu_seqlens_k", "of 64 bits"),
    ("pad", "indices", "integers"),
}  # fmt: skip


def _spoiled_tensors(x: Tensor) -> Iterator[tuple[str, Any]]:
    yield "list", [[1.0]]
    yield "text", "a"
    yield "none", None
    yield "one dimension more", x[None]
    yield "one dimension less", x[0]
    yield "a number", torch.ones((), dtype=x.dtype)
    yield "complex", torch.zeros(x.shape, dtype=torch.complex64)
    yield "meta", torch.empty_like(x, device="meta")
    if x.dtype == torch.int32:
        yield "of 64 bits", x.long()
        yield "of floats", x.float()
        yield "one more", torch.cat([x, x[:1]])
        yield "empty", x[:0]
    else:
        yield "integers", torch.zeros(x.shape, dtype=torch.int32)
    if x.is_floating_point() and x.dtype.itemsize > 1:
        yield "other columns", x[..., :-1]
        yield "float64", x.double()


def spoiled(
    name: str, legal: Legal, options: Options = OPTIONS, right: set[tuple[str, ...]] = RIGHT
) -> Iterator[tuple[str, str, Any]]:
    """An argument, what is wrong with it, and its value."""
    parameters = inspect.signature(legal.function).parameters
    for argument in legal.arguments(options):
        if (name, argument) in UNREAD:
            continue
        given, values = legal.given.get(argument), dict(options.get(argument, {}))
        if isinstance(given, Tensor):
            optional = argument in parameters and "None" in str(parameters[argument].annotation)
            values |= {
                what: value
                for what, value in _spoiled_tensors(given)
                if not (what == "none" and optional)
            }
        for what, value in values.items():
            if not {(argument, what), (name, argument, what)} & right:
                yield argument, what, value
