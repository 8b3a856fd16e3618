"""Reading and checking what a rank gives to a call over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from archflash._errors import UnsupportedError
from archflash.distributed import _shards as _of_shards
from archflash.distributed._cost import METHODS

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


# What was read of cu_seqlens and key_ranges, by tensor: (version, value).
_read: Any = WeakIdKeyDictionary()


def by_head(x: Tensor, packed: bool, layout: str) -> Tensor:
    if packed:
        return x.transpose(0, 1).unsqueeze(0)
    return x.transpose(1, 2) if layout == "bnhd" else x


def checked(q: Any, k: Any, v: Any, packed: bool, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v "bhnd"."""
    if layout not in ("bhnd", "bnhd"):
        raise ValueError(f"layout is {layout!r}: it must be 'bhnd' or 'bnhd'")
    dims = 3 if packed else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) not in (Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{name} is {type(x).__name__}: it must be a plain tensor of this rank's rows"
            )
        if x.ndim != dims:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: it must have {dims} dimensions"
                + (" with cu_seqlens" if packed else "")
            )
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"{name} has dtype {x.dtype}: it must be float32, float16, bfloat16 or float64"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(
                f"{name} is {x.dtype} on {x.device}, and q {q.dtype} on {q.device}: they must agree"
            )
    q, k, v = (by_head(x, packed, layout) for x in (q, k, v))
    if q.shape[2] != k.shape[2] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q has {q.shape[0]} sequences of {q.shape[2]} rows and {q.shape[3]} columns, k "
            f"{k.shape[0]} of {k.shape[2]} and {k.shape[3]}: they must agree, as attention over "
            "ranks is that of a sequence to itself"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v has shape {tuple(v.shape)} and k {tuple(k.shape)}: they must agree")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, which is no multiple of k's {k.shape[1]}")
    return q, k, v


def bounds(causal: bool, window: Any) -> tuple[int | None, int | None]:
    """The bounds of a causal mask and a window together, which make_problem has checked."""
    left, right = (None if x is None or x < 0 else int(x) for x in window or (None, None))
    return left, 0 if causal else right


def checked_method(method: str, sizes: tuple[int, int] | None) -> str:
    if method != "auto" and method not in METHODS:
        raise ValueError(
            f"method is {method!r}: it must be 'auto', {', '.join(map(repr, METHODS))}"
        )
    if sizes is not None and method not in ("auto", "hybrid"):
        raise UnsupportedError(
            f"method {method!r} has no mesh of two dimensions: give a group, or method='hybrid'"
        )
    if sizes is None and method == "hybrid":
        raise UnsupportedError("method 'hybrid' needs a mesh of two dimensions: give mesh=")
    return "hybrid" if sizes is not None else method


def _remembered(x: Tensor, read: Callable[[Tensor], Any]) -> Any:
    """What was read of a tensor on a GPU, which is not read again while it stays the same. One on
    the CPU is read each time, as numpy may have written to it.
    """
    if not x.is_cuda or x.is_inference():
        return read(x)
    known = _read.get(x)
    if known is None or known[0] != x._version:
        known = _read[x] = (x._version, read(x))
    return known[1]


def read_boundaries(cu_seqlens: Any) -> tuple[int, ...]:
    if not isinstance(cu_seqlens, Tensor):
        return tuple(_of_shards.boundaries(cu_seqlens))
    found: tuple[int, ...] = _remembered(cu_seqlens, lambda x: tuple(_of_shards.boundaries(x)))
    return found


def read_ranges(key_ranges: Any) -> Tensor:
    if not isinstance(key_ranges, Tensor) or key_ranges.dtype != torch.int32:
        raise TypeError("key_ranges must be an int32 tensor")
    if key_ranges.ndim != 5 or key_ranges.shape[-1] != 2:
        raise ValueError(
            f"key_ranges has shape {tuple(key_ranges.shape)}: it must be (batch or 1, heads or 1, "
            "n or 1, ranges, 2)"
        )
    found: Tensor = _remembered(key_ranges, lambda x: x.detach().cpu())
    return found


def check_ranges(key_ranges: Tensor, q: Tensor, n: int) -> None:
    batch, heads, rows = key_ranges.shape[:3]
    if batch not in (1, q.shape[0]) or heads not in (1, q.shape[1]) or rows not in (1, n):
        raise ValueError(
            f"key_ranges has shape {tuple(key_ranges.shape)}: it must be ({q.shape[0]} or 1, "
            f"{q.shape[1]} or 1, {n} or 1, ranges, 2), of the whole sequence"
        )
