"""archflash.quantize_fp8: converts numbers to 8-bit floating point with descales."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _dispatch, _ops, _registry, _sharding
from archflash._archflash import SCALE_ROWS
from archflash._eager import in_transform, overridden, refuse_derivatives, stands_for_tensor
from archflash._errors import ForcedImplementationError
from archflash._given import check_dense, is_one_of
from archflash._plain_tensors import goes_through_operator, is_symbolic, plain, resolved
from archflash._strides import as_bhnd

_ops.library.define(
    "quantize_fp8(Tensor x, int per, ScalarType dtype, int heads_dim, str? implementation) "
    "-> (Tensor, Tensor)"
)

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_PER = ("tensor", "head", "block")
(_KERNEL,) = _native.quantizer_names()


def quantize_fp8(
    x: Tensor,
    *,
    per: str = "tensor",
    dtype: torch.dtype = torch.float8_e4m3fn,
    layout: str = "bhnd",
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantises q, k or v to FP8 for `archflash.attention`.

    A descale is the largest finite magnitude of the numbers that share it, divided by the largest
    number of `dtype` (448 or 57344). It is 1 if these have no finite number other than zero.
    Infinities become the largest number of `dtype` with their sign, NaN stays NaN; neither
    influences the descale. The call does not wait for the device.

    Args:
        x: ``(batch, heads, rows, d)``; with layout="bnhd" ``(batch, rows, heads, d)``; or packed
            sequences ``(total, heads, d)``. float32, float16 or bfloat16, dense. There is no
            derivative: pass its detach() where gradients are enabled.
        per: what shares a descale: "tensor"; "head", each head of each batch (for packed sequences
            each head of all sequences); or "block", each 64 rows of a head (not for packed
            sequences).
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        layout: "bhnd" or "bnhd", as in `archflash.attention`.
        implementation: "ada" for the fused kernel, which runs on the simulator if x is on the CPU;
            "torch" for plain operations. Default: the kernel if it runs on x's CUDA device and the
            rows of x are contiguous, with a multiple of 8 and at most 256 numbers; else plain
            operations.

    Returns:
        The pair (values, descale). values has `dtype`, the shape of x, and is dense in its stride
        order. descale is float32, ``(1,)``, ``(batch, heads)`` (``(heads,)`` for packed sequences)
        or ``(batch, heads, ceil(rows / 64))``, as `archflash.attention` takes it for q_descale,
        k_descale and v_descale. x is about values * descale.

    Raises:
        ValueError: an unknown `per` or layout, a wrong number of dimensions, blocks of packed
            sequences, or x without data.
        TypeError: an unsupported dtype; x is not a tensor, or is nested or sparse.
        UnsupportedError: x requires a gradient while gradients are enabled, or has a tangent.
        ForcedImplementationError: the forced implementation cannot quantise x.

    Example:
        >>> import archflash, torch
        >>> values, descale = archflash.quantize_fp8(torch.randn(2, 4, 100, 64), per="block")
        >>> values.dtype, descale.shape
        (torch.float8_e4m3fn, torch.Size([2, 4, 2]))
    """
    if stands_for_tensor(x):
        return overridden(quantize_fp8, locals())  # type: ignore[no-any-return]
    by_operator = goes_through_operator(x)
    if by_operator and is_symbolic(x):
        check_dense(x=x)
    else:
        _native.check_data(x, "x")
    _check(x, per, dtype, layout)
    refuse_derivatives("quantize_fp8", x=x)
    if implementation is not None and not is_one_of(implementation, (_KERNEL, _registry.TORCH)):
        raise ForcedImplementationError(
            f"no quantiser is called {_native.given(implementation)}: there are {_KERNEL} and torch"
        )
    plain = implementation is None and in_transform()  # a transform knows plain operations
    if by_operator and not plain:
        if _sharding.has_dtensor(x):
            _sharding.prepare({})
        heads = 2 if layout == "bnhd" and x.ndim == 4 else 1
        made: tuple[Tensor, Tensor] = torch.ops.archflash.quantize_fp8(
            x.detach(), _PER.index(per), dtype, heads, implementation
        )
        return made
    return _quantize(x, per, dtype, layout, implementation)


def _quantize(
    x: Tensor, per: str, dtype: torch.dtype, layout: str, implementation: str | None
) -> tuple[Tensor, Tensor]:
    """`quantize_fp8` of a plain tensor."""
    if not torch.compiler.is_compiling():
        x = resolved(x)
    values = torch.empty_like(x, dtype=dtype)
    x_by_head, values_by_head = as_bhnd(x, layout), as_bhnd(values, layout)
    simulated = implementation == _KERNEL and x.device.type == "cpu"
    reason = _why_not(x_by_head, values_by_head, simulated)
    if implementation == _KERNEL and reason is not None:
        raise ForcedImplementationError(f"{_KERNEL} is forced, but {reason}")
    sizes = _sizes(x, per, layout)
    if implementation == _registry.TORCH or reason is not None or x.numel() == 0:
        return values, _with_torch(x_by_head, values_by_head, per, dtype).reshape(sizes)
    descale = torch.empty(sizes, dtype=torch.float32, device=x.device)
    _launch(x_by_head, values_by_head, descale, per, dtype)
    return values, descale


