"""blackwell_dc on the simulator: CTAs that go from tile to tile, schedules, what its switches do.

Every pair of features of the core set: test_attention.py.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import reference

# The benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.switches.plans import in_pairs

from .explained import explanation, unexplained
from .test_attention import MODES, SEEDS

sim = pytest.importorskip("archflash.sim")

NAME = "blackwell_dc"
# Of each Config: (d, dv), rows and keys of a tile, how many 2^x of a row's block are MUFU's.
CONFIGS = {
    "d64": ((64, 64), 256, 128, 88),
    "d96": ((96, 96), 256, 128, 96),
    "d128": ((128, 128), 256, 128, 112),
    "d128_pair": ((128, 128), 512, 128, 112),
    "d192": ((192, 128), 256, 128, 128),
    "d192_pair": ((192, 128), 512, 128, 128),
    "d256": ((256, 256), 128, 64, 64),
}
SOFTMAX_WARPS = 4  # of a tile of 128 rows

every_config = pytest.mark.parametrize("config", CONFIGS)


def is_pair(config: str) -> bool:
    return config.endswith("_pair")


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def one_after_another(
    config: str, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> native.LaunchPlan:
    """All row tiles in one CTA, or in one pair of them."""
    planned = archflash.explain(q, k, v, device="B200", implementation=NAME, **call).plan
    assert planned is not None
    one_sm = native.Device.from_dict(planned.device.to_dict() | {"sm_count": 1})
    plan = native.plan(NAME, planned.problem, one_sm)
    assert isinstance(plan, native.LaunchPlan)
    if is_pair(config):
        plan = in_pairs(plan, pairs=1)
    assert plan.to_dict()["launches"][0]["grid"] == [1 + is_pair(config), 1, 1]
    return plan


def check_every_mode(config: str, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> None:
    first = None
    plan = one_after_another(config, q, k, v, return_lse=True, **call)
    for number in range(SEEDS):
        mode = MODES[number % len(MODES)]
        run = sim.run(
            q, k, v, implementation=NAME, mode=mode, seed=7 + number, plan=plan, return_lse=True,
            **call,
        )  # fmt: skip
        assert not unexplained(NAME, run.report), run.report
        assert any(explanation(NAME, finding) for finding in run.report.findings)
        if first is None:
            first = (run.out.clone(), run.lse.clone())
            expected, expected_lse = reference.attention(q, k, v, **call)
            report = reference.check(run.out, expected, reference.baseline(q, k, v, **call))
            assert report.ok, report
            lse_report = reference.check_lse(run.lse, expected_lse)
            assert lse_report.ok, lse_report
        else:
            assert torch.equal(run.out, first[0]), mode
            assert torch.equal(run.lse, first[1]), mode


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@every_config
def test_a_cta_goes_from_tile_to_tile_under_every_schedule(config: str, causal: bool) -> None:
    (d, dv), rows, keys, _ = CONFIGS[config]
    # Three tiles and more of each head, an odd number of blocks, the last ones ragged.
    nq, nk = 2 * rows + 70, 4 * keys + 9
    q, k, v = rand(1, 2, nq, d, seed=0), rand(1, 1, nk, d, seed=1), rand(1, 1, nk, dv, seed=2)
    check_every_mode(config, q, k, v, causal=causal)


@every_config
def test_packed_sequences_with_and_without_keys_follow_each_other(config: str) -> None:
    (d, dv), rows, keys, _ = CONFIGS[config]
    q_lengths = (5, rows, 0, 9, 130, 1, rows + 3)
    k_lengths = (keys + 3, 0, 7, 2 * keys, 1, 0, 3 * keys - 1)
    ends = [
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        for lengths in (q_lengths, k_lengths)
    ]
    q = rand(sum(q_lengths), 2, d, seed=0)
    k, v = rand(sum(k_lengths) + 5, 1, d, seed=1), rand(sum(k_lengths) + 5, 1, dv, seed=2)
    k[-5:], v[-5:] = torch.nan, torch.nan  # rows that no sequence has
    check_every_mode(config, q, k, v, causal=True, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])


# --- what the switches do, in instructions ---


def opcodes_of(config: str, blocks: int, rising: bool) -> dict[str, int]:
    """Of one full tile over so many full blocks of keys, which are taken from the last on."""
    (d, dv), rows, keys, _ = CONFIGS[config]
    q, k = torch.zeros(1, 1, rows, d), torch.zeros(1, 1, blocks * keys, d)
    q[..., 0] = 8.0
    if rising:  # by more than 2^8 from block to block
        k[..., 0] = -torch.arange(blocks * keys).div(keys, rounding_mode="floor") * d**0.5
    v = rand(1, 1, blocks * keys, dv, seed=2)
    q, k = q.bfloat16(), k.bfloat16()
    plan = one_after_another(config, q, k, v)
    run = sim.run(q, k, v, implementation=NAME, plan=plan, race_check=False)
    return dict(run.report.opcodes)


def more_per_block(config: str, opcode: str, rising: bool = False) -> float:
    """Instructions of this kind that each warp of softmax issues for one block more."""
    counts = [
        sum(count for name, count in opcodes_of(config, blocks, rising).items() if opcode in name)
        for blocks in (2, 3)
    ]
    return (counts[1] - counts[0]) / (SOFTMAX_WARPS * CONFIGS[config][1] / 128)


@every_config
def test_the_rest_of_the_exponentials_is_a_polynomial(config: str) -> None:
    keys, mufu = CONFIGS[config][2:]
    assert more_per_block(config, "ex2.approx") == mufu
    polynomials = (keys - mufu) / 2  # two numbers an instruction
    assert more_per_block(config, "add.rm") == polynomials
    # Scale and base; four steps of each polynomial.
    assert more_per_block(config, "fma.rn.ftz.f32x2") == keys / 2 + 4 * polynomials


@every_config
def test_o_is_rescaled_only_where_a_base_has_risen(config: str) -> None:
    (_, dv), _, _, mufu = CONFIGS[config]
    quarters = 4  # P, in 3 + 1 stores; nothing of O
    assert more_per_block(config, "tcgen05.st") == quarters
    assert more_per_block(config, "tcgen05.st", rising=True) == quarters + dv / 16
    assert more_per_block(config, "ex2.approx", rising=True) == mufu + 1  # the factor
    assert more_per_block(config, "tcgen05.ld", rising=True) == quarters + dv / 16


@every_config
def test_products_are_as_many_as_the_tile_needs(config: str) -> None:
    (d, _), _, keys, _ = CONFIGS[config]
    of_tile = d / 16 + keys / 16  # steps of Q K^T and of P V
    # Of 128 rows each; a pair's are of 256.
    assert more_per_block(config, "tcgen05.mma") == of_tile / SOFTMAX_WARPS / (1 + is_pair(config))


# --- pairs of CTAs ---


@pytest.mark.parametrize("nq", [129, 200, 300, 900])
def test_a_pair_whose_rows_end_anywhere_serves_every_feature(nq: int) -> None:
    """The second CTA has no rows, or some; some see no keys; two heads share one of k."""
    q, k, v = (
        rand(2, 2, nq, 104, seed=0),
        rand(2, 1, 650, 104, seed=1),
        rand(2, 1, 650, 120, seed=2),
    )
    call = {
        "window": (300, 40),
        "softcap": 3.0,
        "sinks": rand(2, seed=3).float(),
        "q_offset": torch.tensor([-250, 130], dtype=torch.int32),
    }
    check_every_mode("d128_pair", q, k, v, **call)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_pairs_share_the_tiles_out(dtype: torch.dtype) -> None:
    q, k, v = (rand(1, 2, n, 128, seed=n).to(dtype) for n in (1200, 400, 400))
    alone = one_after_another("d128", q, k, v, causal=True)
    outs = [
        sim.run(q, k, v, implementation=NAME, mode="random", plan=plan, causal=True).out
        for plan in (alone, in_pairs(alone, 1), in_pairs(alone, 4))
    ]
    assert torch.equal(outs[1], outs[2])
    expected, _ = reference.attention(q, k, v, causal=True)
    report = reference.check(outs[2], expected, reference.baseline(q, k, v, causal=True))
    assert report.ok, report
    # Rows of one tile see the same keys in the same order, in whichever kernel.
    assert torch.equal(outs[0], outs[1])


def test_a_long_call_is_planned_and_served_in_pairs() -> None:
    q, k, v = (rand(1, 1, 4096, 104, seed=seed) for seed in range(3))
    planned = archflash.explain(q, k, v, device="B200", implementation=NAME).plan
    assert planned is not None
    two_sms = native.Device.from_dict(planned.device.to_dict() | {"sm_count": 2})
    plan = native.plan(NAME, planned.problem, two_sms)
    assert isinstance(plan, native.LaunchPlan)
    launch = plan.to_dict()["launches"][0]
    assert (launch["cluster"], launch["grid"]) == ([2, 1, 1], [2, 1, 1])
    run = sim.run(q, k, v, implementation=NAME, mode="random", plan=plan, race_check=False)
    expected, _ = reference.attention(q, k, v)
    report = reference.check(run.out, expected, reference.baseline(q, k, v))
    assert report.ok, report
