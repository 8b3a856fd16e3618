"""What blackwell_dc executes for one block of keys more, counted on the simulator; a long call.

What it computes is in tests/core_set, what its switches change in test_blackwell_dc_switches.py.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

import archflash
from archflash import sim

from ..core_set.checks import assert_close
from ..core_set.executors import Simulator
from ..core_set.one_cta import CONFIGS, FP8_CONFIGS, NAME, one_after_another
from ..replanned import replanned

# How many of the 2^x of a row's block are MUFU's; the rest are polynomials.
MUFU = {
    "d64": 88, "d96": 92, "d128": 104, "d128_pair": 104, "d192": 128, "d192_pair": 128, "d256": 64,
}  # fmt: skip
FP8_MUFU = {"d64": 88, "d128": 88, "d192": 88, "d256": 112}
SOFTMAX_WARPS = 4  # of 128 rows
QUARTERS = 4  # P is read and written in quarters


@cache
def opcodes_of(config: str, fp8: bool, blocks: int, rising: bool) -> dict[str, int]:
    """What the CTA executes for one full tile over so many full blocks of keys, the last first."""
    (d, dv), rows, keys = (FP8_CONFIGS if fp8 else CONFIGS)[config]
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    q, k = torch.zeros(1, 1, rows, d), torch.zeros(1, 1, blocks * keys, d)
    q[..., 0] = 8.0
    if rising:  # by more than 2^8.75 from block to block
        k[..., 0] = -torch.arange(blocks * keys).div(keys, rounding_mode="floor") * d**0.5
    v = Simulator().rand(1, 1, blocks * keys, dv, seed=2, dtype=dtype)
    q, k = q.to(dtype), k.to(dtype)
    plan = one_after_another(config, q, k, v)
    run = sim.run(
        q, k, v, implementation=NAME, plan=plan, race_check=False, return_lse=True
    )  # fmt: skip
    return dict(run.report.opcodes)


def more_per_block(config: str, opcode: str, rising: bool = False, fp8: bool = False) -> float:
    """Instructions of this kind that each warp of softmax issues for one block more."""
    rows = (FP8_CONFIGS if fp8 else CONFIGS)[config][1]
    two, three = (
        sum(n for name, n in opcodes_of(config, fp8, blocks, rising).items() if opcode in name)
        for blocks in (2, 3)
    )
    return (three - two) / (SOFTMAX_WARPS * rows / 128)


@pytest.mark.parametrize("config", CONFIGS)
def test_what_a_block_costs(config: str) -> None:
    (d, dv), _, keys = CONFIGS[config]
    mufu = MUFU[config]
    assert more_per_block(config, "ex2.approx") == mufu
    polynomials = (keys - mufu) / 2  # two numbers an instruction
    assert more_per_block(config, "add.rm") == polynomials
    # Scale and base; four steps of each polynomial.
    assert more_per_block(config, "fma.rn.ftz.f32x2") == keys / 2 + 4 * polynomials
    # O is rescaled only where a base has risen.
    assert more_per_block(config, "tcgen05.st") == QUARTERS
    assert more_per_block(config, "tcgen05.st", rising=True) == QUARTERS + dv / 16
    assert more_per_block(config, "tcgen05.ld", rising=True) == QUARTERS + dv / 16
    assert more_per_block(config, "ex2.approx", rising=True) == mufu + 1  # the factor
    # Steps of Q K^T and of P V, for 128 rows each; those of a pair are for 256.
    steps = d / 16 + keys / 16
    pair = config.endswith("_pair")
    assert more_per_block(config, "tcgen05.mma") == steps / SOFTMAX_WARPS / (1 + pair)


@pytest.mark.parametrize("config", FP8_CONFIGS)
def test_what_a_block_of_fp8_costs(config: str) -> None:
    (d, dv), _, keys = FP8_CONFIGS[config]
    mufu = FP8_MUFU[config]

    def more(opcode: str, rising: bool = False) -> float:
        return more_per_block(config, opcode, rising, fp8=True)

    assert more("ex2.approx") == mufu
    assert more("add.rm") == (keys - mufu) / 2
    assert more("e4m3x2") == keys / 2
    assert more("kind::f8f6f4") == (d / 32 + keys / 32) / SOFTMAX_WARPS
    assert more("tcgen05.st") == QUARTERS
    assert more("tcgen05.st", rising=True) == QUARTERS + dv / 16
    assert more("ex2.approx", rising=True) == mufu + 1


def test_a_long_call_is_planned_and_served_in_pairs() -> None:
    q, k, v = Simulator().qkv(4096, 4096, 104, dtype="bfloat16", heads=(1, 1))
    planned = archflash.explain(q, k, v, device="B200", implementation=NAME).plan
    assert planned is not None
    plan = replanned(planned, sm_count=2)
    launch = plan.to_dict()["launches"][0]
    assert (launch["cluster"], launch["grid"]) == ([2, 1, 1], [16, 1, 1])
    run = sim.run(q, k, v, implementation=NAME, mode="random", plan=plan, race_check=False)
    assert_close(run.out, None, q, k, v)
