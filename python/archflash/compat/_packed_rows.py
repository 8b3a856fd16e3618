"""Which rows of packed sequences and chunks count, by operations of PyTorch, for FlashAttention-3's
functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from archflash import _sequences, _torch_cache
from archflash.compat._arguments import check_device, check_ints, check_tensors


def chunks(q: Tensor, k: Tensor, size: int) -> Tensor:
    """The keys of each row's chunk, as `key_ranges`. Positions align to the bottom right."""
    nq, nk = q.shape[1], k.shape[1]
    position = torch.arange(nk - nq, nk, dtype=torch.int32, device=q.device)
    begin = position - position % size
    return torch.stack((begin, begin + size), -1).clamp(0, nk)[None, None, :, None]


def used_rows_first(cu_seqlens: Tensor, used: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The order of the rows of packed sequences in which those that count come first, and where
    each sequence begins in it. Nothing comes back to the host.
    """
    ends = cu_seqlens.long()
    lengths = torch.minimum(used.long().clamp(min=0), ends.diff())
    rows = torch.arange(total, device=ends.device)
    sequence = _sequences.of_rows(rows, ends)
    row = rows - ends[sequence]
    # Rows behind the last sequence have none.
    last = torch.cat([lengths, lengths.new_zeros(1)])[sequence]
    counts = (row >= 0) & (row < last)
    order = (~counts).to(torch.uint8).argsort(stable=True)
    begins = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return order, begins.to(torch.int32)


def check_new(
    k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None,
    cu_seqlens_k_new: Tensor | None, page_table: Tensor | None, sequences: int,
) -> None:  # fmt: skip
    """Checks packed new rows of a cache, before operations of PyTorch turn and write them."""
    check_ints("cu_seqlens_k_new", cu_seqlens_k_new, sequences + 1, k_cache)
    check_tensors(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    check_tensors(**({} if page_table is None else {"page_table": page_table}))
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        assert x is not None
        assert k is not None
        check_device(name, x, cache)
        wanted = (len(k), *cache.shape[2:])
        if x.dtype != cache.dtype or tuple(x.shape) != wanted:
            raise ValueError(
                f"{name} has dtype {x.dtype} and shape {tuple(x.shape)}: with cu_seqlens_k_new it "
                f"must have those of {name}_cache's rows, {cache.dtype} and {wanted}"
            )


def append_new(
    caches: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    cu_seqlens: Tensor,
    cache_seqlens: int | Tensor,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> None:
    """Writes packed new rows (total rows, heads, columns) behind the lengths of the caches."""
    ends = cu_seqlens.long()
    batch = len(ends) - 1
    lengths = torch.as_tensor(cache_seqlens, device=ends.device).long().expand(batch)
    rows = torch.arange(len(new[0]), device=ends.device)
    sequence = _sequences.of_rows(rows, ends)
    row = rows - ends[sequence]
    owned = (sequence < batch) & (row >= 0)
    sequence = sequence.clamp(max=max(batch - 1, 0))
    place = torch.where(owned, lengths[sequence] + row, -1)[:, None]
    pages = None if page_table is None else page_table[sequence]
    of_row = sequence if cache_batch_idx is None else cache_batch_idx.long()[sequence]
    capacity = caches[0].shape[1] * (1 if page_table is None else page_table.shape[1])
    for cache, x in zip(caches, new, strict=True):
        _torch_cache.append(cache, x[:, None], place, capacity, pages, of_row)
