"""Models of Hugging Face transformers on a sequence that lies on several GPUs.

    from archflash.integrations.transformers_parallel import sharing

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="arch_context_parallel")
    with sharing("zigzag"):
        model(input_ids=shard(ids, "zigzag", dim=1), position_ids=positions(n, "zigzag")[None])

Every rank runs the model on its own rows. Layers may be causal or not, with windows, softcap and
sinks; documents are those of `sharing`. Padding, caches and dropout are refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from archflash._errors import UnsupportedError
from archflash.distributed import attention
from archflash.integrations import _mask_functions

# The functions of masks are registered where that module is imported.
from archflash.integrations import transformers as _transformers  # noqa: F401

NAME = "arch_context_parallel"


class _Sharing(threading.local):
    options: dict[str, Any] | None = None


_sharing = _Sharing()


@contextlib.contextmanager
def sharing(shards: Any, **options: Any) -> Iterator[None]:
    """Inside, models run on rows that the ranks share.

    Args:
        shards: who holds which rows, as for `archflash.distributed.attention`.
        options: group, mesh, method, cu_seqlens and key_ranges of that function.
    """
    before, _sharing.options = _sharing.options, {"shards": shards, **options}
    try:
        yield
    finally:
        _sharing.options = before


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> None:
    """Says of a model's mask, of which a rank knows its own rows alone, that none is needed, or why
    this one cannot be had.
    """
    if q_length != kv_length:
        raise UnsupportedError(
            f"{q_length} queries and {kv_length} keys: attention over ranks has no cache; call the "
            "model with use_cache=False"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedError(
            "the attention mask hides padding: pack sequences, and give cu_seqlens to sharing()"
        )
    # transformers takes positions that are no neighbours for documents.
    rule = _mask_functions.rule_of(mask_function)
    if rule is None and _mask_functions.rule_in_documents(mask_function) is None:
        raise UnsupportedError(
            "a layer has a mask that is neither causal nor a window: give what it hides as "
            "key_ranges to sharing()"
        )


def forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    sliding_window: int | None = None, position_bias: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention of a layer, as transformers calls it; see `integrations.transformers`."""
    if _sharing.options is None:
        raise UnsupportedError(
            f"{NAME} is used outside of archflash.integrations.transformers_parallel.sharing(), "
            "which says who holds which rows"
        )
    for name, given in (
        ("dropout", dropout > 0), ("a mask", attention_mask is not None),
        ("position_bias", position_bias is not None),
        *((name, others.get(name) is not None) for name in ("sinks", "indices", "block_indices")),
    ):  # fmt: skip
        if given:
            raise UnsupportedError(f"attention over ranks has no {name}: leave it out")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None
    if sliding_window is not None:  # the row itself counts
        window = (sliding_window - 1, None if causal else sliding_window)
    packed = _sharing.options.get("cu_seqlens") is not None
    if packed:
        if len(query) != 1:
            raise UnsupportedError(f"a batch of {len(query)} with cu_seqlens: it must be 1")
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attention(
        query, key, value, causal=causal, window=window, softcap=softcap, sinks=s_aux,
        scale=scaling, **_sharing.options,
    )  # fmt: skip
    return out[None] if packed else out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, forward)
AttentionMaskInterface.register(NAME, make_mask)
