"""What orders CTAs and launches: scopes, the order of global memory, and launches that overlap."""

from __future__ import annotations

import functools
import re
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash_sim as native
from archflash import sim
from archflash.sim import _attention
from archflash.sim._launch import Bindings, Buffer, run_kernel

from ..core_set.one_cta import one_after_another
from ..kvcache_cases import make
from ..replanned import replanned
from .mutation.backward import BackwardCall, BackwardTarget
from .mutation.statements import kernel_module
from .schedules import MODES

HEADER = """.version 8.7
.target sm_90a
.address_size 64
"""
REGISTERS = """.reg .pred %p<4>;
.reg .b32 %r<8>;
.reg .b64 %rd<8>;
.shared .align 128 .b8 box[128];
"""

# CTA 0 writes 32 words and raises a flag. CTA 1 waits for the flag and copies them.
HANDOVER = f"""{HEADER}
.visible .entry test(.param .u64 data, .param .u64 flag, .param .u64 out)
{{
{REGISTERS}
ld.param.u64 %rd0, [data];
ld.param.u64 %rd1, [flag];
ld.param.u64 %rd2, [out];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
setp.ne.u32 %p0, %r1, 0;
setp.eq.u32 %p1, %r0, 0;
mad.wide.u32 %rd3, %r0, 4, %rd0;
mad.wide.u32 %rd4, %r0, 4, %rd2;
@%p0 bra SECOND;
st.global.u32 [%rd3], %r0;
bar.sync 0;
FENCE
@%p1 st.release.gpu.global.u32 [%rd1], 1;
ret;
SECOND:
ld.acquire.gpu.global.u32 %r2, [%rd1];
setp.eq.u32 %p2, %r2, 0;
@%p2 bra SECOND;
FENCE
bar.sync 0;
ld.global.u32 %r3, [%rd3];
st.global.u32 [%rd4], %r3;
ret;
}}
"""


def hand_over(text: str, fence: str = "", cluster: int = 1, **options: Any) -> set[str]:
    """The kinds of findings; without any, what arrived is right."""
    data, flag, out = (torch.zeros(n, dtype=torch.int32) for n in (32, 1, 32))
    report = sim.launch(
        sim.load(text.replace("FENCE", fence)), "test", [data, flag, out],
        grid=(2,), cluster=(cluster,), check=False, strict=True, **options,
    )  # fmt: skip
    kinds = {finding.kind for finding in report.findings}
    assert kinds or torch.equal(out, torch.arange(32, dtype=torch.int32))
    return kinds


RELAXED = HANDOVER.replace("st.release", "st.relaxed").replace("ld.acquire", "ld.relaxed")


@pytest.mark.parametrize("mode", MODES)
def test_what_a_release_and_an_acquire_put_in_order_is_no_race(mode: str) -> None:
    assert hand_over(HANDOVER, mode=mode) == set()
    assert hand_over(RELAXED, "fence.acq_rel.gpu;", mode=mode) == set()
    assert hand_over(HANDOVER.replace(".gpu", ".cluster"), cluster=2, mode=mode) == set()
    of_cluster = RELAXED.replace(".gpu", ".cluster")
    assert hand_over(of_cluster, "fence.acq_rel.cluster;", cluster=2, mode=mode) == set()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("text", "fence"),
    [
        (HANDOVER.replace("st.release", "st.relaxed"), ""),
        (HANDOVER.replace("ld.acquire", "ld.relaxed"), ""),
        (HANDOVER.replace("st.release.gpu", "st.release.cta"), ""),
        (HANDOVER.replace("ld.acquire.gpu", "ld.acquire.cta"), ""),
        (HANDOVER.replace(".gpu", ".cluster"), ""),
        (RELAXED, ""),
        (RELAXED, "fence.acq_rel.cta;"),
        (RELAXED, "fence.acq_rel.cluster;"),
    ],
)
def test_too_weak_an_order_between_ctas_is_a_race(text: str, fence: str, mode: str) -> None:
    assert hand_over(text, fence, mode=mode) == {"race"}


