"""xformers' `xformers.ops`: of it what concerns attention."""

from __future__ import annotations

from torch import Tensor

from archflash.compat.xformers.ops import fmha
from archflash.compat.xformers.ops.fmha import (
    AttentionBias,
    LowerTriangularMask,
    MemoryEfficientAttentionCkOp,
    MemoryEfficientAttentionCutlassFwdFlashBwOp,
    MemoryEfficientAttentionCutlassOp,
    MemoryEfficientAttentionFlashAttentionOp,
    MemoryEfficientAttentionSplitKCkOp,
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)

AttentionMask = AttentionBias  # its older name

__all__ = [
    "AttentionBias",
    "AttentionMask",
    "LowerTriangularMask",
    "MemoryEfficientAttentionCkOp",
    "MemoryEfficientAttentionCutlassFwdFlashBwOp",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "MemoryEfficientAttentionSplitKCkOp",
    "fmha",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "unbind",
]


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """The parts of a tensor along a dimension, as torch.unbind has them."""
    return x.unbind(dim)
