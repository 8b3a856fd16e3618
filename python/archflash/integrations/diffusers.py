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
)
from torch import Tensor

from archflash._api import attention
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
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

    Returns:
        (batch, rows, heads, dv); with return_lse the pair of it and the log-sum-exp.

    Raises:
        UnsupportedError: context parallelism, or return_lse with dropout.
    """
    if _parallel_config is not None:
        raise UnsupportedError(
            "context parallelism: not built yet; use another attention backend of diffusers"
        )
    nq, nk = query.shape[1], key.shape[1]
    if attn_mask is not None and tuple(attn_mask.shape) == (query.shape[0], nk):
        attn_mask = attn_mask[:, None, None]
    if dropout_p > 0.0:
        if return_lse:
            raise UnsupportedError(f"return_lse with dropout_p={dropout_p}: set dropout_p to 0")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        ).transpose(1, 2)
    result = attention(
        query,
        key,
        value,
        causal=is_causal,
        q_offset=0 if is_causal and nq != nk else None,
        attn_mask=attn_mask,
        scale=scale,
        layout="bnhd",
        return_lse=return_lse,
    )
    if not return_lse:
        return result
    out, lse = result
    return out, lse.transpose(1, 2)


_AttentionBackendRegistry.register(_member(), constraints=[_check_device, _check_shape])(forward)
