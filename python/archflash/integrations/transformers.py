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

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    masking_utils,
)
from transformers.masking_utils import causal_mask_function, sdpa_mask

from archflash import _autocast, masks
from archflash._api import attention
from archflash._registry import TORCH
from archflash._sdpa import scaled_dot_product_attention, who_drops
from archflash.integrations import _mask_functions
from archflash.integrations._mask_functions import Rule
from archflash.integrations._model_mask import (
    Mask,
    Packed,
    Padding,
    Seen,
    both_ranges,
    documents,
    ranges_of_documents,
    visible_by,
)

if "q_length" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError("archflash.integrations.transformers needs transformers 5 or newer")

NAME = "arch_attention"


def _register_mask_functions() -> None:
    """Tells which functions of this version of transformers say which keys a query sees. Those that
    it lacks are in no mask of its models.
    """
    register, none = _mask_functions.register, torch.zeros(1, 1, dtype=torch.long, device="cpu")
    register(_mask_functions.CAUSAL, causal_mask_function)
    register(_mask_functions.ALL, masking_utils.bidirectional_mask_function)
    for kind, maker, arguments in (
        (_mask_functions.AND, "and_masks", (causal_mask_function,)),
        (_mask_functions.OR, "or_masks", (causal_mask_function,)),
        (_mask_functions.WINDOW, "sliding_window_overlay", (1,)),
        (_mask_functions.WINDOW_BOTH_WAYS, "sliding_window_bidirectional_overlay", (1,)),
        (_mask_functions.CHUNKS, "chunked_overlay", (1, none[0])),
        (_mask_functions.BLOCKS, "blockwise_overlay", (none,)),
        (_mask_functions.DOCUMENTS, "packed_sequence_mask_function", (none,)),
        (
            _mask_functions.RENUMBERED,
            "remap_positions_for_packed_sequence",
            (causal_mask_function, none),
        ),
    ):
        make = getattr(masking_utils, maker, None)
        if make is not None:
            register(kind, make(*arguments))


_register_mask_functions()


# --- the mask of a model ---


