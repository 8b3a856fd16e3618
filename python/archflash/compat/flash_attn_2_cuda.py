"""FlashAttention-2's extension `flash_attn_2_cuda`, below its Python functions. `generator` and
`zero_tensors` are there for the order of the arguments: the first must be None, the second is not
read. What `out` is given is written.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from archflash.compat._passes import backward
from archflash.compat.flash_attn import _private
from archflash.compat.flash_attn.flash_attn_interface import flash_attn_with_kvcache

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]


def _no_generator(generator: object) -> None:
    if generator is not None:
        raise RuntimeError(
            "the `generator` argument is no longer supported, as in FlashAttention-2: pass None"
        )


def _written(results: tuple[Tensor, ...], out: Tensor | None) -> list[Tensor]:
    first, *others = results
    return [first if out is None else out.copy_(first), *others]


def fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, alibi_slopes: Tensor | None,
    p_dropout: float, softmax_scale: float, is_causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, return_softmax: bool, generator: Any = None,
) -> list[Tensor]:  # fmt: skip
    """The output, log-sum-exp, an empty tensor and rng_state."""
    _no_generator(generator)
    result = _private._flash_attn_forward(
        q, k, v, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
        alibi_slopes, return_softmax,
    )  # fmt: skip
    return _written(result, out)


def varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    seqused_k: Tensor | None, leftpad_k: Tensor | None, block_table: Tensor | None,
    alibi_slopes: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, p_dropout: float,
    softmax_scale: float, zero_tensors: bool, is_causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, return_softmax: bool, generator: Any = None,
    num_splits: int = 0,
) -> list[Tensor]:  # fmt: skip
    """The output, log-sum-exp, an empty tensor and rng_state of packed sequences."""
    _no_generator(generator)
    result = _private._flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale,
        is_causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax,
        block_table, leftpad_k, seqused_k, zero_tensors, num_splits,
    )  # fmt: skip
    return _written(result, out)


def bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, alibi_slopes: Tensor | None,
    p_dropout: float, softmax_scale: float, is_causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, deterministic: bool, generator: Any = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """dq, dk, dv and the sum of dout * out of each row."""
    _no_generator(generator)
    found, sums = backward(
        dout, q, k, v, out, softmax_lse, (dq, dk, dv), alibi_slopes=alibi_slopes,
        dropout_p=p_dropout, softmax_scale=softmax_scale, causal=is_causal, softcap=softcap,
        window_size=(window_size_left, window_size_right), deterministic=deterministic,
        rng_state=rng_state,
    )  # fmt: skip
    return [*found, sums]


def varlen_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, alibi_slopes: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    p_dropout: float, softmax_scale: float, zero_tensors: bool, is_causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, deterministic: bool,
    generator: Any = None, rng_state: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """dq, dk, dv and the sum of dout * out of each row of packed sequences."""
    _no_generator(generator)
    found, sums = backward(
        dout, q, k, v, out, softmax_lse, (dq, dk, dv), alibi_slopes=alibi_slopes,
        dropout_p=p_dropout, softmax_scale=softmax_scale, causal=is_causal, softcap=softcap,
        window_size=(window_size_left, window_size_right), deterministic=deterministic,
        rng_state=rng_state, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    return [*found, sums]


def fwd_kvcache(
    q: Tensor, kcache: Tensor, vcache: Tensor, k: Tensor | None, v: Tensor | None,
    seqlens_k: Tensor | None, rotary_cos: Tensor | None, rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None, leftpad_k: Tensor | None, block_table: Tensor | None,
    alibi_slopes: Tensor | None, out: Tensor | None, softmax_scale: float, is_causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, is_rotary_interleaved: bool,
    num_splits: int,
) -> list[Tensor]:  # fmt: skip
    """The output and log-sum-exp of a call on a KV cache."""
    result = flash_attn_with_kvcache(
        q, kcache, vcache, k, v, rotary_cos, rotary_sin, seqlens_k, cache_batch_idx, leftpad_k,
        block_table, softmax_scale, is_causal, (window_size_left, window_size_right), softcap,
        is_rotary_interleaved, alibi_slopes, num_splits, return_softmax_lse=True,
    )  # fmt: skip
    return _written(result, out)
