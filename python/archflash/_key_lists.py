"""What calls with key_indices need beside the runtime: the check of what the lists hold, and the
same call with a mask, which gives its gradients where no kernel reads the lists for them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from archflash._archflash import MASK_BLOCK
from archflash._bias import sides_of
from archflash._block_masks import marked
from archflash._sharding import has_dtensor
from archflash.masks import from_key_indices


def _asks_for_checks(value: str) -> bool:
    """Whether this value of ARCHFLASH_CHECK asks for checks of what lies on the device."""
    if value not in ("", "0", "1"):
        raise ValueError(
            f"ARCHFLASH_CHECK is {value!r}: it must be 1, for checks of what lies on the device, "
            "or 0"
        )
    return value == "1"


# Read once: a look takes a microsecond.
ALWAYS_CHECK = _asks_for_checks(os.environ.get("ARCHFLASH_CHECK", ""))


def check(key_indices: Tensor, topk_lengths: Tensor | None, keys: int | Tensor) -> None:
    """Checks the lists of a call whose shapes agree, on their device; one number comes back.

    Args:
        key_indices, topk_lengths: those of the call.
        keys: rows that an entry can name, others stand for none; a tensor ``(batch, 1, 1, 1)`` if
            sequences differ.

    Raises:
        ValueError: a list names a key twice.
    """
    if key_indices.numel() == 0:
        return
    place = torch.arange(key_indices.shape[3], device=key_indices.device)
    counts = (key_indices >= 0) & (key_indices < keys)
    if topk_lengths is not None:
        counts = counts & (place < topk_lengths[..., None])
    # Entries that do not count differ from one another and from those that do.
    named = torch.where(counts, key_indices, -1 - place).sort(3).values
    twice = named[..., 1:] == named[..., :-1]
    if not twice.any():
        return
    sequence, head, number, at = (int(x) for x in twice.nonzero()[0])
    key = int(named[sequence, head, number, at])
    raise ValueError(
        f"key_indices[{sequence}, {head}, {number}] names key {key} "
        "twice, and it would count twice: name each key once, and -1 where a list is shorter"
    )


def needs_gradients(*tensors: Any) -> bool:
    """Whether a call needs gradients that are not left to the operators, as those of DTensors."""
    if not torch.is_grad_enabled() or has_dtensor(*tensors):
        return False
    return any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def explained_as_mask(q: Tensor, k: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a call with lists whose gradients are computed with a mask, as it is made then:
    here the mask has no values.
    """
    options = dict(options)
    lists = options.pop("key_indices")
    options.pop("topk_lengths", None)
    heads, rows = (1, 2) if options.get("layout", "bhnd") == "bhnd" else (2, 1)
    shape = (
        lists.shape[0],
        1 if lists.shape[1] == 1 else q.shape[heads],
        q.shape[rows],
        k.shape[rows],
    )
    return options | {"attn_mask": torch.empty(shape, device=q.device)}


def as_mask(
    key_indices: Tensor, topk_lengths: Tensor | None, q: Tensor, k: Tensor, layout: str
) -> Tensor:
    """The attn_mask of lists of keys, ``(B or 1, Hq or 1, Nq, Nk)``, for q and k as they came."""
    heads, rows = (1, 2) if layout == "bhnd" else (2, 1)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    mask = from_key_indices(key_indices, q.shape[rows], k.shape[rows], topk_lengths, dtype=dtype)
    if mask.shape[1] == 1:
        return mask
    return mask.repeat_interleave(q.shape[heads] // max(mask.shape[1], 1), 1)


def without_unnamed(
    q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """k and v with zeros for keys that no list names, for a call with the mask of the lists: such
    keys may hold anything, and a mask would not keep NaN out of the rows that see others.

    Args:
        q, k, v: of the call.
        options: of it: key_indices, topk_lengths, causal, window, q_offset and layout.
    """
    lists, lengths = options["key_indices"], options["topk_lengths"]
    rows = 2 if options["layout"] == "bhnd" else 1
    nq, nk = q.shape[rows], k.shape[rows]
    place = torch.arange(lists.shape[3], device=lists.device)
    counts = place < (lists.shape[3] if lengths is None else lengths[..., None])
    # Some of the rows of a list, first to last, see the key.
    step = 1 if lists.shape[2] == nq else MASK_BLOCK
    first = torch.arange(lists.shape[2], device=lists.device)[:, None] * step
    last = (first + step).clamp(max=nq) - 1
    offset = nk - nq if options["q_offset"] is None else options["q_offset"]
    if isinstance(offset, Tensor):
        offset = offset.to(lists.device).reshape(-1, 1, 1, 1)
    left, right = sides_of(options["window"])
    if options["causal"]:
        right = 0 if right is None else min(right, 0)
    if left is not None:
        counts = counts & (lists >= first + offset - left)
    if right is not None:
        counts = counts & (lists <= last + offset + right)
    keys, counts = torch.broadcast_tensors(lists, counts)  # type: ignore[no-untyped-call]
    named = marked(keys.flatten(2), counts.flatten(2), nk)[..., None]
    named = named if rows == 2 else named.transpose(1, 2)
    return torch.where(named, k, 0.0), torch.where(named, v, 0.0)
