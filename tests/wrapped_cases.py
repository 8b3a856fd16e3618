"""Calls of every public function with every tensor that it takes, and subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import archflash
from archflash import masks


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def int32(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


class Wrapper(Tensor):
    """A subclass without memory, whose dispatcher hands on the tensor that it wraps: as the results
    of functional collectives are.
    """

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        assert isinstance(made, Wrapper)
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapper) else x

        return func(*pytree.tree_map(unwrap, args), **pytree.tree_map(unwrap, kwargs or {}))


class Tagged(Tensor):
    """A subclass with memory, whose results are of its kind."""


def plain(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, Wrapper):
        return x.inner
    return x.as_subclass(Tensor)  # type: ignore[no-untyped-call]


# --- the public functions, with every tensor that they take ---

F16 = torch.float16
Q, K, V = rand(2, 4, 5, 8, dtype=F16), rand(2, 2, 7, 8, dtype=F16), rand(2, 2, 7, 8, dtype=F16)
STATE, LENGTHS = torch.tensor([3, 4]), int32(2, 4)
RANGES = masks.sliding_window_with_global(5, 7, left=3, global_keys=1)
MASK = rand(2, 1, 5, 7, dtype=F16)
PACKED = (rand(5, 4, 8, dtype=F16), rand(7, 2, 8, dtype=F16), rand(7, 2, 8, dtype=F16))
SUMS = {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k": int32(0, 3, 7)}
OPTIONS = {
    "sinks": rand(4), "attn_mask": MASK, "alibi_slopes": rand(4).abs(), "key_ranges": RANGES,
    "block_mask": torch.ones(1, 1, 1, 1, dtype=torch.int8), "q_offset": int32(2, 1), "causal": True,
    "rng_state": STATE, "dropout_p": 0.25,
}  # fmt: skip
OUT, LSE = archflash.attention(Q, K, V, **OPTIONS, return_lse=True)
CACHES = (rand(2, 8, 2, 16, dtype=F16), rand(2, 8, 2, 16, dtype=F16))


def forced(name: str) -> dict[str, Any]:
    return {"implementation": name}


# A function, its positional and its named arguments; the lists of merge_attention are spread out.
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "attention": (
        archflash.attention,
        (Q, K, V),
        {**OPTIONS, "return_lse": True, **forced("ampere")},
    ),
    "attention of packed": (
        archflash.attention,
        PACKED,
        {**SUMS, "out": torch.zeros(5, 4, 8, dtype=F16), **forced("ampere")},
    ),
    "attention of float8": (
        archflash.attention,
        tuple(x.to(torch.float8_e4m3fn) for x in (rand(1, 2, 5, 16), *[rand(1, 1, 5, 16)] * 2)),
        {f"{x}_descale": torch.ones(1, 1) for x in "qkv"} | forced("ada"),
    ),
    "attention_backward": (
        archflash.attention_backward,
        (rand(2, 4, 5, 8, dtype=F16), Q, K, V, OUT, LSE),
        {
            **OPTIONS, "dlse": rand(2, 4, 5),
            "dq": torch.ones_like(Q), "dk": torch.ones_like(K), "dv": torch.ones_like(V),
            "accumulate": True, "deterministic": True, "mask_gradient": True, **forced("ampere"),
        },
    ),
    "attention_with_kvcache": (
        archflash.attention_with_kvcache,
        (rand(2, 1, 4, 16, dtype=F16), *CACHES),
        {
            "cache_seqlens": LENGTHS, "k_new": rand(2, 2, 2, 16, dtype=F16),
            "v_new": rand(2, 2, 2, 16, dtype=F16), "cache_batch_idx": int32(1, 0),
            "leftpad_k": int32(0, 1), "rotary_cos": rand(8, 8, dtype=F16),
            "rotary_sin": rand(8, 8, dtype=F16), "causal": True, **forced("ampere"),
        },
    ),
    "attention_with_kvcache of pages": (
        archflash.attention_with_kvcache,
        (rand(2, 1, 4, 16, dtype=F16), *CACHES),
        {
            "cache_seqlens": LENGTHS, "page_table": int32([1], [0]), "sinks": rand(4),
            "qv": rand(2, 1, 4, 16, dtype=F16),
        },
    ),
    "attention_with_shared_prefix": (
        archflash.attention_with_shared_prefix,
        (rand(2, 1, 4, 16, dtype=F16), CACHES[0][:1], CACHES[1][:1], *CACHES),
        {"cache_seqlens": LENGTHS, "prefix_seqlens": int32(5), **forced("ampere")},
    ),
    "merge_attention": (
        lambda a, b, c, d: archflash.merge_attention([a, b], [c, d], **forced("ampere")),
        (OUT, Q, LSE, rand(2, 4, 5)),
        {},
    ),
    "quantize_fp8": (archflash.quantize_fp8, (Q,), {"per": "block", **forced("ada")}),
    "scaled_dot_product_attention": (
        archflash.scaled_dot_product_attention, (Q, Q, Q), {"attn_mask": MASK[..., :5]},
    ),
    "summarize_mask": (archflash.summarize_mask, (MASK,), {}),
    "documents": (masks.documents, (int32(1, 1, 2),), {}),
    "prefix_lm": (masks.prefix_lm, (int32(1, 2), 3), {}),
    "bidirectional_spans": (masks.bidirectional_spans, (int32([1, 3]), 4), {}),
    "from_flashmask": (
        lambda x: masks.to_dense(masks.from_flashmask(x, 3, causal=True), 3),
        (int32([2], [3], [3])[None, None],),
        {},
    ),
    "dropout_mask": (archflash.dropout_mask, ((1, 2, 3, 4), 0.5, STATE), {}),
}  # fmt: skip


def assert_same(found: Any, expected: Any) -> None:
    for x, y in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        if isinstance(x, Tensor):
            torch.testing.assert_close(x.float(), y.float(), rtol=1e-3, atol=2e-3)
