"""archflash.attention: the way of one call from Python to the runtime."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _autocast, _bias, _dispatch, _dropout, _gradients, _key_lists, _ops, _options
from archflash import _autograd as _autograd  # it tells the runtime how calls are recorded
from archflash._eager import is_eager, never_compiled, overridden
from archflash._given import as_device
from archflash._value_checks import check_call, is_readable

_is_grad_enabled = torch.is_grad_enabled
_forced = _dispatch.forced
_with_approximate = _dispatch.with_approximate
_is_autocast_on = _autocast.is_on
_always_check = _key_lists.ALWAYS_CHECK


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    q_offset: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_ranges: Tensor | None = None,
    block_mask: Tensor | None = None,
    key_indices: Tensor | None = None,
    topk_lengths: Tensor | None = None,
    dropout_p: float | None = None,
    rng_state: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    approximate: str | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    layout: str = "bhnd",
    implementation: str | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Computes softmax(scale * q k^T) v with the fastest implementation for the GPU at hand.

    Args:
        q: queries, ``(batch, heads_q, nq, d)``; with layout="bnhd" ``(batch, nq, heads_q, d)``;
            with cu_seqlens ``(total_q, heads_q, d)``. float32, float16, bfloat16, float64,
            float8_e4m3fn or float8_e5m2; inside torch.autocast q, k, v and a floating attn_mask of
            32 or 16 bits are cast to its dtype first, as for PyTorch's own function, unless `out`
            is given. Any strides, and any d: what a kernel cannot read as it is
            (rows that are not contiguous, do not start at multiples of 16 bytes, or have a number
            of columns that is no multiple of 8, with float8 of 16) is copied into its workspace
            first. `explain` says so.
        k: keys, ``(batch, heads_kv, nk, d)`` or as q's layout says; heads_q must be a multiple of
            heads_kv.
        v: values, ``(batch, heads_kv, nk, dv)`` or as q's layout says.
        causal: query i sees keys j <= i + q_offset, which aligns the mask to the bottom right
            unless q_offset is given.
        window: ``(left, right)``: i + q_offset - left <= j <= i + q_offset + right; None, or a
            negative number as in flash-attn, for an unbounded side.
        softcap: c > 0 replaces each score s by c * tanh(s / c). None or 0: no cap.
        sinks: ``(heads_q,)``, one more logit per head in the denominator of the softmax.
        scale: multiplies q k^T; default 1 / sqrt(d).
        q_offset: position of query 0 among the keys, an int or an int32 tensor ``(batch,)``;
            default nk - nq. Used by causal, window and alibi_slopes only.
        cu_seqlens_q: int32 ``(sequences + 1,)`` on q's device: sequence b's queries are rows
            cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q. Needs cu_seqlens_k. It is read on the
            device only. Rows that belong to no sequence are written as rows that see no key.
        cu_seqlens_k: int32 ``(sequences + 1,)`` on q's device: the same for the rows of k and v.
            Sequences may share keys where no gradients are needed: between two that do stands one
            without queries, as in ``[0, 12, 12, 30]`` and ``[0, 70, 40, 100]``.
        max_seqlen_q: the longest of the packed query sequences, a hint; default unknown.
        max_seqlen_k: the longest of the packed key sequences, a hint; default unknown.
        attn_mask: bool (True keeps) or floating (added to the scores), broadcastable to ``(batch,
            heads_q, nq, nk)``. Or ``torch.nn.attention.bias.causal_lower_right(nq, nk)``, which is
            causal=True, or ``causal_upper_left(nq, nk)``, which is causal=True with q_offset=0.
            It is added after scale and softcap. A key with -inf is not seen; scores below -2.3e38
            count as -2.3e38, so that a row of finfo.min weighs its keys equally, as in PyTorch. Not
            with cu_seqlens. Any strides, also 0.
        alibi_slopes: float32 ``(heads_q,)`` or ``(batch, heads_q)``, of ALiBi: slope * |i +
            q_offset - j| is subtracted from the scores after softcap, which aligns to the bottom
            right unless q_offset is given, as in flash-attn. With cu_seqlens a sequence is a batch.
        key_ranges: int32 ``(batch or 1, heads_q or 1, nq or 1, n, 2)``, n up to 4: query i sees the
            keys in the union of n half-open ranges, in any order, which may overlap or be empty. A
            key must be allowed by causal, window and attn_mask, too. `archflash.masks` makes them.
            Not with cu_seqlens.
        block_mask: bool or int8, a number for each block of 64 rows and 64 keys: ``(batch or 1,
            heads_q or 1, ceil(nq / 64), ceil(nk / 64))``. 0: no query of it sees any key of it. 2
            (int8 only): a promise that attn_mask keeps all of it and adds nothing. Anything else:
            attn_mask decides, or all is seen if there is none. `archflash.summarize_mask` makes it
            of attn_mask. Not with cu_seqlens.
        key_indices: int32 ``(batch or 1, heads_kv or 1, nq or ceil(nq / 64), n)``: a list of n keys
            for each query row, or for each 64 of them, in any order. A query sees the keys that its
            list names, of those that causal and window allow; entries other than 0 to nk - 1, such
            as -1, name none, and nothing is read for them. A key that is named twice counts twice:
            ARCHFLASH_CHECK=1 refuses that. Not with masks as data, dropout_p, cu_seqlens, float8
            inputs and batch_invariant. Gradients come from the lists where a kernel reads them and
            is faster, else from the mask that `archflash.masks.from_key_indices` makes.
        topk_lengths: int32, shaped as key_indices without its last dimension, or 1 for any: how
            many entries of each list count; what lies behind them is never read. Default: all.
        dropout_p: the probability that a weight is dropped, at least 0 and less than 1; the other
            weights of the softmax are multiplied by 1 / (1 - dropout_p). The log-sum-exp is that of
            all scores. None or 0: no dropout. Not with batch_invariant.
        rng_state: int64 ``(2,)``, seed and offset of the random bits of dropout_p, on q's device.
            They say which weights are dropped, whatever kernel serves the call:
            `archflash.dropout_mask` tells them. Default: a new state for each call, from PyTorch's
            generator (`archflash.dropout_state`).
        q_descale: float32: float8 q stands for q * q_descale. ``()`` or ``(1,)`` for the whole
            tensor; ``(heads_q,)`` or ``(batch, heads_q)``, also with heads_kv for heads_q; or
            ``(batch, heads_q, ceil(nq / 64))``, one for each block of 64 rows (not with
            cu_seqlens). Any strides. `archflash.quantize_fp8` makes them. Or MXFP8, all three of
            dtype float8_e8m0fnu and the last dimension contiguous, as `archflash.quantize_mxfp8`
            makes them, laid out as q, k and v: a scale for 32 columns of a row of q and k,
            ``(batch, heads_q, nq, ceil(d / 32))``, and for 32 rows of a column of v, ``(batch,
            heads_kv, ceil(nk / 32), dv)``. Not with cu_seqlens; by a kernel on 12.x, once
            `archflash verify` has found it right there.
        k_descale: float32: float8 k stands for k * k_descale. Shaped as q_descale, with heads_kv
            and nk.
        v_descale: float32: float8 v stands for v * v_descale. Shaped as k_descale.
        out_dtype: dtype of the output; default that of q, or bfloat16 for float8 inputs, for which
            kernels write float16 or bfloat16. float32 for 16-bit inputs: partial results for
            `archflash.merge_attention`, which are then rounded once, after they are merged. Kernels
            write it without a cache, dropout_p, num_splits and batch_invariant, and compute no
            gradients of it.
        approximate: "int8" or another word lets the result be approximate, for fp16 and bf16; never
            chosen unless asked for. Calls that no such kernel serves are computed exactly. Errors
            are root mean square, of the output's (PyTorch at fp16: 0.05%).
            "fp16_accumulate": p v in fp16 with fp16 sums of 64 keys, about 0.1%. "int8": the same
            p v, and q k^T in int8 after a rotation, 1 to 2%. "int8_pv": p v in 8 bits, too, about
            1.5%, and 3% where a row of v is 20 times as large; no dropout_p. "int8_qk": q k^T in
            int8 with one scale for each block of 64 rows, about 1.4%, and 13% if one channel in 32
            of k is 20 times as large as the others; not with cu_seqlens, softcap or masks as data.
            "nvfp4" (12.x, once `archflash verify` has found it right there): both products in four
            bits, 14 to 28%, 37% with such channels. Not with gradients, KV caches, num_splits and
            batch_invariant. `archflash.approximate` asks for calls that cannot say it themselves.
        num_splits: shares into which the keys of each query tile are split, at most (there are
            never more shares than blocks of keys). The shares go to several SMs, and a second
            kernel combines them. 1 for no split; default what is expected to be the fastest. A
            kernel that does not split refuses more than 1, and so do all for FP8. `torch` ignores
            it.
        batch_invariant: a row gets the same bits whatever else is in the call: other
            sequences, heads and query rows, how many they are and in which order, padding, packed
            or not. For fp16 and bf16. What decides the bits of a row is the row, the keys that it
            sees and their positions in the sequence, scale, softcap, sink, dtype, d, dv, the
            implementation, the GPU model and the version of archflash. Keys are split at every
            1,024th key of a sequence, not by load, so calls of many query rows are slower and take
            a workspace of 4 * (dv + 2) bytes for each row, head and 1,024 keys. Not promised: the
            same bits where the layout of tensors lets another implementation serve (repeated
            rows), or where max_seqlen_k is below the longest sequence; and non-finite
            numbers in v may reach a row that does not see them, as without this option. Not with
            num_splits. A call that no kernel serves so is an error, as PyTorch's kernels do not
            promise it.
        layout: "bhnd" (heads before rows, as torch) or "bnhd" (rows before heads, as flash-attn).
        implementation: forces one by name; overrides `archflash.force` and
            ARCHFLASH_FORCE_IMPLEMENTATION.
        out: the tensor to write the output to. It must not overlap k or v in memory. Default: a new
            tensor in q's stride order.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        The output, shaped as q with dv for d. With return_lse, the pair (output, lse); lse is
        float32 ``(batch, heads_q, nq)``, or ``(heads_q, total_q)`` with cu_seqlens, a natural
        logarithm with sinks included. A query that sees no key gives output 0 and lse -inf (or the
        sink, if there is one).

    Raises:
        ValueError: shapes that disagree, heads_q not a multiple of heads_kv, a NaN scale,
            num_splits below 1, num_splits with batch_invariant, another word for approximate, or,
            under ARCHFLASH_CHECK=1, a list that names a key twice, cu_seqlens that fall or leave
            the tensors, or max_seqlen_q or max_seqlen_k below a length.
        TypeError: mixed dtypes or devices, or an argument of the wrong type.
        UnsupportedError: no kernel serves the call and ARCHFLASH_FALLBACK=error or
            batch_invariant=True.
        ForcedImplementationError: the forced implementation cannot serve the call.
        NotCompiledError: the build lacks the forced implementation.
        LaunchError: CUDA refused the launch.

    Example:
        >>> import archflash, torch
        >>> q, k, v = (torch.randn(2, 4, 7, 16) for _ in range(3))
        >>> archflash.attention(q, k, v, causal=True).shape
        torch.Size([2, 4, 7, 16])
    """
    if attn_mask is not None and _bias.is_causal_bias(attn_mask):
        causal, q_offset, attn_mask = _bias.resolve(
            attn_mask, q, k, causal, window, q_offset, cu_seqlens_q, layout
        )
    if _is_autocast_on():
        q, k, v, attn_mask = _autocast.inputs(q, k, v, attn_mask, out)
    if _dropout.wants_state(dropout_p, rng_state):
        rng_state = _dropout.state_for(q)
    # In the order of the table of options, src/common/options.inc.
    values = (
        causal, window, softcap, sinks, scale, q_offset, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, attn_mask, alibi_slopes, key_ranges, block_mask, key_indices, topk_lengths,
        dropout_p, rng_state, q_descale, k_descale, v_descale, out_dtype, approximate, num_splits,
        batch_invariant, layout, out, return_lse,
    )  # fmt: skip
    if _always_check and is_eager() and is_readable(q):
        _native.make_problem(q, k, v, values, 0)  # refuses wrong shapes
        check_call(q, k, values)
    if key_indices is not None and is_eager() and _key_lists.needs_gradients(q, k, v, sinks):
        problem = _native.make_problem(q, k, v, _with_approximate(values), _is_grad_enabled())
        name = _forced() if implementation is None else implementation
        here, obstacle = _dispatch.device_of(problem, q.device.index)
        if not _gradients.reads_lists(problem, here, name, obstacle):
            mask = _key_lists.as_mask(key_indices, topk_lengths, q, k, layout)
            k, v = _key_lists.without_unnamed(
                q, k, v, dict(zip(_options.OF_ATTENTION, values, strict=True))
            )
            values = _options.replaced(values, attn_mask=mask, key_indices=None, topk_lengths=None)
    if is_eager():
        # An eager call is one C++ call, which reads the tensors, finds the plan, binds and
        # launches.
        forced = _forced() if implementation is None else implementation
        asked = _with_approximate(values)
        try:
            result = _native.attention(q, k, v, asked, _is_grad_enabled(), forced)
        except TypeError:
            given = dict(zip(_options.OF_ATTENTION, values, strict=True))
            given = {"q": q, "k": k, "v": v, **given, "implementation": implementation}
            result = overridden(attention, given)
            if result is NotImplemented:
                raise
        if result is None:
            return _ops.by_torch(q, k, v, values, forced)
        if result is not NotImplemented:
            return result
    return _ops.attention(q, k, v, values, implementation)


