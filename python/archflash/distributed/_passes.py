"""The two passes of a call as autograd sees them, also after an exchange of rows for heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from archflash.distributed import _heads, _stages
from archflash.distributed._agree import Agreement, Statement
from archflash.distributed._shards import digest
from archflash.distributed._travel import columns
from archflash.distributed._work import Work


class Attention(torch.autograd.Function):
    """The call and its gradients; q, k and v are "bhnd"."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, work: Work, words: str,
        agreement: Agreement,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """words: of the backward pass. agreement: for a plan whose messages are one exchange it may
        be asked for then; for another one it was.
        """
        ctx.set_materialize_grads(False)
        out = _like(q, v.shape[3])
        saved: tuple[Tensor, ...] = (q, k, v)
        if work.heads is None:
            lse = _stages.forward(
                work.plan, work.outer, work.options, q, k, v, sinks, out, agreement
            )
            saved = (*saved, out, lse)
        else:
            lse, saved = _by_heads(work, q, k, v, sinks, out)
        ctx.work, ctx.words = work, words
        own = () if sinks is None else (sinks, *(() if work.heads is None else (out, lse)))
        ctx.save_for_backward(*saved, *own)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        work: Work = ctx.work
        q, k, v, out, lse, *own = ctx.saved_tensors
        words = f"{ctx.words}, dlse {dlse is not None}"
        agreement = Agreement(work.ranks.groups, Statement(0, words), digest(words))
        with torch.no_grad(), agreement:
            if not work.plan.in_one:
                agreement.rows()
            if work.heads is None:
                dout = torch.zeros_like(out) if dout is None else dout
                dq, dkv = _stages.backward(
                    work.plan, work.outer, work.options, dout, dlse, q, k, v, out, lse, agreement
                )
                dk, dv = (
                    torch.empty_like(x).copy_(y)
                    for x, y in zip((k, v), columns(dkv, k.shape[3]), strict=True)
                )
                dq = dq.to(q.dtype)
                own = [*own, out, lse]
            else:
                rows = _rows_of(work)
                if dout is None:
                    heads = work.heads.of_q[-1][1]
                    dout = q.new_zeros((q.shape[0], heads, rows, v.shape[3]))
                dq, dk, dv = _gradients_by_heads(work, dout, dlse, q, k, v, out, lse)
            dsinks = None
            if len(own) == 3:
                dsinks = _of_sinks(own[0], own[1], own[2], dout, dlse)
        return dq, dk, dv, dsinks, None, None, None


def _rows_of(work: Work) -> int:
    index = dist.get_rank(work.inner)
    return sum(end - start for start, end in work.pieces[index])


def _like(q: Tensor, columns: int) -> Tensor:
    """A new tensor "bhnd" whose heads and rows are nested as those of q."""
    batch, heads, rows, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty((batch, rows, heads, columns)).transpose(1, 2)
    return q.new_empty((batch, heads, rows, columns))


def _of_sinks(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """The gradient of the sinks by the local rows: a sink's share of a row is exp(sink - lse)."""
    wide = torch.promote_types(out.dtype, torch.float32)
    behind = (dout.to(wide) * out.to(wide)).sum(-1)
    behind = -behind if dlse is None else dlse - behind
    share = (sinks.to(wide)[:, None] - lse).exp().masked_fill(lse.isinf(), 0.0)
    return (share * behind).sum((0, 2)).to(sinks.dtype)


def _by_heads(
    work: Work, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The forward pass after an exchange of rows for heads. Also returns what gradients need."""
    split, rank = work.heads, dist.get_rank(work.inner)
    assert split is not None
    of_q = [range(*heads) for heads in split.of_q]
    moved = [
        _heads.to_heads(work.inner, work.pieces, x, heads)
        for x, heads in ((q, of_q), (k, split.of_kv), (v, split.of_kv))
    ]
    for _, pending in moved:
        pending.wait()
    q_all, k_all, v_all = (x.permute(1, 2, 0, 3) for x, _ in moved)
    out_all = out.new_empty((*moved[0][0].shape[:3], v.shape[3]))
    first, end = split.of_q[rank]
    lse_all = _stages.forward(
        work.plan, work.outer, work.options, q_all, k_all, v_all,
        None if sinks is None else sinks[first:end], out_all.permute(1, 2, 0, 3),
    )  # fmt: skip
    lse = lse_all.new_empty(q.shape[:3])
    _heads.to_rows(work.inner, work.pieces, out_all, of_q, out)
    _heads.to_rows(
        work.inner, work.pieces, lse_all.permute(2, 0, 1)[..., None], of_q, lse[..., None]
    )
    return lse, (q_all, k_all, v_all, out_all.permute(1, 2, 0, 3), lse_all)


def _gradients_by_heads(
    work: Work, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    split = work.heads
    assert split is not None
    of_q = [range(*heads) for heads in split.of_q]
    moved = [_heads.to_heads(work.inner, work.pieces, dout, of_q)]
    if dlse is not None:
        moved.append(_heads.to_heads(work.inner, work.pieces, dlse[..., None], of_q))
    for _, pending in moved:
        pending.wait()
    dout_all, *dlse_all = (x.permute(1, 2, 0, 3) for x, _ in moved)
    dq_all, dkv = _stages.backward(
        work.plan, work.outer, work.options, dout_all, dlse_all[0][..., 0] if dlse_all else None,
        q, k, v, out, lse,
    )  # fmt: skip
    rows, batch = _rows_of(work), q.shape[0]
    dq = q.new_empty((batch, split.of_q[-1][1], rows, q.shape[3]))
    _heads.to_rows(work.inner, work.pieces, dq_all.to(q.dtype).permute(2, 0, 1, 3), of_q, dq)
    # Copies of a head are added up in float32.
    dtype = dkv.dtype if split.repeats else k.dtype
    heads_kv = 1 + max(head for heads in split.of_kv for head in heads)
    both = dkv.new_zeros((batch, heads_kv, rows, dkv.shape[3]), dtype=dtype)
    _heads.to_rows(work.inner, work.pieces, dkv.to(dtype), split.of_kv, both, adds=split.repeats)
    dk, dv = both[..., : k.shape[3]], both[..., k.shape[3] :]
    return dq, dk.to(k.dtype), dv.to(v.dtype)
