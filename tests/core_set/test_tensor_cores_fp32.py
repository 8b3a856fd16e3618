"""simt's kernels on tensor cores, which an H200 gets: fp32 in three products of TF32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as native
from archflash import reference

from ..replanned import plan_with
from . import gradients
from .checks import assert_rows_close
from .executors import executor
from .gradients import FeatureCase, differentiate_and_check, feature_call

on = executor()
NAME = "simt"
OTHER_GPU = (
    on.name == "gpu" and torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)
)
pytestmark = pytest.mark.skipif(
    NAME not in on.kernels() or OTHER_GPU, reason="these kernels have no code for this GPU"
)


def plan_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any) -> native.LaunchPlan:
    plan = plan_with({"sm_count": 1}, q, k, v, device="H200", implementation=NAME, **call)
    (launch,) = plan.to_dict()["launches"]
    assert launch["kernel"].endswith("_tensor")
    return plan


def attend_and_check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any
) -> torch.Tensor:
    plan = plan_of(q, k, v, **call)
    out, _ = on.attend_and_check(NAME, q, k, v, plan=plan, schedules=[0, 3], **call)
    return out


CALLS: dict[str, tuple[tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "plain": ((64, 64), (100, 150), {}),
    "causal": ((128, 128), (130, 130), {"causal": True}),
    "unlike head dims": ((40, 24), (70, 65), {}),
    "more columns of v": ((72, 120), (65, 70), {"causal": True}),
    "window": ((32, 32), (150, 150), {"window": (20, 3)}),
    "softcap": ((96, 96), (40, 90), {"softcap": 3.0}),
    "negative scale": ((64, 64), (40, 90), {"scale": -0.3}),
    "few rows": ((128, 128), (33, 200), {}),
    "wide, few rows": ((256, 136), (70, 90), {"softcap": 3.0}),
    "wide, causal": ((160, 256), (140, 70), {"causal": True}),
    "no keys": ((64, 64), (40, 40), {"window": (2, -1), "q_offset": -39}),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_agree_with_float64(name: str) -> None:
    dims, (nq, nk), options = CALLS[name]
    attend_and_check(*on.qkv(nq, nk, *dims, heads=(4, 2)), **options)


def test_packed_sequences_and_sinks() -> None:
    ends = on.cu_seqlens([70, 0, 3, 65])
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in on.qkv(138, 138, 64))
    attend_and_check(
        q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=70, max_seqlen_k=70,
        causal=True, sinks=on.tensor([0.5, -1.0]),
    )  # fmt: skip


def test_few_rows_and_few_tiles_stay_on_cuda_cores() -> None:
    for nq, d in ((32, 64), (64, 128), (200, 256)):
        q, k, v = on.qkv(nq, 200, d, heads=(8, 8))
        plan = archflash.explain(q, k, v, device="H200", implementation=NAME).plan
        assert plan is not None
        assert plan.tile is not None
        assert not plan.tile.name.endswith("_tensor")


@pytest.mark.parametrize("size", [1e-18, 1e12])
def test_scores_of_any_size(size: float) -> None:
    q, k, v = on.qkv(70, 130, 64)
    attend_and_check(q * size, k, v * size)


@pytest.mark.parametrize(
    ("where", "value", "d"),
    [
        *((x, value, 64) for x in "qkv" for value in (math.nan, math.inf, -math.inf)),
        ("k", math.inf, 136),
        ("v", -math.inf, 136),
    ],
)
def test_what_is_not_finite_spoils_what_sees_it_only(where: str, value: float, d: int) -> None:
    """A tile with such a result is computed again."""
    given = dict(zip("qkv", on.qkv(70, 70, d), strict=True))
    clean = dict(given)
    causal = where != "v"
    spoiled = given[where].clone()
    spoiled[0, 1, 40, 3] = value
    given[where] = spoiled
    plan = plan_of(*given.values(), causal=causal)
    found, _ = on.attend(NAME, *given.values(), plan=plan, schedules=[0], causal=causal)
    if where == "v":
        assert not found[0, 1, :, 3].isfinite().any()
        expected = attend_and_check(*clean.values(), causal=causal)
        found[0, 1, :, 3] = expected[0, 1, :, 3]
        assert torch.equal(found, expected)
        return
    blind = torch.ones(1, 2, 70, dtype=torch.bool, device=on.device)
    blind[0, 1, 40 : 41 if where == "q" else 70] = False
    assert_rows_close(blind, found, *clean.values(), causal=causal)
    if where == "q" or math.isnan(value):
        assert bool(found[~blind].isnan().all())


# Gradients that meet several features at once: see test_gradients.py.
GRADIENTS: dict[str, FeatureCase] = {
    "window-softcap-sinks-lse": (
        (140, 200, 64, 64, 1, (4, 2)),
        {"window": (110, 20), "softcap": 1.5, "sinks": True, "dlse": True},
    ),
    "causal-rows-without-keys": ((200, 130, 128, 72, 1, (2, 1)), {"causal": True}),
    "wide-causal-softcap-sinks-lse": (
        (100, 130, 256, 136, 1, (2, 1)),
        {"causal": True, "softcap": 1.5, "sinks": True, "dlse": True},
    ),
    "bnhd-offsets-negative-scale-added": (
        (129, 200, 120, 128, 2, (2, 1)),
        {
            "layout": "bnhd", "q_offset": (3, 50), "causal": True, "scale": -0.1, "add_to": 0.5,
            "pad": 8,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_agree_with_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = list(GRADIENTS).index(name)
    tensors, options = feature_call(on, GRADIENTS[name], "float32", number)
    plans = gradients.note_plans(monkeypatch)
    differentiate_and_check(
        on, NAME, *tensors, schedules=(number, number + 1), planned_for="H200", **options
    )
    of_keys = [k for plan in plans for k in plan.kernels if k.startswith("simt_attention_bwd_")]
    assert of_keys
    assert all(kernel.endswith("_tensor") for kernel in of_keys)


def test_gradients_of_packed_sequences_on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_q, ends_k = on.cu_seqlens([5, 0, 40, 140]), on.cu_seqlens([9, 12, 0, 150])
    dout, q, k, v = (  # with rows of no sequence
        x[0].transpose(0, 1).contiguous()
        for x in gradients.inputs(on, 520, 520, 64, 64, "float32", heads=(4, 2))
    )
    plans = gradients.note_plans(monkeypatch)
    differentiate_and_check(
        on, NAME, dout, q, k, v, planned_for="H200", schedules=(2,), causal=True,
        cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, sinks=on.rand(4, seed=9),
    )  # fmt: skip
    assert "simt_attention_bwd_f32_d64_tensor" in plans[0].kernels


@pytest.mark.skipif(on.name != "simulator", reason="each CPU has its own order of sums")
def test_gradients_have_the_errors_of_fp32_on_a_cpu() -> None:
    given = gradients.inputs(on, 130, 130, 64, 64, "float32", heads=(2, 2))
    found = gradients.differentiate(on, NAME, *given, schedules=(0,), planned_for="H200")
    on_cpu = [x.cpu() for x in given]
    exact, plain = reference.attention_backward(*on_cpu), reference.baseline_backward(*on_cpu)
    for name in ("dq", "dk", "dv"):
        expected = getattr(exact, name)
        error, usual = (
            (getattr(x, name).cpu().double() - expected).square().mean().sqrt()
            for x in (found, plain)
        )
        assert error < 1.15 * usual, name


# Calls whose sums are short in some way: (nq, nk), options.
SHORT: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "few rows": ((63, 300), {}),
    "few keys": ((300, 63), {"causal": True}),
    "narrow window": ((300, 300), {"window": (31, 31)}),
    "short sequences": ((180, 180), {"ends": (0, 50, 100, 180)}),
}


@pytest.mark.parametrize("name", SHORT)
def test_gradients_with_short_sums_stay_on_cuda_cores(name: str) -> None:
    """On tensor cores errors of short sums can be more than twice those of plain fp32."""
    (nq, nk), options = SHORT[name]
    options = dict(options)
    tensors = gradients.inputs(on, nq, nk, 64, 64, "float32")
    if "ends" in options:
        tensors = [x[0].transpose(0, 1) for x in tensors]
        options["cu_seqlens_q"] = options["cu_seqlens_k"] = on.int32(*options.pop("ends"))
    decision = archflash.explain(
        *tensors[1:], device="H200", implementation=NAME, backward=True, **options
    )
    assert decision.plan is not None
    (kernel,) = (x for x in decision.plan.kernels if x.startswith("simt_attention_bwd_"))
    assert not kernel.endswith("_tensor")
