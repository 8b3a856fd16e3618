"""archflash.merge_attention: attention over the keys of several calls, from their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _dispatch, _ops, _registry, _sharding
from archflash._archflash import MERGE_PARTS
from archflash._eager import has_tangent, in_transform, overridden, unrecorded
from archflash._errors import ForcedImplementationError
from archflash._given import check_dense, is_one_of
from archflash._plain_tensors import goes_through_operator, is_symbolic, plain, resolved
from archflash._strides import as_bhnd

_ops.library.define(
    "merge_attention(Tensor[] outs, Tensor[] lses, int heads_dim, str? implementation) "
    "-> (Tensor, Tensor)"
)

_LARGEST = torch.finfo(torch.float32).max
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
(_KERNEL,) = _native.merger_names()
_GRADIENT = "a tensor requires a gradient: call it under torch.no_grad()"


def merge_attention(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    *,
    layout: str = "bhnd",
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges attention of the same queries over different keys into attention over all these keys.

    Each part is what `archflash.attention(..., return_lse=True)` returned for some of the keys: a
    prefix that sequences share and what is their own, or the shares of several GPUs. With
    lse = log(sum of exp(lse_i)) the result is the sum of exp(lse_i - lse) * out_i. A row of a part
    whose lse is -inf saw no key: it counts for nothing, whatever its output holds; so does one
    whose lse is +inf and whose output is 0, as FlashAttention-2 gives it. A sink belongs into one
    part only. The call does not wait for the device.

    Args:
        outs: the outputs, at least one: tensors ``(batch, heads, nq, dv)``, with layout="bnhd"
            ``(batch, nq, heads, dv)``, or of packed sequences ``(total_q, heads, dv)``; or all of
            them stacked in one tensor with one more dimension in front. float32, float16 or
            bfloat16, all the same. Any strides.
        lses: their log-sum-exps, natural logarithms in float32: ``(batch, heads, nq)``, of packed
            sequences ``(heads, total_q)``; or stacked as outs.
        layout: "bhnd" or "bnhd", that of 4-dimensional outputs.
        implementation: "ampere" for the kernel, which runs on the simulator if the tensors are on
            the CPU; "torch" for plain operations. Default: the kernel if it runs on the tensors'
            CUDA device, dv is a multiple of 4 and the rows are contiguous and 16-byte aligned; else
            plain operations, which have gradients.

    Returns:
        The pair (out, lse): out has the shape and dtype of each of outs, lse those of each of lses;
        both are dense. A row that saw no key in any part has output 0 and lse -inf.

    Raises:
        ValueError: no part, a different number of outs and lses, shapes that disagree, or an
            unknown layout.
        TypeError: what is no tensor, dtypes that differ or are not supported, mixed devices.
        ForcedImplementationError: the forced implementation cannot merge these tensors.

    Example:
        >>> import archflash, torch
        >>> q, k, v = (torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8))
        >>> parts = [
        ...     archflash.attention(q, k[:, :, i], v[:, :, i], return_lse=True)
        ...     for i in (slice(0, 4), slice(4, 9))
        ... ]
        >>> out, lse = archflash.merge_attention(*zip(*parts))
        >>> torch.allclose(out, archflash.attention(q, k, v), atol=1e-5)
        True
    """
    try:
        parts, of_parts = _tensors(outs, "outs"), _tensors(lses, "lses")
    except TypeError:
        call = {"outs": outs, "lses": lses, "layout": layout, "implementation": implementation}
        if (made := overridden(merge_attention, call)) is NotImplemented:
            raise
        return made  # type: ignore[no-any-return]
    by_operator = goes_through_operator(*parts, *of_parts)
    symbolic = by_operator and is_symbolic(*parts, *of_parts)
    unrecorded(_check, parts, of_parts, layout, symbolic)
    if implementation is not None and not is_one_of(implementation, (_KERNEL, _registry.TORCH)):
        raise ForcedImplementationError(
            f"no merging kernel is called {_native.given(implementation)}: there are {_KERNEL} and "
            "torch"
        )
    if implementation != _KERNEL and in_transform():  # these know plain operations
        return _with_torch(parts, of_parts, layout)
    if any(map(has_tangent, (*parts, *of_parts))):
        if implementation == _KERNEL:
            raise ForcedImplementationError(f"{_KERNEL} is forced, but a tensor has a tangent")
        return _with_torch(parts, of_parts, layout)
    if by_operator:
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*parts, *of_parts)):
            if implementation == _KERNEL:
                raise ForcedImplementationError(f"{_KERNEL} is forced, but {_GRADIENT}")
            return _with_torch(parts, of_parts, layout)
        if _sharding.has_dtensor(*parts, *of_parts):
            _sharding.check_lists("merge_attention")
            given = {"outs": parts, "lses": of_parts}
            named = {f"{name}[{i}]": x for name, y in given.items() for i, x in enumerate(y)}
            _sharding.prepare({}, **named)
        heads = 2 if layout == "bnhd" and parts[0].ndim == 4 else 1
        merged: tuple[Tensor, Tensor] = torch.ops.archflash.merge_attention(
            parts, of_parts, heads, implementation
        )
        return merged
    return _merge(parts, of_parts, layout, implementation)


