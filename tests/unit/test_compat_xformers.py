"""archflash.compat.xformers: xformers' attention, its masks and their alignment."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash.compat
from archflash.compat.xformers import ops
from archflash.compat.xformers.ops import fmha
from archflash.compat.xformers.ops.fmha import attn_bias as biases

LENGTHS, OTHERS, ROOM = (3, 5, 1), (4, 5, 2), 6


def rand(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inside(
    lengths: tuple[int, ...], others: tuple[int, ...], rule: Callable[[int, int, int], bool]
) -> Tensor:
    """The keys that queries see, by a rule of query, key and how many more keys there are."""
    seen = torch.zeros(sum(lengths), sum(others), dtype=torch.bool)
    for number, (nq, nk) in enumerate(zip(lengths, others, strict=True)):
        first, begin = sum(lengths[:number]), sum(others[:number])
        for i in range(nq):
            for j in range(nk):
                seen[first + i, begin + j] = rule(i, j, nk - nq)
    return seen


def of(kind: Any, keys: tuple[int, ...] = LENGTHS) -> Any:
    return kind.from_seqlens(LENGTHS, keys, device="cpu")


CAUSAL = biases.BlockDiagonalCausalMask
# Each mask, and what it means for the lengths of queries and keys.
BIASES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], Callable[[int, int, int], bool]]] = {
    "triangle": (biases.LowerTriangularMask(), (7,), (9,), lambda i, j, _: j <= i),
    "triangle to the last": (
        biases.LowerTriangularFromBottomRightMask(), (7,), (9,), lambda i, j, d: j <= i + d,
    ),
    "triangle in a window": (
        biases.LowerTriangularFromBottomRightMask().make_local_attention(3), (7,), (9,),
        lambda i, j, d: i + d - 3 < j <= i + d,
    ),
    "window": (
        biases.LocalAttentionFromBottomRightMask(2, 1), (7,), (9,),
        lambda i, j, d: i + d - 2 <= j <= i + d + 1,
    ),
    "sequences": (of(biases.BlockDiagonalMask, OTHERS), LENGTHS, OTHERS, lambda *_: True),
    "causal": (of(CAUSAL), LENGTHS, LENGTHS, lambda i, j, _: j <= i),
    "causal, more keys": (of(CAUSAL, OTHERS), LENGTHS, OTHERS, lambda i, j, _: j <= i),
    "causal to the last": (
        of(biases.BlockDiagonalMask, OTHERS).make_causal_from_bottomright(), LENGTHS, OTHERS,
        lambda i, j, d: j <= i + d,
    ),
    "local": (
        of(biases.BlockDiagonalMask).make_local_attention(2), LENGTHS, LENGTHS,
        lambda i, j, _: i - 2 < j <= i,
    ),
    "local, more keys": (
        of(biases.BlockDiagonalMask, OTHERS).make_local_attention(2), LENGTHS, OTHERS,
        lambda i, j, _: i - 2 < j <= i,
    ),
    "local to the last": (
        of(biases.BlockDiagonalMask, OTHERS).make_local_attention_from_bottomright(2), LENGTHS,
        OTHERS, lambda i, j, d: i + d - 2 < j <= i + d,
    ),
    "padded": (
        biases.BlockDiagonalPaddedKeysMask.from_seqlens(LENGTHS, ROOM, OTHERS, device="cpu"),
        LENGTHS, (ROOM,) * 3, lambda i, j, d: True,
    ),
    "padded, causal": (
        biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            LENGTHS, ROOM, OTHERS, device="cpu"
        ), LENGTHS, (ROOM,) * 3, lambda i, j, d: True,
    ),
}  # fmt: skip


def visible(name: str) -> Tensor:
    _, lengths, others, rule = BIASES[name]
    if not name.startswith("padded"):
        return inside(lengths, others, rule)
    causal = name != "padded"
    shorter = inside(LENGTHS, OTHERS, lambda i, j, d: j <= i + d or not causal)
    parts = [torch.nn.functional.pad(x, (0, ROOM - x.shape[1])) for x in shorter.split(OTHERS, 1)]
    return torch.cat(parts, 1)


def expected(q: Tensor, k: Tensor, v: Tensor, added: Tensor, scale: float | None) -> Any:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double())
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale) + added
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
    return out.float(), scores.logsumexp(-1).float()


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("name", BIASES)
def test_every_mask_means_what_it_means_in_xformers(name: str, scale: float | None) -> None:
    bias, seen = BIASES[name][0], visible(name)
    nq, nk = seen.shape
    batch = 1 if "seqinfo" in "".join(vars(bias)) else 2
    q, k, v = rand(batch, nq, 4, 8), rand(batch, nk, 4, 8, seed=2), rand(batch, nk, 4, 8, seed=3)
    added = torch.zeros(nq, nk, dtype=torch.double).masked_fill(~seen, -torch.inf)
    assert torch.equal(bias.materialize((nq, nk)), added.float())
    out, lse = ops.memory_efficient_attention_forward_requires_grad(q, k, v, bias, scale=scale)
    for found, wanted in zip((out, lse), expected(q, k, v, added, scale), strict=True):
        torch.testing.assert_close(found, wanted)
    plain = ops.memory_efficient_attention(q, k, v, attn_bias=bias, scale=scale)
    torch.testing.assert_close(plain, out)
    alone = fmha.memory_efficient_attention_forward(q, k, v, bias.to("cpu"), 0.0, scale)
    torch.testing.assert_close(alone, out)


@pytest.mark.parametrize("name", [name for name in BIASES if not name.startswith("padded")])
def test_gradients(name: str) -> None:
    bias, seen = BIASES[name][0], visible(name)
    nq, nk = seen.shape
    q, k, v = (rand(1, n, 2, 8, seed=n).requires_grad_() for n in (nq, nk, nk))
    added = torch.zeros(nq, nk).masked_fill(~seen, -torch.inf)
    out, of_out = ops.memory_efficient_attention(q, k, v, bias), rand(1, nq, 2, 8, seed=9)
    found = torch.autograd.grad(out, (q, k, v), of_out)
    wanted = torch.autograd.grad(expected(q, k, v, added, None)[0], (q, k, v), of_out)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_padded_keys_have_no_gradients_and_no_dropout() -> None:
    bias = BIASES["padded"][0]
    q, k = rand(1, 9, 2, 8).requires_grad_(), rand(1, 18, 2, 8)
    with pytest.raises(archflash.UnsupportedError, match="padded keys"):
        ops.memory_efficient_attention(q, k, k, bias).sum().backward()
    with pytest.raises(archflash.UnsupportedError, match="set p to 0"):
        ops.memory_efficient_attention(q, k, k, bias, 0.5)


def test_tensors_that_are_added_and_inputs_of_three_and_five_dimensions() -> None:
    q, k, v = rand(2, 7, 8), rand(2, 9, 8, seed=2), rand(2, 9, 8, seed=3)
    added = rand(2, 7, 9, seed=4)
    wanted = expected(q[:, :, None], k[:, :, None], v[:, :, None], added[:, None], None)[0]
    found = ops.memory_efficient_attention(q, k, v, attn_bias=added)
    torch.testing.assert_close(found, wanted[:, :, 0])

    q, k, v = rand(2, 7, 3, 2, 8), rand(2, 9, 3, 1, 8, seed=2), rand(2, 9, 3, 1, 8, seed=3)
    added = rand(2, 3, 2, 7, 9, seed=4)
    heads = [x.expand(-1, -1, -1, 2, -1).flatten(2, 3) for x in (k, v)]
    wanted, wanted_lse = expected(q.flatten(2, 3), *heads, added.flatten(1, 2), None)
    for k5, v5 in ((k, v), [x.expand(-1, -1, -1, 2, -1) for x in (k, v)]):
        for key, value in ((k5, v5), (k5.contiguous(), v5.contiguous())):
            out, lse = ops.memory_efficient_attention_forward_requires_grad(q, key, value, added)
            torch.testing.assert_close(out, wanted.unflatten(2, (3, 2)))
            torch.testing.assert_close(lse, wanted_lse.unflatten(1, (3, 2)))

    q = rand(2, 7, 3, 8)
    both = biases.LowerTriangularMask().add_bias(rand(2, 3, 7, 7, seed=5))
    found = ops.memory_efficient_attention(q, q, q, both, output_dtype=torch.float64)
    added = both.materialize((2, 3, 7, 7))
    torch.testing.assert_close(found.float(), expected(q, q, q, added, None)[0])
    assert found.dtype == torch.float64
    with pytest.raises(ValueError, match="query has 2 dimensions"):
        ops.memory_efficient_attention(q[0, 0], q, q)


def test_dropout_is_archflashs() -> None:
    q = rand(1, 9, 2, 8)
    torch.manual_seed(3)
    found = ops.memory_efficient_attention(q, q, q, ops.LowerTriangularMask(), p=0.5)
    torch.manual_seed(3)
    wanted = archflash.attention(q, q, q, causal=True, dropout_p=0.5, layout="bnhd")
    assert torch.equal(found, wanted)


def test_tensors_of_other_lengths_are_joined_and_split_again() -> None:
    tensors = [rand(2, 3, 2, 8), rand(1, 5, 2, 8, seed=2)]
    bias, joined = biases.BlockDiagonalMask.from_tensor_list(tensors)
    assert joined.shape == (1, 11, 2, 8)
    assert all(map(torch.equal, bias.split(joined), tensors))
    parts = bias.split(ops.memory_efficient_attention(joined, joined, joined, bias))
    for part, x in zip(parts, tensors, strict=True):
        torch.testing.assert_close(part, ops.memory_efficient_attention(x, x, x))
    causal = bias.make_causal()
    assert causal.split(joined)[0].shape == (2, 3, 2, 8)
    of_both, q, k, v = biases.BlockDiagonalMask.from_tensor_lists_qkv(
        tensors, [x[:, :2] for x in tensors], [x[:, :2] for x in tensors]
    )
    assert q.shape[1] == 11
    assert k.shape == v.shape == (1, 6, 2, 8)
    assert [x.shape[1] for x in of_both.split_kv(k)] == [2, 2]
    with pytest.raises(ValueError, match="split_queries or split_kv"):
        of_both.split(q)
    with pytest.raises(ValueError, match=r"it must be \(1, 11, "):
        of_both.split_queries(q[:, 1:])
    with pytest.raises(ValueError, match="11 rows of all sequences"):
        ops.memory_efficient_attention(q[:, 1:], k, v, of_both)
    assert ops.unbind(rand(3, 2), 0)[0].shape == (2,)
    without_heads = [x[:, :, :0] for x in tensors]
    bias, joined = biases.BlockDiagonalMask.from_tensor_list(without_heads)
    assert [x.shape for x in bias.split(joined)] == [(2, 3, 0, 8), (1, 5, 0, 8)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: biases.LocalAttentionFromBottomRightMask(-1, 0),
        lambda: of(biases.BlockDiagonalMask).make_local_attention(0),
        lambda: of(biases.BlockDiagonalMask, (1, 5, 1)).make_causal_from_bottomright(),
        lambda: of(biases.BlockDiagonalMask, (1, 5)),
        lambda: biases.BlockDiagonalPaddedKeysMask.from_seqlens([1], 3, [4], device="cpu"),
        lambda: biases.BlockDiagonalPaddedKeysMask.from_seqlens([1], 3, [2, 2], device="cpu"),
    ],
)
def test_masks_that_cannot_be(wrong: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"must|may|has"):
        wrong()


def test_the_type_of_outputs_is_a_dtype() -> None:
    q = rand(1, 3, 1, 8)
    assert ops.memory_efficient_attention(q, q, q, output_dtype=torch.half).dtype == torch.half
    with pytest.raises(TypeError, match="output_dtype is 'half'"):
        ops.memory_efficient_attention(q, q, q, output_dtype="half")  # type: ignore[arg-type]


def test_lengths_are_on_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bias = biases.BlockDiagonalMask.from_seqlens([2, 1])
    assert bias.q_seqinfo.seqstart.device.type == "cpu"


def test_a_mask_of_somebody_elses_is_refused() -> None:
    q = rand(1, 3, 1, 8)
    with pytest.raises(archflash.UnsupportedError, match="a Gappy"):
        ops.memory_efficient_attention(q, q, q, type("Gappy", (ops.AttentionBias,), {})())


def test_install_gives_the_name_unless_xformers_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.machinery.PathFinder.find_spec("xformers") is not None:
        pytest.skip("xformers is installed")
    archflash.compat.install()
    try:
        assert importlib.import_module("xformers.ops.fmha.attn_bias") is biases
        assert importlib.import_module("xformers").ops is ops
        assert importlib.metadata.version("xformers") == "0.0.35+archflash"
    finally:
        archflash.compat.uninstall()
    assert "xformers" not in sys.modules
    original = types.ModuleType("xformers")
    monkeypatch.setitem(sys.modules, "xformers", original)
    archflash.compat.install()
    try:
        assert sys.modules["xformers"] is original
        assert "xformers.ops" not in sys.modules
    finally:
        archflash.compat.uninstall()
    assert sys.modules["xformers"] is original