def _is_traced(device: torch.device | str, *tensors: Tensor | None) -> bool:
    """Whether a call is recorded and not run, so that no value can be read on the host."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    if any(isinstance(x, FakeTensor) for x in tensors):
        return True
    on_gpu = torch.device(device).type == "cuda"
    return on_gpu and torch.cuda.is_current_stream_capturing()


@functools.cache
def _support_of(config: type) -> tuple[bool, bool]:
    """Whether the models of a config support PyTorch's SDPA, and whether they support any attention
    but transformers' eager one; both are true of models that are not found.
    """
    name = config.__module__.replace(".configuration_", ".modeling_")
    models = [
        x
        for x in vars(sys.modules.get(name, torch)).values()
        if isinstance(x, type) and issubclass(x, PreTrainedModel) and x.__module__ == name
    ]
    sdpa, *others = (
        not models or any(getattr(x, flag, True) for x in models)
        for flag in ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
    )
    return sdpa, sdpa or any(others)


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
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """The mask of a model, as transformers asks for it.

    Args:
        batch_size, q_length, kv_length: its shape.
        q_offset: the position of query 0; kv_offset that of key 0.
        mask_function: transformers' function that says which keys a query sees, or the user's own.
        attention_mask: bool (batch, positions), False for padding.
        device: of the mask.
        allow_is_causal_skip: whether None may stand for a plain causal mask.
        allow_is_bidirectional_skip: whether None may stand for no mask.
        options: passed to transformers' own function, which computes masks of other kinds: for some
            rows at a time, and if a query's keys are in no more than four pieces, the whole mask
            never exists.

    Returns:
        A `Mask`, None where none is needed, or a plain bool tensor (batch, 1, queries, keys) where
        calls are recorded and not run, and where a query's keys are in more than four pieces.
    """

    config: Any = type(options.get("config"))
    supports_sdpa, supports_others = _support_of(config)
    if not supports_others:  # It may join more to a mask, which is one that is added, therefore.
        mask: Tensor | None = masking_utils.eager_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            device=device, allow_is_bidirectional_skip=allow_is_bidirectional_skip, **options,
        )  # fmt: skip
        return mask
    # Layers of other models may not say is_causal where there is no mask.
    allow_is_causal_skip = allow_is_causal_skip and supports_sdpa

    def computed(first: int, last: int, **skips: bool) -> Tensor | None:
        mask: Tensor | None = sdpa_mask(
            batch_size, last - first, kv_length, q_offset + first, kv_offset, mask_function,
            attention_mask, device=device, **skips, **options,
        )  # fmt: skip
        return mask

    skips = {
        "allow_is_causal_skip": allow_is_causal_skip,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
    }
    offset_on_device = q_offset if isinstance(q_offset, Tensor) else None
    # A static cache keeps its length on the device. Masks of one query are made outside of compiled
    # code then, which takes plain tensors, and such a mask is small.
    if _is_traced(device, attention_mask, offset_on_device) or (
        offset_on_device is not None and q_length == 1
    ):
        return computed(0, q_length, **skips)
    q_offset = int(q_offset)
    offset = q_offset - kv_offset
    padding = None
    if attention_mask is not None:
        missing = kv_length + kv_offset - attention_mask.shape[-1]
        kept = F.pad(attention_mask, (0, max(missing, 0)))[:, kv_offset : kv_offset + kv_length]
        # A copy, as a mask does not change with what it was made of.
        padding = Padding.of(kept.to(device, torch.bool, copy=True))

    rule = _mask_functions.rule_of(mask_function)
    if rule is not None:
        if padding is None and rule.left is None and rule.right is None:
            # None is what a forward takes for a causal mask of as many queries as keys, or of one.
            plain_causal = q_length == 1 or (offset == 0 and q_length == kv_length)
            ends_with_it = offset + q_length == kv_length
            if rule.causal and allow_is_causal_skip and plain_causal and ends_with_it:
                return None
            if not rule.causal and allow_is_bidirectional_skip:
                return None
        seen = Seen(rule, offset)
        if padding is not None:
            seen = Seen(rule, offset, *padding)
        return Mask.make(batch_size, q_length, kv_length, seen, device)

    in_documents = _mask_functions.rule_in_documents(mask_function)
    whole = in_documents is not None and in_documents[1].shape == (batch_size, q_length)
    if in_documents is not None and whole and offset == 0 and q_length == kv_length:
        rule, ids = in_documents
        if padding is None:
            starts = torch.ones_like(ids, dtype=torch.bool)
            starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
            seen = Seen(rule, 0, None, *documents(starts))
            return Mask.make(batch_size, q_length, kv_length, seen, device)

    positions = torch.arange(q_length, device=device) + q_offset
    found = _mask_functions.ranges_of(mask_function, positions)
    ranges = None
    if found is not None:
        sides = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
            *(side for pair in found for side in pair)
        )
        bounds = (torch.stack(sides, -1) - kv_offset).clamp(0, kv_length).to(torch.int32)
        ranges = bounds.view(*bounds.shape[:2], len(found), 2)[:, None]
        if padding is not None:
            ranges = both_ranges(ranges, padding.ranges)
    if ranges is None and q_length > 1:

        def rows(first: int, last: int) -> Tensor:
            mask = computed(first, last, allow_is_causal_skip=False)
            assert mask is not None
            return mask

        ranges = masks.from_rows(rows, (batch_size, 1, q_length, kv_length), device)
    if ranges is None:
        return computed(0, q_length, **skips)
    seen = Seen(Rule(False), offset, ranges=ranges)
    return Mask.make(batch_size, q_length, kv_length, seen, device)


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
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
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
        position_bias: added to the scores, broadcastable to (batch, heads, queries, keys).
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
    # A mask that somebody has read or written is one of values, but it was made of a rule.
    was = attention_mask._content.seen if isinstance(attention_mask, Mask) else seen
    lengths: _Lengths | None = None
    # Continuous batching gives a mask that says all, and lengths of another order of keys.
    by_mask_alone = cache is not None
    if not by_mask_alone and (cu_seq_lens_q is not None or cu_seq_lens_k is not None):
        if cu_seq_lens_q is None or cu_seq_lens_k is None:
            missing = "cu_seq_lens_q" if cu_seq_lens_q is None else "cu_seq_lens_k"
            raise ValueError(f"{missing} is missing: give both, or none")
        lengths = _Lengths(
            cu_seq_lens_q.to(query.device, torch.int32),
            cu_seq_lens_k.to(query.device, torch.int32),
            max_length_q if isinstance(max_length_q, int) else None,
            max_length_k if isinstance(max_length_k, int) else None,
        )
        as_rule = seen.values is None and seen.padding is None and position_bias is None
        if not as_rule or (seen.ranges is not None and seen.packed is None):
            # What else the mask hides goes by rows and keys, so the documents must do so, too.
            if nq != nk:
                raise ValueError(
                    f"cu_seq_lens_q beside a mask or a bias, for {nq} queries and {nk} keys: as "
                    "many of both are needed; leave the mask or the bias out"
                )
            seen = _inside(seen, _ranges_of_lengths(lengths, batch, nq), nk)
            lengths = None
    elif not by_mask_alone and _may_restart(position_ids, was, nq, nk):
        assert position_ids is not None
        if not _is_traced(position_ids.device, position_ids):
            seen = _in_documents_of(position_ids, seen, was.offset, batch, nq, nk)
        elif others.get("use_cache") or not (
            torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        ):
            # Whether documents begin cannot be asked. Ranges are right for one as well as for many,
            # but gradients are slower with them, and without a cache transformers has looked.
            ranges = ranges_of_documents(_starts(position_ids))
            seen = seen._replace(ranges=_behind_past(ranges, was.offset, nq, nk))

    options: dict[str, Any] = {
        "scale": scaling, "softcap": softcap, "sinks": s_aux, **_options_of(seen, nq, nk)
    }  # fmt: skip
    if lengths is None and seen.packed is not None and position_bias is None:
        cu_seqlens, longest = seen.packed
        lengths = _Lengths(cu_seqlens, cu_seqlens, longest, longest)
    if lengths is not None:
        del options["key_ranges"]
        if dropout > 0.0:
            options["dropout_p"] = dropout
        return _of_lengths(query, key, value, lengths, options), None

    mask = seen.values
    if seen.padding is not None:
        if position_bias is None and _packs(query, key, seen, options):
            if dropout > 0.0:
                options["dropout_p"] = dropout
            return _without_padding(query, key, value, attention_mask, options), None
        if seen.ranges is None:
            mask = seen.padding[:, None, None, :]
    if position_bias is not None:
        mask = _both(position_bias, mask)
    options["attn_mask"] = mask
    if dropout > 0.0:
        if not softcap and s_aux is None and _goes_to_sdpa(query, key, value, options, dropout):
            out = _dropped_by_sdpa(query, key, value, seen, mask, dropout, scaling)
            return out.transpose(1, 2).contiguous(), None
        options["dropout_p"] = dropout
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


def _both(one: Tensor, other: Tensor | None) -> Tensor:
    """One mask for two, each bool or added to the scores."""
    if other is None:
        return one
    if one.dtype == other.dtype == torch.bool:
        return one & other
    if other.dtype == torch.bool:
        return torch.where(other, one, -torch.inf)
    return torch.where(one, other, -torch.inf) if one.dtype == torch.bool else one + other


# --- dropout ---


def _goes_to_sdpa(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], dropout: float
) -> bool:
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
        mask, is_causal = _both(visible, mask), False
    if seen.ranges is not None:
        visible = masks.to_dense(seen.ranges, nk)
        if is_causal:
            visible = visible & visible_by(seen.rule, seen.offset, nq, nk, query.device)
        mask, is_causal = _both(visible, mask), False
    return scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        dropout,
        is_causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


# --- documents in rows of text ---


class _Lengths(NamedTuple):
    """The options of `archflash.attention` that say where packed sequences begin."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class _Restarts(NamedTuple):
    """What was found in a tensor of position_ids, and its version then."""

    of: weakref.ref[Tensor]
    version: int
    found: tuple[Tensor, Packed] | None


