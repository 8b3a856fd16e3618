"""FlashAttention-4's package `flash_attn.cute`, served by archflash.

Names, order and defaults of the arguments and return values are FlashAttention-4's. They differ
from FlashAttention-3's: both functions always return (output, log-sum-exp), the latter None unless
it is asked for, a side of a window is unbounded where it is None and shifts the window where it is
negative, and `learnable_sink` has gradients.

What archflash does not take raises `archflash.UnsupportedError` with the name of the argument:
functions written in CuTe (score_mod, mask_mod and what belongs to them), negative sides in packed
sequences, gather_kv_indices there, and gradients with qv or pages. pack_gqa, scheduler_metadata,
disable_scheduler_metadata, seqlen_k_per_split, min_seqlen_k, gather_bwd_recompute_p,
gather_bwd_token_chunk and num_splits of 0 or 1 are advice about speed; so are max_seqlen_k and
deterministic with pages, and all but out and out_dtype of what is combined.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archflash._errors import UnsupportedError
from archflash.compat._arguments import boolean, check_tensors, count, in_its_words, plain
from archflash.compat._flash import Window, attend, refuse, sides_of, without_backward
from archflash.compat._flash_3 import flash_attn_combine as _fa3_combine
from archflash.compat._flash_3 import flash_attn_varlen_func as _fa3_varlen_func

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
]

_NAMES = {
    "sinks": "learnable_sink", "s_aux": "learnable_sink", "scale": "softmax_scale",
    "window": "window_size", "key_indices": "gather_kv_indices", "k_cache": "k", "v_cache": "v",
}  # fmt: skip


@in_its_words(**_NAMES)
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, score_mod: Any = None, score_mod_bwd: Any = None,
    mask_mod: Any = None, aux_tensors: Any = None, aux_scalars: Any = None,
    block_sparse_tensors: Any = None, block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False, gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of q (batch, rows, heads, d) on k and v.

    Args:
        q, k, v: (batch, rows, heads, d); q may have a multiple of k's heads.
        qv: (batch, rows, heads, dv), a second query that multiplies v. It has no backward.
        gather_kv_indices: int32 (batch, rows, count), the keys that each row sees; -1 for none. It
            needs qv.
        softmax_scale: multiplies q k^T; 1 / sqrt(d) by default, 1 / sqrt(d + dv) with qv.
        causal: query i sees keys up to i + rows of k - rows of q.
        window_size: (left, right) around that key; None for an unbounded side. A negative side
            shifts the window: (None, -3) leaves out that key and the two before it.
        learnable_sink: (heads,), one more logit per head in the denominator.
        softcap: 0 for none.
        deterministic: of the backward, as in `flash_attn_interface`.
        return_lse: also return the log-sum-exp.

    Returns:
        The output (batch, rows, heads, dv), and None or the log-sum-exp, float32 (batch, heads,
        rows), or (batch, rows, heads) with qv.

    Raises:
        UnsupportedError: an argument that archflash does not take; it is named.

    Example:
        >>> import torch
        >>> from archflash.compat.flash_attn.cute import flash_attn_func
        >>> q = torch.randn(2, 7, 4, 16)
        >>> out, lse = flash_attn_func(q, q, q, causal=True, return_lse=True)
        >>> lse.shape
        torch.Size([2, 4, 7])
    """
    _refuse_written_in_cute(
        score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )  # fmt: skip
    window, shift = _window(window_size, boolean("causal", causal))
    num_splits = count("num_splits", num_splits)
    deterministic = boolean("deterministic", deterministic)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "softcap": softcap, "sinks": _sink(learnable_sink),
        "want_lse": return_lse,
    }  # fmt: skip
    if qv is None:
        if gather_kv_indices is not None:
            raise UnsupportedError("gather_kv_indices without qv: give qv, or leave it at None")
        if shift:
            options["q_offset"] = k.shape[1] - q.shape[1] + shift
        return attend(
            q, k, v, causal=False, window_size=window, deterministic=deterministic,
            num_splits=num_splits if num_splits > 1 else None, **options,
        )  # fmt: skip
    if shift:
        raise UnsupportedError(f"window_size={window_size!r} with qv: no side may be negative")
    if gather_kv_indices is not None:
        check_tensors(gather_kv_indices=gather_kv_indices)
        options["key_indices"] = gather_kv_indices[:, None]
    result = without_backward(
        "qv", q, k, v, qv=qv, cache_seqlens=None, page_table=None, causal=False,
        window_size=window, num_splits=num_splits, **options,
    )  # fmt: skip
    return (result[0], result[1].transpose(1, 2)) if return_lse else (result, None)


