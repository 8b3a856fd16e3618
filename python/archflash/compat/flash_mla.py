"""FlashMLA's module `flash_mla`, served by archflash: decoding over a latent cache, and attention
to the tokens that an indexer has chosen (sparse MLA), in decoding and in prefill.

Names, order and defaults of the arguments and return values are FlashMLA's. Pages may have any
size, the rows of a cache are bfloat16 or float16, or with `indices` packed float8 (docs/sparse.md).
A key that a row names twice counts twice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash._eager import is_eager, without_gradient
from archflash._kvcache import attention_with_kvcache, refuse_wrong
from archflash._merge import merge_attention
from archflash.compat._arguments import boolean, check_tensors, flag, in_its_words, plain
from archflash.compat._flash import _with_unseen, refuse

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

_PACKED = {576: ("fp8_656", 656), 512: ("fp8_584", 584)}  # by the columns of q
_ROPE, _LATENT = 64, 512  # columns of a latent row: of K alone, of V


class FlashMLASchedMeta:
    """What `get_mla_metadata` gives. It holds nothing: archflash makes its plans itself."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """An object to pass on, as FlashMLA's functions want one, and None."""
    return FlashMLASchedMeta(), None


@in_its_words(
    page_table="block_table", dv="head_dim_v", scale="softmax_scale", key_indices="indices",
    topk_lengths="topk_length",
)  # fmt: skip
def flash_mla_with_kvcache(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None,
    head_dim_v: int, tile_scheduler_metadata: Any = None, num_splits: Any = None,
    softmax_scale: float | None = None, causal: bool = False, is_fp8_kvcache: bool = False,
    indices: Tensor | None = None, attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None, extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None, extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q (batch, rows, heads, d) on a cache whose rows are K, and V in their first
    columns.

    Args:
        q: (batch, rows, heads, d), the last rows of each sequence.
        k_cache: pages (pages, page size, heads of k, d) of any size. With is_fp8_kvcache and
            indices (pages, page size, 1, 656) for d = 576, or 584 for d = 512: bytes as FlashMLA's
            quantization of V3.2 and of V4 lays them out.
        block_table: int32 (batch, pages of a sequence). Not read with indices.
        cache_seqlens: int32 (batch,). Not read with indices.
        head_dim_v: the columns of a row that are V; 512 with indices.
        tile_scheduler_metadata, num_splits: not read; what `get_mla_metadata` gives.
        softmax_scale: multiplies q k^T; 1 / sqrt(d) by default. Absorbed MLA needs that of the
            model's heads, 1 / sqrt(d_nope + d_rope), which no shape shows: pass it.
        causal: row i of n sees keys up to the sequence's length - n + i. Not with indices.
        is_fp8_kvcache: the rows of the caches are packed float8.
        indices: int32 (batch, rows, n): which rows of the cache a row sees, page * page size + row
            of the page; anything outside the cache, such as -1, names none.
        attn_sink: float32 (heads,): one more logit in the denominator of the output, not in the
            log-sum-exp.
        extra_k_cache, extra_indices_in_kvcache: a second cache, of pages of another size, and the
            rows of it that are seen besides.
        topk_length, extra_topk_length: int32 (batch,): how many indices of each row count.

    Returns:
        The output (batch, rows, heads, head_dim_v), and the log-sum-exp, float32 (batch, heads,
        rows), a natural logarithm, +inf for a row that sees no key, as in FlashMLA.

    Raises:
        ValueError: with indices: causal, another head_dim_v than 512, q of other than 576 or 512
            columns, or packed rows of another size than they need.
        UnsupportedError: an argument that archflash does not take; it is named.

    Example:
        >>> import torch
        >>> from archflash.compat.flash_mla import flash_mla_with_kvcache
        >>> q, pages = torch.randn(2, 1, 4, 24), torch.randn(3, 8, 1, 24)
        >>> table = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)
        >>> lengths = torch.tensor([10, 5], dtype=torch.int32)
        >>> out, lse = flash_mla_with_kvcache(q, pages, table, lengths, 16)
        >>> out.shape, lse.shape
        (torch.Size([2, 1, 4, 16]), torch.Size([2, 4, 1]))
    """
    check_tensors(q=q, k_cache=k_cache)
    packed = boolean("is_fp8_kvcache", is_fp8_kvcache)
    if indices is not None:
        if boolean("causal", causal):
            raise ValueError("causal is True with indices: leave out what a row must not see")
        if head_dim_v != _LATENT:
            raise ValueError(f"head_dim_v is {head_dim_v} with indices: it must be {_LATENT}")
        return _attend_to_listed_rows(
            q, (k_cache, indices, topk_length),
            (extra_k_cache, extra_indices_in_kvcache, extra_topk_length), plain(softmax_scale),
            packed, attn_sink,
        )  # fmt: skip
    refuse(
        is_fp8_kvcache=(packed, False),
        attn_sink=(attn_sink, None),
        extra_k_cache=(extra_k_cache, None),
        extra_indices_in_kvcache=(extra_indices_in_kvcache, None),
        topk_length=(topk_length, None),
        extra_topk_length=(extra_topk_length, None),
    )
    with torch.no_grad():
        out, lse = attention_with_kvcache(
            q, k_cache, cache_seqlens=cache_seqlens, page_table=block_table, dv=head_dim_v,
            scale=plain(softmax_scale), causal=flag(causal), return_lse=True,
        )  # fmt: skip
    out, lse = without_gradient("attention with a KV cache", (out, lse), q, k_cache)
    return out, _with_unseen(lse, math.inf)


@in_its_words(scale="sm_scale", k_cache="kv", key_indices="indices", topk_lengths="topk_length")
def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query to the rows that its indices name (prefill of sparse MLA).

    Args:
        q: (rows, heads, d), d of 576 or 512; bfloat16 or float16, which kernels serve.
        kv: (keys, heads of k, d): rows that are K, and V in their first 512 columns.
        indices: int32 (rows, heads of k, n); anything outside kv names no row.
        sm_scale: multiplies q k^T.
        d_v: 512.
        attn_sink: float32 (heads,): one more logit in the denominator of the output alone.
        topk_length: int32 (rows,): how many indices of each row count.

    Returns:
        The output (rows, heads, 512); the largest scaled score, float32 (rows, heads), -inf for a
        row that sees no key; and the log-sum-exp, float32 (rows, heads), a natural logarithm, +inf
        for such a row. The largest score costs a second pass over the keys.

    Raises:
        ValueError: d_v is not 512, or q has other than 576 or 512 columns.

    Example:
        >>> import torch
        >>> from archflash.compat.flash_mla import flash_mla_sparse_fwd
        >>> q, kv = torch.randn(3, 2, 576), torch.randn(9, 1, 576)
        >>> indices = torch.tensor([[[0, -1]], [[4, 5]], [[8, 2]]], dtype=torch.int32)
        >>> out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, 0.1)
        >>> out.shape, lse.shape
        (torch.Size([3, 2, 512]), torch.Size([3, 2]))
    """
    check_tensors(q=q, kv=kv)
    _check_columns(q, 3, kv=kv)
    _check_lists(q.shape[:1], indices=(indices, 3), topk_length=(topk_length, 1))
    _check_sink(attn_sink, q)
    if d_v != _LATENT:
        raise ValueError(f"d_v is {d_v}: it must be {_LATENT}")
    if isinstance(plain(sm_scale), bool) or not isinstance(plain(sm_scale), (int, float)):
        raise TypeError(f"sm_scale is {_native.given(sm_scale)}: it must be a number")
    lists = indices.transpose(0, 1)[None]
    lengths = None if topk_length is None else topk_length[None, None]
    scale = plain(sm_scale)
    with torch.no_grad():
        call = _call_of(q[None], kv[None], lists, lengths, scale, False)
        out, lse = _attend(call)
        # Scores times a large number: the log-sum-exp of the row is its largest one alone.
        _, largest = _attend(call | {"scale": scale * _SHARPENED})
        out, lse = _merged([(out, lse)], attn_sink, q.dtype)
    out, lse = without_gradient("attention to listed keys", (out, lse), q, kv)
    rows_first = (largest / _SHARPENED)[0].transpose(0, 1).contiguous()
    return out[0], rows_first, _with_unseen(lse, math.inf)[0].transpose(0, 1).contiguous()


