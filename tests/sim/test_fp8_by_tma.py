"""FP8 in blackwell_consumer on the simulator: descales of every kind, every kernel, hand-overs."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import _api, reference, sim
from archflash import _archflash as native

from .test_ada import CASES, quantised, rand

NAME = "blackwell_consumer"
E4M3 = torch.float8_e4m3fn
# Rows of q and of k, head dims, SMs: where few tiles are planned, or enough to fill the GPU.
VARIANTS = {
    "d64_pair": ((300, 140), (64, 64), 2),
    "d64_few": ((61, 140), (64, 64), 2),
    "d128_large": ((300, 140), (128, 96), 2),
    "d128_few": ((61, 140), (112, 128), 3),
    "d192": ((140, 140), (192, 128), 1),
    "d256": ((140, 140), (256, 208), 1),
}


def check(ran: sim.Run, tensors: list[Tensor], call: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("device", ["RTX 5090", "H200"])
@pytest.mark.parametrize("name", CASES)
def test_fp8_meets_its_error_rule(name: str, device: str) -> None:
    _, rows, dims, per, options = CASES[name]
    tensors, call = quantised_call(rows, dims, (2, 1), per)
    call |= options
    ran = sim.run(*tensors, implementation=NAME, device=device, return_lse=True, **call)
    assert ran.plan.code == ("sm_120f" if device == "RTX 5090" else "sm_90a")
    assert not ran.report.findings
    check(ran, tensors, call)


@pytest.mark.parametrize("mode", ["lazy", "eager", "random", "priority"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel_with_several_tiles_for_a_cta(variant: str, mode: str) -> None:
    rows, dims, sms = VARIANTS[variant]
    tensors, call = quantised_call(rows, dims, (4, 2), "block")
    facts = _api.find_device("RTX 5090").to_dict() | {"sm_count": sms}
    problem = _api.make_problem(*tensors, return_lse=True, **call).as_if_on_cuda()
    plan = native.plan(NAME, problem, native.Device.from_dict(facts))
    assert not isinstance(plan, list)
    (launch,) = plan.to_dict()["launches"]
    assert launch["kernel"] == f"{NAME}_attention_fwd_e4m3_{variant}"
    ran = sim.run(*tensors, implementation=NAME, plan=plan, mode=mode, return_lse=True, **call)
    assert not ran.report.findings
    check(ran, tensors, call)


def test_the_kernels_above_are_all() -> None:
    file = resources.files("archflash") / "_kernels" / NAME / "fwd_e4m3.json"
    compiled = {name for entries in json.loads(file.read_text()).values() for name in entries}
    assert compiled == {f"{NAME}_attention_fwd_e4m3_{variant}" for variant in VARIANTS}


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids=str)
def test_the_next_sequence_never_matters(dims: tuple[int, int]) -> None:
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
    ran = sim.run(q, k, v, implementation=NAME, return_lse=True, **call)
    assert not ran.report.findings
    check(ran, [q, k, v], call)


def test_a_block_of_v_may_stand_for_zeros() -> None:
    tensors, call = quantised_call((70, 300), (64, 64), (2, 1), "block")
    call["v_descale"][:, :, 1::2] = 0
    tensors[2].view(torch.uint8)[:, :, 64:128] = 0x7E  # the largest number
    ran = sim.run(*tensors, implementation=NAME, return_lse=True, **call)
    check(ran, tensors, call)
