"""archflash.compat.flash_attn.cute keeps FlashAttention-4's meaning of its arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash.compat
from archflash import UnsupportedError, reference
from archflash.compat.flash_attn import cute


def rand(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return rand(2, 9, 4, 8), rand(2, 12, 2, 8, seed=2), rand(2, 12, 2, 8, seed=3)


def ends(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def agrees(found: tuple[Tensor, Tensor | None], *given: Tensor, **call: Any) -> None:
    out, lse = found
    assert lse is not None
    wanted, wanted_lse = reference.attention(*given, layout="bnhd", **call)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"causal": True}, {"causal": True}),
        ({"window_size": (2, None)}, {"window": (2, None)}),
        ({"window_size": (None, -3)}, {"window": (None, 0), "q_offset": 0}),
        ({"window_size": (5, -3)}, {"window": (2, 0), "q_offset": 0}),
        ({"window_size": (-1, 4)}, {"window": (0, 3), "q_offset": 4}),
        ({"softmax_scale": 0.7, "softcap": 2.0}, {"scale": 0.7, "softcap": 2.0}),
    ],
)
def test_arguments_have_their_meaning(given: dict[str, Any], asked: dict[str, Any]) -> None:
    q, k, v = tensors()
    agrees(cute.flash_attn_func(q, k, v, return_lse=True, **given), q, k, v, **asked)
    assert cute.flash_attn_func(q, k, v, **given)[1] is None


def test_sinks_have_gradients() -> None:
    q, k, v = tensors()
    sink = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    out, _ = cute.flash_attn_func(q, k, v, learnable_sink=sink)
    (found,) = torch.autograd.grad(out.sum(), [sink])
    exact = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    wanted, _ = reference.attention(q, k, v, layout="bnhd", sinks=exact)
    (expected,) = torch.autograd.grad(wanted.sum(), [exact])
    torch.testing.assert_close(found.double(), expected, atol=1e-2, rtol=1e-2)


def test_packed_sequences() -> None:
    q, k, v = tensors()
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    lengths = {"cu_seqlens_q": ends(0, 5, 18), "cu_seqlens_k": ends(0, 14, 24)}
    found = cute.flash_attn_varlen_func(q, k, v, causal=True, return_lse=True, **lengths)
    out, lse = reference.attention(q, k, v, causal=True, **lengths)
    torch.testing.assert_close(found[0].double(), out, atol=1e-5, rtol=1e-5)
    assert found[1] is not None
    torch.testing.assert_close(found[1].double(), lse, atol=1e-5, rtol=1e-5)


def test_rows_that_count_of_sequences_of_one_size() -> None:
    q, k, v = tensors()
    found = cute.flash_attn_varlen_func(q, k, v, seqused_k=ends(12, 7), return_lse=True)
    assert found[1] is not None
    assert found[1].shape == (2, 4, 9)
    for i, count in enumerate((12, 7)):
        one = q[i : i + 1], k[i : i + 1, :count], v[i : i + 1, :count]
        agrees((found[0][i : i + 1], found[1][i : i + 1]), *one)


def test_pages() -> None:
    q, k, v = tensors()
    table = ends(3, 0, 5, 1, 2, 4).reshape(2, 3)
    pages = [torch.zeros(6, 4, 2, 8) for _ in "kv"]
    for of, x in zip(pages, (k, v), strict=True):
        of[table.flatten().long()] = x.reshape(6, 4, 2, 8)
    found = cute.flash_attn_varlen_func(
        q, *pages, page_table=table, seqused_k=ends(12, 12), causal=True, return_lse=True
    )
    agrees(found, q, k, v, causal=True)


def test_second_query_has_heads_last() -> None:
    q, qv = rand(1, 3, 4, 64), rand(1, 3, 4, 512, seed=2)
    k, v = rand(1, 6, 1, 64, seed=3), rand(1, 6, 1, 512, seed=4)
    keys = ends(0, 5, -1).expand(1, 3, 3).contiguous()
    out, lse = cute.flash_attn_func(q, k, v, qv, keys, return_lse=True)
    assert lse is not None
    rows = [0, 5]
    both = torch.cat([q, qv], -1), torch.cat([k, v], -1)[:, rows], v[:, rows]
    agrees((out, lse.transpose(1, 2)), *both, scale=1 / math.sqrt(576))


def test_parts_are_combined() -> None:
    q, k, v = tensors()
    parts = [
        cute.flash_attn_func(q, k[:, x], v[:, x], return_lse=True)
        for x in (slice(0, 5), slice(5, 12))
    ]
    outs = torch.stack([out for out, _ in parts])
    lses = torch.stack([lse.transpose(1, 2) for _, lse in parts if lse is not None])
    out, lse = cute.flash_attn_combine(outs, lses)
    assert lse is not None
    agrees((out, lse.transpose(1, 2)), q, k, v)
    packed = cute.flash_attn_combine(
        outs.flatten(1, 2), lses.flatten(1, 2), cu_seqlens=ends(0, 9, 18), return_lse=False
    )
    assert torch.equal(packed[0], out.flatten(0, 1))
    assert packed[1] is None


def test_advice_about_gradients_of_lists_is_taken() -> None:
    """4.0.0b36 has these two."""
    q, k, v = tensors()
    advice: dict[str, Any] = {"gather_bwd_recompute_p": False, "gather_bwd_token_chunk": None}
    for function in (cute.flash_attn_func, cute.flash_attn_varlen_func):
        assert torch.equal(function(q, k, v, **advice)[0], function(q, k, v)[0])


@pytest.mark.slow
def test_it_compiles_in_one_graph() -> None:
    """Without locals(), which torch.compile of torch 2.11 cannot trace."""
    q, k, v = tensors()
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    lengths = {"cu_seqlens_q": ends(0, 5, 18), "cu_seqlens_k": ends(0, 14, 24)}
    lengths |= {"max_seqlen_q": 13, "max_seqlen_k": 14}
    for call in (
        lambda: cute.flash_attn_func(q, k, v, causal=True)[0],
        lambda: cute.flash_attn_varlen_func(*packed, **lengths)[0],
    ):
        torch.compiler.reset()
        found = torch.compile(call, backend="eager", fullgraph=True)()
        torch.testing.assert_close(found, call())


def test_what_is_not_taken_is_named() -> None:
    q, k, v = tensors()
    with pytest.raises(UnsupportedError, match="mask_mod"):
        cute.flash_attn_func(q, k, v, mask_mod=lambda: None)
    with pytest.raises(UnsupportedError, match="gather_kv_indices without qv"):
        cute.flash_attn_func(q, k, v, gather_kv_indices=ends(0))
    with pytest.raises(UnsupportedError, match="flash_attn_func takes it"):
        cute.flash_attn_varlen_func(q, k, v, qv=q, gather_kv_indices=ends(0))
    with pytest.raises(UnsupportedError, match="the window is empty; None is an unbounded side"):
        cute.flash_attn_func(q, k, v, window_size=(-3, -3))
    with pytest.raises(UnsupportedError, match="window_size"):
        cute.flash_attn_varlen_func(q, k, v, window_size=(None, -3))


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ({"q": [1.0]}, TypeError, "q is .*: it must be a torch.Tensor"),
        ({"k": None}, TypeError, "k is .*None.*: it must be a torch.Tensor"),
        ({"qv": [1.0]}, TypeError, r"qv is \[1.0\]: it must be"),
        ({"learnable_sink": 1.0}, TypeError, "learnable_sink is 1.0: it must be"),
        ({"window_size": None}, TypeError, "window_size is None: it must be"),
        ({"window_size": (3,)}, TypeError, "window_size is .*: it must be"),
        ({"window_size": (1.5, None)}, TypeError, "window_size is .* each an int"),
        ({"num_splits": None}, TypeError, "num_splits is None"),
        ({"num_splits": -1}, ValueError, "num_splits is -1"),
    ],
)
def test_wrong_arguments_are_named(
    wrong: dict[str, Any], kind: type[Exception], words: str
) -> None:
    given: dict[str, Any] = dict(zip("qkv", tensors(), strict=True)) | wrong
    for function in (cute.flash_attn_func, cute.flash_attn_varlen_func):
        with pytest.raises(kind, match=words):
            function(**given)


def test_packed_tensors_without_their_ends_are_named() -> None:
    given = dict(zip("qkv", tensors(), strict=True))
    for name, x in given.items():
        of = "q" if name == "q" else "k"
        with pytest.raises(ValueError, match=rf"{name} has shape \(.*: give cu_seqlens_{of}, or"):
            cute.flash_attn_varlen_func(**given | {name: x.flatten(0, 1)})
    with pytest.raises(ValueError, match=r"qv has shape .*: give cu_seqlens_q, or"):
        cute.flash_attn_varlen_func(**given, qv=given["q"][0])
    with pytest.raises(TypeError, match=r"cu_seqlens_k is \[0, 24\]: it must be"):
        cute.flash_attn_varlen_func(**given, cu_seqlens_k=[0, 24])


def test_no_sequences() -> None:
    none = rand(0, 4, 8)
    out, _ = cute.flash_attn_varlen_func(
        none, none, none, cu_seqlens_q=ends(0), cu_seqlens_k=ends(0)
    )
    assert out.shape == (0, 4, 8)


def test_install_gives_the_name() -> None:
    archflash.compat.install()
    try:
        from flash_attn.cute.interface import flash_attn_func

        assert flash_attn_func is cute.flash_attn_func
    finally:
        archflash.compat.uninstall()
