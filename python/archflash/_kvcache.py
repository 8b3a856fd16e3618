"""archflash.attention_with_kvcache: attention over a cache whose lengths are on the device."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _autocast, _dispatch, _key_lists, _ops, _options, _torch_cache
from archflash._eager import is_eager, overridden, stands_for_tensor
from archflash._latent_rows import latent_parts, packed_parts
from archflash._value_checks import captured, check_cache, is_readable

_always_check = _key_lists.ALWAYS_CHECK

_is_grad_enabled = torch.is_grad_enabled
_forced = _dispatch.forced
_is_autocast_on = _autocast.is_on


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None = None,
    *,
    cache_seqlens: Tensor | None = None,
    dv: int | None = None,
    page_table: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_ranges: Tensor | None = None,
    key_indices: Tensor | None = None,
    topk_lengths: Tensor | None = None,
    physical_indices: bool = False,
    packed_rows: str | None = None,
    qv: Tensor | None = None,
    scale: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    layout: str = "bnhd",
    check: bool | None = None,
    implementation: str | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of new queries over a cache of keys and values, contiguous or in pages.

    Lengths, page tables and indices are read on the device only, so a CUDA graph of the call can be
    replayed with other ones. Rows of the caches behind a sequence's length never matter, whatever
    they hold. What points outside the caches is clamped: nothing outside them is read or written.

    Args:
        q: queries, ``(batch, nq, heads_q, d)``, or with cu_seqlens_q ``(total_q, heads_q, d)``.
        k_cache: keys, ``(batch, capacity, heads_kv, d)``; with page_table pages ``(pages,
            page_size, heads_kv, d)`` of any size from 1. q's dtype, float8_e4m3fn or float8_e5m2.
            Inside torch.autocast, beside a cache of its dtype, q, k_new, v_new and qv are cast.
            Written in place where k_new is given; then no two elements of the caches may overlap.
        v_cache: values, as k_cache with dv for d, and of its dtype. None: a latent cache (MLA),
            of which the first dv columns of each row are V and all d are K. The call is then that
            with qv = q[..., :dv] and, of q, k_cache and k_new, the columns from dv on; so it is
            these that a rotary embedding rotates. `archflash.explain` takes that form only.
        dv: given with v_cache=None only: columns of a latent row that are V, below d.
        cache_seqlens: int32 ``(batch,)`` on q's device: rows of each sequence that are valid before
            this call, leftpad_k included. Left out with physical_indices only.
        page_table: int32 ``(batch, pages of a sequence)``: the pages of each sequence, in order.
            Row j of a sequence is row j % page_size of page page_table[sequence, j // page_size].
            Sequences may share pages, but not those that the call appends to. The capacity of a
            sequence is its pages times page_size.
        k_new: ``(batch, n_new, heads_kv, d)``, keys to append to the cache behind cache_seqlens
            before attention is computed. The cache's dtype. Rows beyond the capacity are dropped.
        v_new: ``(batch, n_new, heads_kv, dv)``, values to append. Given together with k_new; not
            with a latent cache, whose k_new has both.
        cache_batch_idx: int32 ``(batch,)``: which row of the caches each sequence has, of any
            number of rows. Not with page_table. Default: row b for sequence b.
        leftpad_k: int32 ``(batch,)``: rows at the start of each sequence that are padding, which no
            query sees. Default: none.
        rotary_cos: ``(positions, rotary_dim / 2)``, cosines of the rotary embedding for positions
            from 0 on, float32 or q's dtype. The first rotary_dim columns of k_new and of q are
            rotated (k_new is needed): those of new row i by position cache_seqlens - leftpad_k + i,
            and those of query i likewise if causal, a bounded window or attention_chunk is given,
            else by that of new row 0. q itself is not changed. Positions beyond the table count as
            its last.
        rotary_sin: ``(positions, rotary_dim / 2)``, sines of the rotary embedding, as rotary_cos.
        rotary_interleaved: columns 2i and 2i + 1 rotate together, as in GPT-J; default columns i
            and i + rotary_dim / 2, as in GPT-NeoX and Llama.
        cu_seqlens_q: int32 ``(batch + 1,)``: sequence b's queries are rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] of q. Rows that belong to no sequence are written as rows that see
            no key.
        max_seqlen_q: the longest of the packed query sequences, a hint; default unknown.
        causal: query i of nq sees the keys up to row length - nq + i, where length is that after
            the append: the last query sees every key.
        window: ``(left, right)``: query i sees the keys from row length - nq + i - left to row
            length - nq + i + right; None or a negative number for an unbounded side.
        attention_chunk: positions are cut into chunks of so many keys from the first on (behind
            leftpad_k), and a query at row length - nq + i sees keys of its own chunk only, of those
            that causal and window allow. Default: no chunks.
        softcap: c > 0 replaces each score s by c * tanh(s / c). None or 0: no cap.
        sinks: ``(heads_q,)``, one more logit per head in the denominator of the softmax.
        attn_mask: bool ``(batch or 1, heads_q or 1, nq or 1, n)``, True keeps: column j is about
            the key at row length - n + j, so that the mask is one of the last n keys, as a tree of
            drafted tokens needs it. Other keys are not masked by it. With cu_seqlens_q
            ``(1, heads_q or 1, total_q or 1, n)``. Default: no mask.
        alibi_slopes: float32 ``(heads_q,)`` or ``(batch, heads_q)``, of ALiBi: from the score of
            query i and key j slope * |length - nq + i - j| is subtracted, after softcap.
        key_ranges: int32 ``(batch or 1, heads_q or 1, nq or 1, n, 2)``, n up to 4: query i sees the
            keys j of its sequence with begin <= j < end for one of its ranges, of those that causal
            and the others allow; j is counted from the first row behind leftpad_k. A range with end
            <= begin is empty. With cu_seqlens_q ``(1, heads_q or 1, total_q or 1, n, 2)``. Default:
            no ranges.
        key_indices: int32 ``(batch or 1, heads_kv or 1, nq or ceil(nq / 64), n)``: a list of n keys
            for each query row, or for each 64 of them, as in `archflash.attention`. An entry is the
            number of a row of the sequence, counted from the first one behind leftpad_k; others
            than those of its rows name none. Not with the other masks as data, attention_chunk,
            cu_seqlens_q, a rotary embedding, float8 and batch_invariant.
        topk_lengths: int32, shaped as key_indices without its last dimension, or 1 for any: how
            many entries of each list count. Default: all.
        physical_indices: key_indices are places in the caches: page times page_size plus row,
            whatever sequence has that page. Then nothing else says which rows there are:
            cache_seqlens, page_table and what belongs to them are left out, and so are causal and
            window.
        packed_rows: "fp8_656" or "fp8_584": latent rows of float8 with their scales, as FlashMLA
            stores them (docs/sparse.md). k_cache is then uint8 or float8_e4m3fn ``(pages,
            page_size, 1, 656 or 584)``, v_cache None, and q bfloat16 ``(batch, nq, heads_q, 576 or
            512)``. With key_indices only.
        qv: as q with dv for d: a second query, whose product with the rows of V is added to q k^T,
            as multi-head latent attention needs it. With caches of float8 that product has
            v_descale, and q k^T has k_descale. Not with float8 q. Kernels take d = 64 and dv = 512.
        scale: multiplies q k^T; default 1 / sqrt(d), with qv 1 / sqrt(d + dv). Absorbed MLA needs
            that of the model's heads, 1 / sqrt(d_nope + d_rope), which no shape shows: pass it.
        q_descale: float32: float8 q stands for q * q_descale. ``()``, ``(1,)``, ``(heads_q,)`` or
            ``(batch, heads_q)``, also with heads_kv for heads_q.
        k_descale: float32: a float8 k_cache stands for k_cache * k_descale. Shaped as q_descale,
            with heads_kv. k_new is stored as it is.
        v_descale: float32: a float8 v_cache stands for v_cache * v_descale, as k_descale. With a
            latent cache it is that of the first dv columns, and k_descale that of the others.
        out_dtype: dtype of the output; default that of q, or bfloat16 for float8 q.
        num_splits: shares into which the keys of each query tile are split, at most; 1 for no
            split; default what is expected to be the fastest. `torch` ignores it.
        batch_invariant: a row gets the same bits whatever else is in the call, as in
            `archflash.attention`.
        layout: "bnhd" (rows before heads, as flash-attn) or "bhnd" (heads before rows, as torch),
            of q, the caches, k_new, v_new and the output.
        check: whether to check what lies on the device first: lengths, page table, indices,
            offsets. It waits for the device, so it cannot be captured in a CUDA graph; under
            torch.compile it is left out. Default: whether ARCHFLASH_CHECK=1 was set when archflash
            was imported and no graph is captured.
        implementation: forces one by name; overrides `archflash.force` and
            ARCHFLASH_FORCE_IMPLEMENTATION.
        out: the tensor to write the output to. It must not overlap the caches in memory. Default: a
            new tensor in q's stride order.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        The output, shaped as q with dv for d. With return_lse, the pair (output, lse); lse is
        float32 ``(batch, heads_q, nq)``, or ``(heads_q, total_q)`` with cu_seqlens_q, a natural
        logarithm with sinks included. A query that sees no key gives output 0 and lse -inf (or the
        sink, if there is one).

    Raises:
        ValueError: shapes that disagree, an argument that needs another one which is missing; with
            `check` lengths, pages or indices that are out of range, or a list that names a key
            twice.
        TypeError: mixed dtypes or devices, or an argument of the wrong type.
        UnsupportedError: qv is given with float8 q, a tensor of the call requires a gradient
            or has a tangent, or no kernel serves the call and ARCHFLASH_FALLBACK=error.
        ForcedImplementationError: the forced implementation cannot serve the call.
        NotCompiledError: the build lacks the forced implementation.
        LaunchError: CUDA refused the launch.

    Example:
        >>> import archflash, torch
        >>> k_cache, v_cache = (torch.zeros(2, 32, 4, 16) for _ in "kv")
        >>> q, k, v = (torch.randn(2, 1, 4, 16) for _ in "qkv")
        >>> lengths = torch.tensor([7, 20], dtype=torch.int32)
        >>> out = archflash.attention_with_kvcache(
        ...     q, k_cache, v_cache, cache_seqlens=lengths, k_new=k, v_new=v
        ... )
        >>> out.shape, bool((k_cache[1, 20] == k[1, 0]).all())
        (torch.Size([2, 1, 4, 16]), True)
    """
    if v_cache is None and stands_for_tensor(q):
        return overridden(attention_with_kvcache, locals())
    if packed_rows is not None and v_cache is None and scale is None:
        scale = q.shape[-1] ** -0.5
    if v_cache is None or dv is not None:
        q, qv, k_cache, v_cache, k_new, v_new = _without_v_cache(
            q, qv, k_cache, v_cache, k_new, v_new, dv, packed_rows
        )
    if cache_seqlens is None and physical_indices is not True:
        raise _lengths_are_missing(physical_indices)
    if _is_autocast_on():
        q, k_new, v_new, qv = _autocast.beside_cache(k_cache, q, k_new, v_new, qv)
    # In the order of the table of options, src/common/options.inc: a list is one without
    # those that only archflash.attention has.
    values = [
        causal, window, softcap, sinks, scale, cu_seqlens_q, max_seqlen_q, attn_mask, alibi_slopes,
        key_ranges, key_indices, topk_lengths, q_descale, k_descale, v_descale, out_dtype,
        num_splits, batch_invariant, layout, out, return_lse, cache_seqlens, page_table, k_new,
        v_new, cache_batch_idx, leftpad_k, rotary_cos, rotary_sin, rotary_interleaved, qv,
        attention_chunk, packed_rows, physical_indices,
    ]  # fmt: skip
    if not is_eager():
        return _ops.attention_with_kvcache(
            q, k_cache, v_cache, _options.with_cache(values), implementation
        )
    if check is not None and not isinstance(check, bool):
        raise TypeError(f"check is {_native.given(check)}: it must be a bool or None")
    if check and captured(q):
        raise ValueError(
            "check=True waits for the device, which no CUDA graph can capture: leave check out"
        )
    if (check or (check is None and _always_check)) and is_readable(q):
        _native.make_problem(q, k_cache, v_cache, values, 0)  # refuses wrong shapes
        if key_indices is not None:
            rows = k_cache.shape[1 if layout == "bnhd" else 2] * k_cache.shape[0]
            keys: int | Tensor = rows  # that an entry may name
            if cache_seqlens is not None:
                added = 0 if k_new is None else k_new.shape[1 if layout == "bnhd" else 2]
                ends = (
                    cache_seqlens + added
                    if leftpad_k is None
                    else cache_seqlens + added - leftpad_k
                )
                keys = ends[:, None, None, None]
            _key_lists.check(key_indices, topk_lengths, keys)
        if cache_seqlens is not None:
            check_cache(
                q, k_cache, cache_seqlens, page_table, k_new, cache_batch_idx, leftpad_k,
                rotary_cos, cu_seqlens_q, max_seqlen_q, layout,
                _torch_cache.orders_queries(causal, window, attention_chunk),
            )  # fmt: skip
    return _serve(q, k_cache, v_cache, values, implementation)


