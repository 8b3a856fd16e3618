"""The functions of FlashAttention-3; `flash_attn_interface` tells their rules."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash.compat._arguments import (
    boolean,
    check_ints,
    check_starts,
    check_tensors,
    count,
    in_its_words,
)
from archflash.compat._flash import (
    UNBOUNDED,
    Window,
    attend,
    attend_to_cache,
    is_window,
    needs_gradients,
    refuse,
    seen_by_none,
    without_backward,
)
from archflash.compat._packed_rows import append_new, check_new, chunks, used_rows_first
from archflash.compat.flash_attn.layers.rotary import turned_at

_NAMES = {"sinks": "s_aux", "scale": "softmax_scale", "window": "window_size"}


@in_its_words(**_NAMES, k_cache="k", v_cache="v")
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: Window = UNBOUNDED, attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False, *,
    s_aux: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention of q (batch, rows, heads, d) on k and v.

    Args:
        q, k, v: (batch, rows, heads, d); q may have a multiple of k's heads.
        softmax_scale: multiplies q k^T; 1 / sqrt(d) by default, 1 / sqrt(d + dv) with qv.
        causal: query i sees keys up to i + rows of k - rows of q.
        qv: (batch, rows, heads, dv), a second query that multiplies v. It has no backward. Kernels
            take d = 64 and dv = 512.
        q_descale, k_descale, v_descale: float32 (batch, heads_kv), for FP8 inputs.
        window_size: (left, right) around that key; -1 for an unbounded side.
        attention_chunk: positions of a chunk, in which rows see keys of their own; 0 for none.
        softcap: 0 for none.
        deterministic: of the backward, which then is by kernels of archflash: on a GPU, where they
            compute the gradients of the call.
        return_attn_probs: also return the log-sum-exp.
        s_aux: (heads,), one more logit per head in the denominator (sinks). Not an argument of
            FlashAttention-3, but of forks that Hugging Face and vLLM call.

    Returns:
        (batch, rows, heads, dv); with return_attn_probs (output, log-sum-exp), the latter float32
        (batch, heads, rows), -inf for a row that sees no key.

    Raises:
        UnsupportedError: an argument that archflash does not take; it is named.

    Example:
        >>> import torch
        >>> from archflash.compat.flash_attn_interface import flash_attn_func
        >>> q = torch.randn(2, 7, 4, 16)
        >>> out, lse = flash_attn_func(q, q, q, causal=True, return_attn_probs=True)
        >>> lse.shape
        torch.Size([2, 4, 7])
    """
    refuse(sm_margin=(sm_margin, 0))
    num_splits = count("num_splits", num_splits)
    attention_chunk = count("attention_chunk", attention_chunk)
    deterministic = boolean("deterministic", deterministic)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size,
        "softcap": softcap, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
        "sinks": s_aux, "num_splits": num_splits, "want_lse": return_attn_probs,
    }  # fmt: skip
    if qv is not None:  # as with a cache that is full
        return without_backward(
            "qv", q, k, v, cache_seqlens=None, page_table=None, qv=qv,
            attention_chunk=attention_chunk, **options,
        )  # fmt: skip
    ranges = chunks(q, k, attention_chunk) if attention_chunk else None
    return _attend(q, k, v, deterministic=deterministic, key_ranges=ranges, **options)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, num_splits: int, **options: Any) -> Any:
    """`attend` with what version 3 returns, and its default number of splits, 1, for any."""
    out, lse = attend(q, k, v, num_splits=num_splits if num_splits > 1 else None, **options)
    return out if lse is None else (out, lse)


