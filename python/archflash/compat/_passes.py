"""The backward pass by the functions of FlashAttention-2 and -3 that code for context parallelism
calls, with the output and log-sum-exp given.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from archflash import _sequences
from archflash._backward import attention_backward
from archflash.compat._arguments import flag, plain
from archflash.compat._flash import Window, as_window, seen_by_none

_ROWS = 128  # to a multiple of which FlashAttention-2 rounds rows up


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None], *, softmax_scale: float | None,
    causal: bool, window_size: Window, softcap: float, deterministic: bool, dropout_p: float = 0.0,
    rng_state: Tensor | None = None, **options: Any,
) -> tuple[tuple[Tensor, ...], Tensor]:  # fmt: skip
    """The gradients of a call, written into those given, and the sum of dout * out of each row.

    Raises:
        ValueError: dropout_p without the rng_state that the forward pass gave.
    """
    dropout_p = plain(dropout_p)
    if dropout_p and rng_state is None:
        raise ValueError("dropout_p without rng_state: pass the one that the forward pass gave")
    if dropout_p:
        options |= {"dropout_p": dropout_p, "rng_state": rng_state}
    dq, dk, dv = gradients
    found = attention_backward(
        dout, q, k, v, out, seen_by_none(lse), dq=dq, dk=dk, dv=dv, scale=plain(softmax_scale),
        causal=flag(causal), window=as_window(window_size), softcap=plain(softcap) or None,
        deterministic=True if plain(deterministic) else None, layout="bnhd", **options,
    )  # fmt: skip
    sums = (dout.float() * out.float()).sum(-1).transpose(-1, -2)
    return found, padded(sums, options.get("cu_seqlens_q"))


def padded(rows: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Numbers of rows (batch, heads, rows) or (heads, total rows) as FlashAttention keeps them:
    with zeros up to a multiple of 128 rows, or up to 128 more behind each packed sequence.
    """
    if cu_seqlens is None:
        return F.pad(rows, (0, -rows.shape[-1] % _ROWS))
    total, sequences = rows.shape[1], len(cu_seqlens) - 1
    number = torch.arange(total, device=rows.device)
    sequence = _sequences.of_rows(number, cu_seqlens)
    place = number + _ROWS * sequence.clamp(max=max(sequences - 1, 0))
    return rows.new_zeros(len(rows), total + _ROWS * sequences).index_copy(1, place, rows)
