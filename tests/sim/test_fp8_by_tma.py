"""FP8 in blackwell_consumer and blackwell_dc on the simulator: descales of every kind, every
kernel, hand-overs.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import _api, reference, sim
from archflash import _archflash as native

from .explained import unexplained
from .test_ada import CASES, quantised, rand

E4M3 = torch.float8_e4m3fn
CONSUMER, DC = "blackwell_consumer", "blackwell_dc"
# What runs on a GPU, and which code of it.
RUNS_ON = {"RTX 5090": (CONSUMER, "sm_120f"), "H200": (CONSUMER, "sm_90a"), "B200": (DC, "sm_100f")}
HOME = {CONSUMER: "RTX 5090", DC: "B200"}
# Rows of q and of k, head dims, SMs: where few tiles are planned, or enough to fill the GPU.
VARIANTS = {
    (CONSUMER, "d64_pair"): ((300, 140), (64, 64), 2),
    (CONSUMER, "d64_few"): ((61, 140), (64, 64), 2),
    (CONSUMER, "d128_large"): ((300, 140), (128, 96), 2),
    (CONSUMER, "d128_few"): ((61, 140), (112, 128), 3),
    (CONSUMER, "d192"): ((140, 140), (192, 128), 1),
    (CONSUMER, "d256"): ((140, 140), (256, 208), 1),
    (DC, "d64"): ((300, 270), (64, 48), 1),
    (DC, "d128"): ((300, 270), (96, 96), 1),
    (DC, "d192"): ((300, 270), (192, 128), 1),
    (DC, "d256"): ((140, 270), (256, 208), 1),
}
each_name = pytest.mark.parametrize("name", [CONSUMER, DC])


def check(name: str, ran: sim.Run, tensors: list[Tensor], call: dict[str, Any]) -> None:
    assert not unexplained(name, ran.report), ran.report
    expected, expected_lse = reference.attention(*tensors, **call)
    report = reference.check_fp8(ran.out, expected, *tensors, **call)
    assert report.ok, report
    assert ran.lse is not None
    lse_report = reference.check_lse(ran.lse, expected_lse)
    assert lse_report.ok, lse_report


def quantised_call(
    rows: tuple[int, int], dims: tuple[int, int], heads: tuple[int, int], per: str
) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v in e4m3 and their descales."""
    (nq, nk), (d, dv) = rows, dims
    shapes = ((heads[0], nq, d), (heads[1], nk, d), (heads[1], nk, dv))
    made = [quantised(rand(1, *shape, seed=i), per, E4M3) for i, shape in enumerate(shapes)]
    return [values for values, _ in made], {
        f"{letter}_descale": descale for letter, (_, descale) in zip("qkv", made, strict=True)
    }


@pytest.mark.parametrize("device", RUNS_ON)
@pytest.mark.parametrize("case", CASES)
def test_fp8_meets_its_error_rule(case: str, device: str) -> None:
    _, rows, dims, per, options = CASES[case]
    name, code = RUNS_ON[device]
    tensors, call = quantised_call(rows, dims, (2, 1), per)
    call |= options
    ran = sim.run(*tensors, implementation=name, device=device, return_lse=True, **call)
    assert ran.plan.code == code
    check(name, ran, tensors, call)


@pytest.mark.parametrize("mode", ["lazy", "eager", "random", "priority"])
@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_every_kernel_with_several_tiles_for_a_cta(name: str, variant: str, mode: str) -> None:
    rows, dims, sms = VARIANTS[name, variant]
    tensors, call = quantised_call(rows, dims, (4, 2), "block")
    facts = _api.find_device(HOME[name]).to_dict() | {"sm_count": sms}
    problem = _api.make_problem(*tensors, return_lse=True, **call).as_if_on_cuda()
    plan = native.plan(name, problem, native.Device.from_dict(facts))
    assert not isinstance(plan, list)
    (launch,) = plan.to_dict()["launches"]
    assert launch["kernel"] == f"{name}_attention_fwd_e4m3_{variant}"
    ran = sim.run(*tensors, implementation=name, plan=plan, mode=mode, return_lse=True, **call)
    check(name, ran, tensors, call)


