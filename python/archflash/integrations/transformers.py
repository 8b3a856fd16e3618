"""archflash in Hugging Face transformers, after one import:

    import archflash.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="arch_attention")

The name has no "flash" in it, because transformers takes every name that contains it for
FlashAttention: it then looks for a package of that name, gives some models another implementation,
and leaves out masks.

A model makes its mask once for all layers. Here the mask is a tensor that knows what it stands for
(causal, a window, padding), so that no layer needs its values: causal and window become options of
`archflash.attention`, and padded rows are left out of it by packing the sequences where nothing
needs gradients. A model that computes with its mask, or asks for one of another kind, gets the
values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from archflash._api import attention
from archflash._sdpa import scaled_dot_product_attention

if "q_length" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError("archflash.integrations.transformers needs transformers 5 or newer")

NAME = "arch_attention"


# --- the mask of a model ---


class _Rule(NamedTuple):
    """Which keys a query sees, by position: ``k <= q`` where causal, and ``q - left <= k``."""

    causal: bool
    left: int | None


def _rule_of(mask_function: Callable[..., Any]) -> _Rule | None:
    """The rule that one of transformers' mask functions stands for; None for any other function."""
    if mask_function is causal_mask_function:
        return _Rule(True, None)
    if mask_function is bidirectional_mask_function:
        return _Rule(False, None)
    parts = _captured(mask_function, "and_masks", "mask_functions")
    if not isinstance(parts, tuple) or len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    window = _captured(parts[0], "sliding_window_overlay", "sliding_window")
    return _Rule(True, window - 1) if isinstance(window, int) and window > 0 else None


def _captured(function: Any, maker: str, variable: str) -> Any:
    """What a variable of the function that made another one holds; None if another one made it."""
    if not getattr(function, "__qualname__", "").startswith(f"{maker}.<locals>."):
        return None
    names = function.__code__.co_freevars
    if variable not in names:
        return None
    return function.__closure__[names.index(variable)].cell_contents


class Mask(Tensor):
    """A bool mask (batch, 1, queries, keys) that knows its rule. Whatever computes with it gets a
    plain tensor of its values.

    Attributes:
        rule: which keys a query sees, by position.
        offset: the position of query 0 less that of key 0.
        padding: bool (batch, keys), False for a key that no query sees; None if there is none.
    """

    rule: _Rule
    offset: int
    padding: Tensor | None

    @staticmethod
    def make(
        batch: int,
        nq: int,
        nk: int,
        rule: _Rule,
        offset: int,
        padding: Tensor | None,
        device: torch.device | str,
    ) -> Mask:
        mask: Mask = Tensor._make_wrapper_subclass(
            Mask, (batch, 1, nq, nk), dtype=torch.bool, device=torch.device(device)
        )
        mask.rule, mask.offset, mask.padding = rule, offset, padding
        return mask

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def plain(x: Any) -> Any:
            return x.values_() if isinstance(x, Mask) else x

        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def values_(self) -> Tensor:
        """The values, as a plain tensor."""
        batch, _, nq, nk = self.shape
        query = torch.arange(nq, device=self.device)[:, None] + self.offset
        key = torch.arange(nk, device=self.device)
        visible = torch.ones(nq, nk, dtype=torch.bool, device=self.device)
        if self.rule.causal:
            visible = visible & (key <= query)
        if self.rule.left is not None:
            visible = visible & (key >= query - self.rule.left)
        if self.padding is None:
            return visible.expand(batch, 1, nq, nk)
        return visible & self.padding[:, None, None, :]


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """The mask of a model, as transformers asks for it.

    Args:
        batch_size, q_length, kv_length: its shape.
        q_offset: the position of query 0; kv_offset that of key 0.
        mask_function: transformers' function that says which keys a query sees.
        attention_mask: bool (batch, positions), False for padding.
        device: of the mask.
        use_vmap: whether mask_function is the user's own.
        allow_is_causal_skip: whether None may stand for a plain causal mask.
        allow_is_bidirectional_skip: whether None may stand for no mask.
        options: passed to transformers' own function, which makes masks of other kinds.

    Returns:
        A `Mask` where the rule is known, None where none is needed, or a plain bool tensor (batch,
        1, queries, keys).
    """
    rule = None if use_vmap or torch.compiler.is_compiling() else _rule_of(mask_function)
    # A static cache keeps its length on the device, and its masks are made outside of compiled
    # code, which takes plain tensors only.
    if rule is None or isinstance(q_offset, Tensor):
        plain: Tensor | None = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            device=device, use_vmap=use_vmap, allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, **options,
        )  # fmt: skip
        return plain
    padding = None
    if attention_mask is not None:
        missing = kv_length + kv_offset - attention_mask.shape[-1]
        padding = F.pad(attention_mask, (0, max(missing, 0)))[:, kv_offset : kv_offset + kv_length]
        padding = None if bool(padding.all()) else padding.to(device)
    offset = q_offset - kv_offset
    if padding is None and rule.left is None:
        # None is what a forward takes for a causal mask of as many queries as keys, or of one.
        plain_causal = q_length == 1 or (offset == 0 and q_length == kv_length)
        if rule.causal and allow_is_causal_skip and plain_causal and offset + q_length == kv_length:
            return None
        if not rule.causal and allow_is_bidirectional_skip:
            return None
    return Mask.make(batch_size, q_length, kv_length, rule, offset, padding, device)


