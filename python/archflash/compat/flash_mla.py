"""FlashMLA's module `flash_mla`, served by archflash: decoding over a paged latent cache.

Names, order and defaults of the arguments and return values are those of FlashMLA's dense decoding.
Pages may have any size, not 64 only. What archflash does not take raises
`archflash.UnsupportedError` with the name of the argument: float8 caches, sinks, sparse attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from archflash._eager import without_gradient
from archflash._kvcache import attention_with_kvcache
from archflash.compat._flash import _with_unseen, flag, plain, refuse

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[None, None]:
    """(None, None): archflash makes its plans itself and keeps them, so there is nothing to pass
    on.
    """
    return None, None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q (batch, rows, heads, d) on a cache whose rows are K, and V in their first
    columns.

    Args:
        q: (batch, rows, heads, d), the last rows of each sequence.
        k_cache: pages (pages, page size, heads of k, d) of any size.
        block_table: int32 (batch, pages of a sequence).
        cache_seqlens: int32 (batch,).
        head_dim_v: the columns of a row that are V.
        tile_scheduler_metadata, num_splits: not read; what `get_mla_metadata` gives.
        softmax_scale: multiplies q k^T; 1 / sqrt(d) by default. Absorbed MLA needs that of the
            model's heads, 1 / sqrt(d_nope + d_rope), which no shape shows: pass it.
        causal: row i of n sees keys up to the sequence's length - n + i.

    Returns:
        The output (batch, rows, heads, head_dim_v), and the log-sum-exp, float32 (batch, heads,
        rows), a natural logarithm, +inf for a row that sees no key, as in FlashMLA.

    Raises:
        UnsupportedError: an argument that archflash does not take; it is named.

    Example:
        >>> import torch
        >>> from archflash.compat.flash_mla import flash_mla_with_kvcache
        >>> q, pages = torch.randn(2, 1, 4, 24), torch.randn(3, 8, 1, 24)
        >>> table = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)
        >>> lengths = torch.tensor([10, 5], dtype=torch.int32)
        >>> out, lse = flash_mla_with_kvcache(q, pages, table, lengths, 16)
        >>> out.shape, lse.shape
        (torch.Size([2, 1, 4, 16]), torch.Size([2, 4, 1]))
    """
    refuse(
        is_fp8_kvcache=(is_fp8_kvcache, False),
        indices=(indices, None),
        attn_sink=(attn_sink, None),
        extra_k_cache=(extra_k_cache, None),
        extra_indices_in_kvcache=(extra_indices_in_kvcache, None),
        topk_length=(topk_length, None),
        extra_topk_length=(extra_topk_length, None),
    )
    with torch.no_grad():
        out, lse = attention_with_kvcache(
            q,
            k_cache,
            cache_seqlens=cache_seqlens,
            page_table=block_table,
            dv=head_dim_v,
            scale=plain(softmax_scale),
            causal=flag(causal),
            return_lse=True,
        )
    out, lse = without_gradient("attention with a KV cache", (out, lse), q, k_cache)
    return out, _with_unseen(lse, math.inf)
