"""archflash.compat: FlashAttention's interfaces keep their own meaning, order of arguments and
return values.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import archflash
import archflash.compat
from archflash import UnsupportedError, _gradients, reference
from archflash import _archflash as _native
from archflash.compat import _flash, _operators, flash_mla
from archflash.compat import flash_attn as fa2
from archflash.compat import flash_attn_interface as fa3
from archflash.compat.flash_attn import _private, bert_padding
from archflash.compat.flash_attn import flash_attn_interface as interface2
from archflash.compat.flash_attn.layers import rotary
from archflash.compat.flash_attn.layers.rotary import apply_rotary_emb
from archflash.compat.flash_attn.ops.triton.rotary import apply_rotary


def rand(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(nq: int = 9, nk: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    return rand(2, nq, 4, 8), rand(2, nk, 2, 8, seed=2), rand(2, nk, 2, 8, seed=3)


def ends(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def expected(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    out, lse = reference.attention(q, k, v, layout="bnhd", **call)
    return out.float(), lse.float()


# Of FlashAttention-2 and -3 alike: the arguments, and what they are called here.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (2, -1)}, {"window": (2, None)}),
    "causal-window": ({"causal": True, "window_size": (3, 4)}, {"causal": True, "window": (3, 4)}),
    "scale-softcap": ({"softmax_scale": 0.7, "softcap": 2.0}, {"scale": 0.7, "softcap": 2.0}),
    "sinks": ({"s_aux": rand(4, seed=5)}, {"sinks": rand(4, seed=5)}),
}


@pytest.mark.parametrize("rows", [(9, 7), (5, 11)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_both_interfaces_agree_with_float64(name: str, rows: tuple[int, int]) -> None:
    theirs, ours = CALLS[name]
    q, k, v = qkv(*rows)
    out, lse = expected(q, k, v, **ours)
    torch.testing.assert_close(fa2.flash_attn_func(q, k, v, **theirs), out)
    torch.testing.assert_close(fa3.flash_attn_func(q, k, v, **theirs), out)
    out2, lse2, weights = fa2.flash_attn_func(q, k, v, return_attn_probs=True, **theirs)
    out3, lse3 = fa3.flash_attn_func(q, k, v, return_attn_probs=True, **theirs)
    torch.testing.assert_close(out2, out)
    torch.testing.assert_close(out3, out)
    torch.testing.assert_close(lse2, lse.masked_fill(lse == -math.inf, math.inf))
    torch.testing.assert_close(lse3, lse)
    assert weights.numel() == 0


def test_the_order_of_arguments_is_that_of_each() -> None:
    q, k, v = qkv()
    out, _ = expected(q, k, v, scale=0.3, causal=True)
    torch.testing.assert_close(fa2.flash_attn_func(q, k, v, 0.0, 0.3, True), out)
    torch.testing.assert_close(fa3.flash_attn_func(q, k, v, 0.3, True), out)


def test_packed_tensors() -> None:
    q, k, v = qkv(7, 7)
    q2 = q[:, :, :2]
    out, _ = expected(q2, k, v, causal=True)
    together, pair = torch.stack([q2, k, v], 2), torch.stack([k, v], 2)
    torch.testing.assert_close(fa2.flash_attn_qkvpacked_func(together, causal=True), out)
    torch.testing.assert_close(fa2.flash_attn_kvpacked_func(q2, pair, 0.0, None, True), out)
    torch.testing.assert_close(fa3.flash_attn_qkvpacked_func(together, causal=True), out)
    grouped = torch.cat([q, k, v], 2)
    found = fa3.flash_attn_qkvpacked_func(grouped, num_heads_q=4)
    torch.testing.assert_close(found, expected(q, k, v)[0])
    with pytest.raises(ValueError, match="num_heads_q=None"):
        fa3.flash_attn_qkvpacked_func(grouped)


def test_packed_sequences() -> None:
    q, k, v = (rand(12, 2, 8, seed=i) for i in range(3))
    cu_q, cu_k = ends(0, 5, 5, 12), ends(0, 3, 9, 12)
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    out, lse = reference.attention(q, k, v, causal=True, **packed)
    out, lse = out.float(), lse.float()
    assert bool((lse == -math.inf).any())
    args = (cu_q, cu_k, 7, 6)
    out2, lse2, _ = fa2.flash_attn_varlen_func(q, k, v, *args, causal=True, return_attn_probs=True)
    out3, lse3 = fa3.flash_attn_varlen_func(q, k, v, *args, causal=True, return_attn_probs=True)
    torch.testing.assert_close(out2, out)
    torch.testing.assert_close(out3, out)
    torch.testing.assert_close(lse2, lse.masked_fill(lse == -math.inf, math.inf))
    torch.testing.assert_close(lse3, lse)
    pair = torch.stack([k, v], 1)
    torch.testing.assert_close(
        fa2.flash_attn_varlen_kvpacked_func(q, pair, *args, causal=True), out
    )
    alone = fa2.flash_attn_varlen_func(q, q, q, cu_q, cu_q, 7, 7, 0.0, 0.3)
    together = fa2.flash_attn_varlen_qkvpacked_func(torch.stack([q] * 3, 1), cu_q, 7, 0.0, 0.3)
    assert torch.equal(alone, together)


def test_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    fa2.flash_attn_func(q, k, v, causal=True).square().sum().backward()
    wide = [x.detach().requires_grad_() for x in (q, k, v)]
    archflash.attention(*wide, causal=True, layout="bnhd").square().sum().backward()
    for one, other in zip((q, k, v), wide, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_alibi_slopes_are_those_of_the_formula() -> None:
    q, k, v = qkv()
    slopes = torch.rand(q.shape[0], q.shape[2])
    out = fa2.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    bias = -slopes[:, :, None, None] * (distance - torch.arange(k.shape[1])).abs()
    expected = archflash.attention(q, k, v, causal=True, attn_mask=bias, layout="bnhd")
    torch.testing.assert_close(out, expected)
    packed = (x.flatten(0, 1) for x in (q, k, v))
    cu_q, cu_k = (
        torch.arange(0, x.shape[0] * x.shape[1] + 1, x.shape[1], dtype=torch.int32) for x in (q, k)
    )
    apart = fa2.flash_attn_varlen_func(
        *packed, cu_q, cu_k, q.shape[1], k.shape[1], causal=True, alibi_slopes=slopes
    )
    torch.testing.assert_close(apart, expected.flatten(0, 1))
    cached = fa2.flash_attn_with_kvcache(q, k, v, causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(cached, expected)
    table = torch.arange(k.shape[0], dtype=torch.int32)[:, None]
    paged = fa2.flash_attn_varlen_func(
        q.flatten(0, 1), k, v, cu_q, cu_k, q.shape[1], k.shape[1], causal=True,
        alibi_slopes=slopes, block_table=table,
    )  # fmt: skip
    torch.testing.assert_close(paged, expected.flatten(0, 1))


def test_a_second_query_and_chunks_and_used_lengths_without_a_cache() -> None:
    q, k, v = qkv()
    second = rand(*q.shape[:-1], v.shape[-1], seed=7)
    wide = (torch.cat([q, second], -1), torch.cat([k, v], -1), v)
    scale = 1 / math.sqrt(wide[0].shape[-1])
    call: dict[str, Any] = {"causal": True, "scale": scale}
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, qv=second, return_attn_probs=True)
    want, want_lse = expected(*wide, **call)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    # Both sequences are packed now. Of the second only 4 keys count, in chunks of 3.
    used = ends(7, 4)
    packed = fa3.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), ends(0, 9, 18), ends(0, 7, 14), 9, 7, causal=True,
        qv=second.flatten(0, 1), seqused_k=used, attention_chunk=3,
    )  # fmt: skip
    for number, count in enumerate(used.tolist()):
        one = [x[number : number + 1, : count if i else None] for i, x in enumerate(wide)]
        places = torch.arange(count - 9, count)[:, None] // 3
        chunk = places == torch.arange(count) // 3
        (want, _) = expected(*one, **call, attn_mask=chunk)
        torch.testing.assert_close(packed[9 * number : 9 * number + 9], want[0])


def test_gradients_of_packed_keys_that_do_not_count_are_zero() -> None:
    q, k, v = (
        rand(n, heads, 8, seed=n).requires_grad_() for n, heads in ((20, 4), (16, 2), (15, 2))
    )
    v = torch.cat([v, torch.full((1, 2, 8), math.nan)])  # the last key does not count
    cu_q, cu_k = ends(0, 6, 6, 20), ends(0, 5, 9, 16)
    lengths = (5, 0, 6)
    out = fa3.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 14, 7, seqused_k=ends(*lengths), causal=True
    )
    parts = []
    for rows, first, count in ((slice(0, 6), 0, 5), (slice(6, 20), 9, 6)):
        keys = slice(first, first + count)
        parts.append(fa3.flash_attn_func(q[None, rows], k[None, keys], v[None, keys], causal=True))
    want = torch.cat(parts, 1)[0]
    torch.testing.assert_close(out, want)
    grad = rand(*out.shape, seed=3)
    found, expected = (torch.autograd.grad(x, (q, k), grad) for x in (out, want))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_calls_without_a_backward_say_so_where_it_is_asked_for() -> None:
    q, k, v = qkv()
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    ends_q, ends_k = ends(0, 9, 18), ends(0, 7, 14)
    second = rand(*q.shape[:-1], v.shape[-1], seed=7)

    def with_qv(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fa3.flash_attn_func(q, k, v, qv=second, return_attn_probs=True)[0]

    def with_chunks(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fa3.flash_attn_varlen_func(q, k, v, ends_q, ends_k, 9, 7, attention_chunk=3)

    for name, function, given in (("qv", with_qv, (q, k, v)), ("chunk", with_chunks, packed)):
        want = function(*given)
        out = function(*(x.clone().requires_grad_() for x in given))
        torch.testing.assert_close(out, want)
        with pytest.raises(UnsupportedError, match=name):
            out.sum().backward()


@pytest.mark.parametrize("second", [False, True], ids=["", "qv"])
def test_rows_of_a_packed_query_that_do_not_count(second: bool) -> None:
    """Each sequence is as if it had the rows alone that count, and the others see nothing."""
    q, k, v = (rand(n, heads, 8, seed=n) for n, heads in ((20, 4), (16, 2), (16, 2)))
    qv = rand(20, 4, 8, seed=9) if second else None
    cu_q, cu_k, used = ends(0, 6, 6, 17), ends(0, 5, 9, 16), ends(4, 3, 9)  # used of 0 rows: 0
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 11, 7, seqused_q=used, causal=True, qv=qv, return_attn_probs=True
    )
    only_out = fa3.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 11, 7, seqused_q=used, causal=True, qv=qv
    )
    torch.testing.assert_close(only_out, out)
    seen = torch.zeros(20, dtype=torch.bool)
    for first, count, keys in ((0, 4, slice(0, 5)), (6, 9, slice(9, 16))):
        rows = slice(first, first + count)
        seen[rows] = True
        one = (q if qv is None else torch.cat([q, qv], -1))[None, rows]
        key = (k if qv is None else torch.cat([k, v], -1))[None, keys]
        want, want_lse = expected(one, key, v[None, keys], causal=True)
        torch.testing.assert_close(out[rows], want[0])
        torch.testing.assert_close(lse[:, rows], want_lse[0])
    assert not out[~seen].any()
    assert bool((lse[:, ~seen] == -math.inf).all())


def test_gradients_of_the_rows_that_count() -> None:
    q, k, v = (rand(n, 2, 8, seed=n).requires_grad_() for n in (9, 7, 8))
    v = v[:7]
    used = fa3.flash_attn_varlen_func(q, k, v, ends(0, 9), ends(0, 7), 9, 7, ends(5), causal=True)
    want = fa3.flash_attn_varlen_func(q[:5], k, v, ends(0, 5), ends(0, 7), 5, 7, causal=True)
    weights = rand(9, 2, 8, seed=4)
    mine = torch.autograd.grad((used * weights).sum(), (q, k))
    theirs = torch.autograd.grad((want * weights[:5]).sum(), (q, k))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rotary", [False, True], ids=["", "rotary"])
@pytest.mark.parametrize("pages", [False, True], ids=["", "pages"])
def test_packed_new_rows_are_appended(pages: bool, rotary: bool) -> None:
    """As in one call for each sequence, whose new rows are not packed."""
    lengths, new_rows, rows = [3, 0, 6], [2, 0, 3], [4, 1, 3]
    cu_q, cu_new = ends(0, 4, 5, 8), ends(0, 2, 2, 5)
    q, k, v = (rand(8, 4, 8), rand(6, 2, 8, seed=2), rand(6, 2, 8, seed=3))
    k_cache, v_cache = rand(3, 12, 2, 8, seed=4), rand(3, 12, 2, 8, seed=5)
    table = torch.tensor([[4, 0, 8], [1, 5, 2], [3, 7, 6]], dtype=torch.int32)

    def paged(cache: Tensor) -> Tensor:
        if not pages:
            return cache.clone()
        by_page = cache.view(9, 4, 2, 8)
        return torch.empty_like(by_page).index_copy_(0, table.long().flatten(), by_page)

    turns = {"rotary_cos": rand(20, 2, seed=6), "rotary_sin": rand(20, 2, seed=7)}
    call: dict[str, Any] = {"causal": True, **(turns if rotary else {})}
    mine = (paged(k_cache), paged(v_cache))
    out = fa3.flash_attn_with_kvcache(
        q, *mine, k, v, cache_seqlens=ends(*lengths), cu_seqlens_q=cu_q, max_seqlen_q=4,
        cu_seqlens_k_new=cu_new, page_table=table if pages else None, **call,
    )  # fmt: skip
    for number, (length, count, nq) in enumerate(zip(lengths, new_rows, rows, strict=True)):
        new = slice(int(cu_new[number]), int(cu_new[number]) + count)
        caches = [x[number : number + 1] for x in (k_cache, v_cache)]
        of_q = slice(int(cu_q[number]), int(cu_q[number]) + nq)
        want = fa3.flash_attn_with_kvcache(
            q[None, of_q], *caches, k[None, new], v[None, new], cache_seqlens=length, **call
        )
        torch.testing.assert_close(out[of_q], want[0])
    for after, want in zip(mine, (k_cache, v_cache), strict=True):  # written by the calls above
        torch.testing.assert_close(after, paged(want))
    with pytest.raises(ValueError, match="k is given without cache_seqlens"):
        fa3.flash_attn_with_kvcache(q, *mine, k, v, cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_new)


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (fa2.flash_attn_varlen_func, {"dropout_p": 0.1, "block_table": torch.zeros(1)}),
        (fa2.flash_attn_func, {"deterministic": True}),
        (fa3.flash_attn_func, {"sm_margin": 8}),
        (fa3.flash_attn_with_kvcache, {"sm_margin": 8}),
    ],
)
def test_what_is_not_taken_is_named(function: Any, argument: dict[str, Any]) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    packed = (ends(0, 1), ends(0, 1), 1, 1) if "varlen" in function.__name__ else ()
    if packed:
        q, k, v = (x[0] for x in (q, k, v))
    with pytest.raises(UnsupportedError, match=next(iter(argument))):
        function(q, k, v, *packed, **argument)


def test_deterministic_is_taken_where_no_gradients_are_needed() -> None:
    q, k, v = qkv()
    assert fa2.flash_attn_func(q, k, v, deterministic=True).shape == q.shape


def test_compiled_deterministic_gradients_ask_for_pytorchs_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    q, k, v = (x.requires_grad_() for x in qkv())
    with pytest.raises(UnsupportedError, match="use_deterministic_algorithms"):
        fa2.flash_attn_func(q, k, v, deterministic=True)


@pytest.mark.slow
def test_deterministic_gradients_are_those_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without force(), too; on the CPU it takes the simulator."""
    asked, backward = [], _native.recorded_backward

    def noting(*given: Any) -> Any:
        asked.append(given[5])
        return backward(*given)

    monkeypatch.setattr(_native, "recorded_backward", noting)
    q, k, v = (rand(1, 5, 2, 16, seed=i).half() for i in range(3))

    def gradients(deterministic: bool) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = fa2.flash_attn_func(*leaves, causal=True, deterministic=deterministic)
        return torch.autograd.grad(out.float().square().sum(), leaves)

    expected = gradients(False)
    with archflash.force("ampere"):
        found = gradients(True)
    assert asked[-1] is True
    assert not _gradients.wants_deterministic()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)
    with (
        archflash.force("ada"),  # it has no backward
        pytest.raises(UnsupportedError, match="deterministic"),
    ):
        gradients(True)


