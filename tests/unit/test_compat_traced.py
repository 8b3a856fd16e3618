"""Functions of other libraries, and makers of masks, whose calls a tracer or a compiler watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from archflash import masks
from archflash.compat import flash_attn as fa2
from archflash.compat import flash_attn_interface as fa3
from archflash.compat import flash_mla
from archflash.compat.flash_attn import bert_padding, cute

rand = torch.randn


def ends(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(*lengths: int) -> tuple[Tensor, ...]:
    return *(rand(sum(lengths), 2, 16) for _ in "qkv"), ends(*lengths)


def heads(batch: int, nq: int, nk: int) -> tuple[Tensor, ...]:
    return rand(batch, nq, 2, 16), rand(batch, nk, 2, 16), rand(batch, nk, 2, 32)


def latent(rows: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    lists = torch.arange(rows * keys).view(rows, 1, keys).int() % 8
    return rand(rows, 2, 576), rand(8, 1, 576), lists


Call = Callable[..., Tensor]
# A call, what it is recorded with, and what it has to be right for.
RECORDED: dict[str, tuple[Call, tuple[Tensor, ...], tuple[Tensor, ...]]] = {
    "rows that are used": (
        lambda q, k, v, ends: fa3.flash_attn_varlen_func(
            q, k, v, ends, ends, 9, 9, seqused_q=ends.diff() - 1
        ),
        packed(2, 3), packed(2, 3, 1),
    ),
    "full caches": (
        lambda q, k, v: cute.flash_attn_func(q, k, v, v[:, : q.shape[1]])[0],
        heads(2, 4, 8), heads(3, 5, 9),
    ),
    "lists": (
        lambda q, kv, lists: flash_mla.flash_mla_sparse_fwd(q, kv, lists, 0.1)[0],
        latent(3, 2), latent(4, 3),
    ),
    "padding": (
        lambda x, indices, like: bert_padding.pad_input(x, indices, *like.shape),
        (rand(5, 3), torch.arange(5), rand(2, 4)), (rand(7, 3), torch.arange(7), rand(3, 6)),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_call_is_right_for_other_sizes(name: str) -> None:
    call, first, second = RECORDED[name]
    recorded: Any = torch.jit.trace(call, first, check_trace=False)
    torch.testing.assert_close(recorded(*second), call(*second))


@pytest.mark.parametrize("name", ["window", "padding", "mask"])
def test_sizes_may_be_symbols(name: str) -> None:
    calls: dict[str, tuple[Call, tuple[Tensor, ...]]] = {
        "window": (
            lambda q, k, v: fa2.flash_attn_func(q, k, v, window_size=(q.shape[1], -1)),
            heads(2, 4, 8),
        ),
        "padding": (
            lambda x, indices: bert_padding.pad_input(x, indices, 2, x.shape[0]),
            (rand(5, 3), torch.arange(5)),
        ),
        "mask": (
            lambda lengths, like: masks.prefix_lm(lengths, *like.shape),
            (torch.tensor([2, 3]), rand(4, 6)),
        ),
    }
    call, given = calls[name]
    graph = make_fx(call, tracing_mode="symbolic")(*given)
    torch.testing.assert_close(graph(*given), call(*given))


@pytest.mark.slow
def test_functions_of_a_decorator_do_not_use_up_each_others_compilations() -> None:
    q, k, v = heads(2, 5, 7)
    calls: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (fa2.flash_attn_func, (q, k, v)),
        (cute.flash_attn_func, (q, k, v)),
        (masks.prefix_lm, (torch.tensor([2, 3]), 4, 6)),
        (masks.to_dense, (masks.documents(torch.tensor([[0, 0, 1]])), 3)),
    )
    torch._dynamo.reset()
    with torch._dynamo.config.patch(cache_size_limit=1):
        for function, given in calls:
            compiled = torch.compile(function, fullgraph=True, backend="eager")
            torch.testing.assert_close(compiled(*given), function(*given))


def test_new_packed_rows_in_autocast() -> None:
    new, caches = [x.bfloat16() for x in packed(4, 4)[:2]], rand(2, 2, 16, 2, 16).bfloat16()
    q, call = rand(8, 2, 16), {"cu_seqlens_q": ends(4, 4), "max_seqlen_q": 4}
    call |= {"cache_seqlens": torch.tensor([3, 5]).int(), "cu_seqlens_k_new": ends(4, 4)}
    wanted = fa3.flash_attn_with_kvcache(q.bfloat16(), *caches.clone(), *new, **call)
    with torch.autocast("cpu", torch.bfloat16):
        found = fa3.flash_attn_with_kvcache(q, *caches, *new, **call)
    assert torch.equal(found, wanted)


def test_numbers_of_numpy_are_not_blamed_for_other_arguments() -> None:
    q, k, v = heads(2, 5, 7)
    for lengths in (3, np.int64(3)):
        with pytest.raises(ValueError, match="k_cache has shape"):
            fa3.flash_attn_with_kvcache(q, k[..., :8], v, cache_seqlens=lengths)


def test_integers_of_other_widths() -> None:
    rows, indices = rand(2, 3), torch.tensor([1, 6])
    padded = bert_padding.pad_input(rows, indices, 2, 4)
    assert torch.equal(bert_padding.pad_input(rows, indices.int(), 2, 4), padded)
    table, size = torch.ones(1, 1, 1, 2, dtype=torch.bool), np.int64(64)
    seen = masks.from_blocks(table, (size, size), 64, 128)  # type: ignore[arg-type]
    assert torch.equal(seen, masks.from_blocks(table, (64, 64), 64, 128))
