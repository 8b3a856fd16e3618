"""The bytes of a workspace on the simulator: those that a plan wants zero, and unwritten ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import _options, sim
from archflash._api import find_device, make_problem
from archflash.sim._attention import Settings, simulate

from ..kvcache_cases import make

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


def test_counts_of_shares_that_nobody_wrote_lead_nowhere_outside() -> None:
    """Where cu_seqlens decrease, a combining kernel reads counts that no share has written."""
    call = make(
        [40, 700], page_size=8, capacity=704, heads=(1, 1), q_lengths=[1, 2], causal=True,
        max_seqlen_q=2, dtype=torch.float16,
    )  # fmt: skip
    q, k, v = call.q, call.k_cache, call.v_cache
    plan = archflash.explain(q, k, v, implementation="ampere", device="A100", **call.options).plan
    assert plan is not None
    fields = plan.to_dict()
    combine = fields["launches"][-1]
    assert combine["kernel"] == "ampere_combine_f16_decode"
    # The workspace is a tensor of the test, so that it counts as written.
    pointers = [
        slot | {"operand": "k" if slot["operand"] == "workspace" else "q"}
        if slot["operand"] in ("workspace", "k") else slot
        for slot in combine["pointers"]
    ]  # fmt: skip
    fields["launches"] = [combine | {"pointers": pointers, "uses_pdl": False}]
    alone = native.LaunchPlan.unchecked_from_dict(fields)
    tensors = native.operands(plan, q, k, v, tuple(_options.complete(call.options).values()))
    for count in (0x7F7F7F7F, -0x01010102):
        tensors["k"] = torch.full((fields["workspace_bytes"] // 4,), count, dtype=torch.int32)
        simulate(alone, tensors, Settings())