def test_deterministic_gradients_pass_over_kernels_that_the_build_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    targets = _native.targets
    monkeypatch.setattr(_native, "targets", lambda name: targets(name) if name != "hopper" else [])
    monkeypatch.setattr(
        _flash, "attention", lambda q, k, v, implementation, **_: asked.append(implementation) or q
    )
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    assert _flash._deterministic(on_gpu, on_gpu, on_gpu) is on_gpu
    assert asked == ["ampere"]
    capability[0] = (10, 0)  # here blackwell_dc has never run, and comes first when it is asked for
    assert _flash._deterministic(on_gpu, on_gpu, on_gpu) is on_gpu
    assert asked == ["ampere", "ampere"]
    monkeypatch.setenv("ARCHFLASH_UNPROVED", "1")
    assert _flash._deterministic(on_gpu, on_gpu, on_gpu) is on_gpu
    assert asked[2] == "blackwell_dc"


@pytest.mark.parametrize("rows", [(9, 7), (5, 11), (6, 6)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_see_their_own_chunk(rows: tuple[int, int], causal: bool) -> None:
    q, k, v = qkv(*rows)
    nq, nk = rows
    position, key = torch.arange(nk - nq, nk)[:, None], torch.arange(nk)
    seen = (position.div(3, rounding_mode="floor") == key // 3) & ((key <= position) | (not causal))
    out, lse = fa3.flash_attn_func(
        q, k, v, causal=causal, attention_chunk=3, return_attn_probs=True
    )
    right, right_lse = expected(q, k, v, attn_mask=seen)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, right_lse)


def test_a_window_may_be_a_tensor() -> None:
    q, k, v = qkv()
    window = torch.tensor([2, -1])
    for module in (fa2, fa3):
        out = module.flash_attn_func(q, k, v, window_size=window)
        assert torch.equal(out, module.flash_attn_func(q, k, v, window_size=(2, -1)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", ["padding", "positions", "packed", "packed padding"])
def test_rotary_positions_count_from_the_first_row_of_the_cache(case: str, causal: bool) -> None:
    """Padding included; or from where rotary_seqlens says."""
    q, k_new, v_new = rand(2, 3, 4, 8), rand(2, 3, 2, 8, seed=2), rand(2, 3, 2, 8, seed=3)
    angle = rand(32, 3, seed=4)
    cos, sin = angle.cos(), angle.sin()
    lengths, padding, starts = ends(5, 9), ends(2, 4), ends(1, 6)
    caches = [rand(2, 16, 2, 8, seed=i) for i in (5, 6)]
    call: dict[str, Any] = {"cache_seqlens": lengths, "causal": causal}
    if "padding" in case:
        call["cache_leftpad"], first = padding, lengths
    else:
        first = starts
    turned_k = apply_rotary_emb(k_new, cos, sin, seqlen_offsets=first)
    if causal:
        turned_q = apply_rotary_emb(q, cos, sin, seqlen_offsets=first)
    else:
        turned_q = torch.cat(
            [apply_rotary_emb(row, cos, sin, seqlen_offsets=first) for row in q.split(1, 1)], 1
        )
    expected_caches = [x.clone() for x in caches]
    expected = fa3.flash_attn_with_kvcache(turned_q, *expected_caches, turned_k, v_new, **call)
    if "padding" not in case:
        call["rotary_seqlens"] = starts
    if "packed" in case:
        call["cu_seqlens_q"], call["max_seqlen_q"] = ends(0, 3, 6), 3
        q = q.flatten(0, 1)
    out = fa3.flash_attn_with_kvcache(
        q, *caches, k_new, v_new, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False, **call
    )
    torch.testing.assert_close(out.view(expected.shape), expected)
    for one, other in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(one, other)
    if case == "padding":
        again = [rand(2, 16, 2, 8, seed=i) for i in (5, 6)]
        found = fa2.flash_attn_with_kvcache(
            q, *again, k_new, v_new, cos, sin, rotary_interleaved=False, **call
        )
        torch.testing.assert_close(found, expected)


def test_shares_of_the_keys_are_combined() -> None:
    q, k, v = qkv()
    whole, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    parts = [
        fa3.flash_attn_func(q, k[:, part], v[:, part], return_attn_probs=True)
        for part in (slice(0, 3), slice(3, 7))
    ]
    empty = (torch.full_like(whole, math.nan), torch.full_like(lse, -math.inf))
    outs, lses = zip(*parts, empty, strict=True)
    lses = torch.stack(lses).transpose(2, 3)
    found, found_lse = fa3.flash_attn_combine(torch.stack(outs), lses)
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(found_lse.transpose(1, 2), lse)
    nothing, nothing_lse = fa3.flash_attn_combine(torch.stack([empty[0]]), lses[2:])
    assert bool((nothing == 0).all())
    assert bool((nothing_lse == -math.inf).all())


def test_flash_attention_3_has_qv_and_chunks() -> None:
    q, k, v = rand(2, 2, 4, 8), rand(2, 9, 1, 8), rand(2, 9, 1, 24, seed=1)
    qv, lengths = rand(2, 2, 4, 24, seed=2), ends(7, 9)
    out = fa3.flash_attn_with_kvcache(
        q, k, v, qv=qv, cache_seqlens=lengths, attention_chunk=5, causal=True
    )
    same = archflash.attention_with_kvcache(
        q, k, v, qv=qv, cache_seqlens=lengths, attention_chunk=5, causal=True
    )
    assert torch.equal(out, same)
    for options in ({"qv": qv}, {"attention_chunk": 5}, {}):
        other = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **options)
        assert not torch.allclose(out, other, atol=1e-3)


def test_flash_mla_reads_a_latent_cache() -> None:
    q, pages = rand(2, 2, 4, 24), rand(3, 8, 1, 24)
    table = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)
    lengths = torch.tensor([10, 5], dtype=torch.int32)
    metadata = flash_mla.get_mla_metadata(lengths, 8, 1)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, pages, table, lengths, 16, *metadata, causal=True
    )
    for number, length in enumerate(lengths.tolist()):
        rows = pages[table[number].long()].flatten(0, 1)[None, :length]
        want, want_lse = archflash.attention(
            q[number][None], rows, rows[..., :16], causal=True, layout="bnhd", return_lse=True
        )
        torch.testing.assert_close(out[number], want[0])
        torch.testing.assert_close(lse[number], want_lse[0])
    with pytest.raises(UnsupportedError, match="topk_length"):
        flash_mla.flash_mla_with_kvcache(q, pages, table, lengths, 16, topk_length=lengths)


@pytest.mark.parametrize("interface", [fa2, fa3], ids=["2", "3"])
def test_a_cache_is_appended_to_and_read(interface: Any) -> None:
    q, new = rand(2, 2, 4, 8), rand(2, 2, 2, 8, seed=4)
    caches = [rand(3, 10, 2, 8, seed=i) for i in (5, 6)]
    lengths, rows = ends(5, 0), ends(2, 1)
    angles = rand(10, 4, seed=7)
    k, v = (x.clone() for x in caches)
    out, lse = interface.flash_attn_with_kvcache(
        q, k, v, new, new, rotary_cos=angles.cos(), rotary_sin=angles.sin(),
        cache_seqlens=lengths, cache_batch_idx=rows, causal=True, window_size=(3, -1),
        softmax_scale=0.4, return_softmax_lse=True,
    )  # fmt: skip
    rotary = {"cos": angles.cos(), "sin": angles.sin(), "interleaved": True}
    turned_q, turned_k = (apply_rotary_emb(x, seqlen_offsets=lengths, **rotary) for x in (q, new))
    for b, (length, row) in enumerate(zip(lengths.tolist(), rows.tolist(), strict=True)):
        assert torch.equal(v[row, length : length + 2], new[b])
        torch.testing.assert_close(k[row, length : length + 2], turned_k[b])
        keys, values = (x[row, : length + 2][None] for x in (k, v))
        call = {"causal": True, "window": (3, None), "scale": 0.4}
        expected_out, expected_lse = expected(turned_q[b][None], keys, values, **call)
        torch.testing.assert_close(out[b][None], expected_out)
        torch.testing.assert_close(lse[b][None], expected_lse)
    assert torch.equal(k[0], caches[0][0])


@pytest.mark.parametrize("interface", [fa2, fa3], ids=["2", "3"])
def test_lengths_of_a_cache_by_default_and_as_a_number(interface: Any) -> None:
    q, k, v = rand(2, 1, 4, 8), rand(2, 10, 2, 8, seed=2), rand(2, 10, 2, 8, seed=3)
    full = interface.flash_attn_with_kvcache(q, k, v)
    torch.testing.assert_close(full, expected(q, k, v)[0])
    some = interface.flash_attn_with_kvcache(q, k, v, cache_seqlens=4)
    torch.testing.assert_close(some, expected(q, k[:, :4], v[:, :4])[0])
    _, lse = interface.flash_attn_with_kvcache(q, k, v, cache_seqlens=0, return_softmax_lse=True)
    assert bool((lse == (math.inf if interface is fa2 else -math.inf)).all())
    with pytest.raises(ValueError, match="k is given without cache_seqlens"):
        interface.flash_attn_with_kvcache(q, k, v, k[:, :1], v[:, :1])


def test_pages_of_a_cache() -> None:
    q, pages = rand(7, 4, 8), [rand(6, 3, 2, 8, seed=i) for i in (2, 3)]
    table, cu_q, cu_k = ends(4, 0, 5, 2).view(2, 2), ends(0, 3, 7), ends(0, 5, 9)
    whole = [x[table.long()].flatten(1, 2) for x in pages]  # (sequences, 6 rows, heads, d)
    k, v = (torch.cat([x[0, :5], x[1, :4]]) for x in whole)
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True}
    expected_out, expected_lse = (x.float() for x in reference.attention(q, k, v, **packed))
    out, lse, _ = fa2.flash_attn_varlen_func(
        q, *pages, cu_q, cu_k, 4, 5, causal=True, block_table=table, return_attn_probs=True
    )
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    out = fa3.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=cu_k.diff(), page_table=table, cu_seqlens_q=cu_q, max_seqlen_q=4,
        causal=True,
    )  # fmt: skip
    torch.testing.assert_close(out, expected_out)
    longer, rows = torch.cat([ends(1, 1, 3, 3).view(2, 2), table.flip(0)]), ends(3, 2)
    out = fa3.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=cu_k.diff(), page_table=longer, cache_batch_idx=rows,
        cu_seqlens_q=cu_q, max_seqlen_q=4, causal=True,
    )  # fmt: skip
    torch.testing.assert_close(out, expected_out)


