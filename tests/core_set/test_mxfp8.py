"""MXFP8: FP8 inputs with a power of two as the scale of each 32 numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import reference

from .checks import relative_rms_error
from .executors import FP8, executor

on = executor()
pytestmark = pytest.mark.skipif(
    not hasattr(torch, "float8_e8m0fnu"), reason="torch before 2.7 has no float8_e8m0fnu"
)
# Only GPUs of 12.x multiply by block scales; what `torch` makes of them is tried on all.
ELSEWHERE = on.name == "gpu" and (
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 12
)
every_kernel = pytest.mark.parametrize("kernel", [] if ELSEWHERE else on.kernels("block_scales"))
RANDOM = [2]  # one of the simulator's schedules
NAMES = ("q_descale", "k_descale", "v_descale")


def inputs(
    nq: int, nk: int, d: int, dv: int, dtype: str = "float8_e4m3fn", layout: str = "bhnd"
) -> tuple[list[Tensor], dict[str, Any]]:
    """Two heads over one, and scales that differ from group to group."""
    made, scales = [], {}
    sizes = ((2, nq, d), (1, nk, d), (1, nk, dv))
    for number, (name, (heads, rows, columns)) in enumerate(zip(NAMES, sizes, strict=True)):
        x = on.rand(1, heads, rows, columns, seed=number)
        # The size of numbers changes along columns and rows by up to eight.
        steps = [torch.arange(n, device=x.device) // 16 % 3 for n in (rows, columns)]
        x = x * torch.exp2(steps[0][:, None] + steps[1] - 2.0) * (0.3 if number < 2 else 1.0)
        x = x.transpose(1, 2).contiguous() if layout == "bnhd" else x
        along = -1 if number < 2 else 1 if layout == "bnhd" else 2
        values, scales[name] = archflash.quantize_mxfp8(x, dtype=FP8[dtype], dim=along)
        made.append(values)
    return made, scales


# nq, nk, d, dv, dtype, options
CALLS: dict[str, tuple[int, int, int, int, str, dict[str, Any]]] = {
    "d64": (150, 200, 64, 64, "float8_e4m3fn", {"layout": "bnhd"}),
    "causal": (140, 170, 128, 128, "float8_e4m3fn", {"causal": True}),
    "window": (90, 230, 64, 64, "float8_e5m2", {"window": (70, 5), "out_pad": 24}),
    "odd-dims": (33, 100, 80, 48, "float8_e4m3fn", {"sinks": [0.5, -1.0]}),
    "softcap": (40, 75, 128, 112, "float8_e5m2", {"softcap": 3.0}),
    "offset": (65, 150, 32, 16, "float8_e4m3fn", {"q_offset": [20], "causal": True}),
    "wide": (70, 99, 192, 128, "float8_e5m2", {"out_dtype": torch.float16}),
    "widest": (30, 70, 256, 256, "float8_e4m3fn", {"scale": -0.03}),
    "one-row": (1, 300, 128, 64, "float8_e4m3fn", {"sinks": [20.0, 1.0]}),
}


@every_kernel
@pytest.mark.parametrize("name", CALLS)
def test_a_call_agrees_with_float64(kernel: str, name: str) -> None:
    nq, nk, d, dv, dtype, options = CALLS[name]
    call = on.with_tensors(options)
    (q, k, v), scales = inputs(nq, nk, d, dv, dtype, call.get("layout", "bhnd"))
    assert all(len(x.view(torch.uint8).unique()) > 1 for x in scales.values())
    on.attend_and_check(kernel, q, k, v, schedules=RANDOM, **call, **scales)


@every_kernel
def test_scales_may_be_views_of_larger_tensors(kernel: str) -> None:
    (q, k, v), scales = inputs(70, 90, 64, 64)
    expected, _ = on.attend(kernel, q, k, v, schedules=RANDOM, **scales)
    views = {}
    for name, x in scales.items():
        wide = torch.full((1, x.shape[1] + 1, x.shape[2] + 2, x.shape[3] + 5), 255, device=x.device)
        wide = wide.to(torch.uint8)
        wide[:, 1:, 2:, 3:-2] = x.view(torch.uint8)
        views[name] = wide.view(torch.float8_e8m0fnu)[:, 1:, 2:, 3:-2]
    out, _ = on.attend(kernel, q, k, v, schedules=RANDOM, **views)
    assert torch.equal(out, expected)


@every_kernel
def test_the_error_of_rounding_is_small(kernel: str) -> None:
    q, k, v = on.qkv(128, on.pick(simulator=256, gpu=1024), 64, heads=(1, 1))
    made = [archflash.quantize_mxfp8(x, dim=dim) for x, dim in ((q, -1), (k, -1), (v, -2))]
    scales = dict(zip(NAMES, (x[1] for x in made), strict=True))
    out, _ = on.attend(kernel, *(x[0] for x in made), schedules=RANDOM, **scales)
    expected, _ = reference.attention(q, k, v)
    assert 0.02 < relative_rms_error(out, expected) < 0.08


@every_kernel
def test_scales_that_are_not_numbers_stay_where_they_are_seen(kernel: str) -> None:
    (q, k, v), scales = inputs(40, 200, 64, 64)
    call = {"causal": True, "q_offset": 60, "schedules": RANDOM}
    out, lse = on.attend(kernel, q, k, v, **scales, **call)
    assert out.isfinite().all()

    def spoiled(name: str, *place: int | slice) -> Tensor:
        bytes_of = scales[name].view(torch.uint8).clone()
        bytes_of[place] = 255
        rows, row_lse = on.attend(
            kernel, q, k, v, **{**scales, name: bytes_of.view(torch.float8_e8m0fnu)}, **call
        )
        if not rows.isnan().any():
            assert torch.equal(rows, out)
            assert torch.equal(row_lse, lse)
        return rows.isnan()

    of_q = spoiled("q_descale", 0, 1, 7, 1)
    assert of_q[0, 1, 7].all()
    assert of_q.sum() == 64
    # Queries see keys 0 to 99, and the scales of others may be anything.
    assert not spoiled("k_descale", 0, 0, slice(100, None)).any()
    assert not spoiled("v_descale", 0, 0, slice(4, None)).any()
    of_k = spoiled("k_descale", 0, 0, 80, 0)
    assert of_k[:, :, 20:].all()
    assert not of_k[:, :, :20].any()
    of_v = spoiled("v_descale", 0, 0, 1, 5)
    assert of_v[..., 5].all()
    assert of_v.sum() == 2 * 40


@every_kernel
def test_the_smallest_and_largest_scales_count(kernel: str) -> None:
    """The product of two of them is 1, in q k^T, and so is that of a power of two and p v's."""
    (q, k, v), scales = inputs(20, 40, 64, 64)
    expected, lse = on.attend(kernel, q, k, v, schedules=RANDOM, **scales)
    moved = {name: x.view(torch.uint8).to(torch.int32) for name, x in scales.items()}
    moved["q_descale"] += 110
    moved["k_descale"] -= 110
    again, lse_again = on.attend(
        kernel, q, k, v, schedules=RANDOM,
        **{name: x.to(torch.uint8).view(torch.float8_e8m0fnu) for name, x in moved.items()},
    )  # fmt: skip
    assert torch.equal(again, expected)
    assert torch.equal(lse_again, lse)
    moved["v_descale"] += 100
    large, _ = on.attend(
        kernel, q, k, v, schedules=RANDOM,
        **{name: x.to(torch.uint8).view(torch.float8_e8m0fnu) for name, x in moved.items()},
    )  # fmt: skip
    assert torch.equal(large.double(), expected.double() * 2.0**100)


