"""merge_attention with plain operations, its gradient, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import archflash
from archflash import _dispatch, _merge, reference
from archflash._api import find_device


def parts_of(
    count: int, shape: tuple[int, ...] = (2, 3, 5, 7), dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(count)
    outs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]
    return outs, [torch.randn(shape[:3], generator=generator) * 2 for _ in range(count)]


def test_tensors_on_the_cpu_are_merged_in_float32() -> None:
    outs, lses = parts_of(4)
    out, lse = archflash.merge_attention(outs, lses)
    expected, expected_lse = reference.merge_attention(outs, lses)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-6, rtol=1e-6)


def test_the_keys_of_three_calls_are_those_of_one() -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (5, 30, 30))
    parts = [
        archflash.attention(q, k[:, :, keys], v[:, :, keys], return_lse=True)
        for keys in (slice(0, 3), slice(3, 20), slice(20, 30))
    ]
    out, lse = archflash.merge_attention(*zip(*parts, strict=True))
    expected, expected_lse = archflash.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_rows_that_saw_no_key_count_for_nothing() -> None:
    outs, lses = parts_of(2)
    lses[0][0, 0], outs[0][0, 0] = -math.inf, math.nan
    lses[0][1, 1], lses[1][1, 1] = -math.inf, -math.inf
    out, lse = archflash.merge_attention(outs, lses)
    assert torch.equal(out[0, 0], outs[1][0, 0])
    assert torch.equal(lse[0, 0], lses[1][0, 0])
    assert torch.equal(out[1, 1], torch.zeros_like(out[1, 1]))
    assert bool((lse[1, 1] == -math.inf).all())


def test_rows_that_saw_no_key_count_for_nothing_as_flash_attention_2_gives_them() -> None:
    outs, lses = parts_of(3)
    expected, expected_lse = archflash.merge_attention(outs[1:], lses[1:])
    lses[0][:], outs[0][:] = math.inf, 0.0
    out, lse = archflash.merge_attention(outs, lses)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    # A row that holds anything else is no such row: what is wrong with it stays to be seen.
    outs[0][0, 0, 0] = math.nan
    out, lse = archflash.merge_attention(outs, lses)
    assert bool(out[0, 0, 0].isnan().all())
    assert lse[0, 0, 0] == math.inf
    nothing, no_lse = archflash.merge_attention([torch.zeros(1, 1, 2, 4)] * 2,
                                                [torch.full((1, 1, 2), math.inf)] * 2)  # fmt: skip
    assert torch.equal(nothing, torch.zeros(1, 1, 2, 4))
    assert bool((no_lse == -math.inf).all())


def test_plain_operations_have_the_gradient_of_the_formula() -> None:
    outs, lses = parts_of(3, (1, 2, 2, 3))
    outs, lses = ([x.requires_grad_() for x in tensors] for tensors in (outs, lses))
    out, lse = archflash.merge_attention(outs, lses)
    (out.square().sum() + lse.sum()).backward()
    mine = [x.grad for x in (*outs, *lses)]
    doubles = [x.detach().double().requires_grad_() for x in (*outs, *lses)]
    out, lse = reference.merge_attention(doubles[:3], doubles[3:])
    (out.square().sum() + lse.sum()).backward()
    for x, expected in zip(mine, doubles, strict=True):
        assert x is not None
        assert expected.grad is not None
        torch.testing.assert_close(x, expected.grad.float())


@pytest.mark.parametrize("shape", [(2, 3, 0, 8), (0, 3, 5, 8), (2, 3, 5, 0)])
def test_there_may_be_nothing_to_merge(shape: tuple[int, ...]) -> None:
    out, lse = archflash.merge_attention(*parts_of(2, shape))
    assert out.shape == shape
    assert lse.shape == shape[:3]


OUTS, LSES = parts_of(2)
WRONG: dict[str, tuple[Any, Any, dict[str, Any], type[Exception], str]] = {
    "no-part": ([], [], {}, ValueError, "there are 0 outs and 0 lses"),
    "fewer-lses": (OUTS, LSES[:1], {}, ValueError, "there are 2 outs and 1 lses"),
    "no-tensors": ("ab", LSES, {}, TypeError, "outs is 'ab'"),
    "no-tensor": ([OUTS[0], 3], LSES, {}, TypeError, "outs.1. is 3"),
    "number": (torch.tensor(1.0), LSES, {}, ValueError, "outs is a number"),
    "dtype": ([x.double() for x in OUTS], LSES, {}, TypeError, "dtype torch.float64"),
    "dtypes": ([OUTS[0], OUTS[1].half()], LSES, {}, TypeError, "lses\\[1\\] have dtypes"),
    "lse-dtype": (OUTS, [x.half() for x in LSES], {}, TypeError, "lses\\[0\\] have dtypes"),
    "shape": ([OUTS[0], OUTS[1][:1]], LSES, {}, ValueError, "lses\\[1\\] have shapes"),
    "lse-shape": (OUTS, [x[:, :2] for x in LSES], {}, ValueError, r"and \(2, 3, 5\)"),
    "dimensions": ([x[0, 0] for x in OUTS], LSES, {}, ValueError, "must have 4 dimensions"),
    "layout": (OUTS, LSES, {"layout": "nhd"}, ValueError, "layout is 'nhd'"),
    "implementation": (
        OUTS, LSES, {"implementation": "hopper"}, archflash.ForcedImplementationError,
        "no merging kernel is called 'hopper'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_say_what_is_allowed(case: str) -> None:
    outs, lses, options, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        archflash.merge_attention(outs, lses, **options)


# --- who merges ---

FORCED: dict[str, tuple[Any, Any, str]] = {
    "gradient": (
        [OUTS[0].clone().requires_grad_(), OUTS[1]], LSES, "a tensor requires a gradient",
    ),
    "width": ([x[..., :6].contiguous() for x in OUTS], LSES, "it takes multiples of 4"),
    "strides": ([x[..., 1:5] for x in OUTS], LSES, "not contiguous and aligned to 16 bytes"),
    "columns": ([x[..., :4].mT.contiguous().mT for x in OUTS], LSES, "aligned to 16 bytes"),
    "meta": (
        [x.to("meta") for x in OUTS], [x.to("meta") for x in LSES], "not on a CUDA device: move",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORCED)
def test_a_forced_kernel_says_why_it_cannot(case: str) -> None:
    outs, lses, words = FORCED[case]
    with pytest.raises(archflash.ForcedImplementationError, match=words):
        archflash.merge_attention(outs, lses, implementation="ampere")
    if case != "meta":
        out, _ = archflash.merge_attention(outs, lses)  # plain operations serve it
        expected, _ = reference.merge_attention(outs, lses)
        torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-6)


def test_a_build_or_a_machine_without_the_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        outs = [torch.empty(2, 3, 5, 6, device="cuda:0") for _ in range(2)]
    monkeypatch.setattr(_dispatch, "driver_problem", lambda: "no driver")
    assert _merge._why_not(outs, LSES, simulated=False) == "no driver"
    monkeypatch.setattr(_dispatch, "driver_problem", lambda: None)
    monkeypatch.setattr(_dispatch, "query_device", lambda index: find_device("H200"))
    assert "rows of 6 numbers" in str(_merge._why_not(outs, LSES, simulated=False))
    monkeypatch.setattr(_merge._native, "has_merger", lambda capability: False)
    with pytest.raises(archflash.ForcedImplementationError, match="this build has no code of it"):
        archflash.merge_attention(OUTS, LSES, implementation="ampere")


def test_parts_of_other_devices_are_refused() -> None:
    with pytest.raises(TypeError, match="lses\\[1\\] are on meta and cpu: all must be on cpu"):
        archflash.merge_attention([OUTS[0], OUTS[1].to("meta")], LSES)


@pytest.mark.slow
def test_tangents_go_through_plain_operations() -> None:
    tangents = [torch.randn_like(x) for x in OUTS]
    step = 1e-3
    with torch.autograd.forward_ad.dual_level():
        duals = [
            torch.autograd.forward_ad.make_dual(x, t) for x, t in zip(OUTS, tangents, strict=True)
        ]
        out, _ = archflash.merge_attention(duals, LSES)
        _, found = torch.autograd.forward_ad.unpack_dual(out)
        with pytest.raises(archflash.ForcedImplementationError, match="a tensor has a tangent"):
            archflash.merge_attention(duals, LSES, implementation="ampere")
    sides = [
        archflash.merge_attention(
            [x + sign * step * t for x, t in zip(OUTS, tangents, strict=True)], LSES
        )[0]
        for sign in (1, -1)
    ]
    torch.testing.assert_close(found, (sides[0] - sides[1]) / (2 * step), atol=1e-3, rtol=1e-3)