@in_its_words(**_NAMES, cache_seqlens="seqused_k")
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None, page_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (None, None),
    learnable_sink: Tensor | None = None, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, score_mod: Any = None,
    score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None,
    aux_tensors: Any = None, aux_scalars: Any = None, return_lse: bool = False,
    scheduler_metadata: Any = None, seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False, gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of sequences of different lengths: each of q and of k, v is packed (total rows,
    heads, d) with cu_seqlens, or (batch, rows, heads, d), of which the first seqused rows count.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,), where each sequence begins.
        max_seqlen_q, max_seqlen_k: the longest sequences; read from the lengths if they are needed
            and not given.
        seqused_q, seqused_k: int32 (sequences,), how many rows of each sequence count.
        page_table: int32 (sequences, pages): k and v are pages (pages, rows of a page, heads, d),
            and seqused_k says how many keys count.
        The others are those of `flash_attn_func`.

    Returns:
        The output, like q, and None or the log-sum-exp: (heads, total rows) of packed q, else
        (batch, heads, rows); with qv the heads come last.

    Raises:
        UnsupportedError: an argument that archflash does not take; it is named.
    """
    _refuse_written_in_cute(
        score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    if gather_kv_indices is not None:
        raise UnsupportedError("gather_kv_indices: flash_attn_func takes it, with qv")
    window, shift = _window(window_size, boolean("causal", causal))
    num_splits = count("num_splits", num_splits)
    deterministic = boolean("deterministic", deterministic)
    if shift:
        raise UnsupportedError(f"window_size={window_size!r}: no side may be negative here")
    sinks = _sink(learnable_sink)
    check_tensors(q=q)
    rows = None if cu_seqlens_q is not None else q.shape[:2]  # of sequences of one size
    if rows is not None:
        q, cu_seqlens_q, max_seqlen_q = _packed("q", q)
        qv = None if qv is None else _packed("qv", qv)[0]
    assert cu_seqlens_q is not None
    if max_seqlen_q is None:
        max_seqlen_q = _longest("cu_seqlens_q", cu_seqlens_q)
    if page_table is None:
        if cu_seqlens_k is None:
            k, cu_seqlens_k, max_seqlen_k = _packed("k", k)
            v = _packed("v", v)[0]
        if max_seqlen_k is None:
            max_seqlen_k = _longest("cu_seqlens_k", cu_seqlens_k)
        result = _fa3_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
            softmax_scale, window_size=window, qv=qv, softcap=softcap, num_splits=num_splits,
            deterministic=deterministic, return_attn_probs=return_lse, s_aux=sinks,
        )  # fmt: skip
    else:
        refuse(seqused_q=(seqused_q, None), cu_seqlens_k=(cu_seqlens_k, None))
        result = without_backward(
            "page_table", q, k, v, qv=qv, cache_seqlens=seqused_k, page_table=page_table,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=plain(max_seqlen_q),
            softmax_scale=softmax_scale, causal=False, window_size=window, softcap=softcap,
            sinks=sinks, num_splits=num_splits, want_lse=return_lse,
        )  # fmt: skip
    out, lse = result if return_lse else (result, None)
    if rows is not None:
        # Not unflatten(): torch.compile cannot trace it where a default device is set.
        out = out.reshape(*rows, *out.shape[1:])
        lse = None if lse is None else lse.reshape(lse.shape[0], *rows).transpose(0, 1)
    if lse is not None and qv is not None:
        lse = lse.movedim(-2, -1)
    return out, lse


@in_its_words()
def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None,
    out_dtype: torch.dtype | None = None, cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None, virtual_batch_idx: Tensor | None = None, return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The attention on all keys from the attention on shares of them, as that of
    `flash_attn_interface`: out_partial (shares, batch, rows, heads, dv), or (shares, total rows,
    heads, dv) of packed sequences. Without return_lse the log-sum-exp is None.
    """
    want_lse = boolean("return_lse", return_lse)
    out, lse = _fa3_combine(out_partial, lse_partial, out, out_dtype)
    return out, lse if want_lse else None


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """None: archflash makes its plans itself and keeps them, so there is nothing to pass on."""


def _refuse_written_in_cute(**given: Any) -> None:
    """Refuses functions written in CuTe, and what belongs to them."""
    for name, value in given.items():
        refuse(**{name: (value, None)})


def _window(window_size: Window, causal: bool) -> tuple[Window, int]:
    """The sides with -1 for an unbounded one, and by how much the queries move so that no side is
    negative. causal is a right side of 0.
    """
    left, right = sides_of(window_size)
    if causal:
        right = 0
    shift = 0
    if right is not None and right < 0:
        shift = right
    elif left is not None and left < 0:
        shift = -left
    left = None if left is None else left + shift
    right = None if right is None else right - shift
    if any(side is not None and side < 0 for side in (left, right)):
        raise UnsupportedError(
            f"window_size={window_size!r}: the window is empty; None is an unbounded side"
        )
    return (-1 if left is None else left, -1 if right is None else right), shift


def _sink(learnable_sink: Tensor | None) -> Tensor | None:
    if learnable_sink is None:
        return None
    check_tensors(learnable_sink=learnable_sink)
    return learnable_sink.float()


def _longest(name: str, ends: Tensor) -> int:
    """The rows of the longest of packed sequences."""
    check_tensors(**{name: ends})
    lengths = ends.diff()
    return int(lengths.max()) if lengths.numel() else 0


def _packed(name: str, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Sequences of one size as packed ones: rows, where each begins, and the size."""
    check_tensors(**{name: x})
    if x.ndim != 4:
        missing = "cu_seqlens_q" if name.startswith("q") else "cu_seqlens_k"
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: give {missing}, or (batch, rows, heads, d)"
        )
    batch, rows = x.shape[:2]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * rows
    return x.flatten(0, 1), ends, rows