def _sizes(x: Tensor, per: str, layout: str) -> list[int]:
    """The shape of the descales."""
    batch, heads, rows, _ = as_bhnd(x, layout).shape
    if per == "tensor":
        return [1]
    if per == "head":
        return [heads] if x.ndim == 3 else [batch, heads]
    return [batch, heads, -(-rows // SCALE_ROWS)]


def _run(
    x: Tensor, per: int, dtype: torch.dtype, heads_dim: int, implementation: str | None
) -> tuple[Tensor, Tensor]:
    """The operator on real tensors."""
    layout = "bnhd" if heads_dim == 2 else "bhnd"
    return _quantize(plain(x), _PER[per], dtype, layout, implementation)


def _fake(
    x: Tensor, per: int, dtype: torch.dtype, heads_dim: int, implementation: str | None
) -> tuple[Tensor, Tensor]:
    sizes = _sizes(x, _PER[per], "bnhd" if heads_dim == 2 else "bhnd")
    return torch.empty_like(x, dtype=dtype), x.new_empty(sizes, dtype=torch.float32)


_ops.library.impl("quantize_fp8", _run, "CompositeExplicitAutograd")
torch.library.register_fake("archflash::quantize_fp8", _fake, lib=_ops.library)


def _check(x: Tensor, per: str, dtype: torch.dtype, layout: str) -> None:
    if not is_one_of(per, _PER):
        raise ValueError(f"per is {_native.given(per)}: it must be 'tensor', 'head' or 'block'")
    if not is_one_of(layout, ("bhnd", "bnhd")):
        raise ValueError(f"layout is {_native.given(layout)}: it must be 'bhnd' or 'bnhd'")
    if not isinstance(dtype, torch.dtype) or dtype not in tuple(_LARGEST):
        raise TypeError(
            f"dtype is {_native.given(dtype)}: it must be torch.float8_e4m3fn or torch.float8_e5m2"
        )
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"x has dtype {x.dtype}: it must be float32, float16 or bfloat16")
    if x.ndim not in (3, 4):
        raise ValueError(
            f"x has shape {tuple(x.shape)}: it must have 4 dimensions, or 3 for packed sequences"
        )
    if x.ndim == 3 and per == "block":
        raise ValueError(
            "per='block' with packed sequences: blocks would straddle them; use 'head'"
        )


def _why_not(x: Tensor, values: Tensor, simulated: bool) -> str | None:
    """Why the kernel cannot quantise x (bhnd) into values."""
    if in_transform():
        return "torch.func's transforms need plain operations"
    if not simulated:
        if x.device.type != "cuda":
            return "x is not on a CUDA device: move it to one"
        if problem := _dispatch.driver_problem():
            return problem
    capability = _device_of(x).capability
    if not _native.has_quantizer(capability):
        return f"this build has no code of it for {capability[0]}.{capability[1]}"
    d = x.shape[-1]
    if d % 8 or d > 256:
        return f"x has rows of {d} numbers: it takes multiples of 8 up to 256"
    steps = [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1][:-1]
    if (d > 1 and x.stride(-1) != 1) or any(s * x.itemsize % 16 for s in steps):
        return "x has rows that are not contiguous and 16-byte aligned"
    if x.data_ptr() % 16 or values.stride(-1) != 1:
        return "x does not start at a multiple of 16 bytes"
    return None


def _launch(x: Tensor, values: Tensor, descale: Tensor, per: str, dtype: torch.dtype) -> None:
    device = _device_of(x)
    name = str(dtype).removeprefix("torch.")
    plan = _native.plan_quantize(name, _PER.index(per), x, values.view(torch.uint8), device)
    tensors: dict[str, Any] = {"q": x, "out": values.view(torch.uint8), "descale": descale}
    if plan.workspace_bytes:
        tensors["workspace"] = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=x.device)
    _native.launch(plan, tensors)


def plans(device: _native.Device) -> list[_native.LaunchPlan]:
    """Plans that together launch every kernel of the quantiser; none if it cannot run."""
    if not _native.has_quantizer(device.capability):
        return []
    sources = (torch.float32, torch.float16, torch.bfloat16)
    tensors = [torch.empty(1, 1, 2 * SCALE_ROWS, 64, dtype=of, device="meta") for of in sources]
    return [
        _native.plan_quantize("float8_e4m3fn", _PER.index(per), x, x, device)
        for x in tensors
        for per in ("tensor", "block")
    ]


def _device_of(x: Tensor) -> _native.Device:
    """The GPU to plan for."""
    if x.device.type == "cpu":
        return _dispatch.simulated_device(_KERNEL)
    return _dispatch.query_device(x.device.index)


def _with_torch(x: Tensor, values: Tensor, per: str, dtype: torch.dtype) -> Tensor:
    """Writes values (bhnd); returns the descales, broadcastable to (batch, heads, blocks)."""
    batch, heads, rows, d = x.shape
    blocks = math.ceil(rows / SCALE_ROWS)
    magnitude = x.detach().abs().float().nan_to_num(nan=0.0, posinf=0.0)
    padded = torch.nn.functional.pad(magnitude, (0, 0, 0, blocks * SCALE_ROWS - rows))
    of_rows = padded.reshape(batch, heads, blocks, SCALE_ROWS * d)
    largest = of_rows.amax(-1) if of_rows.numel() else magnitude.new_zeros(batch, heads, blocks)
    if per == "head":
        largest = largest.amax(-1, keepdim=True) if blocks else largest.new_zeros(batch, heads, 1)
    if per == "tensor":
        most = largest.amax() if largest.numel() else largest.new_zeros(())
        largest = most.reshape(1, 1, 1)
    limit = _LARGEST[dtype]
    # This divides by a tensor, because on CUDA PyTorch replaces division by a Python number with
    # multiplication by its reciprocal.
    quotient = largest / torch.full_like(largest, limit)
    descale = torch.where(largest == 0, 1.0, quotient.clamp(min=_SMALLEST_NORMAL))
    factor = (
        (1.0 / descale).repeat_interleave(SCALE_ROWS, 2)[:, :, :rows]
        if per == "block"
        else (1.0 / descale)
    )
    values.copy_((x.detach().float() * factor[..., None]).clamp(-limit, limit))
    return descale