def test_padding_and_back() -> None:
    x = rand(3, 5, 2)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 0]])
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    rows, indices, cu, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 2, 11, 12, 13]
    assert cu.tolist() == [0, 3, 3, 6]
    assert (cu.dtype, longest, used.tolist()) == (torch.int32, 3, [2, 0, 3])
    back = bert_padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(back, x * (mask + unused)[..., None])
    assert torch.equal(bert_padding.index_first_axis(x.flatten(0, 1), indices), rows)
    flags = (mask + unused).flatten().bool()
    assert torch.equal(bert_padding.pad_input(rows, flags, 3, 5), back)
    for wrong in (flags[1:], flags.logical_not()):
        with pytest.raises(ValueError, match=r"torch\.bool \(15,\), True for each"):
            bert_padding.pad_input(rows, wrong, 3, 5)
    for batch, wrong in ((2, indices), (3, indices - 16), (3, indices.int() + 2)):
        with pytest.raises(ValueError, match=rf"must be below batch \* seqlen = {batch * 5}"):
            bert_padding.pad_input(rows, wrong, batch, 5)
    with pytest.raises(ValueError, match="must be below first_axis_dim = 13"):
        bert_padding.index_put_first_axis(rows, indices, 13)
    with pytest.raises(ValueError, match="from 0 to 13: they must be below the rows of x = 6"):
        bert_padding.index_first_axis(rows, indices)
    with pytest.raises(ValueError, match="attention_mask counts 11 rows and keeps 6"):
        bert_padding.unpad_input(x, 2 * mask, unused)
    with pytest.raises(ValueError, match="attention_mask_in_length counts 10 rows and keeps 9"):
        bert_padding.unpad_input_for_concatenated_sequences(x, 2 * mask)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_rotary_turns_pairs_of_channels(interleaved: bool, inplace: bool) -> None:
    x = rand(2, 5, 3, 10)
    angles = rand(6, 4, seed=2)
    offsets = ends(0, 3)
    expected = x.clone()
    for b, offset in enumerate(offsets.tolist()):
        for row in range(min(5, 6 - offset)):  # beyond the last position rows stay as they are
            turned = x[b, row, :, :8]
            pairs = turned.unflatten(-1, (4, 2)) if interleaved else turned.unflatten(-1, (2, 4)).mT
            result = torch.view_as_real(
                torch.view_as_complex(pairs.contiguous())
                * torch.polar(torch.ones(4), angles[offset + row])
            )
            result = result if interleaved else result.mT
            expected[b, row, :, :8] = result.flatten(-2)
    given = x.clone()
    call = {"interleaved": interleaved, "inplace": inplace}
    found = apply_rotary_emb(given, angles.cos(), angles.sin(), seqlen_offsets=offsets, **call)
    torch.testing.assert_close(found, expected)
    assert torch.equal(given, found if inplace else x)
    packed = torch.cat([x[0, :4], x[1, :3], x[0, 4:]])  # the last row belongs to no sequence
    found = apply_rotary_emb(
        packed, angles.cos(), angles.sin(), seqlen_offsets=offsets, cu_seqlens=ends(0, 4, 7), **call
    )
    torch.testing.assert_close(found, torch.cat([expected[0, :4], expected[1, :3], x[0, 4:]]))
    with pytest.raises(ValueError, match="make cos longer"):
        apply_rotary_emb(x, angles.cos()[:4], angles.sin()[:4])


