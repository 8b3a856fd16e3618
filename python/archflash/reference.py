"""Attention in float64, and the one rule that says whether an output is right.

`attention` is the formula written as plainly as possible: one head at a time, one block of queries
at a time. `baseline` is the same formula rounded after every step to the inputs' dtype, as plain
PyTorch code would compute it; its error is the yardstick. `check` compares an output with both.
`attention_backward` and `baseline_backward` are the same for gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from archflash import _bias, _dropout

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BLOCK_ELEMENTS = 1 << 24  # scores held at once: 128 MiB in float64
_SCALE_ROWS = 64  # rows that share a descale given per block
_MASK_BLOCK = 64  # rows and keys of a block of block_mask
_MEAN_KEYS = 512  # most keys that enter the mean of k which approximate="int8_qk" subtracts
_LSE_ULPS = 64  # float32 sums of up to a few thousand products, and an approximate exp2 in between


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True] = True, **call: Any
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False], **call: Any
) -> Tensor: ...


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = True, **call: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in float64.

    Args:
        q: ``(B, Hq, Nq, D)``, or ``(B, Nq, Hq, D)`` with layout "bnhd", or ``(Tq, Hq, D)`` with
            cu_seqlens.
        k: ``(B, Hkv, Nk, D)``, ``(B, Nk, Hkv, D)`` or ``(Tk, Hkv, D)``.
        v: ``(B, Hkv, Nk, Dv)``, ``(B, Nk, Hkv, Dv)`` or ``(Tk, Hkv, Dv)``.
        return_lse: also return the log-sum-exp; on by default.
        **call: the other keywords of archflash.attention that change the result: causal, window,
            softcap, sinks, scale, q_offset, cu_seqlens_q, cu_seqlens_k, attn_mask, alibi_slopes,
            key_ranges, block_mask, dropout_p, rng_state, q_descale, k_descale, v_descale, layout.
            out_dtype, max_seqlen_q and max_seqlen_k are taken and change nothing here.

    Returns:
        The output, float64, shaped like q with Dv for D; with return_lse the pair of it and the
        natural-log LSE, float64, ``(B, Hq, Nq)`` or ``(Hq, Tq)``.

    Raises:
        TypeError: for a keyword that archflash.attention does not have.
    """
    out, lse = _run(_Call(**call), q, k, v, torch.float64, _exact_block)
    return (out, lse) if return_lse else out


def baseline(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **call: Any) -> Tensor:
    """Attention in plain PyTorch operations at the inputs' dtype: the yardstick of `check`.

    TF32 is off while it runs. FP8 inputs are first dequantised and rounded to the output dtype
    (bfloat16 by default).

    Args:
        q: as for `attention`.
        k: as for `attention`.
        v: as for `attention`.
        return_lse: ignored; it is accepted so that `attention` and this take the same keywords.
        **call: as for `attention`; out_dtype is the dtype of the result, by default that of q.

    Returns:
        The output in out_dtype, shaped like q with Dv for D.

    Raises:
        TypeError: for a keyword that archflash.attention does not have.
    """
    asked = _Call(**call)
    out_dtype = asked.out_dtype or (torch.bfloat16 if q.dtype in _FP8 else q.dtype)
    with _without_tf32(q):
        out, _ = _run(asked, q, k, v, out_dtype if q.dtype in _FP8 else q.dtype, _rounded_block)
    return out.to(out_dtype)


def attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, **call: Any
) -> tuple[Tensor, Tensor]:
    """archflash.attention_with_kvcache in float64.

    It reads lengths and page tables on the host, and changes no cache: `appended` gives the caches
    after the call.

    Args:
        q: ``(B, Nq, Hq, D)``, or ``(B, Hq, Nq, D)`` with layout "bhnd", or ``(Tq, Hq, D)`` with
            cu_seqlens_q.
        k_cache: ``(B, capacity, Hkv, D)`` or ``(pages, page_size, Hkv, D)``; or with layout "bhnd".
        v_cache: as k_cache, with Dv.
        **call: the other keywords of archflash.attention_with_kvcache that change the result.

    Returns:
        The pair of output and natural-log LSE in float64, shaped as those of the call.

    Raises:
        TypeError: for a keyword that archflash.attention_with_kvcache does not have.
    """

    def exact(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = attention(*tensors, **options)
        return result

    return _run_with_cache(exact, torch.float64, q, k_cache, v_cache, call)


def baseline_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, **call: Any) -> Tensor:
    """`attention_with_kvcache` in plain PyTorch operations at q's dtype: the yardstick of `check`.

    Args:
        q, k_cache, v_cache, **call: as for `attention_with_kvcache`.

    Returns:
        The output, in out_dtype or the dtype of q.
    """

    def rounded(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out = baseline(*tensors, **options)
        return out, out.new_zeros(out.shape[0], out.shape[2], out.shape[1])

    return _run_with_cache(rounded, q.dtype, q, k_cache, v_cache, call)[0]


def appended(k_cache: Tensor, v_cache: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    """The caches after a call of archflash.attention_with_kvcache.

    Rotations are computed in float64 and rounded once.

    Args:
        k_cache, v_cache, **call: as for `attention_with_kvcache`.

    Returns:
        New tensors like k_cache and v_cache.
    """
    asked = _CacheCall(**call)
    caches = k_cache.clone(), v_cache.clone()
    if asked.k_new is None or asked.v_new is None:
        return caches
    rows = tuple(x if asked.layout == "bnhd" else x.transpose(1, 2) for x in caches)
    new = tuple(
        x if asked.layout == "bnhd" else x.transpose(1, 2) for x in (asked.k_new, asked.v_new)
    )
    for number, length in enumerate(asked.cache_seqlens.tolist()):
        for i in range(new[0].shape[1]):
            place = asked.place(rows[0], number, length + i)
            if place is None:
                continue
            k_row = asked.rotated(new[0][number, i].double(), length - asked.first(number) + i)
            rows[0][place] = k_row.to(k_cache.dtype)
            rows[1][place] = new[1][number, i]
    return caches


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges attention of the same queries over different keys, in float64.

    Args:
        outs: ``(batch, heads, nq, dv)`` each, any floating-point dtype.
        lses: ``(batch, heads, nq)`` each, natural logarithms; a row with -inf counts for nothing,
            nor does one with +inf and an output of 0.

    Returns:
        The pair (output, log-sum-exp), float64.
    """
    lses = [
        x.masked_fill((x == torch.inf) & (out == 0).all(-1), -torch.inf)
        for out, x in zip(outs, lses, strict=True)
    ]
    lse = torch.stack([x.double() for x in lses]).logsumexp(0)
    merged = torch.zeros(outs[0].shape, dtype=torch.float64, device=outs[0].device)
    for out, of_part in zip(outs, lses, strict=True):
        seen = (of_part != -torch.inf)[..., None]
        share = (of_part.double() - lse).exp()[..., None]
        merged += torch.where(seen, share * out.double(), 0.0)
    return merged, lse


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What `attention_backward` and `baseline_backward` return.

    Attributes:
        dq, dk, dv: gradients with respect to q, k and v, shaped like them.
        dsinks: the gradient with respect to the sinks, ``(Hq,)``; None where the call has none.
        dmask: the gradient with respect to a floating attn_mask, shaped like it; None where the
            call has none.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None
    dmask: Tensor | None = None


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, dlse: Tensor | None = None, **call: Any
) -> Gradients:
    """The gradients of attention in float64.

    A gradient is that of the formula; where a query does not see a key it is 0. Rows of packed
    tensors that belong to no sequence have no gradient.

    Args:
        dout: the gradient of the output, shaped like the output.
        q, k, v: as for `attention`, not FP8.
        dlse: the gradient of the log-sum-exp, shaped like it; None: it is 0.
        **call: as for `attention`, without descales.

    Returns:
        The gradients, float64.

    Raises:
        TypeError: for a keyword that archflash.attention does not have.
    """
    asked = _Call(**call)
    dout, q, k, v = (_by_head(asked, x) for x in (dout, q, k, v))
    if dlse is not None and asked.cu_seqlens_q is not None:
        dlse = dlse[None]
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    dsinks = None if asked.sinks is None else torch.zeros_like(asked.sinks, dtype=torch.float64)
    mask = asked.attn_mask
    added = mask is not None and not _bias.is_causal_bias(mask) and mask.is_floating_point()
    full = (*q.shape[:3], k.shape[2])
    dmask = q.new_zeros(full, dtype=torch.float64) if added else None
    for place, block in _blocks(asked, q, k, v, torch.float64):
        here = (place.batch, place.head, place.rows)
        keys = (place.batch, place.kv_head, place.keys)
        of_lse = None if dlse is None else dlse[here].double()
        of_q, of_k, of_v, of_sink, of_mask = _exact_gradients(block, dout[here].double(), of_lse)
        dq[here] = of_q
        dk[keys] += of_k
        dv[keys] += of_v
        if dsinks is not None:
            dsinks[place.head] += of_sink
        if dmask is not None:
            dmask[here] = of_mask
    dq, dk, dv = (_as_given(asked, x) for x in (dq, dk, dv))
    if dmask is not None and mask is not None:
        dmask = dmask.sum_to_size(mask.shape)
    return Gradients(dq, dk, dv, dsinks, dmask)


def baseline_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, dlse: Tensor | None = None, **call: Any
) -> Gradients:
    """The gradients that autograd computes of plain PyTorch operations at the inputs' dtype: the
    yardstick of `check` for gradients. Arguments and result as for `attention_backward`, but the
    gradients have the inputs' dtype. TF32 is off while it runs.
    """
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    leaves = [q, k, v]
    others = [name for name in ("sinks", "attn_mask") if call.get(name) is not None]
    others = [name for name in others if call[name].is_floating_point()]
    for name in others:
        call[name] = call[name].detach().requires_grad_()
        leaves.append(call[name])
    with _without_tf32(q), torch.enable_grad():
        out, lse = _run(_Call(**call), q, k, v, q.dtype, _rounded_block_with_lse)
        loss = (out * dout.to(q.dtype)).sum()
        if dlse is not None:
            loss = loss + (lse * dlse.to(q.dtype)).sum()
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if loss.requires_grad:  # not where the call has no query
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
    dq, dk, dv, *more = (
        torch.zeros_like(leaf) if x is None else x for x, leaf in zip(found, leaves, strict=True)
    )
    named = dict(zip(others, more, strict=True))
    return Gradients(dq, dk, dv, named.get("sinks"), named.get("attn_mask"))


@dataclasses.dataclass(frozen=True)
class ErrorReport:
    """How far an output is from the float64 reference, and whether that is near enough.

    Attributes:
        ok: both bounds hold, and NaN and infinities are exactly where the reference has them.
        max_error: largest absolute error; inf if an element is wrongly NaN or infinite.
        mean_error: mean absolute error.
        nrmse: root of the mean squared error over the root of the mean squared reference.
        bad_elements: how many elements exceed `bound`, or differ from the reference in being NaN or
            infinite.
        elements: how many elements were compared.
        worst: coordinate of the largest error; empty for an empty output.
        value: the output at that coordinate.
        expected: the reference at that coordinate.
        bound: largest error that an element may have.
        mean_bound: largest mean error that is accepted.
    """

    ok: bool
    max_error: float
    mean_error: float
    nrmse: float
    bad_elements: int
    elements: int
    worst: tuple[int, ...]
    value: float
    expected: float
    bound: float
    mean_bound: float

    def __str__(self) -> str:
        return (
            f"{'ok' if self.ok else 'WRONG'}: "
            f"max error {self.max_error:.3g} (bound {self.bound:.3g}), "
            f"mean {self.mean_error:.3g} (bound {self.mean_bound:.3g}), NRMSE {self.nrmse:.3g}, "
            f"{self.bad_elements} of {self.elements} elements bad; "
            f"worst at {self.worst}: {self.value:.8g}, expected {self.expected:.8g}"
        )


def check(out: Tensor, ref: Tensor, base: Tensor) -> ErrorReport:
    """Compares an output with the float64 reference by the error rule.

    The rule: ``max|out - ref| <= 2 * max|base - ref| + 2 ulp`` of the output dtype at ``max|ref|``,
    the same for the means, and NaN and infinities exactly where the reference has them. For float32
    it is 4 ulp: there the baseline's own error is of some ulp, and another on each processor,
    because libraries sum in different orders.

    Args:
        out: the output to judge, any floating-point dtype.
        ref: the reference, float64, same shape.
        base: the baseline's output, same shape.

    Returns:
        An ErrorReport.

    Raises:
        ValueError: if the shapes differ.
    """
    if not out.shape == ref.shape == base.shape:
        raise ValueError(
            f"out {tuple(out.shape)}, ref {tuple(ref.shape)} and base {tuple(base.shape)} "
            "differ in shape: compare outputs of the same call"
        )
    finite = ref.isfinite()
    # Where the baseline overflowed it does not show what error to expect, so only its finite values
    # count.
    base_error = (base.double() - ref).abs()[finite & base.isfinite()]
    size = ref.abs()[finite]
    ulps = 4 if out.dtype == torch.float32 else 2
    bound = 2 * _max(base_error) + ulps * _ulp(_max(size), out.dtype)
    mean_bound = 2 * _mean(base_error) + ulps * _ulp(_mean(size), out.dtype)
    return _report(out, ref, bound, mean_bound)


def check_fp8(
    out: Tensor, ref: Tensor, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> ErrorReport:
    """Compares the output of an FP8 kernel with the float64 reference on the same FP8 inputs.

    Such a kernel rounds its output and also its weights, to e4m3. The error of a weight is at most
    2^-4 of itself, or 2^-18 of the largest weight. The rule for each element is::

        |out - ref| <= (2^-4 + 2^-8) * sum(w |v|) + 2^-18 * sum(|v|) + 2 ulp

    with sums over the keys that the row sees, w the weights of the softmax, and the ulp of the
    output dtype at max|ref|; 2^-8 is for the products of the scores. The mean error may be a
    quarter of that. NaN and infinities must be exactly where the reference has them.

    Args:
        out: the output to judge, float16 or bfloat16.
        ref: the reference, float64, same shape.
        q, k, v, **call: the call, as for `attention`.

    Returns:
        An ErrorReport; its bound is the one at the worst element.

    Raises:
        ValueError: if the shapes differ.
    """
    if out.shape != ref.shape:
        raise ValueError(
            f"out {tuple(out.shape)} and ref {tuple(ref.shape)} differ in shape: "
            "compare outputs of the same call"
        )
    size = v.double().abs()
    if call.get("v_descale") is not None:
        call["v_descale"] = call["v_descale"].abs()
    weighted = attention(q, k, size, return_lse=False, **call)
    keys = k.shape[1] if call.get("layout") == "bnhd" else k.shape[-2]
    if call.get("cu_seqlens_k") is not None:
        keys = k.shape[0]
    even = call | {"softcap": None, "scale": 0.0, "sinks": None}
    total = attention(q, k, size, return_lse=False, **even) * keys
    ulp = _ulp(_max(ref.abs()[ref.isfinite()]), out.dtype)
    bound = (2.0**-4 + 2.0**-8) * weighted + 2.0**-18 * total + 2 * ulp
    bound = torch.where(bound.isfinite(), bound, 0.0)
    return _report(out, ref, bound, _mean(bound) / 2)


def fp8_score_error(
    implementation: str,
    capability: tuple[int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **call: Any,
) -> float:
    """What `check_lse` accepts on top from a kernel on a GPU whose tensor cores keep 13 bits of a
    sum of 8-bit products: 2^-12 of the largest sum of |q k|.

    Args:
        implementation: the kernel's implementation.
        capability: the GPU's compute capability.
        q, k, v, **call: the call, as for `attention`.

    Returns:
        The error; 0.0 for other GPUs, kernels and inputs.
    """
    of_13_bits = implementation == "hopper" or (implementation, capability) == ("ada", (8, 9))
    if not of_13_bits or q.dtype.itemsize > 1:
        return 0.0
    call |= {"softcap": None, "sinks": None}
    for name in ("q_descale", "k_descale"):
        if call.get(name) is not None:
            call[name] = call[name].abs()
    if call.get("scale") is not None:
        call["scale"] = abs(call["scale"])
    # The log-sum-exp of these sums is at least the largest of them.
    q_size, k_size = (x.float().abs().to(x.dtype) for x in (q, k))
    _, lse = attention(q_size, k_size, v, **call)
    largest = lse[lse.isfinite()]
    return 2.0**-12 * max(float(largest.max()), 0.0) if largest.numel() else 0.0


def int8_qk(
    q: Tensor, k: Tensor, layout: str = "bhnd", keys: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """The numbers that approximate="int8_qk" multiplies in place of q and k.

    The mean over the keys (at most 512 of them, evenly spread) is subtracted from k. Then q and k
    are rounded to multiples of a scale, which is 1/127 of the largest magnitude in each 64 rows of
    a head. The mean is added back exactly.

    Args:
        q: ``(B, Hq, Nq, D)``, or ``(B, Nq, Hq, D)`` with layout "bnhd"; no NaN, no infinities.
        k: ``(B, Hkv, Nk, D)`` or ``(B, Nk, Hkv, D)``; no NaN, no infinities.
        keys: how many keys of each batch count; later ones, which no query sees, count as zeros.
            None: all.

    Returns:
        float64 tensors in the layout of q and k, with one column more. The products of their rows
        are the scores that such a kernel computes, before scale.
    """
    if layout == "bnhd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    mean = q.new_zeros((k.shape[0], k.shape[1], 1, k.shape[3]), dtype=torch.float32)
    less = torch.zeros_like(k, dtype=torch.float32)
    for batch, seen in enumerate([k.shape[2]] * len(k) if keys is None else keys):
        if seen:
            step = -(-seen // _MEAN_KEYS) | 1
            mean[batch] = k[batch, :, :seen:step].float().mean(1, keepdim=True)
            less[batch, :, :seen] = k[batch, :, :seen].float() - mean[batch]
    stored_q, stored_k = _to_int8(q.float()), _to_int8(less)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    by_head = mean.double().repeat_interleave(group, 1)
    shift = (q.double() * by_head).sum(-1, keepdim=True)
    wide_q = torch.cat([stored_q, shift], -1)
    wide_k = torch.cat([stored_k, torch.ones_like(stored_k[..., :1])], -1)
    if layout == "bnhd":
        wide_q, wide_k = wide_q.transpose(1, 2), wide_k.transpose(1, 2)
    return wide_q, wide_k


def _to_int8(x: Tensor) -> Tensor:
    """Rounds float32 (B, H, N, D) to int8 with scales; returns the numbers in float64."""
    rows = x.shape[2]
    largest = x.abs().amax(-1) if x.numel() else x.new_zeros(x.shape[:3])
    padded = torch.nn.functional.pad(largest, (0, -rows % _SCALE_ROWS))
    blocks = padded.reshape(*padded.shape[:2], -1, _SCALE_ROWS).amax(-1) if rows else padded
    scale = torch.where(blocks == 0, 1.0, blocks / torch.full_like(blocks, 127.0))
    scale = scale.repeat_interleave(_SCALE_ROWS, 2)[:, :, :rows, None] if rows else x[..., :1]
    return (x * (1.0 / scale)).round().double() * scale.double()


def check_int8_qk(
    out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> tuple[ErrorReport, ErrorReport | None]:
    """Compares the output of a kernel of approximate="int8_qk" with float64. The error rule is that
    of exact kernels, applied to the rounded q and k of `int8_qk`.

    The log-sum-exp may be off by 2^-10 more, because such kernels add 1.5 * 2^23 times the scale of
    the exponent, which is at most 2^-10, to a row's base.

    Args:
        out: the output to judge.
        lse: its log-sum-exp; None if there is none.
        q, k, v, **call: the call, as for `attention`.

    Returns:
        The reports of out and of lse.
    """
    scale = call.get("scale")
    call["scale"] = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    layout = call.get("layout", "bhnd")
    wide_q, wide_k = int8_qk(q, k, layout, _seen_keys(q, k, layout, call))
    expected, expected_lse = attention(wide_q, wide_k, v.double(), **call)
    exact = attention(q, k, v, return_lse=False, **call)
    rounding = baseline(q, k, v, **call).double() - exact
    report = check(out, expected, expected + rounding)
    return report, None if lse is None else check_lse(lse, expected_lse, 2.0**-10)


def _seen_keys(q: Tensor, k: Tensor, layout: str, call: dict[str, Any]) -> list[int]:
    """For each batch, the number of keys up to the last one that some query sees."""
    nq, nk = (x.shape[2 if layout == "bhnd" else 1] for x in (q, k))
    rights = [0] if call.get("causal") else []
    _, right = _bias.sides_of(call.get("window"))
    if right is not None:
        rights.append(right)
    if not rights:
        return [nk] * len(q)
    offset = call.get("q_offset")
    if offset is None:
        offset = nk - nq
    offsets = offset.tolist() if isinstance(offset, Tensor) else [offset] * len(q)
    return [min(max(nq + start + min(rights), 0), nk) for start in offsets]


def check_lse(lse: Tensor, ref: Tensor, more: float = 0.0) -> ErrorReport:
    """Compares a float32 log-sum-exp with the float64 reference.

    The rule: each element is within 64 ulp of float32 at ``max(1, max|ref|)``, and -inf exactly
    where the reference is.

    Args:
        lse: the log-sum-exp to judge, float32.
        ref: the reference, float64, same shape.
        more: error that is accepted on top, for an approximate kernel.

    Returns:
        An ErrorReport.

    Raises:
        ValueError: if the shapes differ.
    """
    if lse.shape != ref.shape:
        raise ValueError(
            f"lse {tuple(lse.shape)} and ref {tuple(ref.shape)} differ in shape: "
            "compare those of the same call"
        )
    bound = _LSE_ULPS * _ulp(max(1.0, _max(ref.abs()[ref.isfinite()])), torch.float32) + more
    return _report(lse, ref, bound, bound)


# --- the formula ---


@dataclasses.dataclass(frozen=True)
class _Call:
    """The keywords of archflash.attention that influence a result."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    q_offset: int | Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    attn_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    key_ranges: Tensor | None = None
    block_mask: Tensor | None = None
    dropout_p: float | None = None
    rng_state: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    layout: str = "bhnd"


@dataclasses.dataclass(frozen=True)
class _CacheCall:
    """The keywords of archflash.attention_with_kvcache that influence a result."""

    cache_seqlens: Tensor
    page_table: Tensor | None = None
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    leftpad_k: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = False
    qv: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    attention_chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    scale: float | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    num_splits: int | None = None
    batch_invariant: bool = False
    layout: str = "bnhd"

    def first(self, number: int) -> int:
        """The first row of a sequence that is no padding."""
        return 0 if self.leftpad_k is None else int(self.leftpad_k[number])

    def place(self, rows: Tensor, number: int, row: int) -> tuple[int, int] | None:
        """Where a row of a sequence lies in a cache ``(B, capacity, ...)`` or ``(pages, page_size,
        ...)``; None if that is outside of it.
        """
        size = rows.shape[1]
        if self.page_table is not None:
            if not 0 <= row < size * self.page_table.shape[1]:
                return None
            page, row = int(self.page_table[number, row // size]), row % size
        else:
            page = number if self.cache_batch_idx is None else int(self.cache_batch_idx[number])
        return (page, row) if 0 <= page < len(rows) and 0 <= row < size else None

    def rotated(self, x: Tensor, position: int) -> Tensor:
        """x ``(..., D)`` as the row of a position, in its own dtype after every step."""
        if self.rotary_cos is None or self.rotary_sin is None:
            return x
        at = min(max(position, 0), len(self.rotary_cos) - 1)
        cos, sin = self.rotary_cos[at].to(x.dtype), self.rotary_sin[at].to(x.dtype)
        half = len(cos)
        one = slice(0, 2 * half, 2) if self.rotary_interleaved else slice(0, half)
        other = slice(1, 2 * half, 2) if self.rotary_interleaved else slice(half, 2 * half)
        result = x.clone()
        result[..., one] = x[..., one] * cos - x[..., other] * sin
        result[..., other] = x[..., one] * sin + x[..., other] * cos
        return result


def _run_with_cache(
    formula: Callable[..., tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    call: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Calls a formula of attention for each sequence with the keys that it has after the append."""
    asked = _CacheCall(**call)
    caches = appended(k_cache, v_cache, **call)
    if asked.layout == "bhnd":
        caches = (caches[0].transpose(1, 2), caches[1].transpose(1, 2))
    both = [x for x in (q, asked.qv) if x is not None]
    if asked.layout == "bhnd" and asked.cu_seqlens_q is None:
        both = [x.transpose(1, 2) for x in both]
    q = both[0]
    if asked.cu_seqlens_q is not None:
        ends = asked.cu_seqlens_q.tolist()
        rows = [slice(start, end) for start, end in itertools.pairwise(ends)]
        queries = [[x[r] for x in both] for r in rows]
    else:
        queries = [[x[number] for x in both] for number in range(len(q))]
    scale = asked.scale
    if scale is None and asked.qv is not None:
        scale = 1.0 / math.sqrt(sum(x.shape[-1] for x in both))
    out_dtype = asked.out_dtype or (torch.bfloat16 if q.dtype in _FP8 else q.dtype)
    kind = torch.float64 if dtype == torch.float64 else out_dtype
    out = torch.zeros(*q.shape[:-1], v_cache.shape[-1], dtype=kind, device=q.device)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=kind, device=q.device)
    if asked.sinks is not None:
        lse[:] = asked.sinks.to(kind)
    added = 0 if asked.k_new is None else asked.k_new.shape[1 if asked.layout == "bnhd" else 2]
    size = caches[0].shape[1]
    capacity = size if asked.page_table is None else size * asked.page_table.shape[1]
    for number, length in enumerate(asked.cache_seqlens.tolist()):
        first = asked.first(number)
        places = [
            asked.place(caches[0], number, row)
            for row in range(first, max(first, min(length + added, capacity)))
        ]
        index = torch.tensor(places, dtype=torch.long, device=q.device).reshape(-1, 2)
        keys, values = (x[index[:, 0], index[:, 1]][None] for x in caches)
        x, *others = (y if dtype != torch.float64 else y.double() for y in queries[number])
        if asked.rotary_cos is not None:
            ordered = asked.attention_chunk is not None or asked.causal
            ordered = ordered or any(side is not None for side in _bias.sides_of(asked.window))
            turned = [
                asked.rotated(row, length - first + (i if ordered else 0))
                for i, row in enumerate(x)
            ]
            x = torch.stack(turned) if turned else x
        chunks = {}
        if asked.attention_chunk is not None:
            nq, nk = x.shape[0], keys.shape[1]
            place = torch.arange(nk - nq, nk, device=q.device) // asked.attention_chunk
            of_key = torch.arange(nk, device=q.device) // asked.attention_chunk
            chunks["attn_mask"] = place[:, None] == of_key
        of_heads = {
            name: value[number : number + 1] if value is not None and value.ndim == 2 else value
            for name in ("q_descale", "k_descale", "v_descale", "alibi_slopes")
            for value in (getattr(asked, name),)
        }
        if others:  # the scores are those of both queries beside one another
            x = torch.cat([x, *others], -1)
            parts = [
                rows.double() * (1.0 if descale is None else descale.double().reshape(1, 1, -1, 1))
                for rows, descale in (
                    (keys, of_heads["k_descale"]),
                    (values, of_heads["v_descale"]),
                )
            ]
            keys, of_heads["k_descale"] = torch.cat(parts, -1), None
        of_sequence, of_lse = formula(
            x[None], keys, values, causal=asked.causal, window=asked.window,
            softcap=asked.softcap, sinks=asked.sinks, scale=scale, layout="bnhd",
            out_dtype=out_dtype, **of_heads, **chunks,
        )  # fmt: skip
        here = number if asked.cu_seqlens_q is None else rows[number]
        out[here] = of_sequence[0]
        lse[here] = of_lse[0].transpose(0, 1)
    if asked.cu_seqlens_q is not None:
        return out, lse.transpose(0, 1)
    return (out.transpose(1, 2) if asked.layout == "bhnd" else out), lse.transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class _Block:
    """Some queries of one head, with all keys of their sequence."""

    q: Tensor  # (rows, D)
    k: Tensor  # (Nk, D)
    v: Tensor  # (Nk, Dv)
    visible: Tensor  # bool (rows, Nk)
    bias: Tensor | None  # (rows, Nk)
    factors: Tensor | None  # of dropout (rows, Nk)
    sink: Tensor | None  # one number
    scale: float
    softcap: float | None


def _exact_block(block: _Block) -> tuple[Tensor, Tensor]:
    """Output (rows, Dv) and LSE (rows,) in float64."""
    logits = block.q @ block.k.T * block.scale
    if block.softcap:
        logits = block.softcap * torch.tanh(logits / block.softcap)
    if block.bias is not None:
        logits = logits + block.bias
    logits = logits.masked_fill(~block.visible, -math.inf)
    lse = torch.logsumexp(logits, 1)
    if block.sink is not None:
        lse = torch.logaddexp(lse, block.sink)
    # In a row that sees no key and has no sink, every weight is exp(-inf) = 0. Using 0 for its
    # maximum avoids -inf - -inf.
    weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[:, None])
    weights = weights.masked_fill(~block.visible, 0.0)  # also where the sink is NaN
    weights = weights if block.factors is None else weights * block.factors
    # A value that is not finite affects only the rows that see it, but 0 * NaN would spread it to
    # the others.
    out = weights @ block.v.masked_fill(~block.v.isfinite(), 0.0)
    touched = block.visible.double() @ (~block.v.isfinite()).double() > 0
    return out.masked_fill(touched, math.nan), lse


def _exact_gradients(
    block: _Block, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | float, Tensor]:
    """dQ (rows, D), dK (Nk, D), dV (Nk, Dv), the gradients of the sink and of the mask (rows, Nk)
    in float64.
    """
    _, lse = _exact_block(block)
    logits = block.q @ block.k.T * block.scale
    slope: Tensor | float = 1.0
    if block.softcap:
        tanh = torch.tanh(logits / block.softcap)
        logits, slope = block.softcap * tanh, 1 - tanh.square()
    if block.bias is not None:
        logits = logits + block.bias
    base = lse.masked_fill(lse == -math.inf, 0.0)  # rows that see no key, and have no sink
    weights = torch.exp(logits - base[:, None]).masked_fill(~block.visible, 0.0)
    dweights = dout @ block.v.T
    kept = weights if block.factors is None else weights * block.factors
    dweights = dweights if block.factors is None else dweights * block.factors
    delta = (weights * dweights).masked_fill(~block.visible, 0.0).sum(1)
    if dlse is not None:
        delta = delta - dlse
    dbias = (weights * (dweights - delta[:, None])).masked_fill(~block.visible, 0.0)
    dlogits = (dbias * slope).masked_fill(~block.visible, 0.0)
    of_sink: Tensor | float = 0.0
    if block.sink is not None:  # an infinite sink takes the whole weight
        whole = block.sink == math.inf
        of_sink = -(torch.where(whole, 1.0, torch.exp(block.sink - base)) * delta).sum()
    return (
        dlogits @ block.k * block.scale,
        dlogits.T @ block.q * block.scale,
        kept.T @ dout,
        of_sink,
        dbias,
    )


def _rounded_block(block: _Block) -> tuple[Tensor, Tensor]:
    """Output (rows, Dv) with every step rounded to the dtype of q, and an unused LSE."""
    out, _ = _rounded(block)
    return out, out.new_zeros(len(out))


def _rounded_block_with_lse(block: _Block) -> tuple[Tensor, Tensor]:
    out, logits = _rounded(block)
    return out, torch.logsumexp(logits, 1)


def _rounded(block: _Block) -> tuple[Tensor, Tensor]:
    """Output, and the logits from which it comes."""
    logits = (block.q @ block.k.T) * block.scale
    if block.softcap:
        logits = block.softcap * torch.tanh(logits / block.softcap)
    if block.bias is not None:
        logits = logits + block.bias
    logits = logits.masked_fill(~block.visible, -math.inf)
    if block.sink is not None:
        logits = torch.cat([logits, block.sink.expand(len(logits), 1)], 1)
    weights = torch.softmax(logits, 1)[:, : len(block.k)]
    if block.sink is not None:  # softmax would give NaN instead of the limit
        weights = weights.masked_fill(block.sink == math.inf, 0.0)
    weights = weights.masked_fill(~block.visible, 0.0)
    if block.factors is not None:
        weights = weights * block.factors
    return weights @ block.v, logits


def _run(
    call: _Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtype: torch.dtype,
    block_fn: Callable[[_Block], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Cuts the call into blocks, computes each in `dtype` and combines the results."""
    q, k, v = (_by_head(call, x) for x in (q, k, v))
    # Rows that belong to no sequence see no key.
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device)
    if call.sinks is not None:
        lse[:] = call.sinks.to(dtype)[:, None]
    for place, block in _blocks(call, q, k, v, dtype):
        here = (place.batch, place.head, place.rows)
        out[here], lse[here] = block_fn(block)
    return _as_given(call, out), lse[0] if call.cu_seqlens_q is not None else lse


def _by_head(call: _Call, x: Tensor) -> Tensor:
    """A tensor of the call as (B, H, N, columns); packed sequences have a B of 1."""
    if call.cu_seqlens_q is not None:
        return x.transpose(0, 1)[None]
    return x.transpose(1, 2) if call.layout == "bnhd" else x


def _as_given(call: _Call, x: Tensor) -> Tensor:
    """The way back from `_by_head`."""
    if call.cu_seqlens_q is not None:
        return x[0].transpose(0, 1)
    return x.transpose(1, 2) if call.layout == "bnhd" else x


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a block lies in tensors (B, H, N, columns)."""

    batch: int
    head: int
    kv_head: int
    rows: slice  # of q
    keys: slice  # of k and v


def _blocks(
    call: _Call, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype
) -> Iterator[tuple[_Place, _Block]]:
    """The blocks of a call whose tensors are (B, H, N, columns), their numbers in `dtype`."""
    scale = 1 / math.sqrt(q.shape[-1]) if call.scale is None else call.scale
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    mask = None
    if call.attn_mask is not None:
        mask = call.attn_mask
        if _bias.is_causal_bias(mask):
            _bias.check_lengths(mask, q.shape[2], k.shape[2])
            mask = _bias.as_mask(mask, q.device)
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    for number, batch, q_rows, k_rows in _sequences(call, q, k):
        nq, nk = q_rows.stop - q_rows.start, k_rows.stop - k_rows.start
        offset = nk - nq
        if call.q_offset is not None:
            offset = (
                int(call.q_offset[number]) if isinstance(call.q_offset, Tensor) else call.q_offset
            )
        for head in range(q.shape[1]):
            head_k = _values(
                k[batch, head // group, k_rows], call.k_descale, number, head // group, dtype
            )
            head_v = _values(
                v[batch, head // group, k_rows], call.v_descale, number, head // group, dtype
            )
            q_descale = call.q_descale
            if q_descale is not None and q_descale.numel() > 1:
                by_head = q_descale.shape[min(q_descale.ndim - 1, 1)] == q.shape[1]
            else:
                by_head = True
            q_head = head if by_head else head // group
            head_q = _values(q[batch, head, q_rows], q_descale, number, q_head, dtype)
            step = max(1, _BLOCK_ELEMENTS // max(1, nk))
            for start in range(0, nq, step):
                rows = torch.arange(start, min(start + step, nq), device=q.device)
                visible = _visible(call, rows + offset, nk)
                bias = None
                if mask is not None:
                    given = mask[batch, head, q_rows, k_rows][rows]
                    if given.dtype == torch.bool:
                        visible = visible & given
                    else:
                        visible = visible & (given != -math.inf)
                        bias = given.to(dtype)
                visible = visible & _unhidden(call, batch, head, rows, nk)
                if call.alibi_slopes is not None:
                    of_distance = _alibi(call.alibi_slopes, number, head, rows + offset, nk)
                    bias = of_distance.to(dtype) if bias is None else bias + of_distance.to(dtype)
                block = _Block(
                    q=head_q[rows],
                    k=head_k,
                    v=head_v,
                    visible=visible,
                    bias=bias,
                    factors=_dropout_factors(call, number * q.shape[1] + head, rows, nk, dtype),
                    sink=None if call.sinks is None else call.sinks[head].to(dtype),
                    scale=scale,
                    softcap=call.softcap,
                )
                first = q_rows.start + start
                here = slice(first, first + len(rows))
                yield _Place(batch, head, head // group, here, k_rows), block


def _sequences(call: _Call, q: Tensor, k: Tensor) -> Iterator[tuple[int, int, slice, slice]]:
    """Number, batch index, query rows and key rows of each sequence."""
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        for batch in range(q.shape[0]):
            yield batch, batch, slice(0, q.shape[2]), slice(0, k.shape[2])
        return
    q_ends, k_ends = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    for number in range(len(q_ends) - 1):
        q_rows = slice(q_ends[number], q_ends[number + 1])
        yield number, 0, q_rows, slice(k_ends[number], k_ends[number + 1])


def _values(
    x: Tensor, descale: Tensor | None, number: int, head: int, dtype: torch.dtype
) -> Tensor:
    """The numbers that a stored (N, D) slice stands for, in `dtype`."""
    if descale is None:
        return x.to(dtype)
    if descale.ndim == 3:
        factor = descale[number, head].repeat_interleave(_SCALE_ROWS)[: len(x), None]
    elif descale.ndim == 2:
        factor = descale[number, head]
    elif descale.numel() == 1:
        factor = descale.reshape(())
    else:
        factor = descale[head]
    return (x.double() * factor.double()).to(dtype)


def _visible(call: _Call, position: Tensor, nk: int) -> Tensor:
    """Bool (rows, Nk): which keys the queries at these positions among the keys may see."""
    distance = torch.arange(nk, device=position.device) - position[:, None]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if call.causal:
        visible &= distance <= 0
    left, right = _bias.sides_of(call.window)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible


def _unhidden(call: _Call, batch: int, head: int, rows: Tensor, nk: int) -> Tensor:
    """Bool (rows, Nk): which keys key_ranges and block_mask let these rows of a head see."""

    def of_head(x: Tensor) -> Tensor:
        return x[batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]

    key = torch.arange(nk, device=rows.device)
    seen = torch.ones(len(rows), nk, dtype=torch.bool, device=rows.device)
    if call.key_ranges is not None:
        ranges = of_head(call.key_ranges)  # (Nq or 1, n, 2)
        ranges = ranges.expand(max(int(rows.max()) + 1, len(ranges)), -1, -1)[rows]
        begin, end = ranges[:, :, 0, None], ranges[:, :, 1, None]
        seen &= ((key >= begin) & (key < end)).any(1)
    if call.block_mask is not None:
        blocks = of_head(call.block_mask) != 0
        seen &= blocks[rows // _MASK_BLOCK][:, key // _MASK_BLOCK]
    return seen


def _dropout_factors(
    call: _Call, batch_head: int, rows: Tensor, nk: int, dtype: torch.dtype
) -> Tensor | None:
    """What dropout multiplies the weights of these queries by, 0 or 1 / (1 - p): (rows, Nk)."""
    if not call.dropout_p or call.rng_state is None:
        return None
    key = torch.arange(nk, device=rows.device)
    number = torch.tensor(batch_head, device=rows.device)
    keep = _dropout.kept(number, rows[:, None], key, call.dropout_p, call.rng_state)
    return keep.to(dtype) / (1 - call.dropout_p)


def _alibi(slopes: Tensor, number: int, head: int, position: Tensor, nk: int) -> Tensor:
    """What ALiBi adds to the scores of the queries at these positions: (rows, Nk), float64."""
    slope = slopes[head] if slopes.ndim == 1 else slopes[number, head]
    key = torch.arange(nk, device=position.device)
    return -slope.double() * (position[:, None] - key).abs()


@contextlib.contextmanager
def _without_tf32(q: Tensor) -> Iterator[None]:
    """While entered, CUDA computes float32 products in full, whatever the program has set."""
    if not q.is_cuda or q.dtype != torch.float32:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# --- the error rule ---


def _report(out: Tensor, ref: Tensor, bound: float | Tensor, mean_bound: float) -> ErrorReport:
    value = out.double()
    same = (value == ref) | (
        value.isnan() & ref.isnan()
    )  # equal infinities, and NaN where the reference is NaN
    comparable = value.isfinite() & ref.isfinite()
    error = (value - ref).abs().masked_fill(~comparable, math.inf).masked_fill(same, 0.0)
    bad = int((error > bound).sum())
    finite = ref.isfinite()
    # Where the reference is not finite, an element is right or wrong; the wrong ones are counted
    # above and have no size of error.
    mean_error = _mean(error[finite])
    power = _mean(ref[finite].square())
    nrmse = (
        math.sqrt(_mean(error[finite].square()) / power)
        if power
        else (0.0 if mean_error == 0 else math.inf)
    )
    worst: tuple[int, ...] = ()
    at, expected = 0.0, 0.0
    bound_there = 0.0 if isinstance(bound, Tensor) else bound
    if error.numel():
        excess = error - bound if isinstance(bound, Tensor) else error
        worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), error.shape))
        bound_there = float(bound[worst]) if isinstance(bound, Tensor) else bound
        at, expected = float(value[worst]), float(ref[worst])
    return ErrorReport(
        ok=bad == 0 and mean_error <= mean_bound,
        max_error=_max(error),
        mean_error=mean_error,
        nrmse=nrmse,
        bad_elements=bad,
        elements=error.numel(),
        worst=worst,
        value=at,
        expected=expected,
        bound=bound_there,
        mean_bound=mean_bound,
    )


def _max(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _mean(x: Tensor) -> float:
    return float(x.mean()) if x.numel() else 0.0


def _ulp(size: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of `dtype` at this size, also near zero."""
    info = torch.finfo(dtype)
    return float(2.0 ** math.floor(math.log2(max(size, info.tiny))) * info.eps)
