"""The kernels, tensors and checks of tests/core_set, for tests that only a GPU can run."""

from __future__ import annotations

import math

from ..core_set.checks import Guarded, assert_close, same_bits
from ..core_set.executors import DTYPES, Gpu
from ..core_set.memory import inside_nan
from ..core_set.pairs import all_pairs

GPU = Gpu()
DEVICE = GPU.device
NAN = math.nan

no_gpu = GPU.why_not
kernels = GPU.kernels
kernel_dtypes = GPU.kernels_and_dtypes
rand, qkv, int32, cu_seqlens = GPU.rand, GPU.qkv, GPU.int32, GPU.cu_seqlens
attend_and_check = GPU.attend_and_check

__all__ = [
    "DEVICE",
    "DTYPES",
    "NAN",
    "Guarded",
    "all_pairs",
    "assert_close",
    "attend_and_check",
    "cu_seqlens",
    "inside_nan",
    "int32",
    "kernel_dtypes",
    "kernels",
    "no_gpu",
    "qkv",
    "rand",
    "same_bits",
]