@every_kernel
def test_without_keys_the_output_is_zero(kernel: str) -> None:
    (q, k, v), scales = inputs(5, 0, 64, 64)
    out, lse = on.attend(kernel, q, k, v, schedules=RANDOM, **scales)
    assert not out.any()
    assert (lse == -math.inf).all()


def test_torch_serves_it_everywhere() -> None:
    for layout in ("bhnd", "bnhd"):
        (q, k, v), scales = inputs(40, 75, 48, 80, layout=layout)
        expected, _ = reference.attention(q, k, v, causal=True, layout=layout, **scales)
        out = archflash.attention(
            q, k, v, causal=True, layout=layout, implementation="torch", **scales
        )
        assert out.dtype == torch.bfloat16
        assert relative_rms_error(out, expected) < 0.005


@pytest.mark.parametrize(
    ("kernel", "device", "words"),
    [
        ("blackwell_consumer", "H200", "on compute capability 9.0: blackwell_consumer multiplies "
         "by block scales on 12.x only; use float32 descales or use implementation='torch'"),
        ("hopper", "H200", "descales of dtype float8_e8m0fnu: hopper takes descales of a tensor"),
        ("ampere", "RTX 5090", "dtype float8_e4m3fn"),
    ],
)  # fmt: skip
def test_who_does_not_serve_it_says_why(kernel: str, device: str, words: str) -> None:
    (q, k, v), scales = inputs(64, 64, 64, 64)
    with pytest.raises(archflash.ForcedImplementationError, match=words):
        archflash.explain(q, k, v, device=device, implementation=kernel, **scales)


def test_it_is_chosen_where_a_run_has_shown_it_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the kernels for other inputs, on other GPUs, says nothing about it."""
    (q, k, v), scales = inputs(64, 64, 64, 64)
    found = archflash.explain(q, k, v, device="RTX 5090", **scales)
    assert found.chosen == "torch"
    assert found.unproved == ("blackwell_consumer",)
    assert archflash.explain(q, k, v, device="RTX 5090").chosen == "blackwell_consumer"
    monkeypatch.setenv("ARCHFLASH_UNPROVED", "blackwell_consumer")
    assert archflash.explain(q, k, v, device="RTX 5090", **scales).chosen == "blackwell_consumer"
