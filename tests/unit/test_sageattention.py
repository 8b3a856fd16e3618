"""archflash.compat.sageattention: SageAttention's interface, exact and with masks."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
import archflash.compat
from archflash import reference
from archflash.compat import sageattention, sageattn3
from archflash.compat.sageattention import core

ONE_CALL = [
    sageattention.sageattn,
    sageattention.sageattn_qk_int8_pv_fp16_triton,
    sageattention.sageattn_qk_int8_pv_fp16_cuda,
    sageattention.sageattn_qk_int8_pv_fp8_cuda,
    sageattention.sageattn_qk_int8_pv_fp8_cuda_sm90,
]


def rand(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(nq: int = 9, nk: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    return rand(2, 4, nq, 8), rand(2, 2, nk, 8, seed=2), rand(2, 2, nk, 8, seed=3)


MASK = rand(2, 1, 9, 7, seed=4) > -0.5
MASK[0, 0, 3] = False  # a row that sees no key
# The arguments, and what they are called in archflash.attention.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {"causal": True, "q_offset": 0}),
    "scale": ({"sm_scale": 0.7}, {"scale": 0.7}),
    "bool": ({"attn_mask": MASK}, {"attn_mask": MASK}),
    "of-rows": ({"attn_mask": MASK[1, 0]}, {"attn_mask": MASK[1, 0]}),
    "added": ({"attn_mask": rand(1, 4, 9, 7)}, {"attn_mask": rand(1, 4, 9, 7)}),
    "quantising": ({"smooth_k": False, "smooth_v": True, "pv_accum_dtype": "fp32+fp16"}, {}),
    "pytorchs": ({"scale": 0.3, "dropout_p": 0.0, "enable_gqa": True}, {"scale": 0.3}),
}


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("name", CALLS)
def test_every_function_agrees_with_float64(name: str, layout: str) -> None:
    theirs, ours = CALLS[name]
    q, k, v = qkv()
    out, lse = (x.float() for x in reference.attention(q, k, v, **ours))
    assert bool((lse == -math.inf).any()) == (name == "bool")
    given = (q, k, v) if layout == "HND" else tuple(x.transpose(1, 2) for x in (q, k, v))
    for function in ONE_CALL:
        found, found_lse = function(*given, tensor_layout=layout, return_lse=True, **theirs)
        found = found if layout == "HND" else found.transpose(1, 2)
        torch.testing.assert_close(found, out)
        torch.testing.assert_close(found_lse, lse)
        alone = function(*given, tensor_layout=layout, **theirs)
        torch.testing.assert_close(alone if layout == "HND" else alone.transpose(1, 2), out)
    if layout == "HND" and "sm_scale" not in theirs:
        torch.testing.assert_close(sageattn3.sageattn3_blackwell(*given, **theirs), out)


def test_the_order_of_arguments_is_that_of_the_originals() -> None:
    q, k, v = qkv()
    out = reference.attention(q, k, v, causal=True, q_offset=0, scale=0.3)[0].float()
    torch.testing.assert_close(ONE_CALL[0](q, k, v, "HND", True, 0.3), out)
    torch.testing.assert_close(ONE_CALL[1](q, k, v, "HND", "cuda", True, None, 0.3), out)
    for function in ONE_CALL[2:]:
        found, _ = function(
            *(q, k, v, "HND", True, "per_warp", 0.3), pv_accum_dtype="fp32", return_lse=True
        )
        torch.testing.assert_close(found, out)
    masked = reference.attention(q, k, v, attn_mask=MASK)[0].float()
    torch.testing.assert_close(sageattn3.sageattn3_blackwell(q, k, v, MASK), masked)


def test_it_stands_in_the_place_of_pytorchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (rand(2, 4, 9, 8, seed=seed).requires_grad_() for seed in range(3))
    functional = torch.nn.functional
    call = {"attn_mask": MASK[1:, :, :, :1], "dropout_p": 0.0, "scale": 0.5}
    results = []
    for function in (functional.scaled_dot_product_attention, sageattention.sageattn):
        monkeypatch.setattr(functional, "scaled_dot_product_attention", function)
        out = functional.scaled_dot_product_attention(q, k, v, **call)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = (rand(12, 2, 8, seed=i) for i in range(3))
    cu_q, cu_k = torch.tensor([0, 5, 12], dtype=dtype), torch.tensor([0, 3, 12], dtype=dtype)
    found = sageattention.sageattn_varlen(q, k, v, cu_q, cu_k, 7, 9, causal, 0.4, smooth_k=False)
    rows = [(slice(0, 5), slice(0, 3)), (slice(5, 12), slice(3, 12))]
    for of_q, of_k in rows:
        out, _ = reference.attention(
            q[None, of_q], k[None, of_k], v[None, of_k],
            causal=causal, q_offset=0, scale=0.4, layout="bnhd",
        )  # fmt: skip
        torch.testing.assert_close(found[of_q], out[0].float())


def test_what_is_wrong_is_said() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"'HND' or 'NHD'\. A mask is passed by its name"):
        sageattention.sageattn(q, k, v, MASK)
    with pytest.raises(ValueError, match="'bhnd'"):
        sageattention.sageattn(q, k, v, tensor_layout="bhnd")
    with pytest.raises(ValueError, match="one number"):
        sageattention.sageattn(q, k, v, sm_scale=0.1, scale=0.1)
    for function in ONE_CALL:
        with pytest.raises(TypeError, match=r"got window: .* it takes approximate, dropout_p"):
            function(q, k, v, window=3)
    cu = torch.tensor([0, 2])
    x = rand(2, 2, 8)
    with pytest.raises(archflash.UnsupportedError, match="attn_mask in sageattn_varlen"):
        sageattention.sageattn_varlen(x, x, x, cu, cu, 2, 2, attn_mask=MASK)
    with pytest.raises(TypeError, match="sageattn_varlen got return_lse"):
        sageattention.sageattn_varlen(x, x, x, cu, cu, 2, 2, return_lse=True)


def test_the_approximation_is_taken_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def attention(q: Tensor, *others: Tensor, approximate: str | None, **options: Any) -> Tensor:
        asked.append(approximate)
        return archflash.attention(q, *others, approximate=approximate, **options)

    monkeypatch.setattr(core, "attention", attention)
    wide = qkv()
    q, k, v = (x.half() for x in wide)
    for function in ONE_CALL:
        function(q, k, v)
        function(q, k, v, approximate="int8_qk")
    assert asked == [None, "int8_qk"] * len(ONE_CALL)
    asked.clear()
    monkeypatch.setattr(core, "_asked_of_all", "int8 if served")
    sageattention.sageattn(q, k, v)
    sageattn3.sageattn3_blackwell(q, k, v)
    sageattention.sageattn(*wide)
    packed, ends = q[0].transpose(0, 1), torch.tensor([0, q.shape[2]])
    sageattention.sageattn_varlen(packed, packed, packed, ends, ends, q.shape[2], q.shape[2])
    assert asked == ["int8 if served"] * 4
    with pytest.raises(ValueError, match="int8_qk"):
        sageattention.sageattn(q, k, v, approximate="int3")


@pytest.mark.parametrize("value", ["", "int8_qk"])
def test_the_environment_asks_at_import(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(core.APPROXIMATE_VARIABLE, value)
    spec = importlib.util.spec_from_file_location("another_core", core.__file__)
    assert spec is not None
    assert spec.loader is not None
    another = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(another)
    assert another._asked_of_all == (f"{value} if served" if value else None)


def test_install_gives_the_names_and_takes_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("sageattention", "sageattention.core", "sageattn3")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    archflash.compat.install()
    try:
        found = [importlib.import_module(name) for name in names]
        assert found == [sageattention, core, sageattn3]
        # ComfyUI hands masks on where the signature has them.
        assert "attn_mask" in inspect.signature(found[0].sageattn).parameters
        version = importlib.metadata.version("sageattention")
        assert version.startswith("2.2.0") or "archflash" not in version
    finally:
        archflash.compat.uninstall()
    assert not any(name in sys.modules for name in names)

    another = type(sys)("sageattention")
    monkeypatch.setitem(sys.modules, "sageattention", another)
    with pytest.raises(RuntimeError, match="sageattention was imported before"):
        archflash.compat.install()
    assert sys.modules["sageattention"] is another


def test_it_compiles_in_one_graph() -> None:
    q, k, v = qkv()
    compiled = torch.compile(sageattention.sageattn, fullgraph=True, backend="eager")
    expected = sageattention.sageattn(q, k, v, attn_mask=MASK)
    torch.testing.assert_close(compiled(q, k, v, attn_mask=MASK), expected)
