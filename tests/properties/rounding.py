"""How far correct rounding may move gradients: what the error rule cannot know where plain
operations happen to be exact, as for one key, or where scores are so large that the rounding of a
log-sum-exp counts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from archflash.reference import blocks, formula


def of_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, dlse: Tensor | None, **call: Any
) -> formula.Gradients:
    """The error to first order of each number of the gradients, float64: every intermediate result
    is off by a unit of its dtype. Errors that a row's scores have in common are added, independent
    ones by their squares.
    """
    unit = float(torch.finfo(q.dtype).eps)
    fine = min(unit, 2.0**-23)  # of scores and log-sum-exps
    asked = blocks.Options(**call)
    dout, q, k, v = (blocks.by_head(asked, x) for x in (dout, q, k, v))
    if dlse is not None and asked.cu_seqlens_q is not None:
        dlse = dlse[None]
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    dsinks = None if asked.sinks is None else torch.zeros_like(asked.sinks, dtype=torch.float64)
    mask = asked.attn_mask
    full = (*q.shape[:3], k.shape[2])
    dmask = None if mask is None else torch.zeros(full, dtype=torch.float64, device=q.device)
    for place, block in blocks.blocks(asked, q, k, v, torch.float64):
        here = (place.batch, place.head, place.rows)
        keys = (place.batch, place.kv_head, place.keys)
        of_dout = dout[here].double()
        out, lse = formula._exact_block(block)
        base = lse.masked_fill(~lse.isfinite(), 0.0)[:, None]
        logits = block.q @ block.k.T * block.scale
        steps = (block.q.square() @ block.k.T.square()).sqrt() * abs(block.scale)
        slope: Tensor | float = 1.0
        if block.softcap:
            tanh = torch.tanh(logits / block.softcap)
            logits, slope = block.softcap * tanh, 1 - tanh.square()
        bias = 0.0 if block.bias is None else block.bias
        logits = (logits + bias).masked_fill(~block.visible, -math.inf)
        weights = torch.exp(logits - base).masked_fill(~block.visible, 0.0)
        # What a weight is wrong by: it is exp(score - log-sum-exp), and both are float32.
        size = 1 + base.abs() + 4 * steps + torch.as_tensor(bias).abs()
        size = size + logits.masked_fill(~block.visible, 0.0).abs()
        relative = unit + fine * size.masked_fill(~block.visible, 0.0)
        factors = 1.0 if block.factors is None else block.factors
        products = (of_dout @ block.v.T).abs() + (of_dout.square() @ block.v.T.square()).sqrt()
        delta = (of_dout * out).sum(1).abs() + (of_dout.square() @ out.square().T).diagonal().sqrt()
        if dlse is not None:
            delta = delta + dlse[here].double().abs()
        dbias = weights * (products * factors + delta[:, None]) * relative
        dlogits = dbias * slope
        dq[here] = dlogits @ block.k.abs() * abs(block.scale)
        dk[keys] += dlogits.square().T @ block.q.square() * block.scale**2
        dv[keys] += (weights * factors * relative).square().T @ of_dout.square()
        if dsinks is not None and block.sink is not None:
            whole = block.sink == math.inf
            weight = torch.where(whole, 1.0, torch.exp(block.sink - base[:, 0]))
            relative_of_sink = unit + fine * (1 + base[:, 0].abs())
            # PyTorch has the keys' share, and 1 less that.
            off = weight * relative_of_sink + fine
            dsinks[place.head] += (off * delta).square().sum()
        if dmask is not None:
            dmask[here] = dbias
    dk, dv = (3 * x.sqrt() for x in (dk, dv))
    dsinks = None if dsinks is None else 3 * dsinks.sqrt()
    if dmask is not None and mask is not None:
        dmask = dmask.sum_to_size(mask.shape)
    dq, dk, dv = (blocks.as_given(asked, x) for x in (dq, dk, dv))
    return formula.Gradients(dq, dk, dv, dsinks, dmask)
