"""bench.waits: the instructions that count what each wait of a kernel takes."""

from __future__ import annotations

import pytest
import torch
from bench import waits

from archflash import sim
from archflash.sim._attention import ptx_text

PROGRAM = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry test(.param .u64 table)
{
	.reg .pred %p<3>;
	.reg .b32 %r<6>;
	.shared .align 8 .b64 barrier;

	.loc 1 7 5
	mov.u32 %r1, %tid.x;
	setp.ne.u32 %p1, %r1, 0;
	@%p1 bra $L__BB0_1;
	mbarrier.init.shared::cta.b64 [barrier], 2;
$L__BB0_1:
	bar.sync 0;
	and.b32 %r2, %r1, 31;
	setp.ne.u32 %p1, %r2, 0;
	@%p1 bra $L__BB0_2;
	mbarrier.arrive.shared::cta.b64 _, [barrier];
$L__BB0_2:
	.loc 1 12 5
	.loc 2 3 3, function_name $L__info_string1, inlined_at 1 12 5
	// begin inline asm
	{
.reg .pred complete;
mbarrier.try_wait.parity.shared::cta.b64 complete, [barrier], 0;
selp.b32 %r3, 1, 0, complete;
}
	// end inline asm
	setp.eq.s32 %p2, %r3, 0;
	@%p2 bra $L__BB0_2;
	ret;
}
.file 1 "hopper/forward/load.cuh"
.file 2 "common/ptx/mbarrier.cuh"
"""


ADDRESS = f"""{PROGRAM.partition("{")[0]}{{
	.reg .b64 %rd<2>;
	ld.param.u64 %rd1, [table];
	st.global.u64 [%rd1], %rd1;
	ret;
}}
"""


def test_waits_of_a_program_are_counted() -> None:
    """On the simulator, whose clock counts warp-instructions, and whose first buffer always has the
    same address.
    """
    table = torch.zeros(2, waits.WARPS, dtype=torch.int64)
    sim.launch(sim.load(ADDRESS), "test", [table], block=(1,))
    module, places = waits.counting(PROGRAM, "test", int(table[0, 0]))
    table.zero_()
    assert places == ["hopper/forward/load.cuh:12"]
    sim.launch(sim.load(module), "test", [table], block=(64,))
    assert bool((table[0, :2] > 0).all())
    assert int(table[1, :2].sum()) > 0
    assert bool((table[0] >= table[1]).all())
    assert int(table[:, 2:].sum()) == 0


def test_shares_are_those_of_warps_that_wait_at_a_place() -> None:
    table = torch.zeros(4, waits.WARPS, dtype=torch.int64)
    table[0, :4] = 100
    table[1, 0], table[2, 1] = 10, 30  # two copies of one statement
    table[3, 3] = 5
    found = waits.shares(table, ["a.cuh:1", "a.cuh:1", "b.cuh:2"])
    assert found == [(0.2, "0-1", "a.cuh:1"), (0.05, "3", "b.cuh:2")]


@pytest.mark.parametrize(
    ("image", "capability", "kernel"),
    [
        ("hopper/bwd_f16", (9, 0), "hopper_attention_bwd_f16_d128"),
        ("blackwell_dc/bwd_f16", (10, 0), "blackwell_dc_attention_bwd_f16_d64"),
    ],
)
def test_every_wait_of_a_kernel_is_found(
    image: str, capability: tuple[int, int], kernel: str
) -> None:
    module, places = waits.counting(ptx_text(image, capability), kernel, 1 << 40)
    assert len(places) > 10
    assert module.count("try_wait") == module.count("brev.b32 first") == len(places)
    # Read behind a vote on the result: else the assembler reads the clock before that is there.
    vote = "vote.sync.ballot.b32 done, complete, mask;\nmov.u64 cycles, %clock64;"
    assert module.count(vote) == len(places)
    assert {waits.statement(place).count("mbarrier_wait") for place in places} == {1}
    sim.load(module)