def _without_v_cache(
    q: Tensor,
    qv: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    k_new: Tensor | None,
    v_new: Tensor | None,
    dv: int | None,
    packed_rows: str | None,
) -> tuple[Any, ...]:
    """A call on latent or packed rows as one with qv and v_cache: these tensors, but dv."""
    if v_cache is not None:
        raise ValueError(f"dv is {dv} with v_cache: the cache says how wide V is; leave dv out")
    if packed_rows is not None:
        q, qv, k_cache = packed_parts(q, k_cache, packed_rows, dv)
        return q, qv, k_cache, k_cache, k_new, v_new
    if qv is not None or v_new is not None:
        name = "v_new" if qv is None else "qv"
        raise ValueError(
            f"{name} is given with v_cache=None: a latent cache is K and V in one, and so are "
            "its queries and new rows; pass v_cache, or leave it out"
        )
    return latent_parts(q, k_cache, k_new, dv)


def _lengths_are_missing(physical_indices: Any) -> TypeError:
    if physical_indices is not False:
        given = _native.given(physical_indices)
        return TypeError(f"physical_indices is {given}: it must be a bool")
    return TypeError("cache_seqlens is None: it must be an int32 tensor (batch,)")


def refuse_wrong(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None = None,
    *,
    dv: int | None = None,
    packed_rows: str | None = None,
    **options: Any,
) -> None:
    """Raises what `attention_with_kvcache` raises where arguments do not fit together, for callers
    that launch something before they call it.
    """
    qv, k_new, v_new = (options.pop(name, None) for name in ("qv", "k_new", "v_new"))
    physical_indices = options.get("physical_indices", False)
    if v_cache is None or dv is not None:
        q, qv, k_cache, v_cache, k_new, v_new = _without_v_cache(
            q, qv, k_cache, v_cache, k_new, v_new, dv, packed_rows
        )
    if options.get("cache_seqlens") is None and physical_indices is not True:
        raise _lengths_are_missing(physical_indices)
    if _is_autocast_on():
        q, k_new, v_new, qv = _autocast.beside_cache(k_cache, q, k_new, v_new, qv)
    values = _absent.copy()
    options |= {"qv": qv, "k_new": k_new, "v_new": v_new, "packed_rows": packed_rows}
    for name, value in ({"layout": "bnhd"} | options).items():
        values[PLACES[name]] = value
    _native.make_problem(q, k_cache, v_cache, values, 0)