@each_name
def test_the_kernels_above_are_all(name: str) -> None:
    file = resources.files("archflash") / "_kernels" / name / "fwd_e4m3.json"
    compiled = {name for entries in json.loads(file.read_text()).values() for name in entries}
    assert compiled == {
        f"{name}_attention_fwd_e4m3_{variant}" for other, variant in VARIANTS if other == name
    }


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids=str)
@each_name
def test_the_next_sequence_never_matters(name: str, dims: tuple[int, int]) -> None:
    """V of another sequence in the same block is NaN, and so is K."""
    lengths = [(33, 37), (0, 20), (20, 70)]
    queries, keys = zip(*lengths, strict=True)
    starts = [
        torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32)
        for x in (queries, keys)
    ]
    total_q, total_k = sum(queries), sum(keys)
    q = rand(total_q, 2, dims[0], seed=0).to(E4M3)
    k = rand(total_k + 9, 1, dims[0], seed=1).to(E4M3)
    v = rand(total_k + 9, 1, dims[1], seed=2).to(E4M3)
    for x in (k, v):
        x.view(torch.uint8)[37:57] = 0x7F  # the keys of the sequence without queries
        x.view(torch.uint8)[total_k:] = 0x7F
    descale = torch.rand(3, 1, generator=torch.Generator().manual_seed(5)) + 0.5
    call = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "v_descale": descale}
    ran = sim.run(q, k, v, implementation=name, return_lse=True, **call)
    check(name, ran, [q, k, v], call)


@each_name
def test_a_block_of_v_may_stand_for_zeros(name: str) -> None:
    tensors, call = quantised_call((70, 300), (64, 64), (2, 1), "block")
    call["v_descale"][:, :, 1::2] = 0
    tensors[2].view(torch.uint8)[:, :, 64:128] = 0x7E  # the largest number
    ran = sim.run(*tensors, implementation=name, return_lse=True, **call)
    check(name, ran, tensors, call)


@pytest.mark.parametrize("scale", [None, -0.3, 1e7])
@each_name
def test_descales_of_blocks_of_v_may_have_any_size_and_sign(name: str, scale: float | None) -> None:
    """Each is judged beside the others: the largest block is visited first or last."""
    tensors, call = quantised_call((70, 500), (64, 64), (2, 1), "block")
    sizes = torch.tensor([1.0, -3e-3, 40.0, 2e-30, -0.5, 0.0, 1e-2, -7.0])
    for descale in (sizes, sizes.flip(0), sizes * 1e-20):
        call["v_descale"] = descale.view(1, 1, -1)
        ran = sim.run(
            *tensors, implementation=name, return_lse=True, out_dtype=torch.bfloat16,
            scale=scale, **call
        )  # fmt: skip
        check(name, ran, tensors, call | {"scale": scale})


@pytest.mark.parametrize(
    "descales", [(1e-38, 8.0), (8.0, 1e-38), (1e-4, 0.0), (0.0, 1e-12)], ids=str
)
def test_tiny_descales_of_v_stand_for_zeros(descales: tuple[float, float]) -> None:
    """Rows see both blocks, or the first alone: an empty block must not spoil the others."""
    tensors, call = quantised_call((128, 128), (64, 64), (1, 1), "block")
    call["v_descale"] = torch.tensor(descales).view(1, 1, 2)
    options = call | {"causal": True}
    ran = sim.run(*tensors, implementation="blackwell_dc", return_lse=True, **options)
    check("blackwell_dc", ran, tensors, options)


@pytest.mark.parametrize("descales", [(1.0, 100.0), (100.0, 1.0)], ids=str)
@each_name
def test_descales_of_v_count_beside_equal_scores_of_any_size(
    name: str, descales: tuple[float, float]
) -> None:
    """All keys have one score, so large that the logarithm of a descale is less than its ulp."""
    q, k = torch.ones(1, 1, 5, 64).to(E4M3), torch.ones(1, 1, 128, 64).to(E4M3)
    v = rand(1, 1, 128, 64, seed=1).to(E4M3)
    call = {"scale": 1e7, "v_descale": torch.tensor(descales).view(1, 1, 2)}
    ran = sim.run(q, k, v, implementation=name, return_lse=True, **call)
    check(name, ran, [q, k, v], call)
