"""archflash in Hugging Face transformers, after one import:

    import archflash.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="arch_attention")

The name has no "flash" in it, because transformers takes every name that contains it for
FlashAttention: it then looks for a package of that name, gives some models another implementation,
and leaves out masks.

A model makes its mask once for all layers. Here the mask is a tensor that knows what it stands for
(causal, a window, documents, chunks, blocks of image tokens, padding), so that no layer needs its
values: causal and windows become options of `archflash.attention`, documents become packed
sequences, the rest ranges of keys, and padded rows are left out by packing. A model that computes
with its mask, or asks for one of another kind, gets the values. Under torch.compile and
torch.jit.trace masks are plain tensors.

Documents that are packed into one row of text do not see each other. The first of these that is
given says where they begin: cu_seq_lens_q and cu_seq_lens_k; documents in the mask that
transformers makes; position_ids that start anew, where the mask hides no padding. It is as in
transformers' FlashAttention-2, which needs no use_cache=False either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from archflash import _autocast, masks
from archflash._api import attention
from archflash._registry import TORCH
from archflash._sdpa import scaled_dot_product_attention, who_drops
from archflash.integrations import _chosen_keys
from archflash.integrations._mask_functions import Rule
from archflash.integrations._model_mask import Mask, Seen, both_masks, visible_by
from archflash.integrations._packed_text import (
    Lengths,
    in_documents_of_lengths,
    in_documents_of_positions,
    may_restart,
    of_lengths,
    packs,
    without_padding,
)
from archflash.integrations._transformers_mask import make_mask

NAME = "arch_attention"


def forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    sinks: Tensor | None = None, position_bias: Tensor | None = None, indices: Tensor | None = None,
    block_indices: Tensor | None = None, cache: Any = None, position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None, max_length_k: Any = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention of a layer, as transformers calls it.

    Args:
        module: the layer; its `is_causal` counts where there is no mask.
        query: (batch, heads, queries, d); key and value (batch, heads_kv, keys, d).
        attention_mask: of `make_mask`; or a tensor that broadcasts to (batch, heads, queries,
            keys), bool or added to the scores.
        dropout: probability of dropping a weight. Above 0 PyTorch serves the layer where it has a
            faster kernel and needs no mask for it, or where no kernel of archflash serves it.
        scaling: multiplies query.key.
        is_causal: overrides that of the layer.
        softcap: as for `archflash.attention`.
        s_aux: sinks (heads,).
        sinks: one more logit for each query (batch, heads, queries, 1).
        position_bias: added to the scores, broadcastable to (batch, heads, queries, keys).
        indices: integers (batch, queries, n), keys that an indexer chose: only these count.
        block_indices: integers (batch, heads_kv, queries, n), blocks of keys that it chose, -1 for
            none; `module.indexer.block_size` says how many keys a block has.
        cache: the paged cache of continuous batching, which takes up key and value.
        position_ids: (batch or 1, queries). A document begins where a position is the lowest of its
            row again. It counts where neither a mask nor cu_seq_lens say more than a rule.
        cu_seq_lens_q, cu_seq_lens_k: integers (documents + 1,): where each document begins among
            the queries and keys of all rows of the batch, one after another.
        max_length_q, max_length_k: the longest of them, which need not be known.
        others: what the mask says already, as the sliding window.

    Returns:
        (batch, queries, heads, d), and None in place of the weights.

    Raises:
        ValueError: one of cu_seq_lens_q and cu_seq_lens_k is missing, or they do not go together
            with the mask.
    """
    if cache is not None and hasattr(cache, "update"):
        given = {
            "position_ids": position_ids, "cu_seq_lens_q": cu_seq_lens_q,
            "cu_seq_lens_k": cu_seq_lens_k, "max_length_q": max_length_q,
            "max_length_k": max_length_k,
        }  # fmt: skip
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx,
            kwargs=others | {name: x for name, x in given.items() if x is not None},
        )  # fmt: skip
    if _autocast.is_on():
        query, key, value, attention_mask = _autocast.inputs(query, key, value, attention_mask)
    if query.shape[0] != key.shape[0]:  # learned queries may have a batch of 1
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
    batch, nq, nk = query.shape[0], query.shape[2], key.shape[2]
    seen = _seen(module, attention_mask, is_causal, batch, nq, nk)
    if indices is not None:
        position_bias = both_masks(_chosen_keys.of_indices(indices, nk), position_bias)
    if block_indices is not None:
        indexer: Any = module.indexer
        chosen = _chosen_keys.of_blocks(block_indices, indexer.block_size, query.shape[1], nk)
        position_bias = both_masks(chosen, position_bias)
    # A mask that somebody has read or written is one of values, but it was made of a rule.
    was = attention_mask._content.seen if isinstance(attention_mask, Mask) else seen
    # What goes by rows and keys, so that no rows are packed.
    by_rows = sinks if position_bias is None else position_bias
    lengths: Lengths | None = None
    # Continuous batching gives a mask that says all, and lengths of another order of keys.
    by_mask_alone = cache is not None
    if not by_mask_alone and (cu_seq_lens_q is not None or cu_seq_lens_k is not None):
        given_lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        seen, lengths = in_documents_of_lengths(seen, given_lengths, query, nk, by_rows)
    elif not by_mask_alone and position_ids is not None and may_restart(position_ids, was, nq, nk):
        with_gradients = torch.is_grad_enabled() and any(
            x.requires_grad for x in (query, key, value)
        )
        # Ranges are right for one document as well as for many, but gradients are slower with them,
        # and without a cache transformers has looked.
        unread = others.get("use_cache") or not with_gradients
        seen = in_documents_of_positions(position_ids, seen, was.offset, batch, nk, unread)

    options: dict[str, Any] = {
        "scale": scaling, "softcap": softcap, "sinks": s_aux, **_options_of(seen, nq, nk)
    }  # fmt: skip
    if lengths is None and seen.packed is not None and by_rows is None:
        cu_seqlens, longest = seen.packed
        lengths = Lengths(cu_seqlens, cu_seqlens, longest, longest)
    if lengths is not None:
        del options["key_ranges"]
        if dropout > 0.0:
            options["dropout_p"] = dropout
        return of_lengths(query, key, value, lengths, options), None

    mask = seen.values
    if seen.padding is not None:
        if by_rows is None and packs(query, key, seen, options):
            if dropout > 0.0:
                options["dropout_p"] = dropout
            return without_padding(query, key, value, attention_mask, options), None
        if seen.ranges is None:
            mask = seen.padding[:, None, None, :]
    if position_bias is not None:
        mask = both_masks(position_bias, mask)
    options["attn_mask"] = mask
    plain = not softcap and s_aux is None and sinks is None
    if dropout > 0.0:
        if plain and _goes_to_sdpa(query, key, value, options):
            out = _dropped_by_sdpa(query, key, value, seen, mask, dropout, scaling)
            return out.transpose(1, 2).contiguous(), None
        options["dropout_p"] = dropout
    if sinks is not None:  # of queries, which no kernel knows: they take a share of each row's sum
        out, lse = attention(query, key, value, **options, return_lse=True)
        out = (out * torch.sigmoid(lse[..., None] - sinks)).to(query.dtype)
    else:
        out = attention(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), None


