"""Operations that Inductor, the compiler of torch.compile, gets wrong on GPUs or with some C++
compilers: no call of ours is made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import archflash
from archflash import masks
from archflash.compat import flash_attn
from archflash.compat import flash_attn_interface as fa3
from archflash.compat.flash_attn.layers.rotary import apply_rotary_emb

aten = torch.ops.aten
ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)
STATE = torch.tensor([3, 4])


def packed() -> list[Tensor]:
    return [torch.randn(5, 2, 16, requires_grad=True) for _ in "qkv"]


def attend(ends: Tensor, **options: Any) -> Any:
    return archflash.attention(*packed(), cu_seqlens_q=ends, cu_seqlens_k=ends, **options)


def rotate(ends: Tensor) -> Any:
    turns = torch.randn(5, 8)
    return apply_rotary_emb(torch.randn(5, 2, 16), turns, turns, cu_seqlens=ends, max_seqlen=3)


# Calls that look up to which sequence a row belongs, or to which row of blocks.
LOOKUPS: dict[str, Callable[[Tensor], Any]] = {
    "attention": lambda ends: attend(ends, causal=True),
    "dropout": lambda ends: attend(ends, dropout_p=0.5, rng_state=STATE),
    "flash_attn": lambda ends: flash_attn.flash_attn_varlen_func(*packed(), ends, ends, 3, 3),
    "used rows": lambda ends: fa3.flash_attn_varlen_func(
        *packed(), ends, ends, 3, 3, seqused_q=ends.diff() - 1
    ),
    "rotary": rotate,
    "blocks": lambda ends: masks.from_bsr(ends, torch.arange(5), (64, 64), 128, 320),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKUPS)
def test_nothing_is_looked_up_in_a_view(name: str) -> None:
    """Inductor of torch before 2.13 fails on a GPU if the sorted table is a slice, or takes all of
    what it is a slice of.
    """
    graph = make_fx(LOOKUPS[name])(ENDS).graph
    found = [
        x for x in graph.nodes if x.target in (aten.searchsorted.Tensor, aten.bucketize.Tensor)
    ]
    assert found
    for node in found:
        table = node.args[0 if node.target is aten.searchsorted.Tensor else 1]
        if table.op == "call_function":
            assert table.target._schema.returns[0].alias_info is None, table


class Overflows(TorchDispatchMode):
    """Finds products and sums of integers that do not fit into 63 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        if op.overloadpacket in (aten.mul, aten.add, aten.sub) and result.dtype == torch.int64:
            exact = op(*(x.double() if isinstance(x, Tensor) else x for x in args))
            assert exact.abs().max() < 2**63, op
            self.seen += 1
        return result


def test_no_number_of_dropout_overflows() -> None:
    """Compilers may make anything of signed numbers that overflow, and of Inductor's code for CPUs
    gcc makes other random bits.
    """
    with Overflows() as overflows:
        for state in (STATE, torch.tensor([-1, (1 << 63) - 1])):
            archflash.dropout_mask((2, 3, 40, 70), 0.5, state)
    assert overflows.seen > 0
