"""Calls of archflash's functions beside attention, each of whose arguments is spoiled in turn."""

from __future__ import annotations

import math
from typing import Any

import torch

import archflash
from archflash import masks
from tests.properties.illegal_others import Legal, Options, int32


def legal_calls() -> dict[str, Legal]:
    """By name."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 64), torch.randn(2, 2, 7, 64)
    lists = torch.zeros(2, 1, 5, 3, dtype=torch.int32)
    listed = {"key_indices": lists, "topk_lengths": torch.ones(2, 1, 5, dtype=torch.int32)}
    latent, pool = torch.randn(2, 1, 2, 576), torch.randn(3, 64, 1, 576)
    rows = torch.zeros(3, 64, 1, 656, dtype=torch.uint8)
    sparse: dict[str, Any] = {
        "key_indices": int32([[[0, 1]]], [[[3, -1]]]), "topk_lengths": int32([[1]], [[2]]),
        "physical_indices": True, "scale": 0.1,
    }  # fmt: skip
    outs, lses = [torch.randn(2, 4, 5, 64)] * 2, [torch.randn(2, 4, 5)] * 2
    caches = {"k_cache": torch.randn(2, 16, 2, 64), "v_cache": torch.randn(2, 16, 2, 64)}
    new = {x: torch.randn(2, 5, 2, 64) for x in ("k_new", "v_new")}
    prefix = {"k_prefix": torch.randn(1, 8, 2, 64), "v_prefix": torch.randn(1, 8, 2, 64)}
    blocks = {"block_size": (64, 64), "nq": 100, "nk": 150}
    table = torch.ones(1, 2, 2, 3, dtype=torch.bool)
    out, lse = archflash.attention(q, k, k, return_lse=True)
    of_gradients = {"dout": out, "q": q, "k": k, "v": k, "out": out, "lse": lse}
    return {
        "dropped weights": Legal(archflash.attention, {"q": q, "k": k, "v": k, "dropout_p": 0.3}),
        "explained dropout": Legal(
            archflash.explain, {"q": q, "k": k, "v": k, "dropout_p": 0.3, "device": "H200"}
        ),
        "gradients": Legal(archflash.attention_backward, of_gradients),
        "checked": Legal(
            archflash.attention_with_kvcache,
            {
                "q": q.transpose(1, 2), **caches, "cache_seqlens": int32(5, 3), "check": True,
            },
        ),
        "pages of a prefix": Legal(
            archflash.attention_with_shared_prefix,
            {
                "q": q.transpose(1, 2), "k_prefix": caches["k_cache"], "v_prefix":
                caches["v_cache"], "prefix_page_table": int32([0, 1]), **caches,
                "cache_seqlens": int32(5, 3),
            },
        ),
        "lists": Legal(archflash.attention, {"q": q, "k": k, "v": k, **listed}),
        "approximate": Legal(
            archflash.attention,
            {"q": q.half(), "k": k.half(), "v": k.half(), "approximate": "int8"},
        ),
        "MLA": Legal(
            archflash.attention_with_kvcache, {"q": latent, "k_cache": pool, "dv": 512, **sparse}
        ),
        "packed rows": Legal(
            archflash.attention_with_kvcache,
            {"q": latent.bfloat16(), "k_cache": rows, "packed_rows": "fp8_656", **sparse},
        ),
        "prefix": Legal(
            archflash.attention_with_shared_prefix,
            {"q": q.transpose(1, 2), **prefix, **caches, "cache_seqlens": int32(5, 3), **new},
        ),
        "merge": Legal(archflash.merge_attention, {"outs": outs, "lses": lses}),
        "fp8": Legal(archflash.quantize_fp8, {"x": q}),
        "nvfp4": Legal(archflash.quantize_nvfp4, {"x": q, "dim": -1}),
        "mxfp8": Legal(archflash.quantize_mxfp8, {"x": q, "dim": -1}),
        "stored nvfp4": Legal(
            archflash.attention_nvfp4,
            {
                "q": archflash.quantize_nvfp4(q), "k": archflash.quantize_nvfp4(k),
                "v": archflash.quantize_nvfp4(k, dim=-2),
            },
        ),
        "dropout": Legal(
            archflash.dropout_mask,
            {"shape": (1, 2, 3, 4), "dropout_p": 0.3, "rng_state": torch.zeros(2).long()},
        ),
        "summary": Legal(archflash.summarize_mask, {"attn_mask": torch.ones(70, 70).bool()}),
        "documents": Legal(masks.documents, {"ids": torch.tensor([0, 0, 1])}),
        "prefix_lm": Legal(masks.prefix_lm, {"lengths": torch.tensor([2, 3]), "nq": 5}),
        "spans": Legal(
            masks.bidirectional_spans, {"spans": torch.tensor([[[0, 2]], [[1, 3]]]), "nq": 5}
        ),
        "window": Legal(
            masks.sliding_window_with_global, {"nq": 5, "left": 2, "global_keys": 1}
        ),
        "tree": Legal(masks.tree, {"parents": [-1, 0, 0], "past": 4}),
        "dense": Legal(
            masks.to_dense, {"key_ranges": torch.zeros(1, 1, 5, 1, 2, dtype=torch.int32), "nk": 7}
        ),
        "from_key_indices": Legal(masks.from_key_indices, {**listed, "nq": 5, "nk": 7}),
        "from_blocks": Legal(masks.from_blocks, {"table": table, **blocks}),
        "from_block_lists": Legal(
            masks.from_block_lists,
            {
                "indices": torch.zeros(1, 2, 2, 3, dtype=torch.int32),
                "counts": torch.ones(1, 2, 2, dtype=torch.int32), **blocks,
            },
        ),
        "from_bsr": Legal(
            masks.from_bsr, {"indptr": int32(0, 1, 2), "indices": int32(0, 1), **blocks}
        ),
        "from_ragged_blocks": Legal(
            masks.from_ragged_blocks,
            {
                "table": table[0], "row_sizes": int32([50, 50]), "key_sizes": int32([50, 50, 50]),
                "nq": 100, "nk": 150,
            },
        ),
        "from_chunks": Legal(
            masks.from_chunks,
            {"chunks": torch.zeros(1, 2, 5, 2, dtype=torch.int32), "chunk_size": 16, "nk": 100},
        ),
        "from_vertical_and_slash": Legal(
            masks.from_vertical_and_slash,
            {
                "vertical": torch.zeros(1, 2, 3, dtype=torch.int32),
                "slash": torch.zeros(1, 2, 2, dtype=torch.int32), "nq": 100, "nk": 150,
            },
        ),
        "tile_order": Legal(masks.tile_order, {"canvas": (4, 4, 4), "tile": (2, 2, 2)}),
        "from_query_ranges": Legal(
            masks.from_query_ranges,
            {"query_ranges": torch.zeros(1, 1, 7, 1, 2, dtype=torch.int32), "nq": 5},
        ),
        "from_flashmask": Legal(
            masks.from_flashmask,
            {
                "startend_row_indices": torch.zeros(1, 1, 7, 1, dtype=torch.int32), "nq": 5,
                "causal": True,
            },
        ),
        "query_ranges_to_dense": Legal(
            masks.query_ranges_to_dense,
            {"query_ranges": torch.zeros(1, 1, 7, 1, 2, dtype=torch.int32), "nq": 5},
        ),
    }  # fmt: skip


def _triples() -> dict[str, Any]:
    """No triples of NVFP4, or triples whose parts do not fit one another."""
    values, scales, unit = archflash.quantize_nvfp4(torch.randn(2, 4, 5, 64))
    return {
        "none": None, "tensor": values, "pair": (values, scales), "numbers": (1, 2, 3),
        "values of floats": (values.float(), scales, unit), "scales of floats":
        (values, scales.float(), unit), "fewer scales": (values, scales[..., :-1], unit),
        "unit of 64 bits": (values, scales, unit.double()), "units of heads":
        (values, scales, torch.ones(3)), "fewer columns": (values[..., :-1], scales, unit),
        "three dimensions": (values[0], scales[0], unit), "meta":
        (values.to("meta"), scales, unit),
    }  # fmt: skip


_COUNT = {
    "text": "a", "fraction": 1.5, "list": [1], "below 0": -1, "tensor of two": int32(1, 2),
    "huge": 1 << 70,
}  # fmt: skip
_FLAG = {"text": "yes", "number": 2, "tensor": torch.zeros(0), "list": [True]}
_BLOCK = {
    "tensors": [torch.ones(2).int()] * 2,
    "number": 64,
    "three": (64, 64, 64),
    "texts": ("a", "b"),
    "odd": (60, 64),
    "0": (0, 64),
}
# Wrong values of arguments that are no tensors, or that most calls leave out.
OPTIONS: Options = {
    "approximate": {"unknown": "int4", "number": 8, "list": ["int8"]},
    "packed_rows": {"unknown": "fp8_600", "number": 656},
    "dv": {"too large": 600, "huge": 1 << 70, "below 0": -1, "text": "a", "fraction": 1.5,
           "tensor": torch.zeros(0)},
    "physical_indices": {"text": "yes", "number": 2},
    "scale": {"text": "a", "NaN": math.nan},
    "topk_lengths": {"list": [1]},
    "key_indices": {"list": [1]},
    "out_dtype": {"text": "float16", "of integers": torch.int32},
    "shape": {"text": "abcd", "number": 4, "three": (1, 2, 3), "below 0": (1, 2, -3, 4)},
    "dropout_p": {"text": "a", "NaN": math.nan, "below 0": -0.1, "one": 1.0},
    "outs": {"none": None, "number": 1, "numbers": [1, 2], "empty": []},
    "lses": {"none": None, "number": 1, "numbers": [1, 2], "one": [torch.randn(2, 4, 5)]},
    "per": {"unknown": "row", "number": 1},
    "dtype": {"text": "e4m3", "of integers": torch.int32},
    "dim": {"tensor": torch.zeros(0), "too large": 9, "text": "a", "fraction": 1.5},
    "layout": {"unknown": "hbnd", "number": 1},
    "nq": _COUNT,
    "nk": _COUNT,
    "left": _COUNT,
    "global_keys": _COUNT,
    "past": _COUNT,
    "check": _FLAG,
    "accumulate": _FLAG,
    "deterministic": _FLAG,
    "mask_gradient": _FLAG,
    "backward": _FLAG,
    "parents": {
        "tensors": [torch.zeros(2)] * 2, "text": "abc", "later": [2, 0, 0], "fractions": [0.5],
        "number": 3,
    },
    "block_size": _BLOCK,
    "chunk_size": {**_COUNT, "0": 0},
    "causal": {"text": "yes", "number": 2},
    "key_sizes": {"list": [1]},
    "table": {"of floats": torch.ones(1, 2, 2, 3)},
    "canvas": {"text": "abc", "number": 3, "fractions": (1.5, 2.0, 2.0)},
    "tile": {"text": "abc", "number": 3, "fractions": (1.5, 2.0, 2.0)},
}  # fmt: skip

_MADE_OF = (
    "chunks", "ids", "key_indices", "key_ranges", "key_sizes", "lengths", "query_ranges",
    "row_sizes", "slash", "spans", "startend_row_indices", "topk_lengths", "vertical",
)  # fmt: skip
OF_NVFP4: Options = {**OPTIONS, **dict.fromkeys("qkv", _triples())}
# Changed tensors that make another right call of a maker of masks.
RIGHT: set[tuple[str, ...]] = {
    *((x, what) for x in _MADE_OF for what in ("meta", "one more", "empty", "integers")),
    *((f"from_{x}", y, "of 64 bits") for x, y in (
        ("block_lists", "indices"), ("block_lists", "counts"), ("bsr", "indices"),
        ("bsr", "indptr"), ("chunks", "chunks"), ("key_indices", "key_indices"),
        ("key_indices", "topk_lengths"), ("ragged_blocks", "key_sizes"),
        ("ragged_blocks", "row_sizes"), ("vertical_and_slash", "slash"),
        ("vertical_and_slash", "vertical"),
    )),
    ("dense", "key_ranges", "of 64 bits"), ("from_bsr", "indices", "one more"),
    ("from_bsr", "indices", "empty"), ("from_bsr", "block_size", "odd"),
    ("from_block_lists", "block_size", "odd"),
    ("dropped weights", "v", "other columns"), ("explained dropout", "v", "other columns"),
    ("checked", "v_cache", "other columns"),
    ("lists", "v", "other columns"), ("approximate", "v", "other columns"),
    ("dropout", "rng_state", "meta"),
    ("documents", "ids", "one dimension more"), ("documents", "ids", "one dimension less"),
    ("spans", "spans", "one dimension less"),
    ("summary", "attn_mask", "one dimension less"), ("summary", "attn_mask", "one dimension more"),
    ("summary", "attn_mask", "meta"), ("from_blocks", "table", "meta"),
    ("from_ragged_blocks", "table", "meta"), ("from_bsr", "indices", "meta"),
    ("from_blocks", "table", "integers"), ("from_ragged_blocks", "table", "integers"),
    *(("fp8", "x", x) for x in ("one dimension less", "meta", "other columns")),
    *(("mxfp8", "x", x) for x in ("one dimension less", "one dimension more", "meta",
                                  "other columns")),
    *(("nvfp4", "x", x) for x in ("one dimension less", "one dimension more", "meta")),
}  # fmt: skip