@never_compiled
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    device: str | int | torch.device | None = None,
    implementation: str | None = None,
    backward: bool = False,
    **options: Any,
) -> _dispatch.Decision:
    """Says which implementation would serve a call, why the others would not, and what would be
    launched. It launches nothing.

    Args:
        q, k, v: as for `archflash.attention`, or with cache_seqlens among the options q and the
            caches as for `archflash.attention_with_kvcache`. If `device` is given they may be on
            the "meta" device.
        device: the GPU to decide for: a name from the table of known GPUs ("A100", "RTX 5090",
            "B200", ...), a CUDA device or its index; default the device of q.
        implementation: the forced implementation; default what `archflash.force` or the environment
            says.
        backward: explains `archflash.attention_backward` of the call instead. For the gradients of
            `archflash.attention` it tells how they are computed if a kernel serves the call.
        options: the other arguments of the call.

    Returns:
        A `Decision`, whose str() is readable.

    Raises:
        ValueError, TypeError: as `archflash.attention`; ValueError also for an unknown device name.
        ForcedImplementationError, NotCompiledError: as `archflash.attention`.

    Example:
        >>> import archflash, torch
        >>> q = torch.empty(4, 16, 512, 64, device="meta")
        >>> archflash.explain(q, q, q, device="RTX 5090").chosen
        'simt'
    """
    if not isinstance(backward, bool):
        raise TypeError(f"backward is {_native.given(backward)}: it must be a bool")
    if _is_autocast_on():
        q, k, v = _autocast.described(q, k, v, options)
    drops = _dropout.wants_state(options.get("dropout_p"), options.get("rng_state"))
    if drops and isinstance(q, Tensor):
        # Any state will do, and drawing one would change what later calls draw.
        options["rng_state"] = torch.empty(2, dtype=torch.int64, device=q.device)
    if options.get("key_indices") is not None and not _options.has_cache(options):
        make_problem(q, k, v, **options)  # refuses wrong lists
    problem = make_problem(q, k, v, **options)
    name = _forced() if implementation is None else implementation
    decide = _dispatch.select
    if backward:
        decide = _gradients.decider(q, k, v, _options.named(option_values(q, k, options)))
    elif problem.key_indices and problem.needs_grad and not problem.kv_cache:

        def decide(
            problem: _native.Problem,
            device: _native.Device | None,
            name: str | None = None,
            obstacle: str | None = None,
        ) -> _dispatch.Decision:
            if not _gradients.reads_lists(problem, device, name, obstacle):
                masked = make_problem(q, k, v, **_key_lists.explained_as_mask(q, k, options))
                problem = masked.as_if_on_cuda() if problem.on_cuda else masked
            return _dispatch.select(problem, device, name, obstacle)

    if device is None:
        if q.device.type == "meta":
            raise ValueError("q is on the meta device: name the GPU to explain for with device=")
        here, obstacle = _dispatch.device_of(problem, q.device.index)
        return decide(problem, here, name, obstacle)
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise TypeError(
            f"device is {_native.given(device)}: "
            "it must be the name of a GPU, a CUDA device or its index"
        )
    if isinstance(device, str) and not re.fullmatch(r"(cpu|cuda)(:[0-9]{1,3})?", device):
        # For a GPU from the table the decision is as if the tensors were there.
        return decide(problem.as_if_on_cuda(), find_device(device), name)
    if isinstance(device, int):
        if not 0 <= device < 128:
            raise ValueError(f"device is {_native.given(device)}: it must be the index of a GPU")
        device = f"cuda:{device}"
    asked = as_device(device)
    if asked.type == "cpu":
        return decide(problem, None, name)
    if asked.type != "cuda":
        raise ValueError(f"device is {asked}: name a GPU, a CUDA device or the CPU")
    if trouble := _dispatch.driver_problem():
        raise ValueError(
            f"device {device!r} cannot be asked: {trouble}; "
            "name a GPU from the table of known ones instead"
        )
    index = torch.cuda.current_device() if asked.index is None else asked.index
    return decide(problem.as_if_on_cuda(), _dispatch.query_device(index), name)


