"""The formula of attention and its gradients: exact, and rounded as plain PyTorch code does it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from archflash import _bias, _dropout

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BLOCK_ELEMENTS = 1 << 24  # scores held at once: 128 MiB in float64
SCALE_ROWS = 64  # rows that share a descale given per block
_MASK_BLOCK = 64  # rows and keys of a block of block_mask


@dataclasses.dataclass(frozen=True)
class Options:
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
    key_indices: Tensor | None = None
    topk_lengths: Tensor | None = None
    dropout_p: float | None = None
    rng_state: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    layout: str = "bhnd"


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
    out, lse = _run(Options(**call), q, k, v, torch.float64, _exact_block)
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
    asked = Options(**call)
    out_dtype = asked.out_dtype or (torch.bfloat16 if q.dtype in FP8 else q.dtype)
    with _without_tf32(q):
        out, _ = _run(asked, q, k, v, out_dtype if q.dtype in FP8 else q.dtype, _rounded_block)
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
    asked = Options(**call)
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
        out, lse = _run(Options(**call), q, k, v, q.dtype, _rounded_block_with_lse)
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
    call: Options,
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


def _by_head(call: Options, x: Tensor) -> Tensor:
    """A tensor of the call as (B, H, N, columns); packed sequences have a B of 1."""
    if call.cu_seqlens_q is not None:
        return x.transpose(0, 1)[None]
    return x.transpose(1, 2) if call.layout == "bnhd" else x


def _as_given(call: Options, x: Tensor) -> Tensor:
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
    call: Options, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype
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
                if call.key_indices is not None:
                    often = _listed(call, batch, head // group, rows, nq, nk)
                    visible = visible & (often > 0)
                    bias = often.double().log().to(dtype)  # a key that is named twice counts twice
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


def _sequences(call: Options, q: Tensor, k: Tensor) -> Iterator[tuple[int, int, slice, slice]]:
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
        factor = descale[number, head].repeat_interleave(SCALE_ROWS)[: len(x), None]
    elif descale.ndim == 2:
        factor = descale[number, head]
    elif descale.numel() == 1:
        factor = descale.reshape(())
    else:
        factor = descale[head]
    return (x.double() * factor.double()).to(dtype)


def _visible(call: Options, position: Tensor, nk: int) -> Tensor:
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


def _unhidden(call: Options, batch: int, head: int, rows: Tensor, nk: int) -> Tensor:
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


def _listed(call: Options, batch: int, kv_head: int, rows: Tensor, nq: int, nk: int) -> Tensor:
    """How often the lists of these rows name each key: (rows, Nk)."""

    def of_head(x: Tensor) -> Tensor:
        return x[batch if x.shape[0] > 1 else 0, kv_head if x.shape[1] > 1 else 0]

    assert call.key_indices is not None
    lists = of_head(call.key_indices)
    number = rows if len(lists) == nq else rows // _MASK_BLOCK
    entries = lists[number].long()
    counts = (entries >= 0) & (entries < nk)
    if call.topk_lengths is not None:
        lengths = of_head(call.topk_lengths)
        place = torch.arange(entries.shape[1], device=rows.device)
        counts &= place < lengths[number if len(lengths) > 1 else 0].reshape(-1, 1)
    often = torch.zeros(len(rows), nk + 1, device=rows.device)
    return often.scatter_add_(1, torch.where(counts, entries, nk), counts.float())[:, :nk]


def _dropout_factors(
    call: Options, batch_head: int, rows: Tensor, nk: int, dtype: torch.dtype
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
