"""FlashAttention-2's package `flash_attn`, served by archflash.

Names, order and defaults of the arguments, alignment of masks and return values are those of
FlashAttention-2. Rows come before heads: q is (batch, rows, heads, d). What archflash does not take
raises `archflash.UnsupportedError` with the name of the argument: dropout_p above 0 with pages, and
deterministic=True where no kernel of archflash computes the gradients that are needed. Beyond
FlashAttention-2, float32 and FP8 inputs, any head dimension and any device are served.
"""

from archflash.compat.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.3"  # of the interface: code asks for it to know which arguments there are

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