def _merge(
    parts: list[Tensor], of_parts: list[Tensor], layout: str, implementation: str | None
) -> tuple[Tensor, Tensor]:
    """`merge_attention` of plain tensors."""
    parts, of_parts = ([resolved(x) for x in tensors] for tensors in (parts, of_parts))
    by_head = [as_bhnd(x, layout) for x in parts]
    by_row = [x if x.ndim == 3 else x[None] for x in of_parts]
    simulated = implementation == _KERNEL and parts[0].device.type == "cpu"
    reason = _why_not(by_head, by_row, simulated)
    if implementation == _KERNEL and reason is not None:
        raise ForcedImplementationError(f"{_KERNEL} is forced, but {reason}")
    if implementation == _registry.TORCH or reason is not None or parts[0].numel() == 0:
        return _with_torch(parts, of_parts, layout)
    out = torch.empty(parts[0].shape, dtype=parts[0].dtype, device=parts[0].device)
    return out, _launch(by_head, by_row, as_bhnd(out, layout)).reshape(of_parts[0].shape)


def merge_into(outs: list[Tensor], lses: list[Tensor], out: Tensor) -> Tensor:
    """Merges parts "bhnd", of which each has a dtype of its own, in float32 into `out`, which may
    be the first part. Returns the log-sum-exps.
    """
    if out.numel() and _why_not([out, *outs], lses, simulated=False) is None:
        return _launch(outs, lses, out)
    wide = torch.promote_types(outs[0].dtype, torch.float32)
    merged, lse = _with_torch([x.to(wide) for x in outs], lses, "bhnd")
    out.copy_(merged)
    return lse


def _tensors(given: Sequence[Tensor] | Tensor, name: str) -> list[Tensor]:
    """The parts of an argument."""
    if isinstance(given, Tensor):
        if given.ndim == 0:
            raise ValueError(f"{name} is a number: it must be tensors, or tensors stacked in one")
        check_dense(**{name: given})
        return list(given.unbind(0))
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name} is {_native.given(given)}: it must be tensors, or one stacked one")
    for i, x in enumerate(given):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}[{i}] is {_native.given(x)}: it must be a torch.Tensor")
        if x.is_nested:  # the sizes of some cannot be asked for
            check_dense(**{f"{name}[{i}]": x})
    return list(given)


def _check(outs: list[Tensor], lses: list[Tensor], layout: str, symbolic: bool) -> None:
    if not is_one_of(layout, ("bhnd", "bnhd")):
        raise ValueError(f"layout is {_native.given(layout)}: it must be 'bhnd' or 'bnhd'")
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"there are {len(outs)} outs and {len(lses)} lses: give at least one, and as many"
        )
    first = outs[0]
    if first.dtype not in _DTYPES:
        raise TypeError(f"outs have dtype {first.dtype}: it must be float32, float16 or bfloat16")
    if first.ndim not in (3, 4):
        raise ValueError(
            f"outs have shape {tuple(first.shape)}: it must have 4 dimensions, or 3 for packed "
            "sequences"
        )
    expected = as_bhnd(first, layout).shape[:3]
    shape = tuple(expected if first.ndim == 4 else expected[1:])
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if not symbolic:
            _native.check_data(out, f"outs[{i}]")
            _native.check_data(lse, f"lses[{i}]")
        if out.dtype != first.dtype or lse.dtype != torch.float32:
            raise TypeError(
                f"outs[{i}] and lses[{i}] have dtypes {out.dtype} and {lse.dtype}: they must be "
                f"{first.dtype}, as outs[0], and torch.float32"
            )
        if out.device != first.device or lse.device != first.device:
            raise TypeError(
                f"outs[{i}] and lses[{i}] are on {out.device} and {lse.device}: all must be on "
                f"{first.device}"
            )
        if out.shape != first.shape or tuple(lse.shape) != shape:
            raise ValueError(
                f"outs[{i}] and lses[{i}] have shapes {tuple(out.shape)} and {tuple(lse.shape)}: "
                f"they must be {tuple(first.shape)}, as outs[0], and {shape}"
            )


