"""The functions below those of `flash_attn_interface`, which code for context parallelism calls:
one pass each, with the log-sum-exp given and taken.

Names and order of the arguments are those of FlashAttention-2. What they share:

- window_size_left, window_size_right: -1 for an unbounded side.
- return_softmax: the weights are not returned; the third result is empty.
- softmax_lse: float32 (batch, heads, rows) or (heads, total rows). Rows that see no key have +inf;
  -inf is taken as well.
- rng_state: int64 (2,), what decides which weights are dropped.
- zero_tensors: not read; rows of no sequence are 0.

A backward pass writes dq, dk and dv where they are given, and returns the sum of dout * out of each
row, float32, with rows rounded up to 128 as FlashAttention-2 has them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from archflash._api import explain
from archflash._dropout import dropout_state
from archflash._errors import UnsupportedError
from archflash.compat import flash_attn_interface as fa3
from archflash.compat._arguments import flag, plain
from archflash.compat._flash import attend, attend_to_cache
from archflash.compat._passes import backward

Forward = tuple[Tensor, Tensor, Tensor, Tensor]


def _get_block_size_n(
    device: torch.device | str | int, head_dim: int, is_dropout: bool, is_causal: bool
) -> int:
    """The keys of a block in the kernel that serves large calls of this kind in 16 bits.

    Raises:
        UnsupportedError: PyTorch serves them.
    """
    q = torch.empty(8, 16, 4096, head_dim, dtype=torch.bfloat16, device="meta")
    options = {"dropout_p": 0.1} if is_dropout else {}
    plan = explain(q, q, q, device=device, causal=flag(is_causal), **options).plan  # type: ignore[arg-type]
    if plan is None or plan.tile is None:
        raise UnsupportedError(f"no kernel of archflash serves such calls on {device}: no blocks")
    return int(plan.tile.block_k)


def _forward(q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, **options: Any) -> Forward:
    dropout_p = plain(dropout_p)
    if dropout_p:
        state = dropout_state(q.device)
        options |= {"dropout_p": dropout_p, "rng_state": state}
    else:
        state = torch.zeros(2, dtype=torch.int64, device=q.device)
    out, lse = attend(
        q, k, v, deterministic=False, want_lse=True, lse_unseen=math.inf, **options
    )  # fmt: skip
    assert lse is not None
    return out, lse, q.new_empty(0), state


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Forward:  # fmt: skip
    """The output, log-sum-exp, an empty tensor and rng_state of q (batch, rows, heads, d)."""
    return _forward(
        q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=(window_size_left, window_size_right), softcap=softcap,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None, zero_tensors: bool = False, num_splits: int = 0,
) -> Forward:  # fmt: skip
    """The output, log-sum-exp, an empty tensor and rng_state of packed q (total rows, heads, d).

    Args:
        block_table: int32 (sequences, pages of a sequence): k and v are pages (pages, page size,
            heads, d), of which seqused_k, else cu_seqlens_k says the lengths.
        leftpad_k: int32 (sequences,), where the sequences of the pages begin.
        seqused_k: int32 (sequences,), how many keys of each sequence count.

    Raises:
        RuntimeError: num_splits above 1, as in FlashAttention-2.
        UnsupportedError: what archflash does not take; it is named.
    """
    if plain(num_splits) > 1:
        raise RuntimeError("num_splits > 1 is not supported here: leave it at 0 or 1")
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "softcap": softcap,
        "window_size": (window_size_left, window_size_right), "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
    }  # fmt: skip
    if block_table is None and leftpad_k is None and seqused_k is None:
        return _forward(
            q, k, v, dropout_p=dropout_p, alibi_slopes=alibi_slopes, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_k=max_seqlen_k, **options,
        )  # fmt: skip
    if plain(dropout_p):
        raise UnsupportedError("dropout_p with block_table or seqused_k: leave it at 0")
    if block_table is not None:
        out, lse = attend_to_cache(
            q, k, v, cache_seqlens=cu_seqlens_k.diff() if seqused_k is None else seqused_k,
            page_table=block_table, leftpad_k=leftpad_k, k_new=None, num_splits=0, want_lse=True,
            alibi_slopes=alibi_slopes, **options,
        )  # fmt: skip
    elif leftpad_k is not None or alibi_slopes is not None:
        raise UnsupportedError("leftpad_k, or alibi_slopes with seqused_k, without block_table")
    else:
        out, lse = fa3.flash_attn_varlen_func(
            q, k, v, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k, seqused_k=seqused_k,
            return_attn_probs=True, **options,
        )  # fmt: skip
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float,
    causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The backward pass of `_flash_attn_forward`."""
    return backward(
        dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p=dropout_p,
        softmax_scale=softmax_scale, causal=causal, softcap=softcap, deterministic=deterministic,
        window_size=(window_size_left, window_size_right), alibi_slopes=alibi_slopes,
        rng_state=rng_state,
    )[1]  # fmt: skip


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """The backward pass of `_flash_attn_varlen_forward` on packed keys."""
    return backward(
        dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p=dropout_p,
        softmax_scale=softmax_scale, causal=causal, softcap=softcap, deterministic=deterministic,
        window_size=(window_size_left, window_size_right), alibi_slopes=alibi_slopes,
        rng_state=rng_state, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=plain(max_seqlen_q), max_seqlen_k=plain(max_seqlen_k),
    )[1]  # fmt: skip
