"""The bytes of a workspace that a plan wants zero, on the simulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import _archflash as native
from archflash import sim
from archflash._api import find_device, make_problem
from archflash.sim._attention import Settings, simulate

CTAS = 6
WORKSPACE = 256
# Every CTA takes a number at `AT` of the workspace and writes it to its place of the output.
TAKE_A_NUMBER = """.version 8.0
.target sm_80
.address_size 64
.visible .entry take_a_number(.param .u64 workspace, .param .u64 out)
{
.reg .b32 %r<4>;
.reg .b64 %rd<4>;
ld.param.u64 %rd0, [workspace];
ld.param.u64 %rd1, [out];
atom.global.add.u32 %r0, [%rd0+AT], 1;
mov.u32 %r1, %ctaid.x;
mad.wide.u32 %rd1, %r1, 4, %rd1;
st.global.u32 [%rd1], %r0;
ret;
}
"""


def plan_with(zeroed_bytes: int, launches: int = 1) -> native.LaunchPlan:
    q = torch.empty(1, 1, 64, 64, dtype=torch.float16, device="meta")
    planned = native.plan("ampere", make_problem(q, q, q), find_device("A100"))
    assert isinstance(planned, native.LaunchPlan)
    assert planned.zeroed_bytes == 0
    fields = planned.to_dict()
    slots = [{"operand": name, "offset": 8 * i, "addend": 0}
             for i, name in enumerate(("workspace", "out"))]  # fmt: skip
    launch = fields["launches"][0] | {"kernel": "take_a_number", "grid": [CTAS, 1, 1]}
    launch |= {"block": [1, 1, 1], "shared_bytes": 0, "params": "00" * 16, "pointers": slots}
    fields |= {"launches": [launch] * launches}
    fields |= {"workspace_bytes": WORKSPACE, "zeroed_bytes": zeroed_bytes}
    return native.LaunchPlan.unchecked_from_dict(fields)


def tensors() -> dict[str, Tensor]:
    return {"workspace": torch.full((WORKSPACE,), 7, dtype=torch.uint8),
            "out": torch.zeros(CTAS, dtype=torch.int32)}  # fmt: skip


def numbers(plan: native.LaunchPlan, at: int, operands: dict[str, Tensor]) -> list[Any]:
    program = sim.load(TAKE_A_NUMBER.replace("AT", str(at)))
    simulate(plan, operands, Settings(program=program))
    taken: list[Any] = sorted(operands["out"].tolist())
    return taken


@pytest.mark.parametrize("at", [0, 12])
def test_a_counter_in_the_zeroed_bytes_starts_at_zero_in_every_call(at: int) -> None:
    operands = tensors()
    for _ in range(2):
        assert numbers(plan_with(16), at, operands) == list(range(CTAS))
    assert operands["workspace"][16:].eq(7).all()


def test_the_bytes_are_zeroed_once_and_not_between_the_launches_of_a_plan() -> None:
    assert numbers(plan_with(16, launches=2), 0, tensors()) == list(range(CTAS, 2 * CTAS))


@pytest.mark.parametrize(("zeroed", "at"), [(0, 0), (16, 16), (16, 128)])
def test_the_other_bytes_of_the_workspace_are_not_initialised(zeroed: int, at: int) -> None:
    with pytest.raises(sim.SimulationError, match="uninitialised") as raised:
        numbers(plan_with(zeroed), at, tensors())
    assert "workspace" in str(raised.value)


def test_explain_and_replay_carry_the_number_of_zeroed_bytes() -> None:
    plan = plan_with(16)
    again = native.LaunchPlan.unchecked_from_dict(plan.to_dict())
    assert again.to_dict()["zeroed_bytes"] == again.zeroed_bytes == 16
    from archflash._dispatch import plan_facts

    facts = dict(plan_facts(plan))
    assert facts["workspace"] == "256 bytes, of which the first 16 are zeroed"
    assert dict(plan_facts(plan_with(0)))["workspace"] == "256 bytes"