def _serve(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, values: list[Any], implementation: str | None
) -> Any:
    forced = _forced() if implementation is None else implementation
    try:
        result = _native.attention(q, k_cache, v_cache, values, _is_grad_enabled(), forced)
    except TypeError:
        given = dict(zip(_options.OF_CACHE, values, strict=True))
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **given}
        result = overridden(attention_with_kvcache, given | {"implementation": implementation})
        if result is NotImplemented:
            raise
    if result is None:
        return _ops.by_torch(q, k_cache, v_cache, values, forced)
    if result is not NotImplemented:
        return result
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if _native.is_plain_tensor(x) and x.is_neg():
            raise ValueError(
                f"{name} holds the negative of its values, which no kernel reads or writes: pass "
                f"{name}.resolve_neg()"
            )
    return _ops.attention_with_kvcache(
        q, k_cache, v_cache, _options.with_cache(values), implementation
    )


PLACES = {name: place for place, name in enumerate(_options.OF_CACHE)}
_absent = [_options.DEFAULTS[name] for name in PLACES]  # the values of options that are not given
# One object for equal scales and windows, because a prepared call compares objects. Both tables
# begin anew where they are full: a layer that is made later is then of a kind of its own.
_same: dict[Any, Any] = {}
_kinds: dict[Any, int] = {}
_numbers = itertools.count()
_MOST = 1024


