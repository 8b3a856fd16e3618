"""What a bias of torch.nn.attention.bias (causal_upper_left, causal_lower_right) means for a call.

Such a bias is a tensor in name only: its memory has no values, and its attributes say what it
stands for.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from archflash._eager import unrecorded


def is_causal_bias(attn_mask: object) -> bool:
    # If the module is not loaded, nobody can have such a bias. Importing it here would load
    # torch._dynamo.
    module: Any = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(attn_mask, module.CausalBias)


def resolve(*call: Any) -> tuple[bool, Any, Tensor | None]:
    """`_resolve`, of which torch.jit.trace records nothing: a bias is for its own lengths only."""
    meaning: tuple[bool, Any, Tensor | None] = unrecorded(_resolve, *call)
    return meaning


def _resolve(
    bias: Any,
    q: Tensor,
    k: Tensor,
    causal: object,
    window: object,
    q_offset: Any,
    cu_seqlens: object,
    layout: object,
) -> tuple[bool, Any, Tensor | None]:
    """The `causal`, `q_offset` and `attn_mask` that have the same meaning as this bias.

    Raises:
        ValueError: causal or packed sequences are given too, or the lengths of the bias differ from
            those of q and k.
    """
    if causal is not False:
        raise ValueError(
            f"causal is given together with attn_mask={_name(bias)}: the bias is the causal rule, "
            "so leave causal at False"
        )
    if cu_seqlens is not None:
        raise ValueError(
            f"attn_mask={_name(bias)} is given with cu_seqlens: packed sequences take no mask; "
            "use causal=True, which aligns each sequence to the bottom right"
        )
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.ndim == k.ndim == 4):
        return False, q_offset, None  # the check of q and k refuses the call
    rows = 1 if layout == "bnhd" else 2
    nq, nk = q.shape[rows], k.shape[rows]
    check_lengths(bias, nq, nk)
    upper_left = nq != nk and is_upper_left(bias)
    if q_offset is None and (window is None or not upper_left):
        return True, 0 if upper_left else None, None
    # The window depends on q_offset and the bias does not, so causal and q_offset cannot express
    # both.
    return False, q_offset, as_mask(bias, q.device)


def sides_of(window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """The sides of a window; None for an unbounded one, for which a negative number may stand."""
    left, right = window or (None, None)
    if left is not None and left < 0:
        left = None
    if right is not None and right < 0:
        right = None
    return left, right


def check_lengths(bias: Any, nq: int, nk: int) -> None:
    if (bias.seq_len_q, bias.seq_len_kv) != (nq, nk):
        raise ValueError(
            f"attn_mask is {_name(bias)}, but there are {nq} queries and {nk} keys: make it "
            "for those lengths"
        )


def as_mask(bias: Any, device: torch.device) -> Tensor:
    """Bool ``(nq, nk)``, True where a query sees a key."""
    nq, nk = bias.seq_len_q, bias.seq_len_kv
    row, key = torch.arange(nq, device=device), torch.arange(nk, device=device)
    return key <= row[:, None] + (0 if is_upper_left(bias) else nk - nq)


def is_upper_left(bias: Any) -> bool:
    return bool(bias.variant == type(bias.variant).UPPER_LEFT)


def _name(bias: Any) -> str:
    variant = "upper_left" if is_upper_left(bias) else "lower_right"
    return f"causal_{variant}({bias.seq_len_q}, {bias.seq_len_kv})"