def _seen(
    module: torch.nn.Module,
    mask: Tensor | None,
    is_causal: bool | None,
    batch: int,
    nq: int,
    nk: int,
) -> Seen:
    """What a layer's mask says, or its being causal where there is none."""
    if isinstance(mask, Mask) and tuple(mask.shape) == (batch, 1, nq, nk):
        content = mask._content
        if content.written is None:
            return content.seen
        return Seen(Rule(False), 0, values=content.written)
    if isinstance(mask, Mask):
        return Seen(Rule(False), 0, values=mask.values_()[:, :, :, :nk])
    if mask is not None:
        return Seen(Rule(False), 0, values=mask)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # As in PyTorch's SDPA, query i sees keys up to i: other keys of a static cache are still empty.
    return Seen(Rule(True), 0) if causal and nq > 1 else Seen(Rule(False), nk - nq)


def _options_of(seen: Seen, nq: int, nk: int) -> dict[str, Any]:
    """The options of `archflash.attention` for a rule and ranges."""
    rule = seen.rule
    options: dict[str, Any] = {"causal": rule.causal, "key_ranges": seen.ranges}
    if rule.left is not None or rule.right is not None:
        options["window"] = (rule.left, rule.right)
    if seen.offset != nk - nq and (rule.causal or "window" in options):
        options["q_offset"] = seen.offset
    return options


# --- dropout ---


def _goes_to_sdpa(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether a layer with dropout is left to the function that chooses between PyTorch's fused
    kernels, which drop weights faster, and archflash's. It knows no windows and ranges, so these
    would become a mask of queries times keys: kernels that need none are faster.
    """
    top_left = options.get("q_offset", key.shape[2] - query.shape[2]) == 0
    as_mask = options["attn_mask"] is not None
    plain = "window" not in options and options["key_ranges"] is None
    if plain and (as_mask or not options["causal"] or top_left):
        return True
    return who_drops(query, key, value, options) == TORCH


def _dropped_by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Seen,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
) -> Tensor:
    nq, nk = query.shape[2], key.shape[2]
    bounded = seen.rule.left is not None or seen.rule.right is not None
    is_causal = seen.rule.causal
    if bounded or (is_causal and (mask is not None or seen.offset != 0)):
        visible = visible_by(seen.rule, seen.offset, nq, nk, query.device)
        mask, is_causal = both_masks(visible, mask), False
    if seen.ranges is not None:
        visible = masks.to_dense(seen.ranges, nk)
        if is_causal:
            visible = visible & visible_by(seen.rule, seen.offset, nq, nk, query.device)
        mask, is_causal = both_masks(visible, mask), False
    return scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


AttentionInterface.register(NAME, forward)
AttentionMaskInterface.register(NAME, make_mask)
