"""FlopCounterMode counts calls as PyTorch counts its own attention operators of the same sizes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import archflash

pytestmark = pytest.mark.filterwarnings("ignore:archflash. tensors are on the CPU")
SHAPES = (2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 24)  # of q, k and v
FORWARD = 2 * 8 * 5 * 7 * (16 + 24)
BACKWARD = 2 * 8 * 5 * 7 * (3 * 16 + 2 * 24)


def qkv(**options: Any) -> list[Tensor]:
    return [torch.randn(shape, **options) for shape in SHAPES]


def int32(*x: int) -> Tensor:
    return torch.tensor(x, dtype=torch.int32)


def count(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def test_the_numbers_are_pytorchs() -> None:
    all_heads = [(2, 4, *shape[2:]) for shape in SHAPES]  # older versions know no shared heads
    assert sdpa_flop_count(*all_heads) == FORWARD
    out = (2, 4, 5, 24)
    assert sdpa_backward_flop_count(out, *all_heads) == BACKWARD


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"softcap": 2.0}, {"return_lse": True}, {"implementation": "simt"}],
    ids=str,
)
def test_both_passes_are_counted_whoever_serves_them(options: dict[str, Any]) -> None:
    assert count(lambda: archflash.attention(*qkv(), **options)) == FORWARD
    leaves = qkv(requires_grad=True)

    def train() -> None:
        answer = archflash.attention(*leaves, **options)
        out = answer[0] if isinstance(answer, tuple) else answer
        torch.autograd.grad(out.sum(), leaves)

    assert count(train) == FORWARD + BACKWARD


def test_gradients_that_are_asked_for_by_hand_are_counted() -> None:
    q, k, v = qkv()
    out, lse = archflash.attention(q, k, v, return_lse=True)
    assert count(lambda: archflash.attention_backward(out, q, k, v, out, lse)) == BACKWARD


def test_the_layout_says_where_the_heads_are() -> None:
    rows_first = [x.transpose(1, 2) for x in qkv()]
    assert count(lambda: archflash.attention(*rows_first, layout="bnhd")) == FORWARD


def test_the_drop_in_is_counted() -> None:
    call = archflash.scaled_dot_product_attention
    assert count(lambda: call(*qkv(), is_causal=True, enable_gqa=True)) == FORWARD


def test_packed_sequences_count_by_their_lengths() -> None:
    q, k = torch.randn(5, 4, 16), torch.randn(7, 2, 16)
    cu = {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k": int32(0, 3, 7)}
    assert count(lambda: archflash.attention(q, k, k, **cu)) == 2 * 4 * (2 * 3 + 3 * 4) * 32
    # Lengths that cannot be read are as long as they may be.
    q, k, *lengths = (x.to("meta") for x in (q, k, *cu.values()))
    cu = dict(zip(cu, lengths, strict=True))
    longest = {"max_seqlen_q": 3, "max_seqlen_k": 4}
    assert count(lambda: archflash.attention(q, k, k, **cu, **longest)) == 2 * 4 * 2 * 3 * 4 * 32


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_a_cache_counts_the_keys_that_the_sequences_have(paged: bool) -> None:
    q, new = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    cache = torch.randn(4, 10, 2, 16) if paged else torch.randn(2, 20, 2, 16)
    table = int32(0, 1, 2, 3).reshape(2, 2) if paged else None

    def call(q: Tensor, cache: Tensor, lengths: Tensor, **options: Any) -> Any:
        return archflash.attention_with_kvcache(
            q, cache, cache, cache_seqlens=lengths, page_table=table, **options
        )

    assert count(lambda: call(q, cache, int32(3, 9))) == 2 * 4 * (3 + 9) * 32
    other = cache.clone()  # of V, as the rows that are appended may not overlap

    def append() -> Any:
        return archflash.attention_with_kvcache(
            q, cache, other, cache_seqlens=int32(3, 9), page_table=table, k_new=new, v_new=new
        )

    assert count(append) == 2 * 4 * (4 + 10) * 32
    if not paged:  # of lengths that cannot be read, all that there is room for
        there = (x.to("meta") for x in (q, cache, int32(3, 9)))
        assert count(lambda: call(*there)) == 2 * 4 * (20 + 20) * 32


def test_lists_of_keys_count_the_keys_that_they_name() -> None:
    q, cache = torch.randn(2, 5, 4, 16), torch.randn(2, 20, 1, 16)
    lists = torch.zeros(2, 1, 5, 7, dtype=torch.int32)
    call = {"cache_seqlens": int32(9, 20), "key_indices": lists}

    def served(**more: Any) -> Any:
        return archflash.attention_with_kvcache(q, cache, cache[..., :8], **call, **more)

    assert count(served) == 2 * 4 * 2 * 5 * 7 * (16 + 8)
    qv = torch.randn(2, 5, 4, 8)
    assert count(lambda: served(qv=qv)) == 2 * 4 * 2 * 5 * 7 * (16 + 8 + 8)
    dense = [x.transpose(1, 2) for x in (q, cache, cache)]
    assert count(lambda: archflash.attention(*dense, key_indices=lists)) == 2 * 4 * 2 * 5 * 7 * 32


def test_packed_queries_of_a_cache_count_by_their_lengths() -> None:
    q, cache = torch.randn(6, 4, 16), torch.randn(2, 20, 1, 16)
    call = {"cache_seqlens": int32(9, 20), "cu_seqlens_q": int32(0, 5, 6)}
    served = lambda: archflash.attention_with_kvcache(q, cache, cache, **call)  # noqa: E731
    assert count(served) == 2 * 4 * (5 * 9 + 1 * 20) * 32


def test_merging_and_quantising_count_nothing() -> None:
    x = torch.randn(1, 2, 5, 16)
    assert count(lambda: archflash.merge_attention([x, x], [x[..., 0], x[..., 1]])) == 0
    assert count(lambda: archflash.quantize_fp8(x)) == 0


def test_pytorchs_own_attention_counts_what_it_counts_alone() -> None:
    x = torch.randn(1, 2, 5, 16)
    expected = count(lambda: F.scaled_dot_product_attention(x, x, x))
    with archflash.enabled():
        assert count(lambda: F.scaled_dot_product_attention(x, x, x)) == expected


@pytest.mark.slow
def test_a_compiled_graph_is_counted() -> None:
    leaves = qkv(requires_grad=True)
    torch._dynamo.reset()
    call = torch.compile(
        lambda *x: archflash.attention(*x, implementation="simt").sum(), backend="aot_eager"
    )
    torch.autograd.grad(call(*leaves), leaves)
    assert count(lambda: torch.autograd.grad(call(*leaves), leaves)) == FORWARD + BACKWARD


@pytest.mark.slow
def test_importing_archflash_does_not_import_the_counter_and_either_may_come_first() -> None:
    # Two processes that have imported torch.
    code = """
import importlib, os, sys, torch
second = os.fork() == 0
first = "torch.utils.flop_counter" if second else "archflash"
importlib.import_module(first)
assert ("torch.utils.flop_counter" in sys.modules) == second
import archflash, torch.utils.flop_counter as counter
q = torch.randn(1, 2, 5, 16)
with counter.FlopCounterMode(display=False) as mode:
    archflash.attention(q, q, q)
assert mode.get_total_flops() == 2 * 2 * 5 * 5 * 32
assert counter.__loader__ is counter.__spec__.loader
assert type(counter.__loader__).__name__ == "SourceFileLoader"
assert second or os.wait()[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
