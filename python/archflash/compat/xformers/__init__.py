"""xformers' attention, served by archflash: `xformers.ops.memory_efficient_attention` and the masks
of `xformers.ops.fmha.attn_bias`. The rest of xformers is not here.
"""

from archflash.compat.xformers import ops, version

__version__ = version.__version__
_has_cpp_library = True  # programs ask whether there are kernels

__all__ = ["ops"]