_last_restarts: _Restarts | None = None  # every layer of a model asks for the same


def _may_restart(position_ids: Tensor | None, seen: Seen, nq: int, nk: int) -> bool:
    """Whether position_ids can tell documents apart: those of text, and no mask tells more."""
    if (
        position_ids is None
        or position_ids.ndim != 2
        or position_ids.shape[1] != nq
        or nq <= 1
        or nq > nk
    ):
        return False
    as_rule = seen.values is None and seen.padding is None and seen.ranges is None
    return as_rule and (seen.rule.causal or nq == nk)


def _in_documents_of(
    position_ids: Tensor, seen: Seen, past: int, batch: int, nq: int, nk: int
) -> Seen:
    """The same where position_ids are those of one document, else inside of documents. The queries
    stand behind `past` keys.
    """
    found = _restarts(position_ids)
    if found is None:
        return seen
    ranges, packed = found
    if seen.values is None and nq == nk and past == 0 and position_ids.shape[0] == batch:
        return seen._replace(ranges=ranges, packed=packed)
    return seen._replace(ranges=_behind_past(ranges, past, nq, nk))


def _starts(position_ids: Tensor) -> Tensor:
    starts = position_ids == position_ids.amin(1, keepdim=True)
    first = torch.arange(position_ids.shape[1], device=position_ids.device) == 0
    return starts | first


def _restarts(position_ids: Tensor) -> tuple[Tensor, Packed] | None:
    """The documents of position_ids, None if each row is one. The host waits for the device, once
    for all layers: transformers' FlashAttention-2 does so in each.
    """
    global _last_restarts
    remembers = not position_ids.is_inference()  # such a tensor does not tell when it is changed
    last = _last_restarts
    same = remembers and last is not None and last.of() is position_ids
    if same and last is not None and last.version == position_ids._version:
        return last.found
    starts = _starts(position_ids)
    found = documents(starts) if bool(starts[:, 1:].any()) else None
    if remembers:
        _last_restarts = _Restarts(weakref.ref(position_ids), position_ids._version, found)
    return found


