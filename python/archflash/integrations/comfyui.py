"""archflash in ComfyUI: `attention` has the interface of ComfyUI's attention functions, `register`
lists it among them as "archflash", and `patch` has a model use it.

examples/comfyui is a node that does both. ComfyUI's own function "pytorch" calls PyTorch's
scaled_dot_product_attention: `archflash.enable()` serves that for all models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from archflash._api import attention as _attention
from archflash._dispatch import where_served

NAME = "archflash"
_OVERRIDE = "optimized_attention_override"  # where ComfyUI looks for a function of a model's own


def attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None,
    attn_precision: Any = None, skip_reshape: bool = False, skip_output_reshape: bool = False, *,
    approximate: str | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """The attention of a layer, as ComfyUI calls it; it means what ComfyUI's "pytorch" means.

    Args:
        q: (batch, rows, heads * d), or with skip_reshape (batch, heads, rows, d); k and v the same.
        heads: the heads of q.
        mask: bool (True keeps) or added to the scores: (queries, keys), (batch, queries, keys) or
            (batch, heads, queries, keys), where each but the last two may also be 1.
        attn_precision: has no effect: kernels add scores up in fp32 whatever the dtype is.
        skip_reshape: q, k and v have their heads already.
        skip_output_reshape: the output keeps its heads.
        approximate: as for `archflash.attention`. A layer that no kernel serves so, and one that
            passes low_precision_attention=False, is computed exactly all the same.
        kwargs: `scale` multiplies q k^T, 1 / sqrt(d) by default; with `enable_gqa` k and v may have
            fewer heads. What else ComfyUI passes is for other functions, and not read.

    Returns:
        (batch, rows, heads * d), or with skip_output_reshape (batch, heads, rows, d).

    Raises:
        ValueError: rows of q, k or v are no multiple of the heads; and as `archflash.attention`.

    Example:
        >>> import torch
        >>> from archflash.integrations.comfyui import attention
        >>> q, k, v = (torch.randn(1, 6, 64) for _ in range(3))
        >>> attention(q, k, v, heads=4).shape
        torch.Size([1, 6, 64])
    """
    if not skip_reshape:
        q = _with_heads("q", q, heads)
        d = q.shape[-1]
        heads_kv = heads
        if kwargs.get("enable_gqa"):
            heads_kv = k.shape[-1] // d
            if heads_kv < 1 or k.shape[-1] % d:
                raise ValueError(
                    f"k has shape {tuple(k.shape)}: with enable_gqa its rows must be multiples of "
                    f"q's head dimension {d}"
                )
        k, v = _with_heads("k", k, heads_kv), _with_heads("v", v, heads_kv)
    if mask is not None and mask.ndim == 3:
        mask = mask.unsqueeze(1)
    exact = kwargs.get("low_precision_attention") is False
    out: Tensor = _attention(
        q, k, v, attn_mask=mask, scale=kwargs.get("scale"),
        approximate=None if exact else where_served(approximate, "approximate is"),
        layout="bhnd" if skip_reshape else "bnhd",
    )  # fmt: skip
    if skip_reshape != skip_output_reshape:
        out = out.transpose(1, 2)
    return out if skip_output_reshape else out.flatten(2)


def _with_heads(name: str, x: Tensor, heads: int) -> Tensor:
    """(batch, rows, heads * d) as (batch, rows, heads, d)."""
    if x.ndim != 3 or heads < 1 or x.shape[-1] % heads:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} with {heads} heads: without skip_reshape it must "
            "be (batch, rows, heads * d)"
        )
    return x.view(*x.shape[:2], heads, x.shape[-1] // heads)


def register() -> None:
    """Lists `attention` among ComfyUI's attention functions, for nodes that let one choose."""
    from comfy.ldm.modules import attention as functions

    if not hasattr(functions, "register_attention_function"):
        raise RuntimeError(
            "this ComfyUI keeps no list of attention functions: the node needs 0.3.64 or newer"
        )
    if functions.REGISTERED_ATTENTION_FUNCTIONS.get(NAME) is None:
        functions.register_attention_function(NAME, functions.wrap_attn(attention))


def override(approximate: str | None = None) -> Callable[..., Tensor]:
    """The function that ComfyUI calls in place of its own where a model's transformer_options have
    it as "optimized_attention_override".
    """

    def call(_replaced: Any, *args: Any, **kwargs: Any) -> Tensor:
        return attention(*args, approximate=approximate, **kwargs)

    return call


def patch(model: Any, approximate: str | None = None) -> Any:
    """A clone of a ComfyUI model (a ModelPatcher) whose attention is `attention`. It replaces the
    function of another node that was there.
    """
    model = model.clone()
    model.model_options.setdefault("transformer_options", {})[_OVERRIDE] = override(approximate)
    return model
