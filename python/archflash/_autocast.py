"""torch.autocast: the dtypes that the tensors of a call have inside of it.

PyTorch's own scaled_dot_product_attention is on autocast's list of functions that run in the lower
precision, and archflash's functions follow it: a model whose rotary embedding makes q and k float32
while v stays bfloat16 computes in bfloat16, with an output of that dtype. Only tensors of 32 and 16
bits are cast: float64 and float8 mean what they say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from archflash._bias import is_causal_bias

# Device types that have autocast. They are determined at import, because torch.compile cannot trace
# this query before torch 2.13.
AUTOCAST_DEVICES = tuple(
    name for name in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(name)
)

# Whether autocast is on for any device: what every call asks, in about 50 ns.
is_on = torch._C._is_any_autocast_enabled

_CAST = (torch.float32, torch.float16, torch.bfloat16)


def dtype_on(device: str) -> torch.dtype | None:
    """The dtype of autocast for tensors of a device type; None where it is off."""
    if device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def inputs(q: Any, k: Any, v: Any, attn_mask: Any, out: Any = None) -> tuple[Any, Any, Any, Any]:
    """q, k, v and a floating attn_mask as they are inside autocast. Gradients flow through it.

    Args:
        q, k, v, attn_mask: those of a call, which need not be right.
        out: the tensor that the call writes to. As in PyTorch, nothing is cast then.
    """
    dtype = dtype_on(q.device.type) if isinstance(q, Tensor) and out is None else None
    if dtype is None:
        return q, k, v, attn_mask
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype), _cast(attn_mask, dtype)


def beside_cache(cache: Any, *tensors: Any) -> tuple[Any, ...]:
    """Queries and new rows as they are inside autocast, beside a cache of its dtype. A cache is not
    cast, as the call may write to it, and beside one of another dtype nothing is.
    """
    dtype = dtype_on(cache.device.type) if isinstance(cache, Tensor) else None
    if dtype is None or cache.dtype != dtype:
        return tensors
    return tuple(_cast(x, dtype) for x in tensors)


def described(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """q, k and v of a call that is only explained, as they are inside autocast, and with them the
    tensors among its options. Those that would be cast are replaced by tensors without values, so
    that nothing is launched.
    """
    if options.get("cache_seqlens") is not None or options.get("physical_indices"):
        dtype = dtype_on(k.device.type) if isinstance(k, Tensor) else None
        if dtype is None or k.dtype != dtype:
            return q, k, v
        names: tuple[str, ...] = ("k_new", "v_new", "qv")
    else:
        dtype = dtype_on(q.device.type) if isinstance(q, Tensor) else None
        if dtype is None or options.get("out") is not None:
            return q, k, v
        names = ("attn_mask",)
    for name in names:
        if name in options and not is_causal_bias(options[name]):
            options[name] = _cast(options[name], dtype, _without_values)
    q, k, v = (_cast(x, dtype, _without_values) for x in (q, k, v))
    return q, k, v


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def _without_values(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype).requires_grad_(x.requires_grad)


def _cast(
    x: Any, dtype: torch.dtype, convert: Callable[[Tensor, torch.dtype], Tensor] = _to
) -> Any:
    cast = isinstance(x, Tensor) and x.dtype in _CAST and x.dtype != dtype
    return convert(x, dtype) if cast else x


def may_be_on(device_type: str) -> bool:
    """Whether autocast may be active for tensors of a device type."""
    return device_type not in AUTOCAST_DEVICES or torch.is_autocast_enabled(device_type)


def no_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast casts nothing on a kind of device."""
    if device_type in AUTOCAST_DEVICES and (
        torch.compiler.is_compiling() or torch.is_autocast_enabled(device_type)
    ):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
