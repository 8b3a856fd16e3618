"""FlashAttention-2's `bert_padding`: from padded batches to packed sequences and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from archflash._eager import is_tracing
from archflash._plain_tensors import goes_through_operator
from archflash.compat._arguments import check_tensors, count, in_its_words


def _check_padded(name: str, hidden_states: Tensor, mask: Tensor) -> None:
    check_tensors(**{"hidden_states": hidden_states, name: mask})
    is_fp8 = mask.is_floating_point() and mask.dtype.itemsize == 1
    if mask.is_complex() or is_fp8 or mask.ndim != 2 or mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name} has dtype {mask.dtype} and shape {tuple(mask.shape)} for hidden_states "
            f"{tuple(hidden_states.shape)}: it must be bool or of real numbers, (batch, rows)"
        )


def _is_read(x: Tensor) -> bool:
    """Whether the values of x are checked: reading them from a GPU would make the host wait."""
    return x.is_cpu and x.numel() > 0 and not goes_through_operator(x)


def _check_rows(indices: Tensor, rows: int, said: str) -> None:
    if indices.dtype in (torch.int32, torch.int64) and _is_read(indices):
        first, last = (int(x) for x in indices.aminmax())
        if first < -rows or last >= rows:
            raise ValueError(
                f"indices has row numbers from {first} to {last}: they must be below {said} = "
                f"{rows}"
            )


def _check_kept(name: str, kept: int, counted: Tensor, must: str) -> None:
    if _is_read(counted) and kept != (total := int(counted.sum())):
        raise ValueError(f"{name} counts {total} rows and keeps {kept}: it must hold {must}")


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows of x (rows, ...) with these numbers, int64 (n,)."""
    check_tensors(x=x, indices=indices)
    _check_rows(indices, x.shape[0], "the rows of x")
    return x[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with values (n, ...) at the rows `indices`, int64 (n,)."""
    check_tensors(values=values, indices=indices)
    _check_rows(indices, first_axis_dim, "first_axis_dim")
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_put_((indices,), values)  # autocast on CUDA has index_put alone on its list


@in_its_words()
def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the rows of a padded batch. Reads the longest length on the host, as FlashAttention-2
    does.

    Args:
        hidden_states: (batch, rows, ...).
        attention_mask: (batch, rows), bool, int or float, 1 for a row that counts and 0 for others.
        unused_mask: (batch, rows), 1 for a row that is kept but does not count; none by default.

    Returns:
        The packed rows (n, ...); their numbers in the flattened batch, int64 (n,); cu_seqlens,
        int32 (batch + 1,); the longest sequence; the rows of each sequence that count, int32
        (batch,).
    """
    _check_padded("attention_mask", hidden_states, attention_mask)
    if unused_mask is not None:
        _check_padded("unused_mask", hidden_states, unused_mask)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    _check_kept("attention_mask", len(indices), lengths, "0 or 1, and 0 where unused_mask is 1")
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
        attention_mask_in_length: (batch, rows), int or float: the lengths of the sequences of each
            row of the batch, 0 where there is none.

    Returns:
        As `unpad_input`, for these sequences, but for the last result.
    """
    _check_padded("attention_mask_in_length", hidden_states, attention_mask_in_length)
    rows = torch.arange(attention_mask_in_length.shape[1], device=hidden_states.device)
    kept = rows < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    indices = kept.flatten().nonzero().flatten()
    must = f"lengths of at most {len(rows)} rows in all for each row of the batch"
    _check_kept("attention_mask_in_length", len(indices), lengths, must)
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undoes `unpad_input`: (n, ...) to (batch, seqlen, ...), with 0 in the other rows. `indices`
    are row numbers (n,), or bool (batch * seqlen,) with n rows True, which are counted on the host.
    """
    check_tensors(hidden_states=hidden_states, indices=indices)
    if not is_tracing():  # a tracer's sizes are tensors, which it has to see
        batch, seqlen = count("batch", batch), count("seqlen", seqlen)
    places = indices
    if indices.dtype == torch.bool and indices.shape == (batch * seqlen,):
        places = indices.nonzero().flatten()
    fits = places.ndim == 1 and places.shape == hidden_states.shape[:1]
    if places.dtype not in (torch.int32, torch.int64) or not fits:
        counted = f" with {len(places)} rows True" if places is not indices else ""
        raise ValueError(
            f"indices has dtype {indices.dtype} and shape {tuple(indices.shape)}{counted} for "
            f"hidden_states {tuple(hidden_states.shape)}: it must be int32 or int64, a number for "
            f"each row, or torch.bool ({batch * seqlen},), True for each"
        )
    _check_rows(places, batch * seqlen, "batch * seqlen")
    rows = index_put_first_axis(hidden_states, places, batch * seqlen)
    return rows.reshape(batch, seqlen, *rows.shape[1:])
