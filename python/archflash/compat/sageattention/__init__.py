"""SageAttention's package `sageattention`, served by archflash: exact, and with masks.

Names, order and defaults of the arguments, shapes and the log-sum-exp are those of SageAttention
2.2. What is different:

- Nothing is quantised unless `approximate="int8"` (`archflash.attention`) is passed, or the
  environment has ARCHFLASH_SAGE_APPROXIMATE=int8. Arguments that say how to quantise have no
  effect.
- attn_mask counts in every function, and so do scale and dropout_p of PyTorch's
  scaled_dot_product_attention, in whose place `sageattn` may stand. The originals drop them.
- Every dtype, device and head dimension of `archflash.attention` is taken, and gradients are
  computed.

The functions that quantise (of `sageattention.core`, `quant` and `triton`) are not there.
"""

from archflash.compat.sageattention.core import (
    sageattn,
    sageattn_qk_int8_pv_fp8_cuda,
    sageattn_qk_int8_pv_fp8_cuda_sm90,
    sageattn_qk_int8_pv_fp16_cuda,
    sageattn_qk_int8_pv_fp16_triton,
    sageattn_varlen,
)

__all__ = [
    "sageattn",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_varlen",
]
