"""Dropout: the state of its random bits, and which weights they drop.

The random bits of a weight depend on its batch, head, query and key, and on seed and offset only,
so that every kernel, and the backward pass, drop the same ones. src/common/device/dropout.cuh
computes them in kernels, and `dropout_mask` in PyTorch's operations.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash._eager import is_tracing, overridden, stands_for_tensor
from archflash._given import as_device, check_dense

_WORD = 0xFFFFFFFF
_MIDDLE = 1 << 31
_ROUNDS = 7
_A, _B = 0xD2511F53, 0xCD9E8D57  # what words are multiplied by in a round
_VALUES = 1 << 16  # that the random bits of a weight can have


def dropout_state(device: torch.device | str | None) -> Tensor:
    """A new state for `rng_state`: seed and offset, int64 ``(2,)``, from PyTorch's generator of a
    device. In a CUDA graph each replay draws a new one, and a checkpointed call draws the same.

    Args:
        device: where q is; None for PyTorch's default device.

    Returns:
        The state. Calls that are given the same one drop the same weights.

    Example:
        >>> import archflash
        >>> archflash.dropout_state("cpu").shape
        torch.Size([2])
    """
    if device is not None and not isinstance(device, torch.device):
        device = as_device(device)
    return torch.randint(0, (1 << 63) - 1, (2,), dtype=torch.int64, device=device)


def state_for(q: object) -> Tensor | None:
    """The state that a call draws; None where q is no tensor, which the call is refused for."""
    return dropout_state(q.device) if isinstance(q, Tensor) else None


def wants_state(dropout_p: object, rng_state: object) -> bool:
    """Whether a call drops weights and has to draw the state of their random bits. A dropout_p of a
    wrong type, which might be a tensor on a GPU, is left to the check of arguments unread.
    """
    if dropout_p is None or rng_state is not None:
        return False
    return isinstance(dropout_p, numbers.Number) and bool(dropout_p)


def dropout_mask(shape: Sequence[int], dropout_p: float, rng_state: Tensor) -> Tensor:
    """Which weights a call keeps.

    Args:
        shape: (batch, heads_q, nq, nk). With packed sequences batch is their number, and queries
            and keys are counted within a sequence.
        dropout_p: the probability that a weight is dropped, at least 0 and less than 1. It is
            rounded to a multiple of 1 / 65536, of which at least one remains.
        rng_state: seed and offset, as the call got them.

    Returns:
        Bool of that shape on the device of rng_state: True keeps. The call multiplies what it keeps
        by 1 / (1 - dropout_p).

    Raises:
        TypeError, ValueError: what is no shape, no probability or no state.

    Example:
        >>> import archflash
        >>> state = archflash.dropout_state("cpu")
        >>> archflash.dropout_mask((1, 2, 3, 4), 0.1, state).dtype
        torch.bool
    """
    if stands_for_tensor(rng_state):
        return overridden(dropout_mask, locals())  # type: ignore[no-any-return]
    if not torch.compiler.is_compiling() and not is_tracing():
        shape = _checked(shape, dropout_p, rng_state)
    batch, heads, nq, nk = shape
    device = rng_state.device
    batch_head = torch.arange(batch * heads, device=device).reshape(batch, heads, 1, 1)
    query = torch.arange(nq, device=device)[:, None]
    return kept(batch_head, query, torch.arange(nk, device=device), dropout_p, rng_state)


def _checked(shape: Any, dropout_p: Any, rng_state: Any) -> Sequence[int]:
    """The shape as ints; an array or a tensor of integers says one, too."""
    if isinstance(shape, Tensor):
        check_dense(shape=shape)
    is_shape = getattr(shape, "ndim", 0) == 1 or isinstance(shape, Sequence)
    sizes = list(shape) if is_shape and not isinstance(shape, (str, bytes)) else []
    try:
        sizes = [x if isinstance(x, torch.SymInt) else operator.index(x) for x in sizes]
    except (TypeError, RuntimeError):  # what is no integer, or a tensor without a value
        sizes = []
    if len(sizes) != 4 or not all(0 <= x < 1 << 31 for x in sizes):
        raise ValueError(
            f"shape is {_native.given(shape)}: it must be four ints from 0 on and below 2^31: "
            "(batch, heads_q, nq, nk)"
        )
    is_number = isinstance(dropout_p, numbers.Real) and not isinstance(dropout_p, bool)
    if not is_number or not 0 <= dropout_p < 1:
        error = ValueError if is_number else TypeError
        raise error(
            f"dropout_p is {_native.given(dropout_p)}: it must be a number, at least 0 and less "
            "than 1"
        )
    check_dense(rng_state=rng_state)
    if rng_state.dtype != torch.int64 or rng_state.shape != (2,):
        raise ValueError(
            f"rng_state has dtype {rng_state.dtype} and shape {tuple(rng_state.shape)}: it must be "
            "torch.int64, (2,), seed and offset, as dropout_state gives it"
        )
    return sizes


def kept(
    batch_head: Tensor, query: Tensor, key: Tensor, dropout_p: float, rng_state: Tensor
) -> Tensor:
    """Whether the weights of these queries and keys are kept; int64 numbers that broadcast with one
    another. batch_head: batch * heads_q + head.
    """
    threshold = min(round(dropout_p * _VALUES), _VALUES - 1)
    seed, offset = rng_state[0], rng_state[1]
    # torch.compile counts in 32 bits what arange() made, until a number of 64 is added that the
    # kernel reads: products below would overflow.
    zero = seed & 0
    batch_head, query, key = batch_head + zero, query + zero, key + zero
    counter = [
        (query >> 4 << 3) | (query & 7),
        (key >> 5 << 3) | (key & 7),
        batch_head,
        offset & _WORD,
    ]
    round_key = [seed & _WORD, ((seed >> 32) ^ (offset >> 32)) & _WORD]
    for _ in range(_ROUNDS):
        (high_a, low_a), (high_b, low_b) = _product(counter[0], _A), _product(counter[2], _B)
        counter = [
            high_b ^ counter[1] ^ round_key[0], low_b,
            high_a ^ counter[3] ^ round_key[1], low_a,
        ]  # fmt: skip
        round_key = [(round_key[0] + 0x9E3779B9) & _WORD, (round_key[1] + 0xBB67AE85) & _WORD]
    low = torch.where((key & 16) != 0, counter[1], counter[0])
    high = torch.where((key & 16) != 0, counter[3], counter[2])
    word = torch.where((query & 8) != 0, high, low)
    bits = (word >> (2 * (key & 8))) & 0xFFFF
    return bits >= threshold


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a product of 32 bits with an odd factor of 32 bits. It may
    not fit into 63 bits, and a compiler that is given a product which overflows may make anything
    of it. With the middle of its range as 0 it fits.
    """
    shifted = (word - _MIDDLE) * factor + _MIDDLE  # word * factor less factor // 2 times 2^32
    return (shifted >> 32) + factor // 2, shifted & _WORD
