"""What `archflash.integrations.sglang` does not serve: refused before a server takes requests."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule, get_spec

from archflash._errors import UnsupportedError

_ALGORITHMS = ("EAGLE", "EAGLE3", "NGRAM", "NONE", "STANDALONE")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def refuse_what_is_not_served(runner: Any, step: int | None) -> None:
    """Raises UnsupportedError for what would fail, or be wrong, in a batch."""
    pool = runner.token_to_kv_pool
    deterministic = get_exec().deterministic.enable_deterministic_inference
    algorithm = get_spec().speculative_algorithm or "NONE"
    tree = algorithm == "NGRAM" or (get_spec().speculative_eagle_topk or 1) > 1
    other = "choose another attention backend"
    if runner.model_config.is_encoder_decoder:
        raise UnsupportedError(f"cross attention: {other}")
    if get_parallel().attn_dcp_size > 1:
        raise UnsupportedError(f"decode context parallelism: leave out --dcp-size, or {other}")
    if algorithm not in _ALGORITHMS:
        raise UnsupportedError(
            f"--speculative-algorithm {algorithm}: archflash serves {', '.join(_ALGORITHMS)}"
        )
    if runner.kv_index_translator.is_translating:
        raise UnsupportedError("a unified memory pool: leave out --enable-unified-memory")
    _refuse_pool(pool)
    latent = isinstance(pool, MLATokenToKVPool)
    if deterministic and (pool.dtype in FP8 or latent):
        what = "a latent cache (MLA)" if latent else "a cache of 8 bits"
        raise UnsupportedError(
            f"{what} with --enable-deterministic-inference: archflash is batch-invariant with "
            f"caches of 16 bits; {other}"
        )
    for name, layer in runner.model.named_modules():
        if isinstance(layer, RadixAttention):
            by_branches = tree and (step is not None or pool.dtype in FP8)
            reason = _why_not(layer, by_branches, runner.attention_chunk_size)
            if reason is not None:
                raise UnsupportedError(f"layer {name}: {reason}, or {other}")


def _refuse_pool(pool: Any) -> None:
    """Only pools whose rows are known to be contiguous vectors of numbers are served."""
    parts = [pool]
    if type(pool) is SWAKVPool:
        parts = [pool.full_kv_pool, pool.swa_kv_pool]
    elif type(pool) is HybridLinearKVPool:
        parts = [pool.full_kv_pool]
    for part in parts:
        if type(part) is MHATokenToKVPool and not part.is_quantized_kv_cache:
            if part.kv_cache_layout != "nhd":
                raise UnsupportedError(
                    f"a cache with the layout {part.kv_cache_layout}: archflash reads nhd; unset "
                    "SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT"
                )
        elif type(part) is not MLATokenToKVPool or part is not pool:
            raise UnsupportedError(
                f"the cache {type(part).__name__}: archflash reads caches of 16 and of 8 bits "
                "(--kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2); choose another attention backend"
            )


def _why_not(layer: RadixAttention, by_branches: bool, chunk: int | None) -> str | None:
    """Why a layer is not served, and what to do; None if it is.

    Args:
        by_branches: whether it sees a tree of drafts by branches, whose rows have no positions.
        chunk: keys of an attention chunk of the model's layers that have them.
    """
    if layer.is_cross_attention:
        return "cross attention is not served: leave the model"
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        return f"logits are capped by {layer.logit_capping_method}, not by tanh: leave the model"
    if (layer.xai_temperature_len or 0) > 0:
        return "logits have a temperature that depends on the position: leave the model"
    if layer.pos_encoding_mode != "NONE":
        return f"attention encodes positions ({layer.pos_encoding_mode}): leave the model"
    if layer.attn_type != AttentionType.DECODER and get_schedule().chunked_prefill_size != -1:
        return "rows see later rows, which may be in a later chunk: pass --chunked-prefill-size -1"
    window = layer.sliding_window_size is not None and layer.sliding_window_size >= 0
    if by_branches and (window or (chunk is not None and layer.use_irope)):
        return (
            f"{'a window' if window else 'attention chunks'} beside a tree of drafts, in a draft "
            "model or a cache of 8 bits: pass --speculative-eagle-topk 1, not NGRAM"
        )
    return None
