"""torch.compile with sizes that it does not know: calls whose tensors are views as models make
them, with and without gradients, agree with eager ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash.compat.flash_attn import flash_attn_func

Given = tuple[Any, ...]
SIZES = [(2, 9), (3, 12)]  # batch and rows


def heads_first(batch: int, rows: int, heads: int = 4) -> Tensor:
    """(batch, heads, rows, 16) as a view of (batch, rows, heads, 16)."""
    return torch.randn(batch, rows, heads, 16).transpose(1, 2)


def qkv(batch: int, rows: int) -> Given:
    return tuple(heads_first(batch, rows) for _ in range(3))


def grouped(batch: int, rows: int) -> Given:
    return heads_first(batch, rows), *(heads_first(batch, rows + 3, 2) for _ in range(2))


def with_bias(batch: int, rows: int) -> Given:
    return *qkv(batch, rows), torch.randn(batch, 1, rows, rows)


def packed(batch: int, rows: int) -> Given:
    ends = torch.arange(batch + 1, dtype=torch.int32) * rows
    return *(torch.randn(batch * rows, 4, 16) for _ in range(3)), ends


def rows_outermost(batch: int, rows: int) -> Given:
    return tuple(torch.randn(rows, batch, 4, 16).permute(1, 2, 0, 3) for _ in range(3))


SLOPES = torch.rand(4)
CALLS: dict[str, tuple[Callable[..., Any], Callable[[int, int], Given]]] = {
    "plain": (archflash.attention, qkv),
    "causal": (lambda *x: archflash.attention(*x, causal=True), rows_outermost),
    "window and sinks": (
        lambda *x: archflash.attention(*x, causal=True, window=(3, None), sinks=SLOPES), grouped
    ),
    "bias": (lambda q, k, v, bias: archflash.attention(q, k, v, attn_mask=bias), with_bias),
    "rows first": (lambda *x: archflash.attention(*x, causal=True, layout="bnhd"), qkv),
    "packed": (
        lambda q, k, v, ends: archflash.attention(
            q, k, v, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends
        ),
        packed,
    ),
    "sdpa": (lambda *x: archflash.scaled_dot_product_attention(*x, is_causal=True), qkv),
    "flash_attn": (lambda *x: flash_attn_func(*x, causal=True), qkv),
}  # fmt: skip


def strides_that_count(x: Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # flash_attn has rows first, too.
    [pytest.param(x, marks=pytest.mark.rest if x == "rows first" else ()) for x in CALLS],
)
def test_a_compiled_call_takes_other_sizes(name: str) -> None:
    check(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bias", "sdpa"])
def test_a_call_is_compiled_for_all_sizes(name: str) -> None:
    check(name, True)


def check(name: str, dynamic: bool | None) -> None:
    call, make = CALLS[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=dynamic)
    for size in SIZES:
        given = make(*size)
        results, gradients = [], []
        for function in (compiled, call):
            tensors = [x.detach().requires_grad_() if x.is_floating_point() else x for x in given]
            result = function(*tensors)
            result.square().sum().backward()
            results.append(result)
            gradients.append([x.grad for x in tensors if x.requires_grad])
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
        assert strides_that_count(results[0]) == strides_that_count(results[1])


def test_dropout_that_pytorch_serves_is_compiled_whole() -> None:
    """What is warned of in an eager call takes a lock, which torch.compile cannot trace."""
    q = torch.randn(1, 2, 5, 8)

    def call(q: Tensor) -> Tensor:
        return archflash.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    result = compiled(q)
    torch.manual_seed(0)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    torch.testing.assert_close(result, expected)