def test_install_gives_the_names_and_takes_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.split(".")[0] in ("flash_attn", "flash_attn_interface"):
            monkeypatch.delitem(sys.modules, name)
    archflash.compat.install()
    archflash.compat.install()
    assert importlib.import_module("flash_attn").flash_attn_func is fa2.flash_attn_func
    for name in ("bert_padding", "layers.rotary", "flash_attn_interface"):
        assert importlib.import_module(f"flash_attn.{name}").__name__.startswith("archflash")
    assert importlib.import_module("flash_attn_interface") is fa3
    archflash.compat.uninstall()
    assert "flash_attn" not in sys.modules

    another = type(sys)("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", another)
    with pytest.raises(RuntimeError, match=r"flash_attn was imported before"):
        archflash.compat.install()
    assert sys.modules["flash_attn"] is another
    archflash.compat.install(replace=True)
    assert sys.modules["flash_attn"] is fa2
    archflash.compat.uninstall()
    assert sys.modules["flash_attn"] is another


def test_installed_names_have_the_distributions_of_the_originals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As transformers and diffusers look for them, by a module's name or a distribution's."""
    # transformers asks for all distributions once, and keeps a table or the answer.
    kept = functools.cache(importlib.metadata.packages_distributions)
    available = functools.cache(lambda: importlib.util.find_spec("flash_attn") is not None)
    asked_before = SimpleNamespace(
        PACKAGE_DISTRIBUTION_MAPPING={"torch": ["torch"]}, _package_distribution_mapping=kept,
        is_flash_attn_2_available=available,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "transformers.utils.import_utils", asked_before)
    before = kept()
    there_before = available()
    originals = {
        "flash-attn": "flash_attn", "flash-attn-4": "flash_attn", "flash_attn_3": "flash_attn_3",
        "flash-attn-3": "flash_attn_interface", "flash_mla": "flash_mla",
        "sageattention": "sageattention",
    }  # fmt: skip
    archflash.compat.install(replace=True)
    try:
        for distribution, name in originals.items():
            normal = distribution.replace("-", "_")
            assert normal in kept()[name]
            assert normal in asked_before.PACKAGE_DISTRIBUTION_MAPPING[name]
            assert importlib.util.find_spec(name) is not None
            assert importlib.metadata.version(distribution)
        assert importlib.import_module("flash_attn_3.flash_attn_interface") is fa3
        assert importlib.metadata.version("flash_attn").startswith(fa2.__version__)
        assert importlib.metadata.version("archflash") == archflash.__version__
        assert available()
    finally:
        archflash.compat.uninstall()
    assert available() == there_before
    assert asked_before.PACKAGE_DISTRIBUTION_MAPPING == {"torch": ["torch"]}
    assert kept() == before


def test_an_install_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"flash_attn_3": {"fwd(NoType q) -> Tensor": lambda q: q}}
    monkeypatch.setattr(_operators, "OPERATORS", _operators.OPERATORS | wrong)
    before = dict(sys.modules), list(sys.meta_path)
    with pytest.raises(RuntimeError, match="NoType"):
        archflash.compat.install()
    assert (dict(sys.modules), list(sys.meta_path)) == before
    assert not hasattr(torch.ops.flash_attn, "_flash_attn_forward")
    monkeypatch.undo()
    archflash.compat.install()  # and the next one works
    assert hasattr(torch.ops.flash_attn, "_flash_attn_forward")
    archflash.compat.uninstall()


# --- numbers that are tensors or numpy's ---

NUMBERS = {
    "softmax_scale": (torch.tensor(0.3), np.float32(0.25), np.float64(0.3), torch.tensor([0.3])),
    "causal": (np.bool_(True), torch.tensor(True), 1, np.bool_(False), 0),
    "window_size": ((np.int64(2), np.int32(-1)), np.array([1, 2]), (torch.tensor(2), 0), [2, 1]),
    "softcap": (torch.tensor(2.0), np.float32(2), torch.tensor(0.0), np.float64(0), 3),
    "deterministic": (np.bool_(False), torch.tensor(False)),
}


def as_plain(value: Any) -> Any:
    if isinstance(value, (tuple, list, np.ndarray)):
        return tuple(int(side) for side in value)
    return value if isinstance(value, int) else value.item()


@pytest.mark.parametrize("interface", [fa2, fa3], ids=["2", "3"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_be_tensors_or_numpys(name: str, interface: Any) -> None:
    q, k, v = qkv()
    packed = (ends(0, 9), ends(0, 7), torch.tensor(9), np.int64(7))
    for value in NUMBERS[name]:
        same = as_plain(value)
        given, meant = {name: value}, {name: bool(same) if name == "causal" else same}
        found = interface.flash_attn_func(q, k, v, **given)
        assert torch.equal(found, interface.flash_attn_func(q, k, v, **meant))
        of_packed = interface.flash_attn_varlen_func(q[0], k[0], v[0], *packed, **given)
        torch.testing.assert_close(of_packed, found[0])
        if name != "deterministic":
            cached = interface.flash_attn_with_kvcache(q, k, v, **given, num_splits=np.int64(0))
            torch.testing.assert_close(cached, found)


def test_other_numbers_may_be_tensors_or_numpys() -> None:
    q, k, v = qkv()
    for ask in (np.bool_(True), torch.tensor(True), 1):
        assert len(fa2.flash_attn_func(q, k, v, return_attn_probs=ask)) == 3
        assert len(fa3.flash_attn_func(q, k, v, return_attn_probs=ask)) == 2
        assert len(fa3.flash_attn_with_kvcache(q, k, v, return_softmax_lse=ask)) == 2
    for size in (np.int64(3), torch.tensor(3)):
        chunked = fa3.flash_attn_func(q, k, v, attention_chunk=size, sm_margin=torch.tensor(0))
        assert torch.equal(chunked, fa3.flash_attn_func(q, k, v, attention_chunk=3))
    for share in (np.float32(0.25), torch.tensor(0.25), np.float64(0.25)):
        torch.manual_seed(0)
        dropped = fa2.flash_attn_func(q, k, v, share)
        torch.manual_seed(0)
        assert torch.equal(dropped, fa2.flash_attn_func(q, k, v, 0.25))
    q, pages = torch.randn(2, 3, 4, 24), torch.randn(3, 8, 1, 24)
    given = (q, pages, torch.tensor([[2, 0], [1, 1]]).int(), torch.tensor([10, 5]).int(), 16)
    out, _ = flash_mla.flash_mla_with_kvcache(
        *given, softmax_scale=torch.tensor(0.2), causal=np.bool_(True)
    )
    assert torch.equal(
        out, flash_mla.flash_mla_with_kvcache(*given, softmax_scale=0.2, causal=True)[0]
    )


def test_what_is_no_number_is_still_refused() -> None:
    q, k, v = qkv()
    for given in ({"causal": "yes"}, {"causal": torch.ones(2)}, {"softmax_scale": torch.ones(2)}):
        with pytest.raises(TypeError, match=r"causal|scale"):
            fa2.flash_attn_func(q, k, v, **given)


# --- merging ---


@pytest.mark.parametrize("interface", [fa2, fa3], ids=["2", "3"])
def test_parts_merge_whose_rows_see_no_key(interface: Any) -> None:
    """By merge_attention and by flash_attn_combine, with either infinity for a row without keys."""
    q, k, v = qkv(12, 20)
    # With causal a row sees no key of a block that has fewer keys than rows stand behind it.
    parts = [
        interface.flash_attn_func(
            q, k[:, block], v[:, block], causal=True, return_attn_probs=True
        )[:2]
        for block in (slice(0, 3), slice(3, 8), slice(8, 20))
    ]  # fmt: skip
    outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
    assert [int(lse[0, 0].isinf().sum()) for lse in lses] == [9, 7, 0]
    exact = torch.stack([x.double().masked_fill(x.isinf(), -math.inf) for x in lses])
    shares = (exact - exact.logsumexp(0)).exp().transpose(-1, -2)[..., None]
    expected_out = (shares * torch.stack(outs).double()).sum(0)
    out, lse = archflash.merge_attention(outs, lses, layout="bnhd")
    combined, combined_lse = fa3.flash_attn_combine(
        torch.stack(outs), torch.stack(lses).transpose(-1, -2)
    )
    torch.testing.assert_close(combined, out)
    torch.testing.assert_close(combined_lse.transpose(-1, -2), lse)
    torch.testing.assert_close(out.double(), expected_out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), exact.logsumexp(0), atol=1e-6, rtol=1e-6)


def test_blocks_of_keys_in_a_ring_give_the_whole_attention() -> None:
    """Forward and backward pass block by block, with flash-attn's functions for one pass."""
    q, k, v = rand(2, 12, 4, 8), rand(2, 12, 2, 8, seed=2), rand(2, 12, 2, 8, seed=3)
    dout = rand(2, 12, 4, 8, seed=4)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole, whole_lse = archflash.attention(*leaves, layout="bnhd", return_lse=True)
    expected_gradients = torch.autograd.grad(whole, leaves, dout)
    formula = (0.0, 8**-0.5, False, -1, -1, 0.0, None)
    out = lse = None
    for block in (slice(0, 4), slice(4, 12)):
        found, of_block, empty, state = interface2._flash_attn_forward(
            q, k[:, block], v[:, block], *formula, False
        )
        assert (empty.shape, state.shape, state.dtype) == ((0,), (2,), torch.int64)
        column = of_block.transpose(-1, -2)[..., None]
        if out is None or lse is None:
            out, lse = found, column
        else:  # the update of ring attention
            out = out - torch.sigmoid(column - lse) * (out - found)
            lse = lse - torch.nn.functional.logsigmoid(lse - column)
    assert out is not None
    assert lse is not None
    torch.testing.assert_close(out, whole.detach())
    lse = lse[..., 0].transpose(-1, -2).contiguous()
    torch.testing.assert_close(lse, whole_lse.detach())
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    for block in (slice(0, 4), slice(4, 12)):
        of_block = torch.empty_like(q)
        sums = interface2._flash_attn_backward(
            dout, q, k[:, block], v[:, block], out, lse, of_block, dk[:, block], dv[:, block],
            *formula, False,
        )  # fmt: skip
        dq += of_block
        assert sums.shape == (2, 4, 128)
        torch.testing.assert_close(sums[..., :12], (dout * out).sum(-1).transpose(-1, -2))
    for found, right in zip((dq, dk, dv), expected_gradients, strict=True):
        torch.testing.assert_close(found, right, atol=2e-5, rtol=1e-4)


