"""Inside torch.autocast archflash's functions compute in its dtype, as PyTorch's own does."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_upper_left

import archflash
from archflash import _api, _autocast
from archflash.compat.flash_attn import flash_attn_func
from archflash.compat.flash_attn.bert_padding import pad_input
from archflash.compat.flash_attn.layers.rotary import apply_rotary_emb

HALF = [torch.bfloat16, torch.float16]


def qkv(*dtypes: torch.dtype) -> list[Tensor]:
    seeds = (torch.Generator().manual_seed(seed) for seed in (1, 2, 3))
    return [
        torch.randn(1, 2, 7, 16, generator=seed).to(dtype).requires_grad_()
        for seed, dtype in zip(seeds, dtypes, strict=True)
    ]


@pytest.mark.parametrize("way", ["attention", "sdpa"])
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize("given", [(0, 0, 1), (0, 0, 0), (1, 1, 1), (1, 0, 1)], ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_dtypes_values_and_gradients_are_those_of_pytorch(
    dtype: torch.dtype, given: tuple[int, ...], masked: bool, way: str
) -> None:
    """0 stands for float32, as a rotary embedding makes q and k of it, 1 for what autocast uses."""
    results = []
    for ours in (True, False):
        q, k, v = qkv(*(dtype if x else torch.float32 for x in given))
        mask = torch.linspace(-1, 1, 49).view(7, 7).requires_grad_() if masked else None
        with torch.autocast("cpu", dtype):
            if not ours:
                out = F.scaled_dot_product_attention(q, k, v, mask)
            elif way == "sdpa":
                out = archflash.scaled_dot_product_attention(q, k, v, mask)
            else:
                out = archflash.attention(q, k, v, attn_mask=mask)
        out.float().square().sum().backward()
        leaves = (q, k, v) if mask is None else (q, k, v, mask)
        results.append([out, *(x.grad for x in leaves)])
    for found, expected in zip(*results, strict=True):
        assert found is not None
        assert expected is not None
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_what_autocast_leaves_alone() -> None:
    q, k, v = qkv(torch.float32, torch.float32, torch.float32)
    mixed = (q, k, v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            assert archflash.attention(q, k, v).dtype == torch.float32
            with pytest.raises(TypeError, match="dtype"):
                archflash.attention(*mixed)
        double = [x.double() for x in (q, k, v)]
        assert archflash.attention(*double).dtype == torch.float64
        fp8 = [x.detach().to(torch.float8_e4m3fn) for x in (q, k, v)]
        exact = archflash.attention(*fp8, out_dtype=torch.float32)
        assert exact.dtype == torch.float32
        with torch.no_grad():
            out = torch.empty_like(q)
            assert archflash.attention(q, k, v, out=out) is out
    assert torch.equal(exact, archflash.attention(*fp8, out_dtype=torch.float32))
    assert torch.equal(out, archflash.attention(q, k, v))
    with torch.autocast("cuda", torch.bfloat16, enabled=False):  # nor is that of another device
        assert archflash.attention(q, k, v).dtype == torch.float32


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float32], ids=str)
def test_queries_beside_a_cache(cached: torch.dtype) -> None:
    """A cache of autocast's dtype is written in place, so that it is not cast; beside one of
    another dtype nothing is."""
    lengths = torch.tensor([3], dtype=torch.int32)
    q, new = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 2, 16)
    k_cache, v_cache = (
        torch.zeros(1, 8, 2, 16, dtype=cached),
        torch.zeros(1, 8, 2, 16, dtype=cached),
    )
    call: dict[str, Any] = {"cache_seqlens": lengths, "k_new": new, "v_new": new}
    with torch.autocast("cpu", torch.bfloat16):
        out = archflash.attention_with_kvcache(q, k_cache, v_cache, **call)
    assert out.dtype == cached
    assert torch.equal(k_cache[:, 3], new[:, 0].to(cached))


@pytest.mark.parametrize(("dtype", "other"), [HALF, HALF[::-1]], ids=str)
def test_what_is_not_cast_is_not_refused(dtype: torch.dtype, other: torch.dtype) -> None:
    """PyTorch's autocast refuses to join tensors of the 16-bit dtype that is not its own."""
    q, new, cache = (torch.randn(1, n, 2, 32).to(dtype) for n in (1, 1, 8))
    table, lengths = torch.randn(8, 8).to(dtype), torch.tensor([3], dtype=torch.int32)

    def results() -> tuple[Tensor, ...]:
        k, v = cache.clone(), cache.clone()
        rotary = {"rotary_cos": table, "rotary_sin": table, "k_new": new, "v_new": new}
        kept = torch.tensor([0, 2])
        return (
            archflash.attention_with_kvcache(q, k, v, cache_seqlens=lengths, **rotary),
            archflash.attention_with_kvcache(q, k, v, cache_seqlens=lengths, qv=q),
            apply_rotary_emb(cache, table, table),
            pad_input(cache[0, :2], kept, 2, 2),
        )

    expected = results()
    with torch.autocast("cpu", other):
        found = results()
    assert all(map(torch.equal, found, expected))


