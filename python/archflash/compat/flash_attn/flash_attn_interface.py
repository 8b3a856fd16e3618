"""The functions of FlashAttention-2.

They share their arguments:

- q, k, v: (batch, rows, heads, d), or (total rows, heads, d) with cu_seqlens, int32 (sequences +
  1,), the row at which each packed sequence begins. q may have a multiple of k's heads.
- dropout_p: the probability that a weight is dropped; only 0 with pages. PyTorch's
  generator decides which, but they are others than FlashAttention-2 drops.
- softmax_scale: multiplies q k^T; 1 / sqrt(d) by default.
- causal: query i sees keys up to i + rows of k - rows of q.
- window_size: (left, right) around that key; -1 for an unbounded side.
- softcap: 0 for none.
- alibi_slopes: float32 (heads,) or (batch, heads).
- deterministic: of the backward, which then is by kernels of archflash: on a GPU, where they
  compute the gradients of the call.
- return_attn_probs: also return the log-sum-exp, float32 (batch, heads, rows) or (heads, total
  rows), +inf for a row that sees no key, and an empty tensor in place of the weights, which
  FlashAttention-2 gives with dropout only. The log-sum-exp is that of all weights.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from archflash.compat._arguments import (
    boolean,
    check_ints,
    check_starts,
    check_tensors,
    in_its_words,
)
from archflash.compat._flash import UNBOUNDED, Window, attend, attend_to_cache, is_window, refuse
from archflash.compat.flash_attn._private import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from archflash.compat.flash_attn._private import _get_block_size_n as _get_block_size_n
from archflash.compat.flash_attn.layers.rotary import turned_at

# Other names by which code calls these functions, without torch's dispatcher in between.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
USE_TRITON_ROCM = False  # FlashAttention-2's kernels for AMD's GPUs

_NAMES = {"sinks": "s_aux", "scale": "softmax_scale", "window": "window_size"}
_OF_KV = {"k": "k of kv", "v": "v of kv"}
_OF_QKV = {"q": "q of qkv", "k": "k of qkv", "v": "v of qkv"}


@in_its_words(**_NAMES)
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = UNBOUNDED, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, s_aux: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention of q (batch, rows, heads, d) on k and v.

    Args:
        s_aux: (heads,), one more logit per head in the denominator (sinks). Not an argument of
            FlashAttention-2, but of forks that Hugging Face calls.

    Returns:
        (batch, rows, heads, dv); with return_attn_probs (output, log-sum-exp, empty tensor).

    Raises:
        UnsupportedError: an argument that archflash does not take; it is named.

    Example:
        >>> import torch
        >>> from archflash.compat.flash_attn import flash_attn_func
        >>> q = torch.randn(2, 7, 4, 16)
        >>> flash_attn_func(q, q, q, causal=True).shape
        torch.Size([2, 7, 4, 16])
    """
    out, lse = attend(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, deterministic=deterministic, want_lse=return_attn_probs,
        lse_unseen=math.inf, sinks=s_aux, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
    )  # fmt: skip
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


@in_its_words(**_OF_KV)
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`flash_attn_func` with k and v in one tensor (batch, rows, 2, heads, d)."""
    k, v = _parts("kv", kv, 2, 5)
    return flash_attn_func(q, k, v, *args, **kwargs)


@in_its_words(**_OF_QKV)
def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`flash_attn_func` with q, k and v in one tensor (batch, rows, 3, heads, d)."""
    q, k, v = _parts("qkv", qkv, 3, 5)
    return flash_attn_func(q, k, v, *args, **kwargs)


def _parts(name: str, x: Tensor, count: int, ndim: int) -> tuple[Tensor, ...]:
    """q, k and v, or the last two, of a tensor (..., count, heads, d) of so many dimensions."""
    check_tensors(**{name: x})
    if x.ndim != ndim or x.shape[-3] != count:
        rows = "batch, rows" if ndim == 5 else "total rows"
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: it must be ({rows}, {count}, heads, d)"
        )
    return x.unbind(-3)