# --- one pass each, by the functions below the interfaces ---


def by_autograd(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = archflash.attention(*leaves, return_lse=True, **options)
    return (out.detach(), lse.detach()), torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("packed", [False, True])
def test_one_pass_each_of_flash_attention_2(packed: bool, sign: int) -> None:
    """Rows that see no key may come back with either infinity."""
    q, k, v = qkv(12, 5)  # causal: the first seven rows see no key
    dout = torch.randn_like(q)
    formula = (0.0, 0.4, True, 3, -1, 2.0, None)
    options: dict[str, Any] = {
        "scale": 0.4, "causal": True, "window": (3, None), "softcap": 2.0, "layout": "bnhd",
    }  # fmt: skip
    lengths: tuple[Any, ...] = ()
    forward, backward = interface2._flash_attn_forward, interface2._flash_attn_backward
    if packed:
        q, k, v, dout = (x.flatten(0, 1) for x in (q, k, v, dout))
        lengths = (ends(0, 12, 24), ends(0, 5, 10), 12, 5)
        options |= {"cu_seqlens_q": lengths[0], "cu_seqlens_k": lengths[1]}
        forward = interface2._flash_attn_varlen_forward
        backward = interface2._flash_attn_varlen_backward
    (right, right_lse), gradients = by_autograd(q, k, v, dout, **options)
    out, lse, *_ = forward(q, k, v, *lengths, *formula, False)
    torch.testing.assert_close(out, right)
    assert bool((lse == math.inf).any())
    torch.testing.assert_close(lse, right_lse.masked_fill(right_lse == -math.inf, math.inf))
    lse = lse.masked_fill(lse == math.inf, sign * math.inf)
    found = [torch.full_like(x, math.nan) for x in (q, k, v)]
    sums = backward(dout, q, k, v, out, lse, *found, *lengths, *formula, False)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert sums.dtype == torch.float32
    assert sums.shape == ((4, 24 + 2 * 128) if packed else (2, 4, 128))
    rows = (dout * out).sum(-1).transpose(-1, -2)
    if packed:  # the second sequence begins 128 rows later
        torch.testing.assert_close(sums[:, 12 + 128 : 24 + 128], rows[:, 12:])
    torch.testing.assert_close(sums[..., :12], rows[..., :12])


def test_dropout_of_one_pass_is_that_of_the_other() -> None:
    q, k, v = qkv()
    dout = torch.randn_like(q)
    formula = (0.3, 0.4, False, -1, -1, 0.0, None)
    torch.manual_seed(3)
    out, lse, _, state = interface2._flash_attn_forward(q, k, v, *formula, False)
    options = {"scale": 0.4, "layout": "bnhd", "dropout_p": 0.3, "rng_state": state}
    (right, _), gradients = by_autograd(q, k, v, dout, **options)
    torch.testing.assert_close(out, right)
    found = [torch.empty_like(x) for x in (q, k, v)]
    interface2._flash_attn_backward(dout, q, k, v, out, lse, *found, *formula, False, state)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match="dropout_p without rng_state"):
        interface2._flash_attn_backward(dout, q, k, v, out, lse, *found, *formula, False)


