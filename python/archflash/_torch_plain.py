"""Attention by matrix products and softmax, and second derivatives of PyTorch's fused kernels by
them.

The plain operations serve what no fused kernel has: softcap, sinks, the log-sum-exp, dropout by a
given state, and derivatives of every kind.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from archflash._eager import differentiates_twice
from archflash._torch_kernels import fused_node
from archflash._torch_masks import Band, Mask, visible_keys

_MINUS_INF = -math.inf


def plain_operations(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, *, scale: float, softcap: float | None,
    factors: Tensor | None, want_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Output and LSE (without sinks) by plain operations in float32, or in float64 for float64."""
    if q.dtype != torch.float64:
        q, k, v = q.float(), k.float(), v.float()
    b, hq, nq, _ = q.shape
    hkv, nk = k.shape[1:3]

    def by_kv_head(x: Tensor) -> Tensor:
        """Stacks the query heads that share a key head, so that k and v are never repeated."""
        return x.reshape(b, hkv, hq // max(hkv, 1) * nq, x.shape[-1])

    scores = (by_kv_head(q) @ k.transpose(-1, -2)).view(b, hq, nq, nk) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask:
        if mask.bias is not None:
            scores = scores + mask.bias.to(scores.dtype)
        scores = torch.where(mask.visible, scores, _MINUS_INF)
    lse = None
    if differentiates_twice(scores):
        # PyTorch's rule for the tangent of softmax cannot itself be differentiated by autograd.
        top = scores.detach().amax(-1, keepdim=True)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        weights = weights / total
        lse = (top + total.log())[..., 0]
    else:
        weights = torch.softmax(scores, -1)
        lse = torch.logsumexp(scores, -1) if want_lse else None
    if factors is not None:  # of dropout
        weights = weights * factors
    out = (by_kv_head(weights) @ v).view(b, hq, nq, v.shape[-1])
    return out, lse


def sdpa_by_plain_operations(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, is_causal: bool
) -> Tensor:
    """What `_sdpa` gives, by operations that have derivatives of every kind."""
    visible = None
    if is_causal:
        visible = visible_keys(q, k, Band(None, 0, 0), None)
    masks = None if mask is None and visible is None else Mask.of(visible, mask, None)
    out, _ = plain_operations(
        q, k, v, masks, scale=scale, softcap=None, factors=None, want_lse=False
    )
    return out.to(q.dtype)


def let_differentiate_twice(out: Tensor) -> None:
    """Makes gradients of gradients possible of what PyTorch's SDPA returned.

    Its fused kernels have first gradients only. Where their gradients are to be differentiated
    (create_graph=True), they are replaced by those of plain operations.
    """
    if (node := fused_node(out)) is not None:
        node.register_hook(_differentiable_gradients)


def _differentiable_gradients(
    found: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """A hook of the backward pass of one of PyTorch's fused kernels.

    Args:
        found: the gradients of q, k, v and maybe a mask, by the kernel.
        given: that of the output, and more.
    """
    if not torch.is_grad_enabled() or given[0] is None:
        return None
    node: Any = torch._C._current_autograd_node()
    try:
        mask = getattr(node, "_saved_attn_bias", getattr(node, "_saved_attn_mask", None))
        inputs = [node._saved_query, node._saved_key, node._saved_value, mask]
    except RuntimeError as error:
        if type(error).__name__ != "CheckpointError":
            raise
        # Activation checkpointing gives a tensor once, and the kernel had it. PyTorch raises if the
        # kernel's gradients are differentiated.
        return None
    wanted = [i for i, x in enumerate(found) if x is not None]
    # Where one tensor is several inputs, each of them has a gradient of its own.
    for i in wanted:
        inputs[i] = inputs[i].view_as(inputs[i])
    q, k, v, mask = inputs
    scale, is_causal = node._saved_scale, node._saved_is_causal
    out = sdpa_by_plain_operations(q, k, v, mask, scale, is_causal=is_causal)
    leaves = [inputs[i] for i in wanted]
    gradients = torch.autograd.grad(out, leaves, given[0], create_graph=True)
    of_input = dict(zip(wanted, gradients, strict=True))
    return tuple(of_input.get(i) for i in range(len(found)))
