"""The formula of attention and its gradients: exact, and rounded as plain PyTorch code does it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _bias
from archflash._given import check_dense
from archflash.reference.blocks import Block, Options, as_given, blocks, by_head

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


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
            key_ranges, block_mask, key_indices, topk_lengths, dropout_p, rng_state,
            q_descale, k_descale, v_descale, layout. out_dtype, max_seqlen_q and max_seqlen_k are
            taken and change nothing here.

    Returns:
        The output, float64, shaped like q with Dv for D; with return_lse the pair of it and the
        natural-log LSE, float64, ``(B, Hq, Nq)`` or ``(Hq, Tq)``.

    Raises:
        TypeError: for a keyword that archflash.attention does not have.
    """
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse is {_native.given(return_lse)}: it must be a bool")
    options = Options(**call)
    _check_inputs(options, q, k, v)
    out, lse = run(options, q, k, v, torch.float64, _exact_block)
    return (out, lse) if return_lse else out


def _check_inputs(call: Options, q: Tensor, k: Tensor, v: Tensor) -> None:
    check_dense(q=q, k=k, v=v)
    ndim = 4 if call.cu_seqlens_q is None else 3
    shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    if not q.ndim == k.ndim == v.ndim == ndim:
        raise ValueError(f"q, k and v have shapes {shapes}: each must have {ndim} dimensions")
    of_q, of_k, of_v = (by_head(call, x).shape for x in (q, k, v))
    heads_fit = of_q[1] % of_k[1] == 0 if of_k[1] else of_q[1] == 0
    if of_q[0] != of_k[0] or of_q[3] != of_k[3] or of_k[:3] != of_v[:3] or not heads_fit:
        raise ValueError(
            f"q, k and v have shapes {shapes}: batches must agree, the columns of q and k, the "
            "heads and rows of k and v, and the heads of q must be a multiple of those of k"
        )


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
    asked = Options(**call)
    out_dtype = asked.out_dtype or (torch.bfloat16 if q.dtype in FP8 else q.dtype)
    with _without_tf32(q):
        out, _ = run(asked, q, k, v, out_dtype if q.dtype in FP8 else q.dtype, _rounded_block)
    return out.to(out_dtype)


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
        sinks_rounding: how far an LSE that is rounded to float32, as kernels are given it, may move
            dsinks: `more` of `check`. Of `attention_backward` only.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None
    dmask: Tensor | None = None
    sinks_rounding: float = 0.0


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
    asked = Options(**call)
    dout, q, k, v = (by_head(asked, x) for x in (dout, q, k, v))
    if dlse is not None and asked.cu_seqlens_q is not None:
        dlse = dlse[None]
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    dsinks = None if asked.sinks is None else torch.zeros_like(asked.sinks, dtype=torch.float64)
    mask = asked.attn_mask
    added = mask is not None and not _bias.is_causal_bias(mask) and mask.is_floating_point()
    full = (*q.shape[:3], k.shape[2])
    dmask = q.new_zeros(full, dtype=torch.float64) if added else None
    rounding = None if dsinks is None else torch.zeros_like(dsinks)
    for place, block in blocks(asked, q, k, v, torch.float64):
        here = (place.batch, place.head, place.rows)
        keys = (place.batch, place.kv_head, place.keys)
        of_lse = None if dlse is None else dlse[here].double()
        of_q, of_k, of_v, of_rows, of_mask = _exact_gradients(block, dout[here].double(), of_lse)
        dq[here] = of_q
        dk[keys] += of_k
        dv[keys] += of_v
        if dsinks is not None and rounding is not None and of_rows is not None:
            dsinks[place.head] += of_rows[0].sum()
            rounding[place.head] += of_rows[1].square().sum()
        if dmask is not None:
            dmask[here] = of_mask
    dq, dk, dv = (as_given(asked, x) for x in (dq, dk, dv))
    if dmask is not None and mask is not None:
        dmask = dmask.sum_to_size(mask.shape)
    # The errors of rows are independent: seven times their standard deviation.
    moved = 0.0 if rounding is None else 4 * float(rounding.nan_to_num(0, 0).max().sqrt())
    return Gradients(dq, dk, dv, dsinks, dmask, moved)


def baseline_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, dlse: Tensor | None = None, **call: Any
) -> Gradients:
    """The gradients that autograd computes of plain PyTorch operations at the inputs' dtype: the
    yardstick of `check` for gradients. In float32 the weights come from the rounded LSE, as in a
    kernel. Arguments and result as for `attention_backward`, but the gradients have the inputs'
    dtype. TF32 is off while it runs.
    """
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    leaves = [q, k, v]
    others = [name for name in ("sinks", "attn_mask") if call.get(name) is not None]
    others = [name for name in others if call[name].is_floating_point()]
    for name in others:
        call[name] = call[name].detach().requires_grad_()
        leaves.append(call[name])
    with _without_tf32(q), torch.enable_grad():
        out, lse = run(Options(**call), q, k, v, q.dtype, _rounded_block_with_lse)
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


def exact_weights(block: Block) -> tuple[Tensor, Tensor]:
    """What each key counts in each row (rows, Nk), and LSE (rows,), in float64."""
    logits = block.q @ block.k.T * block.scale
    if block.softcap:
        logits = block.softcap * torch.tanh(logits / block.softcap)
    if block.bias is not None:
        logits = logits + block.bias
    logits = logits.masked_fill(~block.visible, -math.inf)
    lse = torch.logsumexp(logits, 1)
    if block.sink is not None:
        lse = torch.logaddexp(lse, block.sink)
    weights = _weights_of(block, logits)
    return weights if block.factors is None else weights * block.factors, lse


