"""FlashAttention-2's `ops.triton.rotary`, in plain torch."""

from __future__ import annotations

from torch import Tensor

from archflash.compat.flash_attn.layers.rotary import apply_rotary_emb


def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, interleaved: bool = False,
    inplace: bool = False, conjugate: bool = False,
) -> Tensor:  # fmt: skip
    """`layers.rotary.apply_rotary_emb`, which the conjugate undoes."""
    return apply_rotary_emb(
        x, cos, -sin if conjugate else sin, interleaved, inplace, seqlen_offsets, cu_seqlens,
        max_seqlen,
    )  # fmt: skip
