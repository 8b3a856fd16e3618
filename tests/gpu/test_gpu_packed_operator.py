"""PyTorch's operator for packed sequences while archflash is enabled: the runtime serves a call
like an earlier one, or hands it to PyTorch's own kernel, without Python, with the same results.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _overrides, _replacing

from .gpu_cases import cu_seqlens, int32, rand, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not _replacing.runtime_serves(), reason="with this torch Python serves every call"
    ),
]

forward = torch.ops.aten._flash_attention_forward
TAKES_PAGES = "block_table" in str(forward.default._schema)


def packed(window: tuple[int, int], dropout: float = 0.0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Sequences of which some have more queries than keys, no queries, or no keys."""
    q, k, v = (rand(160, heads, 64, seed=heads, dtype="bfloat16") for heads in (4, 2, 2))
    ends_q, ends_k = cu_seqlens((25, 0, 130, 5)), cu_seqlens((20, 10, 130, 0))
    given = (q, k, v, ends_q, ends_k, 130, 130, dropout, False, False)
    return given, {"window_size_left": window[0], "window_size_right": window[1]}


def self_attention() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same tensor of lengths for queries and keys: each row sees its own key."""
    q, k, v = (rand(160, heads, 64, seed=heads, dtype="bfloat16") for heads in (4, 2, 2))
    ends = cu_seqlens((25, 0, 130, 5))
    return (q, k, v, ends, ends, 130, 130, 0.0, True, False), {"window_size_left": 40}


def dense() -> tuple[tuple[Any, ...], dict[str, Any]]:
    q, k, v = (rand(2, 70, 4, 64, seed=i, dtype="bfloat16") for i in range(3))
    return (q, k, v, None, None, 70, 70, 0.0, True, False), {"scale": 0.2}


def pages() -> tuple[tuple[Any, ...], dict[str, Any]]:
    q = rand(7, 4, 64, seed=0, dtype="bfloat16")
    k, v = (rand(6, 16, 2, 64, seed=i, dtype="bfloat16") for i in (1, 2))
    table = int32(4, 0, 5, 2).view(2, 2)
    given = (q, k, v, cu_seqlens((3, 4)), None, 4, 32, 0.0, True, False)
    return given, {"seqused_k": int32(5, 21), "block_table": table}


KINDS = {
    "packed": lambda: packed((-1, -1)),
    "window": lambda: packed((9, 0)),
    "self-attention": self_attention,
    "dense": dense,
    "pages": pages,
    "dropout": lambda: packed((-1, -1), 0.5),
}


@pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients enabled"])
@pytest.mark.parametrize("kind", KINDS)
def test_python_is_asked_once(kind: str, gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "pages" and not TAKES_PAGES:
        pytest.skip("this torch has no block_table")
    given, named = KINDS[kind]()
    asked: list[object] = []
    kernel = _overrides._OPERATORS["_flash_attention_forward"]

    def noting(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        return kernel(*args, **kwargs)

    monkeypatch.setitem(_overrides._OPERATORS, "_flash_attention_forward", noting)
    archflash.stats(reset=True)
    with archflash.enabled(), torch.set_grad_enabled(gradients):
        results = [forward(*given, **named) for _ in range(3)]
        others = tuple(x.flip(0) if i < 3 else x for i, x in enumerate(given))
        changed = forward(*others, **named)
    assert len(asked) == 1
    counted = archflash.stats()
    if kind == "dropout":
        assert counted.served == {}
        assert list(counted.declined.values()) == [4]
        return
    assert sum(counted.served.values()) == 4
    for result in results[1:]:
        for one, other in zip(result[:2], results[0][:2], strict=True):
            assert same_bits(one, other)
            assert one.stride() == other.stride()
    # other tensors of the same kind; and PyTorch's own log-sum-exp, which is +inf for unseen rows
    assert not torch.equal(changed[0], results[0][0])
    own = None if kind == "pages" else forward(*others, **named)  # its pages have 256 rows
    if own is not None:
        assert_like(changed, own)


def assert_like(found: tuple[Tensor, ...], own: tuple[Tensor, ...]) -> None:
    assert bool(((found[1] == math.inf) == (own[1] == math.inf)).all())
    seen = own[1] != math.inf
    torch.testing.assert_close(found[1][seen], own[1][seen], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found[0], own[0], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("first", ["packed", "self-attention"])
def test_lengths_of_their_own_change_who_may_see_no_key(first: str) -> None:
    """Calls that differ only in whether queries and keys have one tensor of lengths: in one of them
    no row can be without keys.
    """
    given, named = packed((-1, -1))
    same = (*given[:4], given[3], *given[5:])
    calls = {"packed": given, "self-attention": same}
    order = sorted(calls, key=lambda name: name != first)
    with archflash.enabled():
        for _ in range(2):
            found = {name: forward(*calls[name], **named) for name in order}
    for name, results in found.items():
        assert_like(results, forward(*calls[name], **named))
    assert bool((found["packed"][1] == math.inf).any())
    assert not bool((found["self-attention"][1] == math.inf).any())
