"""Masks of the keys that a model's indexer chose for each query, as DeepSeek V3.2's does."""

from __future__ import annotations

import torch
from torch import Tensor


def of_indices(indices: Tensor, nk: int) -> Tensor:
    """Bool (batch, 1, queries, nk) of integers (batch, queries, n); others than 0 to nk - 1 choose
    no key.
    """
    return _chosen(indices[:, None], nk)


def of_blocks(block_indices: Tensor, block_size: int, heads: int, nk: int) -> Tensor:
    """Bool (batch, heads, queries, nk) of integers (batch, heads_kv, queries, n), numbers of blocks
    of keys; -1 chooses none.
    """
    blocks = _chosen(block_indices, -(-nk // block_size))
    keys = blocks.repeat_interleave(block_size, -1)[..., :nk]
    return keys.repeat_interleave(heads // block_indices.shape[1], 1)


def _chosen(places: Tensor, count: int) -> Tensor:
    """Bool (..., count), True at each place of integers (..., n) that is one of these."""
    inside = (places >= 0) & (places < count)
    column = torch.where(inside, places, count).long()  # one more column, which is dropped
    chosen = torch.zeros(
        *places.shape[:-1], count + 1, dtype=torch.bool, device=places.device
    ).scatter(-1, column, True)
    return chosen[..., :count]