def test_pages_and_used_keys_of_one_pass() -> None:
    q, pages = rand(2, 4, 8), (rand(6, 4, 2, 8, seed=2), rand(6, 4, 2, 8, seed=3))
    table, lengths = torch.tensor([[5, 0], [3, 1]]).int(), ends(7, 3)
    k, v = (
        torch.cat([x[row].flatten(0, 1)[:n] for row, n in zip(table, lengths, strict=True)])
        for x in pages
    )
    right, _ = archflash.attention(
        q, k, v, cu_seqlens_q=ends(0, 1, 2), cu_seqlens_k=ends(0, 7, 10), return_lse=True
    )
    common = (ends(0, 1, 2), ends(0, 8, 16), 1, 8, 0.0, 8**-0.5, False)
    out, lse, *_ = interface2._flash_attn_varlen_forward(
        q, *pages, *common, block_table=table, seqused_k=lengths
    )
    torch.testing.assert_close(out, right)
    assert lse.shape == (4, 2)
    rows = [x[table].flatten(0, 2) for x in pages]
    out, *_ = interface2._flash_attn_varlen_forward(q, *rows, *common, seqused_k=lengths)
    torch.testing.assert_close(out, right)
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        interface2._flash_attn_varlen_forward(q, *pages, *common, block_table=table, num_splits=2)


