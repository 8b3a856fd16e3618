"""The mask of a model of Hugging Face transformers, as transformers asks for it. Users import
`archflash.integrations.transformers`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask

from archflash import masks
from archflash.integrations import _mask_functions
from archflash.integrations._mask_functions import Rule
from archflash.integrations._model_mask import (
    Mask,
    Padding,
    Seen,
    both_ranges,
    documents,
    is_traced,
)

if "q_length" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError("archflash.integrations.transformers needs transformers 5 or newer")


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


def _support_of(config: type) -> tuple[bool, bool]:
    """Whether the models of a config support PyTorch's SDPA, and whether they support any attention
    but transformers' eager one; both are true of models that are not found.
    """
    name = config.__module__.replace(".configuration_", ".modeling_")
    return _support_in(name) if name in sys.modules else (True, True)


# Otherwise torch.compile would trace a walk over the module.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _support_in(name: str) -> tuple[bool, bool]:
    """`_support_of` the models of a module, which has been imported."""
    return _looked_up(name)


@functools.lru_cache(maxsize=256)
def _looked_up(name: str) -> tuple[bool, bool]:
    models = [
        x
        for x in vars(sys.modules[name]).values()
        if isinstance(x, type) and issubclass(x, PreTrainedModel) and x.__module__ == name
    ]
    sdpa, *others = (
        not models or any(getattr(x, flag, True) for x in models)
        for flag in ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
    )
    return sdpa, sdpa or any(others)


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function, attention_mask: Tensor | None = None,
    *, device: torch.device | str = "cpu", allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False, **options: Any,
) -> Tensor | None:  # fmt: skip
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
    if is_traced(device, attention_mask, offset_on_device) or (
        offset_on_device is not None and q_length == 1
    ):
        return computed(0, q_length, **skips)
    q_offset = int(q_offset)
    offset = q_offset - kv_offset
    padding = None
    if attention_mask is not None:
        padding = _padding_of(attention_mask, kv_offset, kv_length, device)

    rule = _mask_functions.rule_of(mask_function)
    if rule is not None:
        if padding is None and _is_implied(rule, offset, q_length, kv_length, **skips):
            return None
        seen = Seen(rule, offset) if padding is None else Seen(rule, offset, *padding)
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
    ranges = _ranges_of(mask_function, positions, kv_offset, kv_length)
    if ranges is not None and padding is not None:
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


def _padding_of(
    attention_mask: Tensor, first: int, length: int, device: torch.device | str
) -> Padding | None:
    """What a mask of positions says of keys; None where it hides none of them."""
    missing = length + first - attention_mask.shape[-1]
    kept = F.pad(attention_mask, (0, max(missing, 0)))[:, first : first + length]
    # A copy, as a mask does not change with what it was made of.
    return Padding.of(kept.to(device, torch.bool, copy=True))


def _is_implied(
    rule: Rule,
    offset: int,
    queries: int,
    keys: int,
    allow_is_causal_skip: bool,
    allow_is_bidirectional_skip: bool,
) -> bool:
    """Whether None stands for a rule: what a forward takes for no mask, or for a causal mask of as
    many queries as keys, or of one query.
    """
    if rule.left is not None or rule.right is not None:
        return False
    if not rule.causal:
        return allow_is_bidirectional_skip
    plain = queries == 1 or (offset == 0 and queries == keys)
    return allow_is_causal_skip and plain and offset + queries == keys


def _ranges_of(
    mask_function: Callable[..., Any], positions: Tensor, kv_offset: int, kv_length: int
) -> Tensor | None:
    """The ranges of keys, (batch, 1, queries, n, 2), that a function of transformers keeps for
    queries at these positions; None for a function whose meaning is not known.
    """
    found = _mask_functions.ranges_of(mask_function, positions)
    if found is None:
        return None
    sides = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
        *(side for pair in found for side in pair)
    )
    bounds = (torch.stack(sides, -1) - kv_offset).clamp(0, kv_length).to(torch.int32)
    ranges: Tensor = bounds.view(*bounds.shape[:2], len(found), 2)[:, None]
    return ranges
