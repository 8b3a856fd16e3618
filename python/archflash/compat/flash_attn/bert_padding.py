"""FlashAttention-2's `bert_padding`: from padded batches to packed sequences and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows of x (rows, ...) with these numbers, int64 (n,)."""
    return x[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with values (n, ...) at the rows `indices`, int64 (n,)."""
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the rows of a padded batch. Reads the longest length on the host, as FlashAttention-2
    does.

    Args:
        hidden_states: (batch, rows, ...).
        attention_mask: (batch, rows), bool or int, 1 for a row that counts.
        unused_mask: (batch, rows), 1 for a row that is kept but does not count; none by default.

    Returns:
        The packed rows (n, ...); their numbers in the flattened batch, int64 (n,); cu_seqlens,
        int32 (batch + 1,); the longest sequence; the rows of each sequence that count, int32
        (batch,).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    used = attention_mask.sum(-1, dtype=torch.int32)
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs rows of a batch that hold several sequences each, one behind the other.

    Args:
        hidden_states: (batch, rows, ...).
        attention_mask_in_length: (batch, rows), int: the lengths of the sequences of each row of
            the batch, 0 where there is none.

    Returns:
        As `unpad_input`, for these sequences, but for the last result.
    """
    rows = torch.arange(attention_mask_in_length.shape[1], device=hidden_states.device)
    kept = rows < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undoes `unpad_input`: (n, ...) to (batch, seqlen, ...), with 0 in the other rows."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.reshape(batch, seqlen, *rows.shape[1:])
