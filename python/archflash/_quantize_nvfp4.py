"""archflash.quantize_nvfp4: converts numbers to four bits with a scale for each 16."""

from __future__ import annotations

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash._eager import overridden, refuse_derivatives, stands_for_tensor
from archflash._given import check_dense, is_int, is_one_of

GROUP = 16  # neighbouring numbers of a row that share a scale
_LARGEST_VALUE, _LARGEST_SCALE = 6.0, 448.0  # of e2m1 and of e4m3
_SMALLEST_UNIT = torch.finfo(torch.float32).tiny
_PER = ("tensor", "head")
# Beyond which a magnitude is the next of 0, 0.5, 1, 1.5, 2, 3, 4, 6. In the middle it becomes the
# one whose last bit is 0: every second bound belongs to what is above it.
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def quantize_nvfp4(
    x: Tensor, *, per: str = "tensor", dim: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises numbers to NVFP4: four bits (e2m1), with a scale of eight bits (e4m3) for each 16
    neighbouring numbers along a dimension, and a float32 unit behind the scales.

    x is about values * scales * unit; `archflash.reference.dequantize_nvfp4` computes that. The
    call does not wait for the device. `archflash.attention_nvfp4` takes such tensors, q and k with
    scales along their columns and v along its rows (dim=-2), because a product sums along these.

    A unit is the largest finite magnitude of the numbers that share it, divided by 2688, and 1
    where these have no finite number other than zero. A scale is the largest magnitude of its
    numbers, in units, divided by 6 and rounded to e4m3. An infinity becomes 6 with its sign, and
    the scale of its 16 numbers 448. A NaN makes that scale NaN.

    Args:
        x: ``(..., d)``, float32, float16 or bfloat16, dense; d a multiple of 16. There is no
            derivative: pass its detach() where gradients are enabled.
        per: what shares a unit: "tensor", or "head", the rows and columns of the last two
            dimensions.
        dim: the dimension along which 16 numbers share a scale, -1 or -2. The last of 16 rows may
            be missing.

    Returns:
        values: uint8 ``(..., d / 2)``: the even one of two columns in the lower four bits.
        scales: float8_e4m3fn ``(..., d / 16)``, or with dim=-2 ``(..., ceil(rows / 16), d)``.
        unit: float32, ``(1,)``, or with per="head" ``(..., 1, 1)``, which broadcasts.

    Raises:
        ValueError: an unknown `per` or `dim`, d that is no multiple of 16, x without a dimension
            (per="head" and dim=-2 need two), or without data.
        TypeError: an unsupported dtype; x is not a tensor, or is nested or sparse.
        UnsupportedError: x requires a gradient while gradients are enabled, or has a tangent.

    Example:
        >>> import archflash, torch
        >>> values, scales, unit = archflash.quantize_nvfp4(torch.randn(2, 4, 100, 64))
        >>> values.shape, scales.shape
        (torch.Size([2, 4, 100, 32]), torch.Size([2, 4, 100, 4]))
    """
    if stands_for_tensor(x):
        return overridden(quantize_nvfp4, locals())  # type: ignore[no-any-return]
    check_dense(x=x)
    if not is_one_of(per, _PER):
        raise ValueError(f"per is {_native.given(per)}: it must be 'tensor' or 'head'")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"x has dtype {x.dtype}: it must be float32, float16 or bfloat16")
    if not is_int(dim) or dim not in (-1, -2):
        raise ValueError(f"dim is {_native.given(dim)}: it must be -1 or -2")
    least = 1 if per == "tensor" and dim == -1 else 2
    if x.ndim < least:
        raise ValueError(
            f"x has shape {tuple(x.shape)}: with per='{per}' and dim={dim} it must have {least} or "
            "more dimensions"
        )
    if x.shape[-1] % GROUP:
        raise ValueError(
            f"x has rows of {x.shape[-1]} numbers: they must be a multiple of {GROUP}; pad them "
            "with zeros"
        )
    refuse_derivatives("quantize_nvfp4", x=x)
    wide = x.detach().float()
    finite = wide.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
    if x.numel() == 0:
        largest = finite.new_zeros((1,) if per == "tensor" else (*x.shape[:-2], 1, 1))
    elif per == "tensor":
        largest = finite.max().reshape(1)
    else:
        largest = finite.amax((-2, -1), keepdim=True)
    unit = (largest / (_LARGEST_VALUE * _LARGEST_SCALE)).clamp(min=_SMALLEST_UNIT)
    unit = torch.where(largest == 0, 1.0, unit)
    scaled, finite = wide / unit, finite / unit
    most = _by_group(torch.where(scaled.isinf(), torch.inf, finite), dim).amax(-1)
    scales = (most / _LARGEST_VALUE).clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn)
    wide_scales = _along(scales.float(), dim, x.shape)
    # Numbers whose scale is 0 are less than half of the smallest one.
    size = (scaled / torch.where(wide_scales == 0, 1.0, wide_scales)).abs()
    size = torch.where(wide_scales == 0, 0.0, size)
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for number, bound in enumerate(_BOUNDS):
        codes += (size >= bound) if number % 2 else (size > bound)
    codes |= torch.signbit(scaled).to(torch.uint8) << 3
    spoiled = _by_group(scaled.isnan(), dim).any(-1)
    scales = torch.where(spoiled, torch.nan, scales.float()).to(torch.float8_e4m3fn)
    pairs = codes.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    # Dense in the order of dimensions, however those of x lie in memory.
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous(), scales.contiguous(), unit


def _by_group(x: Tensor, dim: int) -> Tensor:
    """x with the numbers of a group as a last dimension, and zeros for missing rows."""
    x = x.transpose(dim, -1)
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP))
    return x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP).transpose(dim - 1, -2)


def _along(scales: Tensor, dim: int, shape: torch.Size) -> Tensor:
    """The scale of each number."""
    return scales.repeat_interleave(GROUP, dim).narrow(dim, 0, shape[dim])
