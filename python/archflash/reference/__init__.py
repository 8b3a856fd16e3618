"""Attention in float64, and the one rule that says whether an output is right.

`attention` is the formula written as plainly as possible: one head at a time, one block of queries
at a time. `baseline` is the same formula rounded after every step to the inputs' dtype, as plain
PyTorch code would compute it; its error is the yardstick. `check` compares an output with both.
`attention_backward` and `baseline_backward` are the same for gradients.
"""

from __future__ import annotations

from archflash.reference.approximate import check_approximate, check_int8_qk, int8, int8_qk
from archflash.reference.blocks import dequantize_mxfp8
from archflash.reference.cache import appended, attention_with_kvcache, baseline_with_kvcache
from archflash.reference.formula import (
    Gradients,
    attention,
    attention_backward,
    baseline,
    baseline_backward,
    merge_attention,
)
from archflash.reference.four_bits import check_nvfp4, check_stored_nvfp4, dequantize_nvfp4, nvfp4
from archflash.reference.rule import ErrorReport, check, check_fp8, check_lse, fp8_score_error

__all__ = [
    "ErrorReport",
    "Gradients",
    "appended",
    "attention",
    "attention_backward",
    "attention_with_kvcache",
    "baseline",
    "baseline_backward",
    "baseline_with_kvcache",
    "check",
    "check_approximate",
    "check_fp8",
    "check_int8_qk",
    "check_lse",
    "check_nvfp4",
    "check_stored_nvfp4",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "fp8_score_error",
    "int8",
    "int8_qk",
    "merge_attention",
    "nvfp4",
]