def _weights_of(block: Block, logits: Tensor) -> Tensor:
    """The softmax of logits, 0 of keys that a row does not see. Not by the LSE: beside the lowest
    numbers of a mask it has no room for the logarithm of the sum.
    """
    logits = logits.masked_fill(~block.visible, -math.inf)
    of_sink = logits.new_full((len(logits), 1), -math.inf)
    if block.sink is not None:
        of_sink = block.sink.expand(len(logits), 1)
    base = torch.cat([logits, of_sink], 1).amax(1, keepdim=True)
    # In a row that sees no key and has no sink, every weight is exp(-inf) = 0. Using 0 for its
    # maximum avoids -inf - -inf.
    base = base.masked_fill(base == -math.inf, 0.0)
    weights = torch.exp(logits - base)
    of_sink = torch.exp(of_sink - base).masked_fill(of_sink == math.inf, 1.0)
    total = weights.sum(1, keepdim=True) + of_sink
    # Also 0 where the sink is NaN.
    return (weights / total.masked_fill(total == 0, 1.0)).masked_fill(~block.visible, 0.0)


def _exact_block(block: Block) -> tuple[Tensor, Tensor]:
    """Output (rows, Dv) and LSE (rows,) in float64."""
    weights, lse = exact_weights(block)
    # A value that is not finite affects only the rows that see it, but 0 * NaN would spread it to
    # the others.
    out = weights @ block.v.masked_fill(~block.v.isfinite(), 0.0)
    touched = block.visible.double() @ (~block.v.isfinite()).double() > 0
    return out.masked_fill(touched, math.nan), lse


def _exact_gradients(
    block: Block, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None, Tensor]:
    """dQ (rows, D), dK (Nk, D), dV (Nk, Dv), what rows add to the gradient of the sink and how far
    the rounding of their LSE to float32 may move that (rows,), and the gradient of the mask (rows,
    Nk), in float64.
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
    weights = _weights_of(block, logits)
    dweights = dout @ block.v.T
    kept = weights if block.factors is None else weights * block.factors
    dweights = dweights if block.factors is None else dweights * block.factors
    delta = (weights * dweights).masked_fill(~block.visible, 0.0).sum(1)
    if dlse is not None:
        delta = delta - dlse
    dbias = (weights * (dweights - delta[:, None])).masked_fill(~block.visible, 0.0)
    dlogits = (dbias * slope).masked_fill(~block.visible, 0.0)
    of_sink = None
    if block.sink is not None:  # an infinite sink takes the whole weight
        whole = block.sink == math.inf
        of_rows = -torch.where(whole, 1.0, torch.exp(block.sink - base)) * delta
        of_sink = of_rows, of_rows * base * 2**-24
    return (
        dlogits @ block.k * block.scale,
        dlogits.T @ block.q * block.scale,
        kept.T @ dout,
        of_sink,
        dbias,
    )


def _rounded_block(block: Block) -> tuple[Tensor, Tensor]:
    """Output (rows, Dv) with every step rounded to the dtype of q, and an unused LSE."""
    out, _ = _rounded(block)
    return out, out.new_zeros(len(out))


def _rounded_block_with_lse(block: Block) -> tuple[Tensor, Tensor]:
    """Output and LSE, whose gradients are wanted.

    A kernel of gradients is given the LSE in float32 and computes the weights from it. So does
    this in float32, where the rounding of the LSE is as large as the other errors.
    """
    out, logits = _rounded(block, from_lse=block.q.dtype == torch.float32)
    return out, torch.logsumexp(logits, 1)


def _rounded(block: Block, from_lse: bool = False) -> tuple[Tensor, Tensor]:
    """Output, and the logits from which it comes."""
    logits = (block.q @ block.k.T) * block.scale
    if block.softcap:
        logits = block.softcap * torch.tanh(logits / block.softcap)
    if block.bias is not None:
        logits = logits + block.bias
    logits = logits.masked_fill(~block.visible, -math.inf)
    if block.sink is not None:
        logits = torch.cat([logits, block.sink.expand(len(logits), 1)], 1)
    if from_lse:
        weights = torch.exp(logits - torch.logsumexp(logits, 1, keepdim=True))
    else:
        weights = torch.softmax(logits, 1)
    weights = weights[:, : len(block.k)]
    if block.sink is not None:  # softmax would give NaN instead of the limit
        weights = weights.masked_fill(block.sink == math.inf, 0.0)
    weights = weights.masked_fill(~block.visible, 0.0)
    if block.factors is not None:
        weights = weights * block.factors
    return weights @ block.v, logits


def run(
    call: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtype: torch.dtype,
    block_fn: Callable[[Block], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Cuts the call into blocks, computes each in `dtype` and combines the results."""
    q, k, v = (by_head(call, x) for x in (q, k, v))
    # Rows that belong to no sequence see no key.
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device)
    if call.sinks is not None:
        lse[:] = call.sinks.to(dtype)[:, None]
    for place, block in blocks(call, q, k, v, dtype):
        here = (place.batch, place.head, place.rows)
        out[here], lse[here] = block_fn(block)
    return as_given(call, out), lse[0] if call.cu_seqlens_q is not None else lse


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