def test_an_atomic_operation_may_depend_on_a_relaxed_load() -> None:
    """A card keeps that order. A plain access has none."""
    text = HANDOVER.replace("ld.acquire", "ld.relaxed")
    adds = text.replace("ld.global.u32 %r3, [%rd3];", "red.relaxed.gpu.global.add.u32 [%rd3], 0;")
    waits = "@%p2 bra SECOND;\nFENCE\nbar.sync 0;"
    assert waits in adds  # every thread loads the flag
    data, flag, out = (torch.zeros(n, dtype=torch.int32) for n in (32, 1, 32))
    report = sim.launch(
        sim.load(adds.replace("FENCE", "")), "test", [data, flag, out], grid=(2,), strict=True
    )
    assert {(f.kind, f.severity) for f in report.findings} == {("relaxed-order", "lint")}
    assert torch.equal(data, torch.arange(32, dtype=torch.int32))


@pytest.mark.parametrize("fence", ["", "fence.acq_rel.cta;"])
def test_the_scope_of_a_cta_orders_nobody_in_another_cta_of_the_cluster(fence: str) -> None:
    text = (RELAXED if fence else HANDOVER).replace(".gpu", ".cta")
    assert hand_over(text, fence, cluster=2) & {"race", "scope"}


# A kernel without anything that orders CTAs: CTA 1 reads what CTA 0 writes.
UNORDERED = re.sub(r"@%p1 st.release.*\n", "", HANDOVER).replace(
    "ld.acquire.gpu.global.u32 %r2, [%rd1];\nsetp.eq.u32 %p2, %r2, 0;\n@%p2 bra SECOND;\n", ""
)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_read_of_what_another_cta_writes_is_a_race(threads: int) -> None:
    assert hand_over(UNORDERED, threads=threads) == {"race"}
    assert hand_over(UNORDERED.replace("[%rd3], %r0", "[%rd4], %r0")) == {"race"}  # both write


