"""What the interfaces of FlashAttention-2 and -3 have in common."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from archflash._api import attention
from archflash._errors import UnsupportedError

Window = tuple[int | None, int | None]
UNBOUNDED: Window = (-1, -1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    deterministic: bool,
    want_lse: bool,
    lse_unseen: float = -math.inf,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """A call with FlashAttention's arguments: rows before heads, causal and window aligned to the
    bottom right, -1 for an unbounded side of the window, 0 for no softcap.

    Args:
        lse_unseen: the log-sum-exp of a row that sees no key.
        options: further options of `archflash.attention`.

    Returns:
        The output, and the log-sum-exp where it is wanted: float32 (batch, heads, rows), or
        (heads, rows) for packed sequences.
    """
    if deterministic and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise UnsupportedError(
            "deterministic=True: the backward is PyTorch's and is not promised to give the same "
            "bits; leave it at False"
        )
    left, right = (None if side is None or side < 0 else side for side in window_size)
    result = attention(
        q,
        k,
        v,
        scale=softmax_scale,
        causal=causal,
        window=None if left is None and right is None else (left, right),
        softcap=softcap or None,
        layout="bnhd",
        return_lse=want_lse,
        **options,
    )
    if not want_lse:
        return result, None
    out, lse = result
    if lse_unseen != -math.inf:
        lse = lse.masked_fill(lse == -math.inf, lse_unseen)
    return out, lse


def refuse(**given: tuple[Any, Any]) -> None:
    """Refuses arguments that archflash does not take.

    Args:
        given: for each argument its value and the only one that is taken.

    Raises:
        UnsupportedError: one has another value; it is named.
    """
    for name, (value, taken) in given.items():
        if isinstance(value, Tensor):
            raise UnsupportedError(f"{name}: not built yet; leave it at {taken}")
        if value != taken:
            raise UnsupportedError(f"{name}={value!r}: not built yet; leave it at {taken!r}")
