"""Calls on latent and on packed rows as calls with qv: views of the same memory."""

from __future__ import annotations

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash._eager import unrecorded
from archflash._given import check_dense, is_int, is_one_of
from archflash._packed_rows import ROW_BYTES


def packed_parts(
    q: Tensor, k_cache: Tensor, packed_rows: str, dv: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The call on packed latent rows as one with qv: views of the same memory.

    Returns:
        q, qv and k_cache, which is v_cache too. Where V has all columns of a row, K's other ones
        count as 0, so that any columns will do for q.

    Raises:
        ValueError: no such format, or q or dv do not fit it.
    """
    check_dense(q=q, k_cache=k_cache)
    if not is_one_of(packed_rows, ROW_BYTES):
        raise ValueError(
            f"packed_rows is {_native.given(packed_rows)}: it must be 'fp8_656' or 'fp8_584'"
        )
    columns = 576 if ROW_BYTES[packed_rows] == 656 else 512
    found = q.shape[-1] if q.ndim else 0
    if found != columns or not (dv is None or (is_int(dv) and dv == 512)):
        raise ValueError(
            f"q has {found} columns and dv is {_native.given(dv)} with "
            f"packed_rows={packed_rows!r}: they must be {columns} and 512"
        )
    if k_cache.dtype == torch.uint8:
        k_cache = k_cache.view(torch.float8_e4m3fn)
    return q[..., 512:] if columns == 576 else q[..., :64], q[..., :512], k_cache


def latent_parts(
    q: Tensor, k_cache: Tensor, k_new: Tensor | None, dv: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The call on a latent cache as one with qv: views of the same memory.

    Args:
        q: ``(..., d)``.
        k_cache: ``(..., d)``, rows whose first dv columns are V.
        k_new: rows to append, or None.
        dv: columns of V.

    Returns:
        q, qv, k_cache, v_cache, k_new and v_new for `attention_with_kvcache`.

    Raises:
        TypeError: what is no tensor, or dv is no int.
        ValueError: dv is missing or does not lie between 1 and d - 1.
    """
    unrecorded(_check_latent, q, k_cache, k_new, dv)
    return (
        q[..., dv:],
        q[..., :dv],
        k_cache[..., dv:],
        k_cache[..., :dv],
        None if k_new is None else k_new[..., dv:],
        None if k_new is None else k_new[..., :dv],
    )


def _check_latent(q: Tensor, k_cache: Tensor, k_new: Tensor | None, dv: int | None) -> None:
    check_dense(q=q, k_cache=k_cache, **({} if k_new is None else {"k_new": k_new}))
    if dv is None:
        raise ValueError("dv is missing: with v_cache=None it is the number of columns that are V")
    if not is_int(dv):
        raise TypeError(f"dv is {_native.given(dv)}: it must be an int")
    if k_cache.ndim == 0:
        raise ValueError("k_cache has shape (): it must have rows of d columns")
    d = k_cache.shape[-1]
    if not 0 < dv < d:
        raise ValueError(f"dv is {dv} for a latent cache of {d} columns: it must be 1 to {d - 1}")
    if q.ndim == 0 or q.shape[-1] != d:
        raise ValueError(
            f"q has shape {tuple(q.shape)}: its last dimension must be {d} as in k_cache"
        )
    if k_new is not None and (k_new.ndim == 0 or k_new.shape[-1] != d):
        raise ValueError(
            f"k_new has shape {tuple(k_new.shape)}: its last dimension must be {d} as in k_cache"
        )
