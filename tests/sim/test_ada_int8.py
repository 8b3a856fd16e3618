"""approximate="int8_qk" on the simulator: products of int8, the mean of K added back, its error."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import reference

sim = pytest.importorskip("archflash.sim")


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(
    nq: int, nk: int, d: int, dv: int, dtype: torch.dtype, size: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Two heads over one; the keys have a mean that is large beside what tells them apart."""
    q = rand(1, 2, nq, d, seed=1) * size
    k = (rand(1, 1, nk, d, seed=2) + 3 * rand(1, 1, 1, d, seed=4)) * size
    return q.to(dtype), k.to(dtype), rand(1, 1, nk, dv, seed=3, dtype=dtype)


# nq, nk, d, dv, device, size of the scores, options
CASES: dict[str, tuple[int, int, int, int, str, float, dict[str, Any]]] = {
    "causal": (70, 130, 128, 128, "RTX 4090", 1, {"causal": True}),
    "two-ctas-per-sm": (70, 130, 128, 128, "H200", 1, {"causal": True}),
    "d64": (70, 200, 64, 64, "RTX 4090", 1, {}),
    "d256": (20, 130, 256, 256, "RTX 4090", 1, {"window": (70, 5)}),
    "odd-dims": (33, 70, 24, 40, "RTX 4090", 1, {"sinks": torch.tensor([0.5, -1.0])}),
    "offset": (65, 100, 72, 72, "RTX 4090", 1, {"q_offset": torch.tensor([20], dtype=torch.int32)}),
    "peaked": (40, 200, 64, 64, "RTX 4090", 6, {}),
    "huge": (40, 200, 64, 64, "RTX 4090", 1, {"scale": 1e6}),
    "decode": (1, 300, 64, 64, "RTX 4090", 1, {"sinks": torch.tensor([20.0, 1.0])}),
    "no-keys": (5, 0, 64, 64, "RTX 4090", 1, {"sinks": torch.tensor([0.5, -1.0])}),
}


@pytest.mark.parametrize("name", CASES)
def test_int8_products_meet_the_error_rule_on_the_rounded_inputs(name: str) -> None:
    nq, nk, d, dv, device, size, options = CASES[name]
    dtype = torch.float16 if name in ("d64", "peaked") else torch.bfloat16
    q, k, v = inputs(nq, nk, d, dv, dtype, size)
    ran = sim.run(
        q, k, v, implementation="ada", approximate="int8_qk", device=device, return_lse=True,
        **options,
    )  # fmt: skip
    out, lse = reference.check_int8_qk(ran.out, ran.lse, q, k, v, **options)
    assert out.ok, out
    if name != "huge":  # of scores of 1e7 the rounding of the shift alone is more than the rule
        assert lse is not None
        assert lse.ok, lse


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("tail", [6e4, math.nan])
def test_what_lies_behind_the_last_visible_key_never_matters(tail: float, per_batch: bool) -> None:
    """A cache of 300 keys of which 100 are in use, and one with 150 in use beside it."""
    used = [100, 150 if per_batch else 100]
    q, k, v = inputs(20, 300, 64, 64, torch.float16)
    q, k, v = (torch.cat([x, x.flip(2)]) for x in (q, k, v))
    offsets = torch.tensor(used, dtype=torch.int32) - 20
    call = {"causal": True, "q_offset": offsets if per_batch else 80}
    bits = []
    for behind in (0.0, tail):
        for batch, keys in enumerate(used):
            k[batch, :, keys:] = behind
        ran = sim.run(q, k, v, implementation="ada", approximate="int8_qk", return_lse=True, **call)
        bits.append((ran.out, ran.lse))
    assert torch.equal(bits[0][0], bits[1][0])
    assert torch.equal(bits[0][1], bits[1][1])
    out, lse = reference.check_int8_qk(*bits[1], q, k.nan_to_num(nan=0.0), v, **call)
    assert out.ok, out
    assert lse is not None
    assert lse.ok, lse


def test_rows_that_are_not_finite_spoil_what_sees_them_alone() -> None:
    q, k, v = inputs(40, 130, 64, 64, torch.float16)
    q[0, 0, 7, 3] = math.nan
    k[0, 0, 100, 5] = math.inf
    call = {"implementation": "ada", "approximate": "int8_qk", "return_lse": True}
    ran = sim.run(q, k, v, q_offset=80, causal=True, **call)
    spoiled = torch.zeros(2, 40, dtype=torch.bool)
    spoiled[0, 7] = True
    spoiled[:, 20:] = True  # these see key 100
    assert torch.equal(ran.out[0].isnan().all(-1), spoiled)
    assert torch.equal(ran.out[0].isnan().any(-1), spoiled)
    assert torch.equal(ran.lse[0].isnan(), spoiled)
    clean_q, clean_k = q.nan_to_num(nan=0.0), k.nan_to_num(posinf=0.0)
    exact = reference.attention(
        clean_q, clean_k, v, return_lse=False, q_offset=80, causal=True
    )[0]  # fmt: skip
    assert (ran.out[0].double() - exact)[~spoiled].abs().max() < 0.2


def test_a_mean_of_the_keys_costs_no_accuracy() -> None:
    """The same keys with and without something that all share: 100 times as large as they are."""
    q, v = rand(1, 1, 64, 64, seed=1, dtype=torch.float16), rand(1, 1, 128, 64, seed=3)
    k = (rand(1, 1, 128, 64, seed=2, dtype=torch.float32) * 8).round() / 8
    errors = []
    for mean in (0.0, 100.0):
        keys = (k + mean).to(torch.float16)
        assert torch.equal(keys - mean, k.to(torch.float16))  # nothing is lost before
        call: dict[str, Any] = {"scale": 0.125}
        run = sim.run(
            q, keys, v.to(torch.float16), implementation="ada", approximate="int8_qk", **call
        )
        expected = reference.attention(q, keys, v.to(torch.float16), return_lse=False, **call)
        errors.append((run.out.double() - expected).square().mean().sqrt().item())
    assert errors[1] < 1.2 * errors[0]


@pytest.mark.parametrize(("outliers", "limit"), [(False, 0.02), (True, 0.16)])
def test_error_against_the_tensors_before_rounding(outliers: bool, limit: float) -> None:
    """Root mean square errors, relative; those of the output in bf16 alone are about 0.002."""
    channels = torch.ones(128)
    if outliers:
        channels[5::40] = 20.0
    q = (rand(1, 1, 128, 128, seed=1) / channels.sqrt()).to(torch.bfloat16)
    k = (rand(1, 1, 256, 128, seed=2) * channels).to(torch.bfloat16)
    v = rand(1, 1, 256, 128, seed=3)
    ran = sim.run(q, k, v, implementation="ada", approximate="int8_qk")
    expected = reference.attention(q, k, v, return_lse=False)
    error = (ran.out.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 0.002 < error < limit


def test_a_call_on_the_cpu_is_simulated_when_it_is_forced() -> None:
    q, k, v = inputs(20, 70, 64, 64, torch.float16)
    out = archflash.attention(q, k, v, implementation="ada", approximate="int8_qk")
    exact = archflash.attention(q, k, v, implementation="ada")
    assert not torch.equal(out, exact)
    assert (out - exact).abs().max() < 0.1