def test_the_extension_of_flash_attention_2() -> None:
    q, k, v = qkv(5, 7)
    gpu = interface2.flash_attn_gpu
    into = torch.empty_like(q)
    out, lse, _, state = gpu.fwd(q, k, v, into, None, 0.0, 0.4, True, -1, -1, 0.0, False, None)
    assert out is into
    right = fa2.flash_attn_func(q, k, v, 0.0, 0.4, True)
    torch.testing.assert_close(out, right)
    _, gradients = by_autograd(q, k, v, q, layout="bnhd", causal=True, scale=0.4)
    found = gpu.bwd(q, q, k, v, out, lse, None, None, None, None, 0.0, 0.4, True, -1, -1, 0.0,
                    False, None, state)  # fmt: skip
    for one, other in zip(found[:3], gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    cached, _ = gpu.fwd_kvcache(q, k, v, None, None, None, None, None, None, None, None, None, None,
                                0.4, True, -1, -1, 0.0, True, 0)  # fmt: skip
    torch.testing.assert_close(cached, right)
    with pytest.raises(RuntimeError, match="`generator` argument is no longer supported"):
        gpu.fwd(q, k, v, None, None, 0.0, 0.4, True, -1, -1, 0.0, False, torch.Generator())


def test_blocks_are_those_of_the_kernel_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    explain = archflash.explain
    monkeypatch.setattr(
        _private, "explain", lambda *x, device, **options: explain(*x, device="H200", **options)
    )
    for d, dropout in ((64, False), (128, True)):
        q = torch.empty(8, 16, 4096, d, dtype=torch.bfloat16, device="meta")
        options = {"dropout_p": 0.1} if dropout else {}
        plan = explain(q, q, q, device="H200", causal=True, **options).plan
        assert plan is not None
        assert plan.tile is not None
        assert interface2._get_block_size_n("cuda", d, dropout, True) == plan.tile.block_k
    monkeypatch.undo()
    with pytest.raises(UnsupportedError, match="no kernel of archflash serves such calls on cpu"):
        interface2._get_block_size_n("cpu", 64, False, True)


# --- the operators of torch ---


@pytest.fixture
def installed() -> Iterator[None]:
    archflash.compat.install()
    yield
    archflash.compat.uninstall()


@pytest.mark.usefixtures("installed")
def test_the_operators_have_the_originals_names_and_arguments() -> None:
    two, three = torch.ops.flash_attn, torch.ops.flash_attn_3
    names = {argument.name for argument in three.fwd.default._schema.arguments}
    assert {"k_new", "q_v", "is_causal", "is_rotary_interleaved", "kv_batch_idx"} <= names
    assert str(three.fwd.default._schema).endswith("-> (Tensor(out!), Tensor, Tensor, Tensor)")
    written = {x.name for x in three.bwd.default._schema.arguments if x.is_write}
    assert written == {"dq", "dk", "dv"}
    for operator in (two._flash_attn_backward, two._flash_attn_varlen_backward):
        arguments = operator.default._schema.arguments
        assert [x.name for x in arguments if x.is_write] == ["dq", "dk", "dv"]
    functions = {
        two._flash_attn_forward: interface2._flash_attn_forward,
        two._flash_attn_varlen_forward: interface2._flash_attn_varlen_forward,
        two._flash_attn_backward: interface2._flash_attn_backward,
        two._flash_attn_varlen_backward: interface2._flash_attn_varlen_backward,
        three.fwd: fa3._forward,
        three.bwd: fa3._backward,
        three.fwd_combine: fa3.flash_attn_combine,
    }
    for operator, function in functions.items():
        asked = {x.name: x.default_value for x in operator.default._schema.arguments}
        signature = inspect.signature(function).parameters
        assert list(signature) == list(asked)
        for name, parameter in signature.items():
            if parameter.default is not inspect.Parameter.empty:
                assert parameter.default == asked[name], name


@pytest.mark.usefixtures("installed")
def test_the_operators_compute_what_the_functions_do() -> None:
    q, k, v = qkv()
    out, lse = fa3.flash_attn_func(q, k, v, 0.4, True, return_attn_probs=True)
    found, found_lse, *empty = torch.ops.flash_attn_3.fwd(
        q, k, v, softmax_scale=0.4, is_causal=True
    )
    assert torch.equal(found, out)
    assert torch.equal(found_lse, lse)
    assert [x.numel() for x in empty] == [0, 0]
    into = torch.empty_like(q)
    torch.ops.flash_attn_3.fwd(q, k, v, out=into, softmax_scale=0.4, is_causal=True)
    assert torch.equal(into, out)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    torch.ops.flash_attn_3.bwd(q, q, k, v, out, lse, dq, dk, dv, softmax_scale=0.4, is_causal=True)
    _, gradients = by_autograd(q, k, v, q, layout="bnhd", causal=True, scale=0.4)
    for one, other in zip((dq, dk, dv), gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    merged, _ = torch.ops.flash_attn_3.fwd_combine(
        out[None], lse.transpose(-1, -2)[None], out_dtype=torch.float16
    )
    assert merged.dtype == torch.float16
    # A cache, packed sequences and keys that are appended, by the same operator.
    cache = torch.zeros(2, 9, 2, 8), torch.zeros(2, 9, 2, 8)
    cached, *_ = torch.ops.flash_attn_3.fwd(
        q[:, :7], *cache, k, v, seqused_k=ends(0, 0), is_causal=True
    )
    torch.testing.assert_close(cached, fa3.flash_attn_func(q[:, :7], k, v, causal=True))
    assert torch.equal(cache[0][:, :7], k)
    of_packed, *_ = torch.ops.flash_attn_3.fwd(
        q[0], k[0], v[0], cu_seqlens_q=ends(0, 9), cu_seqlens_k=ends(0, 7), max_seqlen_q=9,
        max_seqlen_k=7,
    )  # fmt: skip
    torch.testing.assert_close(of_packed, fa3.flash_attn_func(q, k, v)[0])
    with pytest.raises(UnsupportedError, match="page_table"):
        torch.ops.flash_attn_3.fwd(q[0], k, v, cu_seqlens_q=ends(0, 9), cu_seqlens_k=ends(0, 7),
                                   page_table=ends(0))  # fmt: skip


def test_functions_below_flash_attention_3_take_names_of_earlier_versions_too() -> None:
    """Code for context parallelism calls them by keywords."""
    q, k, v = qkv()
    into = torch.empty_like(q)
    out, lse, *_ = fa3._flash_attn_forward(q, k, v, causal=True, window_size_left=3)
    old, _, *_ = fa3._flash_attn_forward(q, k, v, causal=True, window_size=(3, -1), out=into)
    assert old is into
    assert torch.equal(old, out)
    found = [[torch.empty_like(x) for x in (q, k, v)] for _ in range(2)]
    new: dict[str, Any] = {"is_causal": True, "window_size_left": 3}
    old_names: dict[str, Any] = {"causal": True, "window_size": (3, -1)}
    for (dq, dk, dv), names in zip(found, (new, old_names), strict=True):
        fa3._flash_attn_backward(q, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **names)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    with pytest.raises(TypeError, match="window_size is 3"):
        fa3._flash_attn_forward(q, k, v, window_size=3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("installed")
def test_the_operators_compile_in_one_graph() -> None:
    q, k, v = qkv()
    formula = (0.0, 0.4, True, -1, -1, 0.0, None)

    def both(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        out, lse, *_ = torch.ops.flash_attn._flash_attn_forward(q, k, v, *formula, False)
        found = [torch.empty_like(x) for x in (q, k, v)]
        torch.ops.flash_attn._flash_attn_backward(q, q, k, v, out, lse, *found, *formula, False)
        return [out, lse, *found]

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(q, k, v), both(q, k, v), strict=True):
        torch.testing.assert_close(one, other)


def test_operators_of_the_originals_are_left_alone() -> None:
    assert not hasattr(torch.ops.flash_attn_3, "fwd")
    original = torch.library.Library("flash_attn_3", "FRAGMENT")  # type: ignore[no-untyped-call]
    original.define("fwd(Tensor q) -> Tensor")
    original.impl("fwd", lambda q: q + 1, "CompositeImplicitAutograd")
    try:
        archflash.compat.install()
        assert torch.equal(torch.ops.flash_attn_3.fwd(torch.ones(2)), torch.full((2,), 2.0))
        assert hasattr(torch.ops.flash_attn, "_flash_attn_forward")
        archflash.compat.uninstall()
        assert hasattr(torch.ops.flash_attn_3, "fwd")
        assert not hasattr(torch.ops.flash_attn, "_flash_attn_forward")
    finally:
        original._destroy()


# --- rotary embeddings ---


@pytest.mark.parametrize("interleaved", [False, True])
def test_other_names_of_rotary_embeddings(interleaved: bool) -> None:
    angles = rand(9, 2, seed=7)
    cos, sin = angles.cos(), angles.sin()
    x = rand(2, 9, 4, 8)
    right = apply_rotary_emb(x, cos, sin, interleaved)
    turn = rotary.apply_rotary_emb_torch
    assert torch.equal(turn(x, cos, sin, interleaved), right)
    of_each = turn(x, cos.expand(2, -1, -1), sin.expand(2, -1, -1), interleaved)
    assert torch.equal(of_each, right)
    back = apply_rotary(right, cos, sin, interleaved=interleaved, conjugate=True)
    torch.testing.assert_close(back, x)
    qkv_ = torch.stack([x, x + 1, x + 2], 2)
    assert rotary.apply_rotary_emb_qkv_(qkv_, cos, sin, interleaved=interleaved) is qkv_
    assert torch.equal(qkv_[:, :, 0], right)
    assert torch.equal(qkv_[:, :, 1], apply_rotary_emb(x + 1, cos, sin, interleaved))
    assert torch.equal(qkv_[:, :, 2], x + 2)
    together = torch.cat([x, x[:, :, :2], x[:, :, 2:]], 2)
    rotary.apply_rotary_emb_qkv_(together, cos, sin, interleaved=interleaved, num_heads_q=4)
    assert torch.equal(together, torch.cat([right, right[:, :, :2], x[:, :, 2:]], 2))
    kv = torch.stack([x, x], 2)
    rotary.apply_rotary_emb_kv_(kv, cos, sin, interleaved)
    assert torch.equal(kv, torch.stack([right, x], 2))


@pytest.mark.parametrize("scale_base", [None, 16.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_module_of_rotary_embeddings(interleaved: bool, scale_base: float | None) -> None:
    """The product of a turned q and a turned k depends on how far apart they are."""
    module = rotary.RotaryEmbedding(8, 100.0, interleaved, scale_base)
    q, k = rand(1, 1, 1, 8), rand(1, 1, 1, 8, seed=2)

    def product(i: int, j: int) -> float:
        # Both tables have 12 positions, so that XPos has the same middle.
        turned_q, _ = module(q.clone(), torch.stack([k, k], 2), i, 12)
        _, turned_kv = module(q.clone(), torch.stack([k, k], 2), j, 12)
        assert torch.equal(turned_kv[:, :, 1], k)
        return float((turned_q * turned_kv[:, :, 0]).sum())

    assert product(3, 1) == pytest.approx(product(9, 7), rel=1e-4)
    assert product(3, 1) != pytest.approx(product(4, 1), rel=1e-2)
    x = rand(2, 5, 3, 4, 10, seed=4)
    before = x.clone()
    assert module(x, seqlen_offset=2) is x
    angles = torch.outer(torch.arange(2, 7), 100.0 ** (-torch.arange(0, 8, 2) / 8)).float()
    if scale_base is None:
        for i in range(2):
            right = apply_rotary_emb(before[:, :, i], angles.cos(), angles.sin(), interleaved)
            torch.testing.assert_close(x[:, :, i], right, atol=1e-6, rtol=1e-5)
    assert torch.equal(x[:, :, 2], before[:, :, 2])
    with pytest.raises(ValueError, match="pass max_seqlen at the first call"):
        rotary.RotaryEmbedding(8)(x, seqlen_offset=ends(0, 1))
    half = module.to(torch.bfloat16)  # angles stay exact
    y = before.bfloat16()
    half(y, seqlen_offset=2, max_seqlen=12)
    torch.testing.assert_close(y.float(), x, atol=3e-2, rtol=3e-2)


def test_several_sequences_in_a_row_are_packed() -> None:
    x = torch.arange(12.0).reshape(2, 6, 1)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]])
    packed, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(
        x, lengths
    )
    assert packed.flatten().tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert cu_seqlens.tolist() == [0, 2, 5, 9]
    assert (cu_seqlens.dtype, longest) == (torch.int32, 4)


def test_what_took_the_place_of_an_installed_module_stays() -> None:
    archflash.compat.uninstall()  # nothing was installed
    archflash.compat.install()
    try:
        other = ModuleType("flash_attn_3")
        sys.modules["flash_attn_3"] = other
    finally:
        archflash.compat.uninstall()
    assert sys.modules.pop("flash_attn_3") is other
    assert "flash_attn_interface" not in sys.modules
