"""xformers' `xformers.ops.fmha`: its functions of attention.

Names, order and defaults of the arguments and the alignment of masks are those of xformers 0.0.35.
What archflash does not take raises `archflash.UnsupportedError`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _sequences
from archflash._api import attention
from archflash._errors import UnsupportedError
from archflash.compat._arguments import check_tensors, in_its_words, plain
from archflash.compat._flash import without_backward
from archflash.compat.xformers.ops.fmha import attn_bias as attn_bias
from archflash.compat.xformers.ops.fmha.attn_bias import (
    AttentionBias,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
)

# Which kernels a program asks for. They have no effect.
MemoryEfficientAttentionCkOp: Any = ("ck", "ck")
MemoryEfficientAttentionCutlassFwdFlashBwOp: Any = ("cutlass", "flash")
MemoryEfficientAttentionCutlassOp: Any = ("cutlass", "cutlass")
MemoryEfficientAttentionFlashAttentionOp: Any = ("flash", "flash")
MemoryEfficientAttentionSplitKCkOp: Any = ("ck_splitk", "ck")

_NAMES = {"q": "query", "k": "key", "v": "value", "attn_mask": "attn_bias", "dropout_p": "p"}


@in_its_words(**_NAMES)
def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0,
    scale: float | None = None, *, op: Any = None, output_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Attention of query on key and value.

    Args:
        query: (batch, rows, heads, d); (batch, rows, d) for one head; or (batch, rows, groups,
            heads, d), where key and value have 1 head in a group or repeat one.
        attn_bias: a mask of `attn_bias`, or a tensor (batch, heads, queries, keys) that is added to
            the scores; bool keeps keys where it is True.
        p: the probability that a weight is dropped.
        scale: multiplies query.key; 1 / sqrt(d) by default.
        op: has no effect: archflash chooses its kernels.
        output_dtype: of the output; query's by default.

    Returns:
        The output, shaped as query with value's d.

    Raises:
        UnsupportedError: a mask that is not built yet, or one of padded keys with dropout; or their
            gradients are asked for.

    Example:
        >>> import torch
        >>> from archflash.compat.xformers import ops
        >>> q = torch.randn(2, 7, 4, 16)
        >>> ops.memory_efficient_attention(q, q, q, attn_bias=ops.LowerTriangularMask()).shape
        torch.Size([2, 7, 4, 16])
    """
    out, _ = _attend(query, key, value, attn_bias, p, scale, output_dtype, False)
    return out


@in_its_words(**_NAMES)
def memory_efficient_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0,
    scale: float | None = None, *, op: Any = None, output_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`memory_efficient_attention` without gradients."""
    with torch.no_grad():
        out, _ = _attend(query, key, value, attn_bias, p, scale, output_dtype, False)
    return out


@in_its_words(**_NAMES)
def memory_efficient_attention_forward_requires_grad(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0,
    scale: float | None = None, *, op: Any = None, output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`memory_efficient_attention_forward`, and the log-sum-exp, float32 (batch, heads, rows), or
    (batch, groups, heads, rows).
    """
    with torch.no_grad():
        out, lse = _attend(query, key, value, attn_bias, p, scale, output_dtype, True)
    assert lse is not None
    return out, lse


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Any, p: float, scale: float | None,
    output_dtype: torch.dtype | None, want_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    check_tensors(query=query, key=key, value=value)
    if output_dtype is not None and not isinstance(output_dtype, torch.dtype):
        raise TypeError(f"output_dtype is {_native.given(output_dtype)}: it must be a torch.dtype")
    if not 3 <= query.ndim == key.ndim == value.ndim <= 5:
        raise ValueError(
            f"query has {query.ndim} dimensions, key {key.ndim} and value {value.ndim}: all must "
            "have the same, from 3 to 5"
        )
    groups = query.shape[2:-1]
    q = query.flatten(2, 3) if query.ndim == 5 else query.unsqueeze(2) if query.ndim == 3 else query
    k, v = _heads_of_groups(key, value)
    options: dict[str, Any] = {"scale": plain(scale)}
    if plain(p):
        options["dropout_p"] = plain(p)
    if isinstance(bias, AttentionBias):
        bias = bias.to(q.device)
    if isinstance(bias, BlockDiagonalPaddedKeysMask):
        result = _on_padded_keys(q, k, v, bias, options, want_lse)
    elif isinstance(bias, BlockDiagonalMask):
        result = _on_sequences(q, k, v, bias, options, want_lse)
    else:
        tensor = bias
        if isinstance(bias, AttentionBias):
            options |= bias.options(q.shape[1], k.shape[1])
            with_tensor = isinstance(bias, LowerTriangularMaskWithTensorBias)
            tensor = bias._bias if with_tensor else None  # type: ignore[attr-defined]
        if tensor is not None:
            check_tensors(attn_bias=tensor)
            options["attn_mask"] = _mask_of(tensor, query.ndim)
        result = attention(q, k, v, **options, layout="bnhd", return_lse=want_lse)
    out, lse = result if want_lse else (result, None)
    if query.ndim != 4:
        out = out.reshape(*out.shape[:2], *groups, out.shape[-1])
        lse = None if lse is None else lse.reshape(lse.shape[0], *groups, lse.shape[-1])
    return out if output_dtype is None else out.to(output_dtype), lse


