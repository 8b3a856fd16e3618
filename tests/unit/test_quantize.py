"""quantize_fp8 with plain operations, its plans, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import archflash
from archflash import ForcedImplementationError, _dispatch, _quantize, reference
from archflash import _archflash as native
from archflash._api import find_device

FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spread(descale: Tensor, x: Tensor) -> Tensor:
    """Broadcasts the descales to the numbers of x (bhnd)."""
    if descale.ndim == 3:
        return descale.repeat_interleave(64, 2)[:, :, : x.shape[2], None]
    return descale.reshape(*descale.shape, 1, 1) if descale.ndim == 2 else descale


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize(
    ("per", "shape"), [("tensor", (1,)), ("head", (2, 3)), ("block", (2, 3, 3))]
)
def test_the_largest_of_what_shares_a_descale_becomes_the_largest_number(
    dtype: torch.dtype, per: str, shape: tuple[int, ...]
) -> None:
    x = rand(2, 3, 150, 16) * torch.arange(1, 7).view(2, 3, 1, 1)
    values, descale = archflash.quantize_fp8(x, per=per, dtype=dtype)
    assert values.dtype == dtype
    assert descale.shape == shape
    blocks = {"tensor": (2, 3, 150), "head": (1, 1, 150), "block": (1, 1, 64)}[per]
    b, h, n = blocks
    for i in range(0, 2, b):
        for j in range(0, 3, h):
            for row in range(0, 150, n):
                part = x[i : i + b, j : j + h, row : row + n]
                stored = values[i : i + b, j : j + h, row : row + n].float()
                assert stored.abs().max() == FP8[dtype]
                index = {"tensor": (0,), "head": (i, j), "block": (i, j, row // 64)}[per]
                assert descale[index] == part.abs().max() / FP8[dtype]


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_values_times_descale_are_near(dtype: torch.dtype, per: str) -> None:
    x = rand(2, 3, 150, 16)
    values, descale = archflash.quantize_fp8(x, per=per, dtype=dtype)
    error = (values.float() * spread(descale, x) - x).abs()
    relative = 2.0**-4 if dtype == torch.float8_e4m3fn else 2.0**-3
    assert (error <= relative * x.abs() + 1e-3).all()


def test_zeros_have_descale_1_and_no_number_becomes_nan() -> None:
    x = torch.zeros(1, 2, 130, 16)
    x[0, 1, 70] = 1e-42  # so small that its descale would not be normal
    values, descale = archflash.quantize_fp8(x, per="block")
    assert descale[0, 0].tolist() == [1.0, 1.0, 1.0]
    assert descale[0, 1, 1] == torch.finfo(torch.float32).tiny
    assert not values.float().isnan().any()


def test_nan_stays_where_it_is() -> None:
    x = rand(1, 1, 64, 16)
    x[0, 0, 3, 5] = math.nan
    values, descale = archflash.quantize_fp8(x)
    assert descale.isfinite().all()
    assert values.float().isnan().nonzero().tolist() == [[0, 0, 3, 5]]


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_infinities_become_the_largest_number_and_count_for_no_descale(
    dtype: torch.dtype, per: str
) -> None:
    x = rand(1, 1, 64, 16)
    finite, descale = archflash.quantize_fp8(x, per=per, dtype=dtype)
    odd = [(3, 5, math.inf, FP8[dtype]), (9, 0, -math.inf, -FP8[dtype]), (60, 1, math.nan, 0.0)]
    with_odd, expected = x.clone(), finite.float()
    for row, column, number, stored in odd:
        assert x[0, 0, row, column].abs() < x.abs().max()
        with_odd[0, 0, row, column], expected[0, 0, row, column] = number, stored
    values, same = archflash.quantize_fp8(with_odd, per=per, dtype=dtype)
    assert torch.equal(same, descale)
    assert values.float().isnan().nonzero().tolist() == [[0, 0, 60, 1]]
    assert torch.equal(values.float().nan_to_num(nan=0.0), expected)


def test_without_a_finite_number_but_zero_the_descale_is_1() -> None:
    x = torch.zeros(1, 1, 3, 16)
    x[0, 0, 0, 0], x[0, 0, 1, 0] = math.inf, math.nan
    values, descale = archflash.quantize_fp8(x)
    assert descale.tolist() == [1.0]
    assert values[0, 0, 0, 0].float() == 448


def test_the_largest_float32_numbers_are_finite() -> None:
    x = torch.full((1, 1, 1, 16), torch.finfo(torch.float32).max)
    values, descale = archflash.quantize_fp8(x)
    assert descale == torch.finfo(torch.float32).max / 448
    assert (values.float() == 448).all()


def test_a_lazily_negated_view_is_quantised_as_what_it_stands_for() -> None:
    x = rand(1, 2, 5, 16)
    values, _ = archflash.quantize_fp8(torch._neg_view(x))
    negative, _ = archflash.quantize_fp8(-x)
    assert torch.equal(values.float(), negative.float())


def test_a_gradient_is_refused_where_gradients_are_enabled() -> None:
    for x in (rand(1, 2, 5, 16).requires_grad_(), torch.nn.Parameter(rand(1, 2, 5, 16))):
        with pytest.raises(archflash.UnsupportedError, match="x requires a gradient, and quant"):
            archflash.quantize_fp8(x)
        with torch.no_grad():
            values, descale = archflash.quantize_fp8(x)
        assert not values.requires_grad
        assert not descale.requires_grad


def test_the_layout_says_where_the_heads_are() -> None:
    x = rand(2, 3, 150, 16)
    for per in ("tensor", "head", "block"):
        values, descale = archflash.quantize_fp8(x, per=per)
        other = x.transpose(1, 2).contiguous()
        there, same = archflash.quantize_fp8(other, per=per, layout="bnhd")
        assert torch.equal(there.transpose(1, 2).float(), values.float())
        assert torch.equal(same, descale)


def test_packed_sequences_share_the_descale_of_a_head() -> None:
    x = rand(150, 3, 16)
    values, descale = archflash.quantize_fp8(x, per="head")
    assert descale.shape == (3,)
    assert torch.equal(descale, x.abs().amax((0, 2)) / 448)
    assert values.shape == x.shape


@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (2, 0, 5, 16), (2, 2, 0, 16)])
@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_nothing_is_quantised_to_nothing(shape: tuple[int, ...], per: str) -> None:
    values, descale = archflash.quantize_fp8(torch.empty(shape), per=per)
    assert values.shape == shape
    blocks = math.ceil(shape[2] / 64)
    assert descale.shape == {"tensor": (1,), "head": shape[:2], "block": (*shape[:2], blocks)}[per]


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_attention_of_quantised_tensors_is_near_that_of_the_tensors(per: str) -> None:
    q, k, v = (rand(2, 2, 150, 32, seed=i) for i in range(3))
    pairs = [archflash.quantize_fp8(x, per=per) for x in (q, k, v)]
    descales = {f"{name}_descale": d for name, (_, d) in zip("qkv", pairs, strict=True)}
    stored = [values for values, _ in pairs]
    out = archflash.attention(*stored, **descales, out_dtype=torch.float32)
    exact = reference.attention(*stored, return_lse=False, **descales)
    assert (out - exact).abs().max() < 1e-5
    wanted = reference.attention(q, k, v, return_lse=False)
    error = (exact - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert 0.001 < error < 0.07


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "per": ({"per": "row"}, ValueError, "per is 'row'"),
    "layout": ({"layout": "hnbd"}, ValueError, "layout is 'hnbd'"),
    "dtype": ({"dtype": torch.float16}, TypeError, "dtype is torch.float16"),
    "x-dtype": ({"x": torch.zeros(1, 1, 1, 16, dtype=torch.int32)}, TypeError, "x has dtype"),
    "rank": ({"x": torch.zeros(2, 16)}, ValueError, "x has shape (2, 16)"),
    "packed-blocks": ({"x": torch.zeros(5, 2, 16), "per": "block"}, ValueError, "straddle"),
    "unknown": ({"implementation": "simt"}, ForcedImplementationError, "no quantiser"),
    "list": ({"x": [[[[0.0]]]]}, TypeError, "x is [[[[0.0]]]]: it must be a torch.Tensor"),
    "none": ({"x": None}, TypeError, "x is None: it must be a torch.Tensor"),
    "numpy": ({"x": np.zeros((1, 2, 5, 16))}, TypeError, "x is a numpy.ndarray"),
    "bool": ({"x": torch.zeros(1, 2, 5, 16, dtype=torch.bool)}, TypeError, "x has dtype"),
    "complex": ({"x": torch.zeros(1, 2, 5, 16, dtype=torch.cfloat)}, TypeError, "x has dtype"),
    "sparse": ({"x": torch.zeros(1, 2, 5, 16).to_sparse()}, TypeError, "nested or sparse"),
    "nested": (
        {"x": torch.nested.nested_tensor([torch.zeros(2, 5, 16)], layout=torch.jagged)},
        TypeError,
        "nested or sparse",
    ),
    "dtype-list": ({"dtype": []}, TypeError, "dtype is []"),
    "gradient": (
        {"x": torch.zeros(1, 2, 5, 16, requires_grad=True), "implementation": "ada"},
        archflash.UnsupportedError,
        "call it under torch.no_grad()",
    ),
    "meta": (
        {"x": torch.empty(1, 2, 5, 16, device="meta"), "implementation": "ada"},
        ForcedImplementationError,
        "not on a CUDA device",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_calls_are_refused_with_what_was_given(name: str) -> None:
    options, error, text = REFUSED[name]
    x = options.get("x", torch.zeros(1, 2, 5, 16))
    with pytest.raises(error) as caught:
        archflash.quantize_fp8(x, **{key: value for key, value in options.items() if key != "x"})
    assert text in str(caught.value)


X = torch.randn(1, 2, 5, 32, generator=torch.manual_seed(0))
WHY_NOT: dict[str, tuple[torch.Tensor, str]] = {
    "width": (X[..., :12].contiguous(), "x has rows of 12 numbers: it takes multiples of 8 up to"),
    "wide": (torch.zeros(1, 1, 2, 264), "x has rows of 264 numbers"),
    "steps": (torch.zeros(1, 2, 5, 33)[..., :32], "not contiguous and 16-byte aligned"),
    "columns": (X.mT.contiguous().mT, "not contiguous and 16-byte aligned"),
    "start": (
        torch.zeros(330)[1:321].view(1, 2, 5, 32),
        "does not start at a multiple of 16 bytes",
    ),
}


@pytest.mark.parametrize("name", WHY_NOT)
def test_a_forced_kernel_says_why_it_cannot(name: str) -> None:
    x, words = WHY_NOT[name]
    with pytest.raises(ForcedImplementationError, match=words):
        archflash.quantize_fp8(x, implementation="ada")
    values, descale = archflash.quantize_fp8(x)  # plain operations serve it
    torch.testing.assert_close(values.float() * descale, x, atol=0.1, rtol=0.07)


def test_a_build_or_a_machine_without_the_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        x = torch.empty(1, 2, 5, 12, device="cuda:0")
    monkeypatch.setattr(_dispatch, "driver_problem", lambda: "no driver")
    assert _quantize._why_not(x, x, simulated=False) == "no driver"
    monkeypatch.setattr(_dispatch, "driver_problem", lambda: None)
    monkeypatch.setattr(_dispatch, "query_device", lambda index: find_device("H200"))
    assert "rows of 12 numbers" in str(_quantize._why_not(x, x, simulated=False))
    monkeypatch.setattr(_quantize._native, "has_quantizer", lambda capability: False)
    with pytest.raises(ForcedImplementationError, match="this build has no code of it"):
        archflash.quantize_fp8(X, implementation="ada")
    assert _quantize.plans(find_device("H200")) == []


# --- plans ---


def test_the_binding_refuses_what_it_does_not_know() -> None:
    x = torch.empty(1, 1, 5, 16, dtype=torch.float16, device="meta")
    device = find_device("RTX 4090")
    with pytest.raises(ValueError, match="out_dtype 'int8': it must be float8_e4m3fn or"):
        native.plan_quantize("int8", 0, x, x, device)
    for per in (-1, 3):
        with pytest.raises(ValueError, match=f"per {per}: it must be 0"):
            native.plan_quantize("float8_e5m2", per, x, x, device)


@pytest.mark.parametrize(
    ("per", "kernels", "grids"),
    [
        (0, ["largest_f16", "descale", "values_f16"], [18, 1, 18]),
        (1, ["largest_f16", "descale", "values_f16"], [18, 6, 18]),
        (2, ["at_once_f16"], [18]),
    ],
)
def test_blocks_are_read_once_and_larger_parts_twice(
    per: int, kernels: list[str], grids: list[int]
) -> None:
    x = torch.empty(2, 3, 150, 16, dtype=torch.float16, device="meta")
    plan = native.plan_quantize("float8_e5m2", per, x, x, find_device("RTX 4090"))
    launches = plan.to_dict()["launches"]
    assert [launch["kernel"] for launch in launches] == [f"quantize_{name}" for name in kernels]
    assert [launch["grid"][0] for launch in launches] == grids
    assert plan.workspace_bytes == (0 if per == 2 else 18 * 4)


# Calls with more tiles of 64 rows than CUDA takes CTAs along x, or more rows than int32 counts.
MOST_CTAS = 2**31 - 1


@pytest.mark.parametrize(
    ("shape", "per", "grids", "workspace"),
    [
        ((1, 1, 2**31 + 70, 16), 0, [[2**25 + 2], [1], [2**25 + 2]], 4 * (2**25 + 2)),
        ((1, 1, 2**31 + 70, 16), 2, [[2**25 + 2]], 0),
        ((1, 1, 64 * 2**31 + 1, 8), 2, [[MOST_CTAS, 2]], 0),
        ((2**30, 3, 1, 8), 1, [[MOST_CTAS, 2**30 + 1]], 0),  # a head is one tile
        (
            (2**29, 3, 70, 8),
            1,
            [[MOST_CTAS, 2**30 + 1], [3 * 2**29], [MOST_CTAS, 2**30 + 1]],
            4 * 3 * 2**30,
        ),
    ],
)
def test_every_tile_of_a_huge_tensor_gets_its_cta(
    shape: tuple[int, ...], per: int, grids: list[list[int]], workspace: int
) -> None:
    x = torch.empty(shape, dtype=torch.float16, device="meta")
    plan = native.plan_quantize("float8_e4m3fn", per, x, x, find_device("H200"))
    by_kernel: dict[str, list[int]] = {}
    for launch in plan.to_dict()["launches"]:
        by_kernel.setdefault(launch["kernel"], []).append(launch["grid"][0])
    assert list(by_kernel.values()) == grids
    assert plan.workspace_bytes == workspace
