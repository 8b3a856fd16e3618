"""merge_attention: attention over some of the keys in each part is attention over all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import _merge, reference

from .checks import same_bits
from .executors import DTYPES, executor

on = executor()
(NAME,) = native.merger_names()
pytestmark = pytest.mark.skipif(NAME not in on.kernels(), reason=f"{NAME} has no code for this GPU")


def parts_of(
    count: int, dtype: str = "bfloat16", shape: tuple[int, ...] = (2, 3, 5, 40)
) -> tuple[list[Tensor], list[Tensor]]:
    """Results as attention over different keys gives them, bhnd."""
    outs = [on.rand(*shape, seed=i, dtype=dtype) for i in range(count)]
    lses = [on.rand(*shape[:3], seed=100 + i) * 3 for i in range(count)]
    lses[0][0, 0, 0] = -math.inf  # this row saw no key there, whatever its output holds
    outs[0][0, 0, 0] = math.nan
    for lse in lses:
        lse[1, 2, 1] = -math.inf  # and this one nowhere
    for out, lse in zip(outs, lses, strict=True):  # nor did this one, as FlashAttention-2 says it
        lse[0, 2, 2], out[0, 2, 2] = math.inf, 0.0
    lses[-1][1, 1], outs[-1][1, 1] = math.inf, 0.0  # nor these rows in one part
    return outs, lses


def check(out: Tensor, lse: Tensor, outs: list[Tensor], lses: list[Tensor]) -> None:
    expected, expected_lse = reference.merge_attention(outs, lses)
    base, _ = archflash.merge_attention(outs, lses, implementation="torch")
    report = reference.check(out, expected, base)
    assert report.ok, report
    lse_report = reference.check_lse(lse, expected_lse)
    assert lse_report.ok, lse_report
    for row in ((1, 2, 1), (0, 2, 2)):
        assert torch.equal(out[row], torch.zeros_like(out[row]))
        assert lse[row] == -math.inf


@pytest.mark.parametrize("dv", [40, 200])
def test_parts_of_other_dtypes_are_merged_in_the_place_of_the_first(dv: int) -> None:
    outs, lses = parts_of(3, "float32", (2, 3, 25, dv))
    outs[1] = outs[1].bfloat16()
    before = [x.float().clone() for x in outs]
    lse = _merge._launch(outs, lses, outs[0])
    check(outs[0], lse, before, lses)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 8, 19])
def test_parts_are_merged_as_in_float64(dtype: str, count: int) -> None:
    outs, lses = parts_of(count, dtype)
    out, lse = archflash.merge_attention(outs, lses, implementation=NAME)
    assert out.dtype == outs[0].dtype
    assert lse.dtype == torch.float32
    check(out, lse, outs, lses)
    stacked = archflash.merge_attention(torch.stack(outs), torch.stack(lses), implementation=NAME)
    assert same_bits(stacked[0], out)
    assert same_bits(stacked[1], lse)


@pytest.mark.parametrize("dv", [4, 256, 320])
def test_every_width(dv: int) -> None:
    outs, lses = parts_of(3, "float16", (2, 3, 3, dv))
    out, lse = archflash.merge_attention(outs, lses, implementation=NAME)
    check(out, lse, outs, lses)


def test_layouts_and_strides_are_followed() -> None:
    outs, lses = parts_of(3)
    out, lse = archflash.merge_attention(outs, lses, implementation=NAME)
    bnhd = [torch.nn.functional.pad(x, (0, 8)).transpose(1, 2)[..., :40] for x in outs]
    turned, turned_lse = archflash.merge_attention(
        bnhd, [x.expand(3, -1, -1, -1)[1] for x in lses], layout="bnhd", implementation=NAME
    )
    assert turned.is_contiguous()
    assert same_bits(turned.transpose(1, 2).contiguous(), out)
    assert same_bits(turned_lse, lse)
    packed = [x[1].transpose(0, 1) for x in outs]
    of_packed, packed_lse = archflash.merge_attention(
        packed, [x[1] for x in lses], implementation=NAME
    )
    assert same_bits(of_packed.transpose(0, 1).contiguous(), out[1])
    assert same_bits(packed_lse, lse[1])


def test_a_sink_and_keys_in_three_calls_are_one_call() -> None:
    q, k, v = on.qkv(7, 200, 64, dtype="bfloat16", heads=(4, 2))
    sinks = on.rand(4, seed=8)
    parts = [
        on.attend("ampere", q, k[:, :, keys].contiguous(), v[:, :, keys].contiguous(), **options)
        for keys, options in (
            (slice(0, 70), {"sinks": sinks}),
            (slice(70, 71), {}),
            (slice(71, 200), {}),
        )
    ]
    out, lse = archflash.merge_attention(
        [part[0] for part in parts], [part[1] for part in parts], implementation=NAME
    )
    expected, expected_lse = reference.attention(q, k, v, sinks=sinks)
    report = reference.check(out, expected, reference.baseline(q, k, v, sinks=sinks))
    assert report.ok, report
    assert reference.check_lse(lse, expected_lse).ok


def test_infinite_sinks_take_the_whole_weight() -> None:
    outs, lses = parts_of(2)
    lses[1][0, 1, 2] = math.inf
    for name in (NAME, "torch"):
        out, lse = archflash.merge_attention(outs, lses, implementation=name)
        assert torch.equal(out[0, 1, 2], outs[1][0, 1, 2])
        assert lse[0, 1, 2] == math.inf


@pytest.mark.skipif(on.name == "simulator", reason="the simulator is only for forced kernels")
def test_the_kernel_is_the_default_on_a_gpu() -> None:
    outs, lses = parts_of(3)
    for mine, other in zip(
        archflash.merge_attention(outs, lses),
        archflash.merge_attention(outs, lses, implementation=NAME),
        strict=True,
    ):
        assert same_bits(mine, other)


def test_what_the_kernel_does_not_take_is_refused_with_a_reason() -> None:
    cases: dict[str, tuple[Any, Any]] = {
        "it takes multiples of 4": parts_of(2, shape=(2, 3, 5, 42)),
        "not contiguous and aligned": ([x[..., ::2] for x in parts_of(2)[0]], parts_of(2)[1]),
        "a tensor requires a gradient": (
            [x.requires_grad_() for x in parts_of(2)[0]],
            parts_of(2)[1],
        ),
    }
    for words, (outs, lses) in cases.items():
        with pytest.raises(archflash.ForcedImplementationError, match=words):
            archflash.merge_attention(outs, lses, implementation=NAME)
