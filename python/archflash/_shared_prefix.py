"""archflash.attention_with_shared_prefix: sequences that begin with the same keys."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash._eager import is_eager, is_tracing, overridden, stands_for_tensor
from archflash._errors import ArchflashError
from archflash._given import check_dense, is_one_of
from archflash._kvcache import attention_with_kvcache, refuse_wrong
from archflash._merge import merge_attention
from archflash._registry import TORCH

_MERGING = (*_native.merger_names(), TORCH)


def attention_with_shared_prefix(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    prefix_seqlens: Tensor | None = None,
    prefix_page_table: Tensor | None = None,
    dv: int | None = None,
    page_table: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    qv: Tensor | None = None,
    scale: float | None = None,
    layout: str = "bnhd",
    check: bool | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of sequences whose keys are a prefix that all share and then rows of their own.

    It is `attention_with_kvcache` on the concatenation of both, in cascade: one call attends to the
    prefix with the queries of all sequences at once, so that the prefix is read once for every 64
    packed rows (query rows times the query heads that share a head of k), not for each sequence;
    one call attends to what each sequence has of its own; `merge_attention` adds them up.
    Prefixes of several levels are merged likewise from calls of these two functions. Lengths and
    page tables are read on the device only. Each part is rounded to q's dtype before it is merged.

    Args:
        q: queries, ``(batch, nq, heads_q, d)``, or with cu_seqlens_q ``(total_q, heads_q, d)``: the
            last rows of each sequence. Copied if the rows of all sequences cannot be viewed as
            those of one.
        k_prefix: keys of the prefix, ``(1, capacity, heads_kv, d)``; with prefix_page_table pages
            ``(pages, page_size, heads_kv, d)``, which may be those of k_cache.
        v_prefix: its values, as k_prefix with dv for d; None for a latent cache.
        k_cache: keys that each sequence has of its own, as for `attention_with_kvcache`.
        v_cache: their values; None for a latent cache.
        cache_seqlens: int32 ``(batch,)``: rows of each sequence behind the prefix, before this
            call's. With causal, at least as many as its queries after the append.
        prefix_seqlens: int32 ``(1,)``: rows of the prefix that are valid. Default: its capacity.
        prefix_page_table: int32 ``(1, pages of the prefix)``.
        dv: as for `attention_with_kvcache`, of both parts.
        page_table, k_new, v_new, cache_batch_idx, leftpad_k, cu_seqlens_q, max_seqlen_q: as for
            `attention_with_kvcache`, of the sequences' own rows. Every query sees the whole prefix.
        causal: query i of nq sees the prefix and its sequence's own keys up to row
            length - nq + i, where length is that after the append.
        softcap, sinks, qv, scale, layout: as for `attention_with_kvcache`; a sink counts once.
        check: as for `attention_with_kvcache`, of both calls.
        implementation: forces one by name, of both calls.
        return_lse: also return the log-sum-exp over all keys.

    Returns:
        The output, or with return_lse the pair (output, lse), as `attention_with_kvcache` does.

    Raises:
        ValueError, TypeError, UnsupportedError, ForcedImplementationError, LaunchError: as
            `attention_with_kvcache`.

    Example:
        >>> import archflash, torch
        >>> q = torch.randn(3, 1, 4, 16)
        >>> k_prefix, v_prefix = (torch.randn(1, 100, 4, 16) for _ in "kv")
        >>> k, v = (torch.randn(3, 20, 4, 16) for _ in "kv")
        >>> lengths = torch.tensor([7, 20, 0], dtype=torch.int32)
        >>> out = archflash.attention_with_shared_prefix(
        ...     q, k_prefix, v_prefix, k, v, cache_seqlens=lengths
        ... )
        >>> both = torch.cat([k_prefix[0], k[0, :7]]), torch.cat([v_prefix[0], v[0, :7]])
        >>> alone = archflash.attention(q[:1], *(x[None] for x in both), layout="bnhd")
        >>> torch.allclose(out[:1], alone, atol=1e-5)
        True
    """
    if stands_for_tensor(q):
        return overridden(attention_with_shared_prefix, locals())
    if not is_one_of(layout, ("bhnd", "bnhd")):
        raise ValueError(f"layout is {_native.given(layout)}: it must be 'bhnd' or 'bnhd'")
    if (v_prefix is None) != (v_cache is None):
        name = "v_prefix" if v_prefix is None else "v_cache"
        raise ValueError(f"{name} is None and the other is not: both parts are latent or neither")
    tensors = {
        "q": q, "k_prefix": k_prefix, "v_prefix": v_prefix, "v_cache": v_cache,
        "prefix_page_table": prefix_page_table,
    }  # fmt: skip
    check_dense(**{x: y for x, y in tensors.items() if isinstance(y, Tensor)})
    columns = [x.shape[3] for x in (v_prefix, v_cache) if isinstance(x, Tensor) and x.ndim == 4]
    # A tracer's sizes are tensors.
    if not is_tracing() and len(columns) == 2 and columns[0] != columns[1]:
        raise ValueError(
            f"v_prefix has {columns[0]} columns and v_cache {columns[1]}: they must have as many"
        )
    packed = cu_seqlens_q is not None
    if not isinstance(q, Tensor) or q.ndim != (3 if packed else 4):
        given = f"has shape {tuple(q.shape)}" if isinstance(q, Tensor) else f"is {_native.given(q)}"
        raise ValueError(
            f"q {given}: it must be "
            + ("(total_q, heads_q, d), as cu_seqlens_q is given" if packed else "4-dimensional")
        )
    swapped = layout == "bhnd" and not packed
    shared: dict[str, Any] = {
        "softcap": softcap, "scale": scale, "dv": dv, "layout": layout, "check": check,
        "implementation": implementation, "return_lse": True,
    }  # fmt: skip
    of_own: dict[str, Any] = {
        "cache_seqlens": cache_seqlens, "page_table": page_table, "k_new": k_new, "v_new": v_new,
        "cache_batch_idx": cache_batch_idx, "leftpad_k": leftpad_k, "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q, "causal": causal, "sinks": sinks, "qv": qv,
    }  # fmt: skip
    if is_eager():  # The attention to the prefix is launched before this call checks the others.
        refuse_wrong(
            q, k_cache, v_cache, dv=dv, softcap=softcap, scale=scale, layout=layout,
            return_lse=return_lse, **of_own,
        )  # fmt: skip

    def of_one_sequence(x: Tensor) -> Tensor:
        """The queries of all sequences as those of one."""
        if packed:
            return x
        rows = (x.transpose(1, 2) if swapped else x).flatten(0, 1)[None]
        return rows.transpose(1, 2) if swapped else rows

    if prefix_seqlens is None:
        prefix_seqlens = _capacity(k_prefix, prefix_page_table, layout)
    all_rows: dict[str, Any] = {}
    if cu_seqlens_q is not None:  # rows of no sequence see no prefix either
        all_rows = {"cu_seqlens_q": torch.stack([cu_seqlens_q[0], cu_seqlens_q[-1]])}
    compiling = torch.compiler.is_compiling()  # torch 2.6 does not trace such a context
    with contextlib.nullcontext() if compiling else _named_as_the_prefix():
        of_prefix = attention_with_kvcache(
            of_one_sequence(q), k_prefix, v_prefix, cache_seqlens=prefix_seqlens,
            page_table=prefix_page_table, qv=None if qv is None else of_one_sequence(qv),
            **all_rows, **shared,
        )  # fmt: skip

    # Last: where either part is refused, no row has been appended to the caches.
    own = attention_with_kvcache(q, k_cache, v_cache, **of_own, **shared)
    outs, lses = [own[0], of_prefix[0]], [own[1], of_prefix[1]]
    if not packed:
        batch, _, nq = own[1].shape
        rows = outs[1].transpose(1, 2) if swapped else outs[1]
        # Not unflatten(): torch.compile cannot trace it where a default device is set.
        rows = rows.reshape(batch, nq, *rows.shape[2:])
        outs[1] = rows.transpose(1, 2) if swapped else rows
        lses[1] = lses[1].reshape(lses[1].shape[1], batch, nq).transpose(0, 1)
    merging = implementation if implementation in _MERGING else None
    merged = merge_attention(outs, lses, layout=layout, implementation=merging)
    return merged if return_lse else merged[0]