# --- attention ---


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, as transformers calls it.

    Args:
        module: the layer; its `is_causal` counts where there is no mask.
        query: (batch, heads, queries, d); key and value (batch, heads_kv, keys, d).
        attention_mask: of `make_mask`; or a tensor that broadcasts to (batch, heads, queries,
            keys), bool or added to the scores.
        dropout: probability of dropping a weight; above 0 PyTorch serves the layer, unless it has
            softcap or sinks, which PyTorch's own function lacks.
        scaling: multiplies query.key.
        is_causal: overrides that of the layer.
        softcap: as for `archflash.attention`.
        s_aux: sinks (heads,).
        position_bias: added to the scores, broadcastable to (batch, heads, queries, keys).
        cache: the paged cache of continuous batching, which takes up key and value.
        others: what the mask says already, as the sliding window.

    Returns:
        (batch, queries, heads, d), and None in place of the weights.
    """
    if cache is not None and hasattr(cache, "update"):
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=others
        )
    nq, nk = query.shape[2], key.shape[2]
    options: dict[str, Any] = {}
    if isinstance(attention_mask, Mask):
        if tuple(attention_mask.shape[2:]) != (nq, nk):
            options["attn_mask"] = attention_mask.values_()[:, :, :, :nk]
        else:
            options = _options_of(attention_mask, nq, nk)
    elif attention_mask is not None:
        options["attn_mask"] = attention_mask
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and nq > 1:
            # As in PyTorch's SDPA, query i sees keys up to i: other keys of a static cache are
            # still empty.
            options = {"causal": True} if nq == nk else {"causal": True, "q_offset": 0}

    if dropout > 0.0 and not softcap and s_aux is None:
        out = _dropped_by_sdpa(query, key, value, options, dropout, scaling, position_bias)
        return out.transpose(1, 2).contiguous(), None
    options.update(scale=scaling, softcap=softcap, sinks=s_aux)
    if dropout > 0.0:
        options["dropout_p"] = dropout
    padding = options.pop("padding", None)
    if padding is not None:
        if position_bias is None and _packs(query, key, value, padding, options):
            return _packed(query, key, value, padding, options), None
        options["attn_mask"] = padding[:, None, None, :]
    if position_bias is not None:
        options["attn_mask"] = _with_bias(position_bias, options.get("attn_mask"))
    out = attention(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), None


def _options_of(mask: Mask, nq: int, nk: int) -> dict[str, Any]:
    """The options of `archflash.attention` that have the meaning of a mask, and its padding."""
    options: dict[str, Any] = {"padding": mask.padding}
    if mask.rule.causal:
        options["causal"] = True
        if mask.rule.left is not None:
            options["window"] = (mask.rule.left, None)
        if mask.offset != nk - nq:
            options["q_offset"] = mask.offset
    return options


def _with_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -torch.inf)
    return bias + mask


def _dropped_by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
    dropout: float,
    scale: float | None,
    bias: Tensor | None,
) -> Tensor:
    """The layer by the function that chooses between PyTorch's fused kernels, which drop weights
    faster, and archflash's. The latter take no mask tensor for windows and padding, but PyTorch's
    do, so they all become one.
    """
    nq, nk = query.shape[2], key.shape[2]
    rule = _Rule(options.get("causal", False), options.get("window", (None, None))[0])
    offset = options.get("q_offset", nk - nq)
    rows = Mask.make(query.shape[0], nq, nk, rule, offset, options.get("padding"), query.device)
    mask = rows.values_()
    if "attn_mask" in options:
        given = options["attn_mask"]
        mask = given if not rule.causal else _with_bias(given, mask)
    if bias is not None:
        mask = _with_bias(bias, mask)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        dropout,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


# --- padding: packed sequences ---


def _packs(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor, options: dict[str, Any]
) -> bool:
    """Whether the rows that are no padding are packed, so that a kernel serves them. Packing copies
    them, which does not pay for one query. It keeps the order of positions, which is all that a
    causal rule needs, but not their distances where there is padding between rows.
    """
    nq, nk = query.shape[2], key.shape[2]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if not _a_kernel_may_serve(query) or needs_grad or nq == 1:
        return False
    if options.get("causal") and (nq != nk or "q_offset" in options):
        return False
    if "window" not in options:
        return True
    begins = padding[:, 1:] & ~padding[:, :-1]
    return bool((begins.sum(-1) + padding[:, 0] <= 1).all())


def _a_kernel_may_serve(query: Tensor) -> bool:
    return query.is_cuda


def _packed(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor, options: dict[str, Any]
) -> Tensor:
    """The attention of the rows that are no padding, packed; (batch, queries, heads, dv), with 0 in
    rows of padding where queries are keys.
    """
    batch, heads, nq, _ = query.shape
    lengths = padding.sum(-1, dtype=torch.int32)
    ends_k = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    kept = padding.flatten().nonzero().flatten()
    k, v = (x.transpose(1, 2).flatten(0, 1)[kept] for x in (key, value))
    q = query.transpose(1, 2).flatten(0, 1)
    causal = bool(options.get("causal"))
    if causal:
        q, ends_q = q[kept], ends_k
    else:
        ends_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * nq
    out: Tensor = attention(q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, **options)
    if causal:
        rows = out.new_zeros(batch * nq, heads, out.shape[-1])
        rows[kept] = out
        out = rows
    return out.view(batch, nq, heads, out.shape[-1])


AttentionInterface.register(NAME, forward)
AttentionMaskInterface.register(NAME, make_mask)
