"""archflash.quantize_mxfp8: converts numbers to 8 bits with a scale for each 32."""

from __future__ import annotations

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash._archflash import SCALED_NUMBERS
from archflash._eager import overridden, refuse_derivatives, stands_for_tensor
from archflash._errors import UnsupportedError
from archflash._given import check_dense, is_int

# The largest number of each type, 0.875 times a power of two, and the exponent of that.
_LARGEST = {torch.float8_e4m3fn: (448.0, 9), torch.float8_e5m2: (57344.0, 16)}
_BIAS = 127  # of ue8m0


def quantize_mxfp8(
    x: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, dim: int = -1
) -> tuple[Tensor, Tensor]:
    """Quantises numbers to MXFP8: 8 bits, with a power of two (ue8m0) as the scale of each 32
    neighbouring numbers along a dimension, for `archflash.attention`.

    x is about values * scales; `archflash.reference.dequantize_mxfp8` computes that. q and k are
    quantised along their columns, v along its rows (dim=-2; with layout="bnhd" dim=1), because a
    product sums along these. The call does not wait for the device.

    A scale is the smallest power of two with which none of its finite numbers exceeds the largest
    number of `dtype` (448 or 57344); 1 where these have none other than zero. Infinities become
    that largest number with their sign, NaN stays NaN; neither influences the scale.

    Args:
        x: float32, float16 or bfloat16, dense. The last of 32 numbers may be missing. There is no
            derivative: pass its detach() where gradients are enabled.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        dim: the dimension along which 32 numbers share a scale.

    Returns:
        values: `dtype`, the shape of x, dense in its stride order.
        scales: float8_e8m0fnu, contiguous, shaped as x with ceil(size / 32) along `dim`.

    Raises:
        ValueError: x without dimensions, without that of `dim`, or without data.
        TypeError: an unsupported dtype; x is not a tensor, or is nested or sparse.
        UnsupportedError: x requires a gradient while gradients are enabled, or has a tangent; or
            torch is older than 2.7, which has no float8_e8m0fnu.

    Example:
        >>> import archflash, torch
        >>> values, scales = archflash.quantize_mxfp8(torch.randn(2, 4, 100, 64))
        >>> values.shape, scales.shape
        (torch.Size([2, 4, 100, 64]), torch.Size([2, 4, 100, 2]))
    """
    if stands_for_tensor(x):
        return overridden(quantize_mxfp8, locals())  # type: ignore[no-any-return]
    check_dense(x=x)
    if not isinstance(dtype, torch.dtype) or dtype not in tuple(_LARGEST):
        raise TypeError(
            f"dtype is {_native.given(dtype)}: it must be torch.float8_e4m3fn or torch.float8_e5m2"
        )
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"x has dtype {x.dtype}: it must be float32, float16 or bfloat16")
    if x.ndim == 0:
        raise ValueError("x has no dimension: its numbers must be neighbours of one another")
    if not is_int(dim) or not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"dim is {_native.given(dim)}: it must be an integer from {-x.ndim} to {x.ndim - 1}"
        )
    if not hasattr(torch, "float8_e8m0fnu"):
        raise UnsupportedError(
            f"torch {torch.__version__} has no float8_e8m0fnu, the dtype of scales: install 2.7 or "
            "newer"
        )
    refuse_derivatives("quantize_mxfp8", x=x)
    wide = x.detach().float()
    size, limit, exponent = x.shape[dim], *_LARGEST[dtype]
    largest = _by_group(wide.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs(), dim)
    fraction, power = torch.frexp(largest)  # largest = fraction * 2 ** power, fraction < 1
    power = power - exponent + (fraction > 0.875)
    power = torch.where(largest == 0, 0, power.clamp(min=-_BIAS))
    factor = torch.ldexp(torch.ones_like(largest), -power).repeat_interleave(SCALED_NUMBERS, dim)
    values = (wide * factor.narrow(dim, 0, size)).clamp(-limit, limit).to(dtype)
    scales = (power + _BIAS).to(torch.uint8).contiguous().view(torch.float8_e8m0fnu)
    return values, scales


def _by_group(x: Tensor, dim: int) -> Tensor:
    """The largest of each 32 numbers along a dimension; magnitudes."""
    x = x.movedim(dim, -1)
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % SCALED_NUMBERS))
    groups = x.shape[-1] // SCALED_NUMBERS
    return x.reshape(*x.shape[:-1], groups, SCALED_NUMBERS).amax(-1).movedim(-1, dim)