# CTA 0 stores a box, and CTA 1 adds to it when the flag says so.
BOXES = f"""{HEADER}
.visible .entry test(.param .u64 data, .param .u64 flag)
{{
{REGISTERS}
ld.param.u64 %rd0, [data];
ld.param.u64 %rd1, [flag];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, box;
mad.lo.u32 %r3, %r0, 4, %r2;
st.shared.u32 [%r3], %r0;
fence.proxy.async.shared::cta;
bar.warp.sync -1;
setp.ne.u32 %p0, %r0, 0;
@%p0 ret;
setp.ne.u32 %p0, %r1, 0;
@%p0 bra SECOND;
cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r2], 128;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
st.release.gpu.global.u32 [%rd1], 1;
ret;
SECOND:
ld.acquire.gpu.global.u32 %r4, [%rd1];
setp.eq.u32 %p1, %r4, 0;
@%p1 bra SECOND;
fence.proxy.async.global;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd0], [%r2], 128;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
ret;
}}
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        ("", "", set()),
        ("fence.proxy.async.global", "fence.proxy.async", set()),
        ("cp.async.bulk.wait_group 0;\nst.", "cp.async.bulk.wait_group.read 0;\nst.", {"race"}),
        ("fence.proxy.async.global;", "", {"proxy"}),
        ("fence.proxy.async.global", "fence.proxy.async.shared::cta", {"proxy"}),
        ("st.release", "st.relaxed", {"race"}),
        ("ld.acquire", "ld.relaxed", {"race"}),
    ],
)
def test_bulk_stores_and_reductions_of_two_ctas_have_an_order(
    old: str, new: str, kinds: set[str], mode: str
) -> None:
    assert old in BOXES
    data, flag = torch.zeros(32, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    program = sim.load(BOXES.replace(old, new, 1))
    report = sim.launch(program, "test", [data, flag], grid=(2,), mode=mode, check=False)
    assert {finding.kind for finding in report.findings} == kinds, report
    assert kinds or torch.equal(data, 2 * torch.arange(32, dtype=torch.int32))


def test_additions_of_many_ctas_need_no_order() -> None:
    text = BOXES.replace("@%p0 bra SECOND;", "bra ADD;").replace(
        "fence.proxy.async.global;", "ADD:"
    )
    data, flag = torch.zeros(32, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    report = sim.launch(sim.load(text), "test", [data, flag], grid=(7,))
    assert not report.findings
    assert torch.equal(data, 7 * torch.arange(32, dtype=torch.int32))


# --- launches that overlap ---

# Each thread adds one to its word of the first buffer and writes that to the second.
STEP = f"""{HEADER}
.visible .entry test(.param .u64 from, .param .u64 to)
{{
{REGISTERS}
ld.param.u64 %rd0, [from];
ld.param.u64 %rd1, [to];
mov.u32 %r0, %tid.x;
mad.wide.u32 %rd2, %r0, 4, %rd0;
mad.wide.u32 %rd3, %r0, 4, %rd1;
griddepcontrol.launch_dependents;
WAIT
ld.global.u32 %r1, [%rd2];
add.u32 %r1, %r1, 1;
st.global.u32 [%rd3], %r1;
ret;
}}
"""
WAIT, START = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
WAIT_FIRST = f"{WAIT} // before the next launch may start"


def launches(*steps: tuple[str, int, int], first_early: bool = False) -> list[set[str]]:
    """The kinds of findings of launches that overlap: each is the text for WAIT, and the buffers
    that it reads and writes, of three.
    """
    tensors = [torch.zeros(32, dtype=torch.int32) for _ in range(3)]
    memory = native.Memory()
    addresses = Bindings(memory, [Buffer(x) for x in tensors]).addresses
    found = []
    for number, (wait, read, written) in enumerate(steps):
        text = STEP.replace("WAIT", wait)
        if wait == WAIT_FIRST:
            text = text.replace(f"{START}\n{wait}", f"{WAIT}\n{START}")
        report = run_kernel(
            sim.load(text), "test",
            struct.pack("<2Q", addresses[read], addresses[written]), memory,
            grid=(1,), block=(32,), shared_bytes=0, mode="random", seed=0, race_check=True,
            threads=1, starts_early=number > 0 or first_early,
            next_starts_early=number + 1 < len(steps),
        )  # fmt: skip
        found.append({finding.kind for finding in report.findings})
    return found


OVERLAP = {"launch-overlap"}


def test_a_launch_waits_for_the_one_with_which_it_overlaps() -> None:
    assert launches((WAIT, 0, 1), (WAIT, 1, 2)) == [set(), set()]
    assert launches(("", 0, 1), (WAIT, 1, 2)) == [set(), set()]
    assert launches(("", 0, 1), ("", 1, 2)) == [set(), OVERLAP]  # it reads what that one writes
    assert launches(("", 0, 1), ("", 2, 0)) == [set(), OVERLAP]  # it writes what that one reads
    assert launches(("", 0, 1), ("", 2, 1)) == [set(), OVERLAP]  # both write
    assert launches(("", 0, 1), ("", 0, 2)) == [set(), set()]


def test_a_wait_is_for_the_launch_before_and_what_that_one_has_waited_for() -> None:
    assert launches(("", 0, 1), (WAIT, 0, 2), (WAIT, 1, 0)) == [set(), set(), set()]
    assert launches(("", 0, 1), ("", 0, 2), (WAIT, 1, 0)) == [set(), set(), OVERLAP]


def test_a_launch_tells_by_its_start_of_the_next_one_what_it_had_waited_for_by_then() -> None:
    between = (WAIT, 0, 2)  # lets the next launch start before it waits
    assert launches(("", 0, 1), between, ("", 1, 1)) == [set(), set(), OVERLAP]
    assert launches(("", 0, 1), between, (WAIT, 1, 1)) == [set(), set(), set()]
    assert launches(("", 0, 1), (WAIT_FIRST, 0, 2), ("", 1, 1)) == [set(), set(), set()]
    assert launches(between, ("", 1, 1), first_early=True) == [set(), OVERLAP]
    assert launches(between, (WAIT, 1, 1), first_early=True) == [set(), set()]
    assert launches((WAIT_FIRST, 0, 2), ("", 1, 1), first_early=True) == [set(), set()]


def test_nothing_is_known_of_what_runs_before_the_first_launch() -> None:
    assert launches((WAIT, 0, 1), first_early=True) == [set()]
    assert launches(("", 0, 1), first_early=True) == [OVERLAP]
    x, y = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    program = sim.load(STEP.replace("WAIT", ""))
    with pytest.raises(sim.SimulationError, match=r"no griddepcontrol\.wait comes first"):
        sim.launch(program, "test", [x, y], starts_early=True)
    assert not sim.launch(program, "test", [x, y]).findings


@pytest.mark.parametrize("synchronises", [True, False])
def test_one_warp_may_wait_for_others(synchronises: bool) -> None:
    wait = "setp.lt.u32 %p1, %r0, 32;\n@!%p1 bra GO;\ngriddepcontrol.wait;\nGO:"
    text = STEP.replace("WAIT", wait + ("bar.sync 0;" if synchronises else ""))
    x, y = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    report = sim.launch(sim.load(text), "test", [x, y], block=(64,), starts_early=True, check=False)
    assert {f.kind for f in report.findings} == (set() if synchronises else OVERLAP)


# --- our kernels ---


def changed(text: str, kernel: str, old: str, new: str) -> sim.Program:
    """The module of one kernel, in which a pattern matches and is replaced everywhere."""
    module, count = re.subn(old, new, kernel_module(text, kernel))
    assert count > 0, old
    return sim.load(module)


def program_of(launch: dict[str, str], capability: tuple[int, int], *change: str) -> sim.Program:
    text = _attention.ptx_text(launch["image"], capability)
    return changed(text, launch["kernel"], *change)


@functools.cache
def backward_in_turns(implementation: str) -> BackwardCall:
    """A call whose keys are those of two CTAs, which add to dQ in turns."""
    name, device = {"hopper": ("f16_d128", "H200"), "blackwell_dc": ("f16_d128", "B200")}[
        implementation
    ]
    target = BackwardTarget(implementation, name, device, 128)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 1, 150, 128),) * 4
    inputs = [torch.randn(shape, generator=generator).half() for shape in shapes]
    return BackwardCall(target, "in turns", inputs, {})


def kinds_of(call: BackwardCall, program: sim.Program | None) -> set[str]:
    tensors: dict[str, Tensor] = {name: x.clone() for name, x in call.tensors.items()}
    settings = _attention.Settings(check=False, program=program)
    reports = _attention.simulate(call.plan, tensors, settings)
    return {error.kind for report in reports for error in report.errors}


@pytest.mark.parametrize("implementation", ["hopper", "blackwell_dc"])
@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        ("", "", set()),
        (r"cp\.async\.bulk\.wait_group\s+0", "cp.async.bulk.wait_group.read 0", {"race"}),
        (r"fence\.proxy\.async\.global;", "", {"proxy"}),
        (r"st\.release\.gpu", "st.relaxed.gpu", {"race"}),
        (r"ld\.acquire\.gpu", "ld.relaxed.gpu", {"race"}),
        (r"st\.release\.gpu", "st.release.cta", {"race"}),
    ],
    ids=["whole", "wait-read", "no-proxy-fence", "relaxed-store", "relaxed-load", "cta"],
)
def test_the_backward_pass_in_turns_needs_its_order(
    old: str, new: str, kinds: set[str], implementation: str
) -> None:
    call = backward_in_turns(implementation)
    program = None
    if old:
        program = program_of(call.launches[call.number], call.plan.device.capability, old, new)
    found = kinds_of(call, program)
    assert kinds <= found if kinds else not found


def test_launches_whose_code_cannot_wait_start_in_order() -> None:
    """simt's kernels for caches and lists are compiled for 8.0, which has no such wait."""
    call = make([300], capacity=320, heads=(4, 1), d=64, dtype=torch.float32)
    key_indices = torch.arange(256, dtype=torch.int32).reshape(1, 1, 1, 256)
    for more in ({}, {"key_indices": key_indices}):
        done = sim.run(
            call.q, call.k_cache, call.v_cache, implementation="simt", device="H200", num_splits=2,
            **call.options, **more,
        )  # fmt: skip
        rows = done.plan.to_dict()["launches"]
        assert [row["uses_pdl"] for row in rows] == [False, False]
        assert not any(report.findings for report in done.reports)