def _attend_to_listed_rows(
    q: Tensor,
    first: tuple[Tensor, Tensor, Tensor | None],
    extra: tuple[Tensor | None, Tensor | None, Tensor | None],
    scale: float | None,
    packed: bool,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What `flash_mla_with_kvcache` returns with indices.

    Args:
        q, scale, packed, sink: as it got them.
        first, extra: each cache with its indices and how many of them count.
    """
    cache, indices, count = first
    extra_cache, extra_indices, extra_count = extra
    _check_sink(sink, q)
    left_out = (extra_cache is None, extra_indices is None)
    if any(left_out) and not (all(left_out) and extra_count is None):
        raise ValueError(
            "extra_k_cache, extra_indices_in_kvcache or extra_topk_length is given alone: the "
            "second cache needs the first two"
        )
    _check_columns(q, 4, k_cache=cache, packed=packed)
    _check_lists(q.shape[:2], indices=(indices, 3), topk_length=(count, 1))
    caches = [(_call_of, cache, indices, count)]
    if extra_cache is not None and extra_indices is not None:
        check_tensors(extra_k_cache=extra_cache)
        _check_columns(q, 4, extra_k_cache=extra_cache, packed=packed)
        _check_lists(
            q.shape[:2],
            extra_indices_in_kvcache=(extra_indices, 3),
            extra_topk_length=(extra_count, 1),
        )
        caches.append((_call_of_extra, extra_cache, extra_indices, extra_count))
    with torch.no_grad():
        calls = [
            call_of(q, rows, lists[:, None], None if n is None else n[:, None, None], scale, packed)
            for call_of, rows, lists, n in caches
        ]
        if len(calls) == 1:
            parts = [_attend(calls[0])]
        else:
            if is_eager():  # before the first one is launched
                _refuse_extra(calls[1])
            wide = torch.promote_types(q.dtype, torch.float32)  # rounded once, when they are merged
            of_first, of_extra = (call | {"out_dtype": wide} for call in calls)
            parts = [_attend(of_first), _attend_extra(of_extra)]
        out, lse = _merged(parts, sink, q.dtype)
    out, lse = without_gradient("attention with a KV cache", (out, lse), q, cache)
    return out, _with_unseen(lse, math.inf)


_SHARPENED = float(1 << 20)


def _call_of(
    q: Tensor,
    cache: Tensor,
    lists: Tensor,
    lengths: Tensor | None,
    scale: float | None,
    packed: bool,
) -> dict[str, Any]:
    """The call of `attention_with_kvcache` that is attention of q (batch, rows, heads, d) to the
    rows that lists name.
    """
    columns = int(q.shape[-1])  # a tracer gives a tensor
    call: dict[str, Any] = {
        "q": q, "k_cache": cache, "key_indices": lists, "topk_lengths": lengths,
        "physical_indices": True, "scale": columns**-0.5 if scale is None else scale,
        "return_lse": True,
    }  # fmt: skip
    if packed:
        return call | {"packed_rows": _PACKED[columns][0]}
    if columns == _LATENT:  # K has no columns of its own: zeros of q meet any columns
        zeros = q.new_zeros(*q.shape[:-1], _ROPE)
        return call | {"q": zeros, "k_cache": cache[..., :_ROPE], "v_cache": cache, "qv": q}
    return call | {"dv": _LATENT}


def _attend(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of what `_call_of` made."""
    return attention_with_kvcache(**call)  # type: ignore[no-any-return]


def _refuse(call: dict[str, Any]) -> None:
    refuse_wrong(**call)


# These functions for the second cache: their errors name the arguments of that one.
_of_extra = in_its_words(
    k_cache="extra_k_cache", key_indices="extra_indices_in_kvcache",
    topk_lengths="extra_topk_length",
)  # fmt: skip
_call_of_extra = _of_extra(_call_of)
_attend_extra, _refuse_extra = _of_extra(_attend), _of_extra(_refuse)


def _check_columns(q: Tensor, ndim: int, packed: bool = False, **cache: Tensor) -> None:
    """Checks the dimensions of q and of a cache, and the size of its rows."""
    (name, rows), columns = *cache.items(), int(q.shape[-1]) if q.ndim else 0
    for of, x in (("q", q), (name, rows)):
        if x.ndim != ndim:
            raise ValueError(f"{of} has shape {tuple(x.shape)}: it must have {ndim} dimensions")
    if columns not in _PACKED:
        raise ValueError(f"q has {columns} columns: it must have 576 or 512")
    wanted, held = _PACKED[columns][1] if packed else columns, int(rows.shape[-1])
    if held != wanted:
        unsaid = ndim == 4 and held == _PACKED[columns][1]
        other = f", or {held} bytes with is_fp8_kvcache=True" if unsaid else ""
        raise ValueError(
            f"{name} has rows of {held} {'bytes' if packed else 'columns'} for q of {columns} "
            f"columns: they must have {wanted}{other}"
        )
    if packed and rows.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise ValueError(
            f"{name} has dtype {rows.dtype}: packed rows must be torch.uint8 or torch.float8_e4m3fn"
        )


def _check_lists(rows: torch.Size, **given: tuple[Tensor | None, int]) -> None:
    """Checks lists of rows and how many entries of each count, with their dimensions. rows: those
    of q that have lists, (batch, rows) or (rows,).
    """
    for name, (x, ndim) in given.items():
        if x is None:
            continue
        check_tensors(**{name: x})
        if x.dtype != torch.int32 or x.ndim != ndim:
            raise ValueError(
                f"{name} has dtype {x.dtype} and shape {tuple(x.shape)}: it must be torch.int32 "
                f"of {ndim} dimension{'s' * (ndim > 1)}"
            )
        wanted = tuple(rows[:ndim])
        if tuple(x.shape[: len(wanted)]) != wanted:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} for q of {' x '.join(map(str, rows))} rows: "
                f"it must begin with {wanted}"
            )