@in_its_words(
    **_NAMES, page_table="block_table", cache_seqlens="cu_seqlens_k", k_cache="k", v_cache="v"
)
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = UNBOUNDED, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None, *,
    s_aux: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention of packed sequences: q (total rows, heads, d), each sequence on its own keys.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,), where each sequence begins.
        max_seqlen_q, max_seqlen_k: the longest sequences.
        block_table: int32 (sequences, pages of a sequence): k and v are pages (pages, page size,
            heads, d), of which cu_seqlens_k says the lengths. It has no backward.
        s_aux: as for `flash_attn_func`.

    Returns:
        (total rows, heads, dv); with return_attn_probs (output, log-sum-exp, empty tensor).

    Raises:
        UnsupportedError: an argument that archflash does not take; it is named.
    """
    options: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "softmax_scale": softmax_scale,
        "causal": causal, "window_size": window_size, "softcap": softcap, "sinks": s_aux,
        "alibi_slopes": alibi_slopes, "want_lse": return_attn_probs, "lse_unseen": math.inf,
    }  # fmt: skip
    if block_table is not None:
        refuse(dropout_p=(dropout_p, 0.0))
        check_ints("cu_seqlens_k", cu_seqlens_k)
        boolean("deterministic", deterministic)
        result = attend_to_cache(
            q, k, v, cache_seqlens=cu_seqlens_k.diff(), page_table=block_table, k_new=None,
            num_splits=0, **options,
        )  # fmt: skip
        return (*result, q.new_empty(0)) if return_attn_probs else result
    out, lse = attend(
        q, k, v, deterministic=deterministic, dropout_p=dropout_p, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_k=max_seqlen_k, **options,
    )  # fmt: skip
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


@in_its_words(**_OF_KV)
def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`flash_attn_varlen_func` with k and v in one tensor (total rows, 2, heads, d)."""
    k, v = _parts("kv", kv, 2, 4)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


@in_its_words(
    **_OF_QKV, cu_seqlens_q="cu_seqlens", cu_seqlens_k="cu_seqlens", max_seqlen_q="max_seqlen",
    max_seqlen_k="max_seqlen",
)  # fmt: skip
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """`flash_attn_varlen_func` with q, k and v in one tensor (total rows, 3, heads, d)."""
    q, k, v = _parts("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs
    )


@in_its_words(
    **_NAMES, k_new="k", v_new="v", leftpad_k="cache_leftpad", page_table="block_table",
    cos="rotary_cos", sin="rotary_sin",
)  # fmt: skip
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = UNBOUNDED,
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: bool = False, *, s_aux: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention of q (batch, rows, heads, d) on a cache of keys and values. It has no backward.

    Args:
        k_cache, v_cache: (batch, capacity, heads, d), or with block_table pages (pages, page size,
            heads, d) of any size.
        k, v: (batch, new rows, heads, d), written in place behind cache_seqlens.
        rotary_cos, rotary_sin: (positions, channels / 2), by which q and k are turned; new row i
            has position cache_seqlens + i.
        cache_seqlens: an int or int32 (batch,), the lengths before k; by default the caches are
            full.
        cache_batch_idx: int32 (batch,), which sequence of the caches each one of q has.
        cache_leftpad: int32 (batch,), where the sequences of the caches begin.
        block_table: int32 (batch, pages of a sequence).
        rotary_interleaved: pairs of channels are 0 and 1, 2 and 3, ...; otherwise halves.
        num_splits: shares of the keys; 0 for the fastest.
        return_softmax_lse: also return the log-sum-exp.
        s_aux: as for `flash_attn_func`.

    Returns:
        (batch, rows, heads, dv); with return_softmax_lse (output, log-sum-exp (batch, heads,
        rows)), +inf for a row that sees no key.

    Raises:
        UnsupportedError: an argument that archflash does not take; it is named.
        ValueError: k without cache_seqlens.
    """
    rotary = rotary_cos is not None and rotary_sin is not None
    if rotary and k is not None and cache_seqlens is not None and cache_leftpad is not None:
        check_tensors(q=q, k=k, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
        check_starts("cache_seqlens", cache_seqlens, len(q))
        assert rotary_cos is not None
        assert rotary_sin is not None
        # FlashAttention counts positions from the cache's first row, padding included.
        q, k = turned_at(
            q, k, rotary_cos, rotary_sin, cache_seqlens, interleaved=rotary_interleaved,
            apart=causal or is_window(window_size),
        )  # fmt: skip
        rotary_cos = rotary_sin = None
    return attend_to_cache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, page_table=block_table, k_new=k, v_new=v,
        cache_batch_idx=cache_batch_idx, leftpad_k=cache_leftpad, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved, softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap, sinks=s_aux,
        alibi_slopes=alibi_slopes, num_splits=num_splits, want_lse=return_softmax_lse,
        lse_unseen=math.inf,
    )  # fmt: skip