def test_a_decoding_kernel_waits_for_the_launch_before_it() -> None:
    call = make([300], capacity=320, heads=(4, 1), d=64, dtype=torch.bfloat16)
    run = functools.partial(
        sim.run, call.q, call.k_cache, call.v_cache, implementation="ampere", device="H200",
        num_splits=2, **call.options,
    )  # fmt: skip
    whole = run()
    rows = whole.plan.to_dict()["launches"]
    assert [row["uses_pdl"] for row in rows] == [True, True]
    assert not any(report.findings for report in whole.reports)
    for row in rows:
        program = program_of(row, whole.plan.device.capability, r"griddepcontrol\.wait;", "")
        reports = run(program=program, check=False).reports
        assert {e.kind for report in reports for e in report.errors} == OVERLAP, row["kernel"]


@pytest.mark.parametrize("calls", ["one", "packed"])
def test_the_forward_kernels_of_hopper_wait_for_the_launch_before_them(calls: str) -> None:
    """Of packed sequences, which count their tiles, warps write the rows of no sequence, too."""
    q, k = torch.randn(1, 2, 200, 128).bfloat16(), torch.randn(1, 2, 130, 128).bfloat16()
    call: dict[str, Any] = {}
    kernels = ["hopper_attention_fwd_bf16_d128_medium"]
    if calls == "packed":
        q, k = (x[0].transpose(0, 1).contiguous() for x in (q.repeat(1, 1, 4, 1), k))
        ends = {"cu_seqlens_q": (10, 700), "cu_seqlens_k": (0, 130)}
        call = {name: torch.tensor(x, dtype=torch.int32) for name, x in ends.items()}
        kernels = ["hopper_clear_counter_bf16", "hopper_attention_fwd_bf16_d128_large"]
    planned = archflash.explain(q, k, k, device="H200", implementation="hopper", **call).plan
    assert planned is not None
    plan = replanned(planned, sm_count=1 if calls == "packed" else 2)
    rows = plan.to_dict()["launches"]
    assert [row["kernel"] for row in rows] == kernels
    assert all(row["uses_pdl"] for row in rows)
    run = functools.partial(sim.run, q, k, k, implementation="hopper", plan=plan, **call)
    assert not any(report.findings for report in run().reports)
    for row in rows:
        program = program_of(row, plan.device.capability, r"griddepcontrol\.wait;", "")
        reports = run(program=program, check=False).reports
        assert {e.kind for report in reports for e in report.errors} == OVERLAP, row["kernel"]


def test_stores_for_the_products_of_a_pair_are_released_to_the_cluster() -> None:
    """Threads clear the rows of V behind a sequence's end, which the pair's products read."""
    q, k = torch.randn(300, 1, 128).bfloat16(), torch.randn(200, 1, 128).bfloat16()
    ends = [torch.tensor(x, dtype=torch.int32) for x in ((0, 40, 300), (0, 90, 200))]
    options: dict[str, Any] = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    plan = one_after_another("d128_pair", q, k, k, **options)
    (launch,) = plan.to_dict()["launches"]

    def kinds(program: sim.Program | None = None) -> set[str]:
        run = sim.run(
            q, k, k, implementation="blackwell_dc", plan=plan, return_lse=True, check=False,
            program=program, **options,
        )  # fmt: skip
        return {error.kind for error in run.report.errors}

    assert not kinds()
    for ends_of in ("arrive.release", "try_wait.parity.acquire"):
        change = rf"mbarrier\.{ends_of}\.cluster", f"mbarrier.{ends_of}.cta"
        assert kinds(program_of(launch, plan.device.capability, *change)) == {"scope"}, ends_of
