"""The functions of FlashAttention-2.

They share their arguments:

- q, k, v: (batch, rows, heads, d), or (total rows, heads, d) with cu_seqlens, int32 (sequences +
  1,), the row at which each packed sequence begins. q may have a multiple of k's heads.
- dropout_p: only 0.
- softmax_scale: multiplies q k^T; 1 / sqrt(d) by default.
- causal: query i sees keys up to i + rows of k - rows of q.
- window_size: (left, right) around that key; -1 for an unbounded side.
- softcap: 0 for none.
- alibi_slopes: only None.
- deterministic: of the backward; True only where no gradients are needed.
- return_attn_probs: also return the log-sum-exp, float32 (batch, heads, rows) or (heads, total
  rows), +inf for a row that sees no key, and an empty tensor in place of the weights, which
  FlashAttention-2 gives with dropout only.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from archflash._errors import UnsupportedError
from archflash.compat._flash import UNBOUNDED, Window, attend, refuse


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Any:
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
    refuse(dropout_p=(dropout_p, 0.0), alibi_slopes=(alibi_slopes, None))
    out, lse = attend(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        want_lse=return_attn_probs,
        lse_unseen=math.inf,
        sinks=s_aux,
    )
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`flash_attn_func` with k and v in one tensor (batch, rows, 2, heads, d)."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`flash_attn_func` with q, k and v in one tensor (batch, rows, 3, heads, d)."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention of packed sequences: q (total rows, heads, d), each sequence on its own keys.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,), where each sequence begins.
        max_seqlen_q, max_seqlen_k: the longest sequences.
        block_table: only None.
        s_aux: as for `flash_attn_func`.

    Returns:
        (total rows, heads, dv); with return_attn_probs (output, log-sum-exp, empty tensor).

    Raises:
        UnsupportedError: an argument that archflash does not take; it is named.
    """
    refuse(
        dropout_p=(dropout_p, 0.0),
        alibi_slopes=(alibi_slopes, None),
        block_table=(block_table, None),
    )
    out, lse = attend(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        want_lse=return_attn_probs,
        lse_unseen=math.inf,
        sinks=s_aux,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`flash_attn_varlen_func` with k and v in one tensor (total rows, 2, heads, d)."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """`flash_attn_varlen_func` with q, k and v in one tensor (total rows, 3, heads, d)."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs
    )


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Any:
    """Not built yet: archflash has no attention on a key-value cache.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "flash_attn_with_kvcache: not built yet, because archflash has no KV cache; pass the keys "
        "and values of the cache to flash_attn_func"
    )