def find_device(name: str) -> _native.Device:
    """The known GPU of that name.

    Raises:
        ValueError: no GPU of that name is in the table.
    """
    known = _native.find_known_device(name)
    if known is None:
        names = ", ".join(row.device.name for row in _native.known_devices())
        raise ValueError(
            f"device is {_native.given(name)}: no GPU called {name!r} in the table of known ones: "
            f"{names}"
        )
    return known.device


def make_problem(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> _native.Problem:
    """The call as planning sees it; options and errors as those of `attention`."""
    values = _with_approximate(option_values(q, k, options))
    return _native.make_problem(q, k, v, values, _is_grad_enabled())


def option_values(q: Tensor, k: Tensor, options: dict[str, Any]) -> tuple[Any, ...]:
    """The values of all options as the runtime takes them."""
    given = _options.complete(options)
    if _bias.is_causal_bias(given["attn_mask"]):
        given["causal"], given["q_offset"], given["attn_mask"] = _bias.resolve(
            given["attn_mask"], q, k, given["causal"], given["window"], given["q_offset"],
            given["cu_seqlens_q"], given["layout"],
        )  # fmt: skip
    if _dropout.wants_state(given["dropout_p"], given["rng_state"]):
        given["rng_state"] = _dropout.state_for(q)
    return tuple(given.values())