def _check_sink(sink: Tensor | None, q: Tensor) -> None:
    if sink is None:
        return
    check_tensors(attn_sink=sink)
    heads = q.shape[-2] if q.ndim > 1 else 0
    if not sink.is_floating_point() or tuple(sink.shape) != (heads,):
        raise ValueError(
            f"attn_sink has dtype {sink.dtype} and shape {tuple(sink.shape)}: it must be "
            f"torch.float32, ({heads},)"
        )
    if sink.device != q.device:
        raise TypeError(f"attn_sink is on {sink.device} but q is on {q.device}: move it")


def _merged(
    parts: list[tuple[Tensor, Tensor]], sink: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Output of all parts with a sink in its denominator, and the log-sum-exp without it. A sink is
    a part whose output is 0.
    """
    outs, lses = (list(x) for x in zip(*parts, strict=True))
    lse = lses[0] if len(lses) == 1 else torch.logaddexp(*lses)
    if sink is not None:
        outs.append(outs[0].new_zeros(outs[0].shape[-1]).expand_as(outs[0]))
        # An infinite one would count for nothing.
        lses.append(sink.float().clamp(max=1e30)[:, None].expand_as(lse).contiguous())
    if len(outs) == 1:
        return outs[0], lse
    return merge_attention(outs, lses, layout="bnhd")[0].to(dtype), lse