def _behind_past(ranges: Tensor, past: int, nq: int, nk: int) -> Tensor:
    """key_ranges (batch, 1, queries, 1, 2) of queries that stand behind `past` keys. The first
    document continues what is there."""
    if past == 0 and nq == nk:
        return ranges
    begin, end = ranges.unbind(-1)
    begin = torch.where(begin > 0, begin + past, 0)
    end = torch.where(end < nq, end + past, nk)
    return torch.stack([begin, end], -1).to(torch.int32)


def _inside(seen: Seen, documents: Tensor, nk: int) -> Seen:
    """What is seen, inside of documents. Ranges that are too many become values."""
    ranges = documents if seen.ranges is None else both_ranges(seen.ranges, documents)
    if ranges is not None:
        return seen._replace(ranges=ranges, packed=None)
    assert seen.ranges is not None
    values = _both(masks.to_dense(seen.ranges, nk), seen.values)
    return seen._replace(values=values, ranges=documents, packed=None)


def _ranges_of_lengths(lengths: _Lengths, batch: int, n: int) -> Tensor:
    """The keys of each query's document as key_ranges (batch, 1, n, 1, 2), of rows of n tokens."""
    cu_seqlens_q, cu_seqlens_k = lengths[:2]
    rows = torch.arange(batch * n, dtype=torch.int32, device=cu_seqlens_q.device)
    document = torch.searchsorted(cu_seqlens_q[1:].contiguous(), rows, right=True)
    ends_k = F.pad(cu_seqlens_k[1:], (0, 1))  # rows behind the last document see no key
    first_of_row = rows // n * n
    sides = [
        (side[document] - first_of_row).clamp(0, n).view(batch, 1, n, 1)
        for side in (cu_seqlens_k, ends_k)
    ]
    return torch.stack(sides, -1).to(torch.int32)


def _of_lengths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: _Lengths,
    options: dict[str, Any],
) -> Tensor:
    """The attention of packed sequences; (batch, queries, heads, dv)."""
    batch, _, nq, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    options = options | lengths._asdict()
    options.pop("q_offset", None)  # causal and window align to the end of each sequence
    out: Tensor = attention(q, k, v, **options)
    return out.view(batch, nq, *out.shape[1:])


# --- padding: packed sequences ---


def _packs(query: Tensor, key: Tensor, seen: Seen, options: dict[str, Any]) -> bool:
    """Whether the rows that are no padding are packed, so that a kernel serves them. Packing copies
    them, which does not pay for one query. It keeps the order of positions, which is all that a
    causal rule needs, but not their distances where there is padding between rows.
    """
    nq, nk = query.shape[2], key.shape[2]
    if not _a_kernel_may_serve(query) or nq == 1 or _is_traced(query.device, query):
        return False
    if _by_position(options) and (nq != nk or "q_offset" in options):
        return False
    in_one_piece = seen.ranges is not None and seen.ranges.shape[3] == 1
    return "window" not in options or in_one_piece


def _by_position(options: dict[str, Any]) -> bool:
    """Whether a query's position counts, so that queries are packed like keys."""
    return options["causal"] or "window" in options


def _a_kernel_may_serve(query: Tensor) -> bool:
    return query.is_cuda


def _rows_kept(mask: Any) -> tuple[Tensor, Tensor]:
    """The rows of a batch that are no padding, and where each sequence of them ends. It is read on
    the host, for the first layer."""
    content = mask._content
    if content.rows_kept is None:
        padding = content.seen.padding
        lengths = padding.sum(-1, dtype=torch.int32)
        ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        content.rows_kept = (padding.flatten().nonzero().flatten(), ends)
    rows: tuple[Tensor, Tensor] = content.rows_kept
    return rows


def _without_padding(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
) -> Tensor:
    """The attention of the rows that are no padding, packed; (batch, queries, heads, dv), with 0 in
    rows of padding where queries are keys.
    """
    batch, heads, nq, _ = query.shape
    kept, ends_k = _rows_kept(mask)
    k, v = (x.transpose(1, 2).flatten(0, 1).index_select(0, kept) for x in (key, value))
    q = query.transpose(1, 2).flatten(0, 1)
    packs_queries = _by_position(options)
    if packs_queries:
        q, ends_q = q.index_select(0, kept), ends_k
    else:
        ends_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * nq
    options = options | {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    del options["key_ranges"]
    out: Tensor = attention(q, k, v, **options)
    if packs_queries:
        rows = out.new_zeros(batch * nq, heads, out.shape[-1])
        out = rows.index_copy(0, kept, out)
    return out.view(batch, nq, heads, out.shape[-1])


AttentionInterface.register(NAME, forward)
AttentionMaskInterface.register(NAME, make_mask)
