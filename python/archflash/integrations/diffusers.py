"""archflash in Hugging Face diffusers: import this module, then

    pipeline.transformer.set_attention_backend("archflash")

or ``with diffusers.models.attention_dispatch.attention_backend("archflash"):``. The default backend
of diffusers, `native`, calls PyTorch's scaled_dot_product_attention: `archflash.enable()` serves it
too.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    _check_device,
    _check_shape,
    _templated_context_parallel_attention,
)
from torch import Tensor

from archflash._api import attention
from archflash._backward import attention_backward
from archflash._errors import UnsupportedError
from archflash._sdpa import scaled_dot_product_attention

NAME = "archflash"


def _member() -> Any:
    """The member of diffusers' enumeration of backends that stands for archflash. Functions that
    take the name of a backend look for it there, and diffusers has none that adds a member.
    """
    for member in AttentionBackendName:
        if member.value == NAME:
            return member
    member = str.__new__(AttentionBackendName, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    AttentionBackendName._member_names_.append(member._name_)
    AttentionBackendName._member_map_[member._name_] = member
    AttentionBackendName._value2member_map_[NAME] = member
    return member


def forward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, _parallel_config: Any = None,
) -> Any:  # fmt: skip
    """The attention of a layer, as diffusers calls it.

    Args:
        query: (batch, rows, heads, d); key and value (batch, rows, heads_kv, d).
        attn_mask: (batch, keys), or broadcastable to (batch, heads, queries, keys); bool or added
            to the scores.
        dropout_p: above 0 PyTorch serves the call.
        is_causal: query i sees keys up to i.
        scale: multiplies query.key; 1 / sqrt(d) by default.
        enable_gqa: not needed: heads may always be a multiple of heads_kv.
        return_lse: also return the log-sum-exp, float32 (batch, rows, heads).
        _parallel_config: where it is given, diffusers' own ring or all-to-all calls `_forward_op`
            and `_backward_op` with the rows of this rank.

    Returns:
        (batch, rows, heads, dv); with return_lse the pair of it and the log-sum-exp.

    Raises:
        UnsupportedError: dropout with return_lse or with context parallelism.
        ValueError: diffusers' context parallelism takes neither is_causal nor enable_gqa.
    """
    if _parallel_config is not None:
        return _templated_context_parallel_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse,
            forward_op=_forward_op, backward_op=_backward_op, _parallel_config=_parallel_config,
        )  # fmt: skip
    options = _options(query, key, attn_mask, is_causal, scale)
    if dropout_p > 0.0:
        if return_lse:
            raise UnsupportedError(f"return_lse with dropout_p={dropout_p}: set dropout_p to 0")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return scaled_dot_product_attention(
            q, k, v, options["attn_mask"], dropout_p, is_causal, scale=scale, enable_gqa=True
        ).transpose(1, 2)
    result = attention(query, key, value, **options, return_lse=return_lse)
    if not return_lse:
        return result
    out, lse = result
    return out, lse.transpose(1, 2)


def _options(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> dict[str, Any]:
    """The options of `archflash.attention` that a call has: a mask of two dimensions is one of
    keys, and causal aligns to the top left.
    """
    nq, nk = query.shape[1], key.shape[1]
    if attn_mask is not None and tuple(attn_mask.shape) == (query.shape[0], nk):
        attn_mask = attn_mask[:, None, None]
    q_offset = 0 if is_causal and nq != nk else None
    options = {"causal": is_causal, "q_offset": q_offset, "attn_mask": attn_mask}
    return options | {"scale": scale, "layout": "bnhd"}


def _forward_op(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Any:  # fmt: skip
    """One part of a call that is spread over ranks: diffusers calls it inside an autograd.Function
    of its own, whose context it passes.
    """
    if dropout_p > 0.0:
        raise UnsupportedError(f"dropout_p={dropout_p} with context parallelism: set it to 0")
    out, lse = forward(
        query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, return_lse=True
    )
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.attn_mask, ctx.is_causal, ctx.scale = attn_mask, is_causal, scale
    return (out, lse) if return_lse else out


def _backward_op(
    ctx: Any,
    grad_out: Tensor,
    *args: Any,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one part. A ring passes the tensors of the part, with the output and the
    log-sum-exp of all of them together; else they are those that `_forward_op` kept.
    """
    given = (query, key, value, out, lse)
    q, k, v, o, of_rows = (
        kept if x is None else x for x, kept in zip(given, ctx.saved_tensors, strict=True)
    )
    options = _options(q, k, ctx.attn_mask, ctx.is_causal, ctx.scale)
    dq, dk, dv = attention_backward(
        grad_out.to(q.dtype), q, k, v, o.to(q.dtype), of_rows.transpose(1, 2), **options
    )
    return dq, dk, dv


_AttentionBackendRegistry.register(
    _member(), constraints=[_check_device, _check_shape], supports_context_parallel=True
)(forward)