def _heads_of_groups(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """key and value with one dimension of heads; one for all heads of a group where they share
    it.
    """
    if key.ndim == 3:
        return key.unsqueeze(2), value.unsqueeze(2)
    if key.ndim == 4:
        return key, value
    if all(x.shape[3] == 1 or x.stride(3) == 0 for x in (key, value)):
        return key[..., 0, :], value[..., 0, :]
    return key.flatten(2, 3), value.flatten(2, 3)


def _mask_of(bias: Tensor, ndim: int) -> Tensor:
    """A tensor attn_bias as (batch, heads, queries, keys)."""
    if ndim == 5 and bias.ndim == 5:
        return bias.flatten(1, 2)
    return bias.unsqueeze(1) if ndim == 3 and bias.ndim == 3 else bias


def _on_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: BlockDiagonalMask,
    options: dict[str, Any],
    want_lse: bool,
) -> Any:
    """Sequences that lie one behind another in a batch of 1."""
    of_q, of_k = bias.q_seqinfo, bias.k_seqinfo
    _check_rows(query=(q, of_q), key=(k, of_k))
    inner = bias.of_sequence()
    asked = {} if inner is None else inner.options(of_q.max_seqlen, of_k.max_seqlen)
    if asked.pop("q_offset", None) is not None and of_q.seqstart_py != of_k.seqstart_py:
        # No option aligns each sequence to its first key.
        left = asked.get("window", (None, None))[0]
        options["key_ranges"] = _from_first_keys(of_q.seqstart, of_k.seqstart, q.shape[1], left)
        return attention(q, k, v, **options, layout="bnhd", return_lse=want_lse)
    result = attention(
        q[0], k[0], v[0], cu_seqlens_q=of_q.seqstart, cu_seqlens_k=of_k.seqstart,
        max_seqlen_q=of_q.max_seqlen, max_seqlen_k=of_k.max_seqlen, **asked, **options,
        return_lse=want_lse,
    )  # fmt: skip
    return tuple(x[None] for x in result) if want_lse else result[None]


def _from_first_keys(starts_q: Tensor, starts_k: Tensor, rows: int, left: int | None) -> Tensor:
    """key_ranges (1, 1, rows, 1, 2): query i of a sequence sees its keys up to i, and no more than
    `left` before that.
    """
    row = torch.arange(rows, device=starts_q.device)
    sequence = _sequences.of_rows(row, starts_q)
    place = starts_k[sequence] + row - starts_q[sequence]
    begin = starts_k[sequence]
    if left is not None:
        begin = torch.maximum(begin, place - left)
    ends = starts_k[sequence + 1]
    sides = torch.stack([torch.minimum(begin, ends), torch.minimum(place + 1, ends)], -1)
    return sides.to(torch.int32)[None, None, :, None]


def _on_padded_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: BlockDiagonalPaddedKeysMask,
    options: dict[str, Any],
    want_lse: bool,
) -> Any:
    """Sequences whose keys have room for the same number of rows, as in a cache."""
    if "dropout_p" in options:
        raise UnsupportedError(f"p={options['dropout_p']} with {type(bias).__name__}: set p to 0")
    of_q, of_k = bias.q_seqinfo, bias.k_seqinfo
    _check_rows(query=(q, of_q), key=(k, of_k))
    caches = (x.view(len(of_k.seqlen), of_k.padding, *x.shape[2:]) for x in (k, v))
    result = without_backward(
        "padded keys", q[0], *caches, cache_seqlens=of_k.seqlen, page_table=None,
        cu_seqlens_q=of_q.seqstart, max_seqlen_q=of_q.max_seqlen, softmax_scale=options["scale"],
        causal=bias.of_sequence() is not None, window_size=(-1, -1), softcap=0.0, num_splits=1,
        want_lse=want_lse,
    )  # fmt: skip
    return tuple(x[None] for x in result) if want_lse else result[None]


def _check_rows(**given: Any) -> None:
    for name, (x, lengths) in given.items():
        if x.shape[0] != 1 or x.shape[1] != lengths.seqstart_py[-1]:
            raise ValueError(
                f"{name} has a batch of {x.shape[0]} and {x.shape[1]} rows: it must be a batch of "
                f"1 with the {lengths.seqstart_py[-1]} rows of all sequences of attn_bias"
            )


__all__ = [
    "AttentionBias",
    "BlockDiagonalMask",
    "LowerTriangularMask",
    "attn_bias",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
]