def _why_not(outs: list[Tensor], lses: list[Tensor], simulated: bool) -> str | None:
    """Why the kernel cannot merge these parts (bhnd)."""
    first = outs[0]
    for x in outs:
        if x.dtype not in _DTYPES:
            return f"outs have dtype {x.dtype}: it takes float32, float16 and bfloat16"
    if not simulated:
        if first.device.type != "cuda":
            return "the tensors are not on a CUDA device: move them to one"
        if problem := _dispatch.driver_problem():
            return problem
    capability = _device_of(first).capability
    if not _native.has_merger(capability):
        return f"this build has no code of it for {capability[0]}.{capability[1]}"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*outs, *lses)):
        return _GRADIENT
    if first.shape[-1] % 4:
        return f"outs have rows of {first.shape[-1]} numbers: it takes multiples of 4"
    for x in outs:
        steps = [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]
        last = steps.pop() if x.shape[-1] > 1 else 1
        step = 4 * x.itemsize  # what a lane reads at once
        if last != 1 or any(s * x.itemsize % step for s in steps) or x.data_ptr() % step:
            return f"outs have rows that are not contiguous and aligned to {step} bytes"
    return None


def _launch(outs: list[Tensor], lses: list[Tensor], out: Tensor) -> Tensor:
    """Merges parts into `out` (bhnd); returns the log-sum-exps (batch, heads, nq)."""
    # More parts than the kernel takes are merged one after another, in float32.
    while len(outs) > MERGE_PARTS:
        some = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        lse = _launch(outs[:MERGE_PARTS], lses[:MERGE_PARTS], some)
        outs, lses = [some, *outs[MERGE_PARTS:]], [lse, *lses[MERGE_PARTS:]]
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    tensors: dict[str, Any] = {"out": out, "lse": lse}
    tensors |= {f"part_{i}": x for i, x in enumerate(outs)}
    tensors |= {f"part_lse_{i}": x for i, x in enumerate(lses)}
    _native.launch(_native.plan_merge(outs, lses, out, _device_of(out)), tensors)
    return lse


def _device_of(x: Tensor) -> _native.Device:
    """The GPU to plan for."""
    if x.device.type == "cpu":
        return _dispatch.simulated_device(_KERNEL)
    return _dispatch.query_device(x.device.index)


def _with_torch(outs: list[Tensor], lses: list[Tensor], layout: str) -> tuple[Tensor, Tensor]:
    """The result by PyTorch's operations in float32."""
    outs = [as_bhnd(x, layout) if x.ndim == 4 else x.transpose(0, 1) for x in outs]
    stacked = torch.stack(lses)
    zeros = torch.stack([(out == 0).all(-1) for out in outs])
    stacked = stacked.masked_fill((stacked == torch.inf) & zeros, -torch.inf)
    top = stacked.amax(0)
    # A finite number near the largest, because the difference of infinities would be NaN.
    base = top.detach().clamp(-_LARGEST, _LARGEST)
    weights = torch.where(stacked == torch.inf, 1.0, (stacked - base).exp())
    total = weights.sum(0)
    total = torch.where(total == 0, 1.0, total)
    lse = torch.where(top.isinf(), top, base + total.log())
    merged = torch.zeros_like(outs[0], dtype=torch.promote_types(outs[0].dtype, torch.float32))
    for out, weight in zip(outs, weights, strict=True):
        share = (weight / total)[..., None]
        merged = merged + torch.where(share == 0, 0.0, out.to(merged.dtype)) * share
    merged = merged.to(outs[0].dtype)
    merged = as_bhnd(merged, layout) if merged.ndim == 4 else merged.transpose(0, 1)
    return merged.contiguous(), lse


def _run(
    outs: list[Tensor], lses: list[Tensor], heads_dim: int, implementation: str | None
) -> tuple[Tensor, Tensor]:
    """The operator on real tensors."""
    parts, of_parts = ([plain(x) for x in tensors] for tensors in (outs, lses))
    return _merge(parts, of_parts, "bnhd" if heads_dim == 2 else "bhnd", implementation)


def _fake(
    outs: list[Tensor], lses: list[Tensor], heads_dim: int, implementation: str | None
) -> tuple[Tensor, Tensor]:
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


_ops.library.impl("merge_attention", _run, "CompositeExplicitAutograd")
torch.library.register_fake("archflash::merge_attention", _fake, lib=_ops.library)
