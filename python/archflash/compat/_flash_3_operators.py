"""The functions below those of FlashAttention-3's module `flash_attn_interface`: code for context
parallelism and torch.ops.flash_attn_3 call them.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from archflash._errors import UnsupportedError
from archflash.compat._arguments import plain
from archflash.compat._flash import Window, refuse, seen_by_none, sides_of
from archflash.compat._flash_3 import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from archflash.compat._passes import backward, padded


def _forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    q_v: Tensor | None = None, out: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None, rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, is_causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0,
    softcap: float = 0.0, is_rotary_interleaved: bool = False,
    scheduler_metadata: Tensor | None = None, num_splits: int = 0, pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """torch.ops.flash_attn_3.fwd: any of the calls above. The last two results, those of the shares
    of the keys, are empty.

    Raises:
        UnsupportedError: arguments that archflash does not take together; they are named.
    """
    window = (window_size_left, window_size_right)
    descales = (q_descale, k_descale, v_descale)
    speed = (num_splits, pack_gqa)
    only_with_cache = {
        "k_new": k_new, "page_table": page_table, "kv_batch_idx": kv_batch_idx,
        "leftpad_k": leftpad_k, "rotary_cos": rotary_cos,
    }  # fmt: skip
    if cu_seqlens_k is not None:
        refuse(**{name: (value, None) for name, value in only_with_cache.items()})
        if cu_seqlens_q is None or max_seqlen_q is None or max_seqlen_k is None:
            raise UnsupportedError(
                "cu_seqlens_k without cu_seqlens_q, max_seqlen_q or max_seqlen_k: give all of them"
            )
        result = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
            softmax_scale, is_causal, q_v, *descales, window, attention_chunk, softcap, *speed,
            sm_margin=sm_margin, return_attn_probs=True,
        )  # fmt: skip
    else:
        refuse(seqused_q=(seqused_q, None))
        cached = (*only_with_cache.values(), seqused_k, cu_seqlens_q)
        if all(x is None for x in cached):
            result = flash_attn_func(
                q, k, v, softmax_scale, is_causal, q_v, *descales, window, attention_chunk, softcap,
                *speed, sm_margin=sm_margin, return_attn_probs=True,
            )  # fmt: skip
        else:
            result = flash_attn_with_kvcache(
                q, k, v, k_new, v_new, q_v, rotary_cos, rotary_sin, seqused_k, kv_batch_idx,
                leftpad_k, page_table, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, seqlens_rotary,
                *descales, softmax_scale, is_causal, window, attention_chunk, softcap,
                is_rotary_interleaved, scheduler_metadata, *speed, sm_margin,
                return_softmax_lse=True,
            )  # fmt: skip
    found, lse = result
    empty = lse.new_empty(0)
    return found if out is None else out.copy_(found), lse, empty, lse.new_empty(0)


def _sides(both: Window | None, left: int, right: int) -> list[Any]:
    """The sides of a window that is given as a pair, or else each for itself."""
    return [left, right] if both is None else sides_of(both)


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None, rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0,
    softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None, num_splits: int = 1, pack_gqa: bool | None = None,
    sm_margin: int = 0, *, out: Tensor | None = None, window_size: Window | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`_forward` with the names and defaults that FlashAttention-3's Python has. Earlier versions
    have `out` for `out_`, and both sides of the window as `window_size`.
    """
    left, right = _sides(window_size, window_size_left, window_size_right)
    return _forward(
        q, k, v, k_new, v_new, qv, out if out_ is None else out_, cu_seqlens_q, cu_seqlens_k,
        cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table,
        kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale,
        v_descale, softmax_scale, causal, left, right, attention_chunk, softcap,
        rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin,
    )  # fmt: skip


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    softmax_scale: float | None = None, is_causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """torch.ops.flash_attn_3.bwd: writes dq, dk and dv where they are given.

    Returns:
        The sum of dout * out of each row, and its log-sum-exp to the base 2, both float32 with rows
        rounded up to 128; three empty tensors, which are FlashAttention-3's workspace.

    Raises:
        UnsupportedError: an argument that archflash does not take; it is named.
    """
    refuse(sm_margin=(sm_margin, 0), seqused_q=(seqused_q, None), seqused_k=(seqused_k, None))
    _, sums = backward(
        dout, q, k, v, out, softmax_lse, (dq, dk, dv), softmax_scale=softmax_scale,
        causal=is_causal, window_size=(window_size_left, window_size_right), softcap=softcap,
        deterministic=deterministic, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=plain(max_seqlen_q), max_seqlen_k=plain(max_seqlen_k),
    )  # fmt: skip
    lse = padded(seen_by_none(softmax_lse) * math.log2(math.e), cu_seqlens_q)
    first, second, third = (sums.new_empty(0) for _ in range(3))
    return sums, lse, first, second, third


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None, sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dq: Tensor | None = None,
    dk: Tensor | None = None, dv: Tensor | None = None, softmax_scale: float | None = None,
    is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0, *,
    causal: bool = False, window_size: Window | None = None,
) -> Tensor:  # fmt: skip
    """`_backward` with the order that FlashAttention-3's Python has; its first result. Earlier
    versions have `causal` for `is_causal`, and both sides of the window as `window_size`.
    """
    left, right = _sides(window_size, window_size_left, window_size_right)
    return _backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
        max_seqlen_q, max_seqlen_k, softmax_scale, is_causal or causal, left, right, softcap,
        deterministic, sm_margin,
    )[0]  # fmt: skip
