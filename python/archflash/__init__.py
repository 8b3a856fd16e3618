"""archflash: attention kernels written by hand for each NVIDIA GPU generation. One call:
`archflash.attention(q, k, v)`.
"""

from archflash import reference
from archflash._api import attention, explain
from archflash._archflash import version as __version__
from archflash._dispatch import Decision, force
from archflash._errors import (
    ArchflashError,
    ForcedImplementationError,
    LaunchError,
    NotCompiledError,
    UnsupportedError,
)
from archflash._quantize import quantize_fp8
from archflash._registry import Implementation, implementations
from archflash._sdpa import scaled_dot_product_attention
from archflash._warm_up import warm_up

__all__ = [
    "ArchflashError",
    "Decision",
    "ForcedImplementationError",
    "Implementation",
    "LaunchError",
    "NotCompiledError",
    "UnsupportedError",
    "__version__",
    "attention",
    "explain",
    "force",
    "implementations",
    "quantize_fp8",
    "reference",
    "scaled_dot_product_attention",
    "warm_up",
]
