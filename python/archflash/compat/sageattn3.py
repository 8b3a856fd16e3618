"""SageAttention3's module `sageattn3`, served by archflash as `archflash.compat.sageattention` is:
exact, and with masks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from archflash.compat.sageattention.core import sageattn

__all__ = ["sageattn3_blackwell"]


def sageattn3_blackwell(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    per_block_mean: bool = True,
    **kwargs: Any,
) -> Tensor:
    """Attention of q, k and v (batch, heads, rows, d), as `sageattention.sageattn` has it. The
    original drops attn_mask, and writes k less its mean into k.
    """
    return sageattn(q, k, v, "HND", is_causal, attn_mask=attn_mask, **kwargs)  # type: ignore[no-any-return]
