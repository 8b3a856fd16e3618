"""What the kernels of approximate="int8_pv" make of P and V, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archflash.reference.blocks import Block, Options, as_given, by_head, seen_keys
from archflash.reference.formula import exact_weights, run

_LARGEST = 2.0**100  # magnitudes of v beyond it count as it


def attention_in_int8(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> tuple[Tensor, Tensor, float]:
    """Attention with P and V in 8 bits.

    The mean over the keys that some query sees is subtracted from each column of v. What is left is
    divided by the largest of its column and, then, by the largest of its row (at least 2^-12 / 127
    of it), and rounded to multiples of 1/127. Weights are multiplied by the scale of their key's
    row of v and rounded, by way of fp16, to multiples of 1/255 of the largest of these products
    that the row has in a step of keys: 96, with softcap and masks as data 64, for head dimensions
    above 128 only 32. The mean is added back for exact weights.

    Args:
        q, k: float64, as `int8` gives them: with a column more than its kernel multiplies.
        v: as for `attention`; no NaN, no infinities.
        **call: as for `attention`, without dropout_p.

    Returns:
        The output and the log-sum-exp; and by what an element of a kernel's output may differ,
        because the neighbour of an integer of Q, K, P or V is as near: sums and exponentials are
        rounded otherwise there.
    """
    asked = Options(**call)
    columns = (as_given(asked, x) for x in _to_int8(by_head(asked, v), q, call))
    dv, step = v.shape[-1], 32 if k.shape[-1] > 129 else 64 if _changes_scores(asked) else 96
    largest = 0.0  # of what a key contributes to a number

    def of_block(block: Block) -> tuple[Tensor, Tensor]:
        nonlocal largest
        less, mean, scale = block.v[:, :dv], block.v[:, dv : 2 * dv], block.v[:, 2 * dv]
        weights, lse = exact_weights(block)
        rows, keys = weights.shape
        p = torch.nn.functional.pad(weights * scale, (0, -keys % step))
        p = p.reshape(rows, p.shape[1] // step, step)
        top = p.amax(-1, keepdim=True) if keys else p[..., :1]
        p = (255 * (p / torch.where(top == 0, 1.0, top)).half().double()).round() * (top / 255)
        p = p.reshape(rows, -1)[:, :keys] if p.numel() else p.new_zeros(rows, keys)
        if weights.numel():
            largest = max(largest, float((weights * scale * less.abs().amax(1)).max()))
        return torch.cat([p @ less + weights @ mean, weights @ block.v[:, dv:]], 1), lse

    made, lse = run(asked, q, k, torch.cat([*columns], -1), torch.float64, of_block)
    return made[..., :dv], lse, 2.0**-5 * largest


def _changes_scores(call: Options) -> bool:
    """Whether the kernel with masks as data serves a call."""
    masks = (call.attn_mask, call.key_ranges, call.alibi_slopes, call.block_mask)
    return any(x is not None for x in masks) or bool(call.softcap) or (call.scale or 0) <= 0


def _to_int8(v: Tensor, q: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Of (B, H, N, Dv), in float64: what the integers stand for but for the scale of their row, the
    mean that they lack, and that scale (B, H, N, 1).
    """
    nq = q.shape[0 if q.ndim == 3 else 1 if call.get("layout") == "bnhd" else 2]
    less, mean = (torch.zeros_like(v, dtype=torch.float64) for _ in range(2))
    scales = torch.ones_like(v[..., :1], dtype=torch.float64)
    for batch, (begin, end) in enumerate(seen_keys(len(v), nq, v.shape[2], call)):
        if begin >= end:
            continue
        seen = v[batch, :, begin:end].float().clamp(-_LARGEST, _LARGEST)
        of_columns = seen.double().mean(1, keepdim=True).float()
        scale = ((seen - of_columns).abs().amax(1, keepdim=True) / 127).clamp(min=2.0**-110)
        x = (seen - of_columns) * (1 / scale)
        of_rows = (x.abs().amax(2, keepdim=True) * (1 / 127)).clamp(min=2.0**-12)
        less[batch, :, begin:end] = (x * (1 / of_rows)).round().double() * scale.double()
        mean[batch] = of_columns.double()
        scales[batch, :, begin:end] = of_rows.double()
    return less, mean, scales
