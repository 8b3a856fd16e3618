"""FlashAttention-3's package `flash_attn_3`, in which the original has its extension. Programs look
for it to learn whether the module `flash_attn_interface` can be used.
"""

from __future__ import annotations

from archflash.compat import flash_attn_interface

__all__ = ["flash_attn_interface"]
