"""The context-parallel attention of TransformerEngine, which Megatron calls, by archflash.

    from archflash.compat.transformer_engine import attn_forward_func_with_cp

has the arguments of TransformerEngine's function of that name and deals rows as it does: each
sequence in zigzag, chunk r and chunk 2 cp - 1 - r of 2 cp on rank r. What archflash does not
compute is refused, never left out.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch.distributed as dist
from torch import Tensor

from archflash import _gradients
from archflash._errors import UnsupportedError
from archflash.distributed import Shards, attention
from archflash.distributed._reading import read_boundaries

_METHODS = {"p2p": "ring", "all_gather": "all-gather", "a2a": "ulysses"}
_CAUSAL = {
    "causal": True, "padding_causal": True, "causal_bottom_right": True,
    "padding_causal_bottom_right": True, "no_mask": False, "padding": False,
}  # fmt: skip


def attn_forward_func_with_cp(
    is_training: bool, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None, max_seqlen_q: int | None, max_seqlen_kv: int | None,
    cu_seqlens_q_padded: Tensor | None, cu_seqlens_kv_padded: Tensor | None, dropout_p: float,
    cp_group: dist.ProcessGroup, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p",
    softmax_scale: float | None = None, qkv_format: str = "bshd", attn_mask_type: str = "causal",
    attn_bias_type: str = "no_bias", attn_bias: Tensor | None = None, deterministic: bool = False,
    use_fused_attention: bool = False, window_size: tuple[int, int] | None = None,
    fp8: bool = False, *, softmax_type: str = "vanilla", softmax_offset: Tensor | None = None,
    **others: Any,
) -> Tensor:  # fmt: skip
    """Attention of rows that lie on the ranks of cp_group, in the arguments of TransformerEngine.

    Args:
        q, k, v: this rank's rows as qkv_format says: "bshd", "sbhd" or "thd".
        cu_seqlens_q, cu_seqlens_kv: of "thd": real lengths of whole sequences; the others are not
            read of other formats.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: of "thd": where sequences start, in multiples of
            2 cp; default cu_seqlens_q.
        cp_comm_type: "p2p" (ring), "all_gather" or "a2a" (ulysses).
        softmax_type, softmax_offset: "learnable" takes softmax_offset as sinks.
        max_seqlen_q, max_seqlen_kv, cp_global_ranks, cp_stream, is_training, use_fused_attention:
            not needed.

    Returns:
        The output of this rank's rows, shaped as q with the columns of v. Rows of padding are those
        of a sequence of their own.

    Raises:
        UnsupportedError: an option that archflash has not.
        ValueError: sequences that are no multiples of 2 cp, or what `attention` refuses.
    """
    causal, padded = _CAUSAL.get(attn_mask_type), attn_mask_type.startswith("padding")
    sinks = None
    if softmax_type == "learnable" and softmax_offset is not None:
        sinks = softmax_offset.flatten()  # (1, heads, 1, 1)
    asked: dict[str, bool] = {
        f"attn_mask_type {attn_mask_type!r}": causal is None,
        f"padding of {qkv_format!r} (pack sequences as 'thd')": padded and qkv_format != "thd",
        f"cp_comm_type {cp_comm_type!r}": cp_comm_type not in _METHODS,
        f"attn_bias_type {attn_bias_type!r}": attn_bias_type != "no_bias" or attn_bias is not None,
        f"dropout_p {dropout_p}": dropout_p != 0,
        "fp8": fp8,
        f"softmax_type {softmax_type!r}": softmax_type not in ("vanilla", "learnable"),
        f"qkv_format {qkv_format!r}": qkv_format not in ("bshd", "sbhd", "thd"),
        "return_max_logit": bool(others.get("return_max_logit")),
        "fp8_output": bool(others.get("fp8_output")),
    }  # fmt: skip
    if refused := [what for what, is_asked in asked.items() if is_asked]:
        raise UnsupportedError(
            f"attention over ranks has no {', '.join(refused)}: call "
            "archflash.distributed.attention, whose options say what there is"
        )
    ranks = dist.get_world_size(cp_group)
    options: dict[str, Any] = {
        "causal": causal, "window": window_size, "sinks": sinks, "scale": softmax_scale,
        "group": cp_group, "method": _METHODS[cp_comm_type], "shards": "zigzag", "layout": "bnhd",
    }  # fmt: skip
    with _gradients.asked_for(deterministic):
        if qkv_format == "thd":
            starts = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
            options["shards"] = _zigzag_of_each(read_boundaries(starts), ranks)
            options["cu_seqlens"] = _with_padding(
                read_boundaries(cu_seqlens_q), read_boundaries(starts)
            )
            out: Tensor = attention(q, k, v, **options)
            return out
        if qkv_format == "sbhd":
            swapped: Tensor = attention(*(x.transpose(0, 1) for x in (q, k, v)), **options)
            return swapped.transpose(0, 1)
        out = attention(q, k, v, **options)
        return out


def _zigzag_of_each(starts: tuple[int, ...], ranks: int) -> Shards:
    """Each sequence in zigzag."""
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start, end in itertools.pairwise(starts):
        if (end - start) % (2 * ranks):
            raise ValueError(
                f"a sequence has {end - start} rows with its padding: it must be a multiple of "
                f"{2 * ranks}, twice the number of ranks"
            )
        for held, mine in zip(pieces, Shards.zigzag(end - start, ranks).pieces, strict=True):
            held += [(start + a, start + b) for a, b in mine]
    return Shards(starts[-1], tuple(map(tuple, pieces)))


def _with_padding(ends: tuple[int, ...], starts: tuple[int, ...]) -> list[int]:
    """cu_seqlens in which the padding behind each sequence is a sequence of its own."""
    made = [0]
    for i, (start, stop) in enumerate(itertools.pairwise(starts)):
        made += [start + ends[i + 1] - ends[i], stop]
    return made
