"""FlashAttention-3's module `flash_attn_interface`, served by archflash.

Names, order and defaults of the arguments, alignment of masks and return values are those of
FlashAttention-3. They differ from FlashAttention-2's: there is no dropout, the fourth argument is
the scale, and return_attn_probs adds the log-sum-exp alone. FP8 inputs take descales (batch,
heads_kv), and their output is bfloat16.

What archflash does not take raises `archflash.UnsupportedError` with the name of the argument:
sm_margin; the backward pass of a call with qv, or with attention_chunk and packed sequences; and
deterministic=True where gradients are needed and no kernel of archflash computes them. pack_gqa and
scheduler_metadata are not read, and num_splits of 0 or 1 leaves the choice to archflash where 1 is
the default: they are advice about speed.
"""

from __future__ import annotations

from archflash.compat._flash_3 import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from archflash.compat._flash_3_operators import _backward as _backward
from archflash.compat._flash_3_operators import _flash_attn_backward as _flash_attn_backward
from archflash.compat._flash_3_operators import _flash_attn_forward as _flash_attn_forward
from archflash.compat._flash_3_operators import _forward as _forward

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