_NAMES_OF_PREFIX = {
    "k_cache": "k_prefix",
    "v_cache": "v_prefix",
    "cache_seqlens": "prefix_seqlens",
    "page_table": "prefix_page_table",
}


@contextlib.contextmanager
def _named_as_the_prefix() -> Iterator[None]:
    """Errors of a call of attention_with_kvcache on the prefix get the names of its arguments."""
    try:
        yield
    except (ValueError, TypeError, ArchflashError) as error:
        names = r"\b(" + "|".join(_NAMES_OF_PREFIX) + r")\b"
        message = re.sub(names, lambda name: _NAMES_OF_PREFIX[name[0]], str(error))
        raise type(error)(message) from error


def _capacity(k_prefix: Tensor, prefix_page_table: Tensor | None, layout: str) -> Tensor:
    """The rows that a prefix has room for, as its length."""
    if not isinstance(k_prefix, Tensor) or k_prefix.ndim != 4:
        raise ValueError("k_prefix must be a tensor of 4 dimensions, (1, capacity, heads_kv, d)")
    rows = k_prefix.shape[1 if layout == "bnhd" else 2]
    if prefix_page_table is not None:
        if not isinstance(prefix_page_table, Tensor) or prefix_page_table.ndim != 2:
            raise ValueError("prefix_page_table must be an int32 tensor (1, pages of the prefix)")
        rows *= prefix_page_table.shape[-1]
    return torch.full((1,), rows, dtype=torch.int32, device=k_prefix.device)