def _one_of(table: dict[Any, Any], key: Any, value: Any) -> Any:
    if key not in table and len(table) >= _MOST:
        table.clear()
    return table.setdefault(key, value)


def values_of(**options: Any) -> list[Any]:
    """The options of a call by their `PLACES`, for `serve`; those that are not given are absent."""
    values = _absent.copy()
    for name, value in ({"layout": "bnhd"} | options).items():
        if isinstance(value, float | tuple):
            value = _one_of(_same, value, value)
        values[PLACES[name]] = value
    return values


# Where options are that all layers of a batch have in common, in the order of `batch` of `serve`.
_OF_BATCH = [PLACES[x] for x in ("cu_seqlens_q", "max_seqlen_q", "cache_seqlens", "page_table")]
_OUT = PLACES["out"]
Batch = tuple[Tensor | None, int | None, Tensor, Tensor | None]


def serve(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    values: list[Any],
    kind: int,
    prepared: dict[int, Any],
    batch: Batch,
    out: Tensor | None = None,
) -> Any:
    """`attention_with_kvcache` for the layers of a server's model, whose calls have most in common:
    a batch is read once, and a layer's options are those that `values_of` made once, which takes
    the host less time than so many arguments. Such layers run outside of autocast.

    Args:
        values, kind: those of `values_of` and `kind_of`, of the layer.
        prepared: what is known of the batch, by `kind`; empty at first.
        batch: cu_seqlens_q, max_seqlen_q, cache_seqlens and page_table. All layers give the same
            tuple; its tensors are read by the first of a kind alone. Who changes their memory or
            the numbers in it clears `prepared`, unless a CUDA graph is replayed with them.
    """
    known = prepared.get(kind)
    plain = not _is_grad_enabled() and not _always_check and is_eager()
    if known and plain:
        result = known(q, k_cache, v_cache, values, out, batch, _forced())
        if result is not NotImplemented:
            return result
    values = values.copy()
    values[_OUT] = out
    for place, value in zip(_OF_BATCH, batch, strict=True):
        values[place] = value
    if _always_check or not is_eager():
        options = dict(zip(PLACES, values, strict=True))
        return attention_with_kvcache(q, k_cache, v_cache, **options)
    result = _serve(q, k_cache, v_cache, values, None)
    if plain and known is None:  # False: no kernel serves it
        made = _native.prepare_call(q, k_cache, v_cache, values, batch, _forced())
        prepared[kind] = False if made is None else made
    return result


def serve_flat(
    q: Tensor,
    shape: tuple[int, ...],
    k_cache: Tensor,
    v_cache: Tensor,
    values: list[Any],
    kind: int,
    prepared: dict[int, Any],
    batch: Batch,
) -> Tensor:
    """`serve` of queries (rows, heads * d) or (1, rows, heads, d) without return_lse.

    Args:
        shape: that which `serve` wants of q.

    Returns:
        (rows, heads * dv).
    """
    known = prepared.get(kind)
    if known and not _is_grad_enabled() and not _always_check and is_eager():
        result: Any = known(q, k_cache, v_cache, values, None, batch, _forced())
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
    result = serve(q.reshape(shape), k_cache, v_cache, values, kind, prepared, batch)
    return result.reshape(-1, result.shape[-2] * result.shape[-1])  # type: ignore[no-any-return]


def kind_of(values: list[Any]) -> int:
    """A number that layers have in common whose options are the same but for tensors."""
    plain = tuple(x if not isinstance(x, Tensor) else Tensor for x in values)
    return int(_one_of(_kinds, plain, next(_numbers)))