@in_its_words(q="q of qkv", k="k of qkv", v="v of qkv")
def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: Window = UNBOUNDED, attention_chunk: int = 0,
    softcap: float = 0.0, deterministic: bool = False, num_heads_q: int | None = None,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` with q, k and v in one tensor.

    Args:
        qkv: (batch, rows, 3, heads, d); or (batch, rows, heads, d) with num_heads_q, where q's
            heads come first, and those of k and v share the rest.
        num_heads_q: q's heads, for the latter.

    Raises:
        ValueError: qkv of four dimensions without num_heads_q, or heads that do not divide.
    """
    check_tensors(qkv=qkv)
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    else:
        of_q = None if num_heads_q is None else count("num_heads_q", num_heads_q)
        heads = None if of_q is None or qkv.ndim != 4 else qkv.shape[2] - of_q
        if of_q is None or heads is None or heads % 2 or heads < 0:
            raise ValueError(
                f"qkv {tuple(qkv.shape)} with num_heads_q={num_heads_q}: pass (batch, rows, 3, "
                "heads, d), or num_heads_q such that k and v share the other heads"
            )
        q, k, v = torch.split(qkv, [of_q, heads // 2, heads // 2], 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, deterministic=deterministic, sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )  # fmt: skip


@in_its_words(
    **_NAMES, k_cache="k", v_cache="v", cache_seqlens="seqused_k or cu_seqlens_k",
    page_table="cu_seqlens_k",
)  # fmt: skip
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: Window = UNBOUNDED, attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False, *,
    s_aux: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention of packed sequences: q (total rows, heads, d), each sequence on its own keys.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,), where each sequence begins.
        max_seqlen_q, max_seqlen_k: the longest sequences.
        seqused_q: int32 (sequences,), how many of the first rows of each sequence of q count, as if
            there were no others, whose output is 0 and log-sum-exp -inf. The rows that count are
            copied.
        seqused_k: int32 (sequences,), how many keys of each sequence count. Where gradients are
            needed the keys and values that count are copied.
        attention_chunk: as qv, it has no backward here.
        The others are those of `flash_attn_func`.

    Returns:
        (total rows, heads, dv); with return_attn_probs (output, log-sum-exp), the latter float32
        (heads, total rows).

    Raises:
        UnsupportedError: an argument that archflash does not take; it is named.
    """
    refuse(sm_margin=(sm_margin, 0))
    num_splits = count("num_splits", num_splits)
    attention_chunk = count("attention_chunk", attention_chunk)
    deterministic = boolean("deterministic", deterministic)
    if seqused_q is not None:
        check_tensors(q=q, **({} if qv is None else {"qv": qv}))
        check_ints("cu_seqlens_q", cu_seqlens_q)
        check_ints("seqused_q", seqused_q, len(cu_seqlens_q) - 1)
        if qv is not None and len(qv) != len(q):
            raise ValueError(f"qv has {len(qv)} rows: it must have {len(q)} as q has")
        order, cu_seqlens_q = used_rows_first(cu_seqlens_q, seqused_q, q.shape[0])
        result = flash_attn_varlen_func(
            q[order], k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, seqused_k,
            softmax_scale, causal, None if qv is None else qv[order], q_descale, k_descale,
            v_descale, window_size, attention_chunk, softcap, num_splits, pack_gqa, deterministic,
            sm_margin, return_attn_probs, s_aux=s_aux,
        )  # fmt: skip
        place = order.argsort()
        if not return_attn_probs:
            return result[place]
        return result[0][place], result[1][:, place]
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size,
        "softcap": softcap, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
        "sinks": s_aux, "num_splits": num_splits, "want_lse": return_attn_probs,
    }  # fmt: skip
    has_backward = qv is None and not attention_chunk
    if seqused_k is not None and has_backward and needs_gradients(q, k, v, s_aux):
        check_ints("cu_seqlens_k", cu_seqlens_k)
        check_ints("seqused_k", seqused_k, len(cu_seqlens_k) - 1)
        order, cu_seqlens_k = used_rows_first(cu_seqlens_k, seqused_k, k.shape[0])
        k, v, seqused_k = k[order], v[order], None
    if not has_backward or seqused_k is not None:
        # as with a cache whose pages have one row, in their order
        check_ints("cu_seqlens_k", cu_seqlens_k)
        check_tensors(k=k, v=v)
        longest = count("max_seqlen_k", max_seqlen_k)
        if type(longest) is type(k.shape[0]) is int:  # a hint, which may be far too large
            longest = min(longest, k.shape[0])
        rows = torch.arange(longest, dtype=torch.int32, device=k.device)
        return without_backward(
            "attention_chunk" if qv is None else "qv", q, k[:, None], v[:, None],
            cache_seqlens=cu_seqlens_k.diff() if seqused_k is None else seqused_k,
            page_table=cu_seqlens_k[:-1, None] + rows, qv=qv, attention_chunk=attention_chunk,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, **options,
        )  # fmt: skip
    return _attend(
        q, k, v, deterministic=deterministic, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **options,
    )  # fmt: skip


@in_its_words()
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The attention on all keys from the attention on shares of them, in plain torch.

    Args:
        out_partial: (shares, batch, rows, heads, dv), the output on each share.
        lse_partial: float32 (shares, batch, rows, heads), its log-sum-exp; -inf or +inf where a row
            saw no key of a share.
        out: where to write the output; a new tensor by default.
        out_dtype: default that of out_partial.

    Returns:
        The output (batch, rows, heads, dv), and its log-sum-exp, float32 (batch, rows, heads). A
        row without keys in any share gives 0 and -inf.
    """
    check_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if not out_partial.is_floating_point() or out_partial.ndim < 2:
        raise ValueError(
            f"out_partial has dtype {out_partial.dtype} and shape {tuple(out_partial.shape)}: it "
            "must be floating point, (shares, batch, rows, heads, dv)"
        )
    if not lse_partial.is_floating_point() or lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"lse_partial has dtype {lse_partial.dtype} and shape {tuple(lse_partial.shape)}: it "
            f"must be float32, {tuple(out_partial.shape[:-1])}"
        )
    is_dtype = isinstance(out_dtype, torch.dtype) and out_dtype.is_floating_point
    if out_dtype is not None and not is_dtype:
        raise TypeError(
            f"out_dtype is {_native.given(out_dtype)}: it must be a floating point torch.dtype"
        )
    if out is not None:
        check_tensors(out=out)
        if out.shape != out_partial.shape[1:]:
            raise ValueError(
                f"out has shape {tuple(out.shape)}: it must be {tuple(out_partial.shape[1:])}"
            )
    lse_partial = seen_by_none(lse_partial.float())
    lse = torch.logsumexp(lse_partial, 0)
    weights = torch.exp(lse_partial - torch.where(lse.isfinite(), lse, 0.0))
    # A share without keys may hold anything, and 0 times NaN is NaN.
    shares = torch.where(weights[..., None] > 0, out_partial.float(), 0.0) * weights[..., None]
    result = shares.sum(0).to(out_partial.dtype if out_dtype is None else out_dtype)
    return (result if out is None else out.copy_(result)), lse


@in_its_words(
    **_NAMES, k_new="k", v_new="v", leftpad_k="cache_leftpad", cos="rotary_cos", sin="rotary_sin"
)
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None, rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = UNBOUNDED, attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False, *,
    s_aux: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention of q (batch, rows, heads, d) on a cache of keys and values. It has no backward.

    Args:
        q: (batch, rows, heads, d), or (total rows, heads, d) with cu_seqlens_q.
        k_cache, v_cache: (batch, capacity, heads, d), or with page_table pages (pages, page size,
            heads, d) of any size.
        k, v: (batch, new rows, heads, d), or (total new rows, heads, d) with cu_seqlens_k_new;
            written in place behind cache_seqlens.
        qv: as q with dv for d, a second query that multiplies v_cache. Kernels take d = 64 and
            dv = 512.
        attention_chunk: positions of a chunk, in which rows see keys of their own; 0 for none.
        rotary_cos, rotary_sin: (positions, channels / 2), by which q and k are turned; new row i
            has position cache_seqlens + i.
        rotary_seqlens: int32 (batch,), positions in place of cache_seqlens.
        cache_seqlens: an int or int32 (batch,), the lengths before k; by default the caches are
            full.
        cache_batch_idx: int32 (batch,), which sequence of the caches, or row of page_table, each
            one of q has.
        cache_leftpad: int32 (batch,), where the sequences of the caches begin.
        page_table: int32 (batch, pages of a sequence), or more rows with cache_batch_idx.
        cu_seqlens_q: int32 (batch + 1,), where each sequence of q begins.
        cu_seqlens_k_new: int32 (batch + 1,), where the new rows of each sequence begin. They are
            turned and written by operations of PyTorch.
        max_seqlen_q: the longest sequence of q.
        rotary_interleaved: pairs of channels are 0 and 1, 2 and 3, ...; otherwise halves.
        num_splits: shares of the keys; 0 for the fastest.
        return_softmax_lse: also return the log-sum-exp.
        The others are those of `flash_attn_func`.

    Returns:
        q's shape with dv for d; with return_softmax_lse (output, log-sum-exp), the latter float32
        (batch, heads, rows) or (heads, total rows).

    Raises:
        UnsupportedError: an argument that archflash does not take; it is named.
        ValueError: k without cache_seqlens.
    """
    refuse(sm_margin=(sm_margin, 0))
    attention_chunk = count("attention_chunk", attention_chunk)
    if cu_seqlens_q is not None:
        check_ints("cu_seqlens_q", cu_seqlens_q)
    check_tensors(q=q)
    sequences = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if page_table is not None and cache_batch_idx is not None:
        check_tensors(page_table=page_table)
        if page_table.ndim != 2 or not page_table.shape[0]:
            raise ValueError(
                f"page_table has shape {tuple(page_table.shape)}: it must be (sequences, pages)"
            )
        check_ints("cache_batch_idx", cache_batch_idx, sequences, page_table)
        # Which row of the table each sequence of q has; archflash takes tables in q's order.
        page_table, cache_batch_idx = page_table.index_select(0, cache_batch_idx), None
    starts = cache_seqlens
    if rotary_seqlens is not None:
        starts = check_starts("rotary_seqlens", rotary_seqlens, sequences)
    packed_new = k is not None and cu_seqlens_k_new is not None
    if packed_new:
        check_new(k_cache, v_cache, k, v, cu_seqlens_k_new, page_table, sequences)
        if cache_seqlens is None:
            raise ValueError("k is given without cache_seqlens: say how long the caches are")
    if k is not None and cache_seqlens is not None:
        check_starts("cache_seqlens", cache_seqlens, sequences)
    elsewhere = rotary_seqlens is not None or cache_leftpad is not None or packed_new
    rotary = rotary_cos is not None and rotary_sin is not None
    if elsewhere and rotary and k is not None and starts is not None:
        assert rotary_cos is not None
        assert rotary_sin is not None
        # FlashAttention counts positions from the cache's first row, padding included.
        q, k = turned_at(
            q, k, rotary_cos, rotary_sin, starts, interleaved=rotary_interleaved,
            apart=causal or is_window(window_size) or attention_chunk != 0,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k_new,
        )  # fmt: skip
        rotary_cos = rotary_sin = None
    append = None
    if packed_new:
        assert k is not None
        assert v is not None
        assert cu_seqlens_k_new is not None
        assert cache_seqlens is not None
        append = functools.partial(
            append_new, (k_cache, v_cache), (k, v), cu_seqlens_k_new, cache_seqlens, page_table,
            cache_batch_idx,
        )  # fmt: skip
        added = cu_seqlens_k_new.diff()
        cache_seqlens = torch.as_tensor(cache_seqlens, dtype=torch.int32, device=q.device) + added
        k = v = None
    return attend_to_cache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, page_table=page_table, k_new=k, v_new=v,
        cache_batch_idx=cache_batch_idx, leftpad_k=cache_leftpad, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved, qv=qv,
        attention_chunk=attention_chunk or None, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        sinks=s_aux, num_splits=num_splits, want_lse=return_softmax_lse, append=append,
    )  # fmt: skip


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """None: archflash makes its plans itself and keeps them, so there is nothing to pass on."""