def test_explain_tells_what_the_call_would_do() -> None:
    q, k, v = (x.detach() for x in qkv(torch.float32, torch.float32, torch.bfloat16))
    q, k, v = (x.expand(2, 2, 7, 16).repeat(1, 1, 40, 1) for x in (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        problem = archflash.explain(q, k, v, attn_mask=torch.zeros(280, 280)).problem
    assert problem.dtype == "bfloat16"
    with pytest.raises(TypeError, match="dtype"):
        archflash.explain(q, k, v)


def test_flash_attn_takes_mixed_dtypes_there() -> None:
    q, k, v = (x.detach().transpose(1, 2) for x in qkv(*[torch.float32] * 2, torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attn_func(q, k, v).dtype == torch.bfloat16


@pytest.mark.slow
def test_torch_compile_takes_it_whole() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(archflash.attention, fullgraph=True, backend="aot_eager")
    q, k, v = qkv(torch.float32, torch.float32, torch.bfloat16)
    for on in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16) if on else contextlib.nullcontext():
            given = (q, k, v if on else v.float())
            found, expected = compiled(*given), archflash.attention(*given)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)


def test_a_call_outside_of_autocast_asks_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any) -> Any:
        raise AssertionError("autocast is off")

    monkeypatch.setattr(_autocast, "inputs", asked)
    assert _api._is_autocast_on() is False
    q, k, v = qkv(*[torch.float32] * 3)
    assert archflash.attention(q, k, v).dtype == torch.float32


def test_gradients_of_float32_inside_of_autocast_are_exact() -> None:
    q = torch.randn(1, 2, 4, 8)
    out, lse = archflash.attention(q, q, q, return_lse=True)
    expected = archflash.attention_backward(q, q, q, q, out, lse)
    with torch.autocast("cpu", torch.bfloat16):
        found = archflash.attention_backward(q, q, q, q, out, lse)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_a_causal_bias_is_explained() -> None:
    q = torch.randn(1, 2, 8, 8)
    bias = causal_upper_left(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert archflash.explain(q, q, q, attn_mask=bias, device="H200").problem.dtype == "bfloat16"


def test_explain_leaves_uncast_what_the_call_leaves() -> None:
    q = torch.empty(2, 3, 4, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.empty(2, 4, 3, 64)
        three = [x.transpose(1, 2) for x in (q, q, q)]
        assert archflash.explain(*three, device="H200").problem.dtype == "bfloat16"
        assert archflash.explain(*three, out=out, device="H200").problem.dtype == "float32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_explain_casts_queries_to_autocasts_dtype_if_the_cache_has_it(dtype: torch.dtype) -> None:
    q, cache = torch.zeros(2, 1, 4, 64), torch.zeros(2, 16, 4, 64, dtype=dtype)
    call = {"cache_seqlens": torch.full((2,), 5, dtype=torch.int32), "k_new": q, "v_new": q}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        said = archflash.explain(q, cache, cache.clone(), **call, layout="bnhd", device="H200")
        out = archflash.attention_with_kvcache(q, cache, cache.clone(), **call)
    assert said.problem.dtype == str(dtype).removeprefix("torch.")
    assert out.dtype == dtype
    assert call["k_new"].dtype == torch.float32


def test_autocast_of_another_device_does_not_count() -> None:
    q = torch.randn(1, 2, 5, 16)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert archflash.attention(q, q, q).dtype == torch.float32
        with pytest.raises(TypeError, match="dtype"):
            archflash.attention(q, q.half(), q)
    finally:
        torch.set_autocast_enabled("cuda", False)
