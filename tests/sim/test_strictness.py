"""What is wrong with a kernel is found, named and placed; what is right is not complained about."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from archflash import LaunchError, sim

from .fuzz import attempt, corpus, instruction_lines, without_lanes
from .ptx import findings, program, run

MODES = ("lazy", "eager", "random", "priority")


def words(count: int = 256) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


def only(found: list[sim.Finding], kind: str, severity: str = "error") -> sim.Finding:
    assert [(f.kind, f.severity) for f in found] == [(kind, severity)], found
    return found[0]


# --- global memory ---


@pytest.mark.parametrize(
    ("statement", "offset"),
    [
        ("ld.global.u32 %r1, [%rd0+1024];", "1024"),
        ("ld.global.u32 %r1, [%rd0+-4];", "-4"),
        ("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd0+1008];\nadd.s32 %r5, %r1, %r4;\n"
         "ld.global.u64 %rd9, [%rd0+1024];", "1024"),
        ("st.global.u8 [%rd1+512], %r0;", "512"),
        ("atom.global.add.u32 %r1, [%rd1+512], 1;", "512"),
    ],
)  # fmt: skip
def test_access_outside_a_buffer_is_an_error_with_its_offset(statement: str, offset: str) -> None:
    found = only(findings(program(statement), words(), words(128)), "out-of-bounds")
    assert re.search(rf"[+0-9a-z ]*{re.escape(offset)} \(the buffer has", found.message)
    assert found.lane == 0
    assert found.warp == 0


def test_a_pointer_from_nowhere_is_an_error() -> None:
    body = "mov.u64 %rd5, 4096;\nld.global.u32 %r1, [%rd5];"
    assert "no registered buffer" in findings(program(body), words(), words())[0].message
    assert (
        "is in no memory"
        in findings(program(body.replace(".global", "")), words(), words())[0].message
    )


def test_neighbouring_buffers_do_not_hide_an_overrun() -> None:
    both = words(64)
    first, second = both[:32], both[32:]
    body = "ld.global.u32 %r1, [%rd10+4];\nst.global.u32 [%rd1], %r1;"
    # The views are one allocation, but no bytes of one lie in the other.
    assert only(findings(program(body), first, second), "out-of-bounds").lane == 31


def test_gaps_between_the_rows_of_a_view_are_out_of_bounds() -> None:
    view = words(256).view(16, 16)[:, :12]
    inside = "ld.global.u32 %r1, [%rd0+44];\nst.global.u32 [%rd11], %r1;"
    assert not findings(program(inside), view, words())
    gap = only(findings(program(inside.replace("+44", "+48")), view, words()), "out-of-bounds")
    assert "between the tensor's rows" in gap.message


def test_views_of_one_storage_share_memory() -> None:
    storage = words(64)
    body = "st.global.u32 [%rd11], 7;\nld.global.u32 %r1, [%rd10];\nst.global.u32 [%rd10], %r1;"
    run(program(body), storage, storage)
    assert (storage[:32] == 7).all()


def test_writing_to_an_input_is_an_error() -> None:
    constant = sim.Buffer(words(), writable=False, name="weights")
    found = only(findings(program("st.global.u32 [%rd10], 1;"), constant, words()), "read-only")
    assert "weights" in found.message


@pytest.mark.parametrize("width", ["u16", "u32", "u64", "v2.u32", "v4.u32"])
def test_misaligned_access_is_an_error(width: str) -> None:
    registers = {"u16": "%h1", "u64": "%rd9", "v2.u32": "{%r1, %r2}"}
    registers["v4.u32"] = "{%r1, %r2, %r3, %r4}"
    body = f"ld.global.{width} {registers.get(width, '%r1')}, [%rd0+1];"
    assert "multiple of" in only(findings(program(body), words(), words()), "misaligned").message


def test_reading_memory_that_nothing_wrote_is_an_error() -> None:
    raw = sim.Buffer(words(), initialised=False, name="raw")
    body = "ld.global.u32 %r1, [%rd10];\nst.global.u32 [%rd11], %r1;"
    assert "raw" in only(findings(program(body), raw, words()), "uninitialised").message
    assert not findings(program("st.global.u32 [%rd10], 3;" + body), raw, words())


def test_parts_of_a_vector_that_nobody_uses_need_no_value() -> None:
    body = """st.shared.v2.u32 [smem], {%r0, %r0};
    bar.warp.sync -1;
    ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [smem];
    st.global.u32 [%rd11], %rX;"""
    lints = {
        f.kind for f in findings(program(body.replace("%rX", "%r2"), shared=16), words(), words())
    }
    assert "uninitialised" not in lints
    kinds = {
        f.kind for f in findings(program(body.replace("%rX", "%r3"), shared=16), words(), words())
    }
    assert "uninitialised" in kinds


# --- shared memory ---


def test_shared_memory_has_bounds_and_alignment() -> None:
    beyond = program("ld.shared.u32 %r1, [smem+256];", shared=256)
    assert "of 256" in only(findings(beyond, words(), words()), "out-of-bounds").message
    null = program("mov.u32 %r2, 0;\nld.shared.u32 %r1, [%r2];", shared=256)
    only(findings(null, words(), words()), "out-of-bounds")
    odd = program("ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [smem+8];", shared=256)
    only(findings(odd, words(), words()), "misaligned")


def test_reading_shared_memory_that_nothing_wrote_is_an_error() -> None:
    body = "ld.shared.u32 %r1, [smem+4];\nst.global.u32 [%rd11], %r1;"
    found = only(findings(program(body, shared=64), words(), words()), "uninitialised")
    assert "offset 4" in found.message


def test_dynamic_shared_memory_is_aligned_as_declared_and_no_more() -> None:
    module = ".extern .shared .align 128 .b8 dynamic[];"
    body = "mov.u32 %r1, dynamic;\nst.global.u32 [%rd11], %r1;"
    out = words()
    run(program(body, module=module), words(), out, shared_bytes=512)
    assert out[0] % 128 == 0
    assert out[0] % 256 != 0


# --- races ---

EXCHANGE = """
mov.u32 %r1, smem;
mad.lo.u32 %r2, %r0, 4, %r1;
st.shared.u32 [%r2], %r0;
BARRIER
xor.b32 %r3, %r2, 256;
ld.shared.u32 %r4, [%r3];
st.global.u32 [%rd11], %r4;
"""


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_barrier_is_a_race_on_every_schedule(mode: str) -> None:
    # 256-byte aligned so that the xor exchanges the two warps' halves of 512 bytes.
    text = program(EXCHANGE, shared=512).replace(".align 16", ".align 512")
    good = text.replace("BARRIER", "bar.sync 0;")
    assert not findings(good, words(), words(), block=(128,), mode=mode)
    found = findings(text.replace("BARRIER", ""), words(), words(), block=(128,), mode=mode)
    assert {f.kind for f in found} & {"race"}
    race = next(f for f in found if f.kind == "race")
    assert race.severity == "error"
    assert "warp" in race.message


def test_a_missing_warp_barrier_is_a_race_between_lanes() -> None:
    body = """mov.u32 %r1, smem;
    mad.lo.u32 %r2, %r0, 4, %r1;
    st.shared.u32 [%r2], %r0;
    BARRIER
    xor.b32 %r3, %r2, 4;
    ld.shared.u32 %r4, [%r3];
    st.global.u32 [%rd11], %r4;"""
    text = program(body, shared=128)
    good = text.replace("BARRIER", "bar.warp.sync 0xffffffff;")
    assert not findings(good, words(), words())
    found = only(findings(text.replace("BARRIER", ""), words(), words()), "race")
    assert "another lane of the same warp" in found.message


def test_overwriting_what_another_lane_has_read_is_a_race_without_a_warp_barrier() -> None:
    body = """mov.u32 %r1, smem;
    mad.lo.u32 %r2, %r0, 4, %r1;
    xor.b32 %r3, %r2, 4;
    st.shared.u32 [%r2], %r0;
    bar.warp.sync -1;
    ld.shared.u32 %r4, [%r3];
    BARRIER
    st.shared.u32 [%r2], %r4;"""
    text = program(body, shared=128)
    assert not findings(text.replace("BARRIER", "bar.warp.sync -1;"), words(), words())
    # A shuffle and a vote let the lanes wait for each other, but they order no memory.
    for other in (
        "",
        "shfl.sync.bfly.b32 %r5, %r4, 4, 31, -1;",
        "vote.sync.ballot.b32 %r5, %p1, -1;",
        "match.any.sync.b32 %r5, %r4, -1;",
        "redux.sync.add.u32 %r5, %r4, -1;",
        "elect.sync %r5|%p1, -1;",
    ):
        found = only(findings(text.replace("BARRIER", other), words(), words()), "race")
        assert "a read by another lane of the same warp" in found.message


# Lane i fills row i of four matrices, loads fragments of them, and overwrites a word of row i / 4.
MATRIX_LANES = """mov.u32 %r1, smem;
    mad.lo.u32 %r2, %r0, 16, %r1;
    mad.lo.u32 %r3, %r0, 4, %r1;
    st.shared.v4.u32 [%r2], {%r0, %r0, %r0, %r0};
    BEFORE
    LOAD
    AFTER
    STORE
    st.global.u32 [%rd11], %r4;"""
LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r2];"
STORE = "st.shared.u32 [%r3], 1;"
STORE_MATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {%r4, %r5, %r6, %r7};"
WARP_SYNC = "bar.warp.sync -1;"


def matrix_lanes(before: str, load: str, after: str, store: str, **options: bool) -> list[str]:
    """The severities of what is found, all of kind "lane-order"."""
    body = MATRIX_LANES.replace("BEFORE", before).replace("LOAD", load)
    body = body.replace("AFTER", after).replace("STORE", store)
    found = findings(program(body, shared=512), words(), words(), **options)
    assert {f.kind for f in found} <= {"lane-order"}, found
    assert all(f.warp == 0 and f.line > 0 for f in found)
    return [f.severity for f in found]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_ldmatrix_orders_no_memory(transposed: str, strict: bool) -> None:
    load = LOAD.replace(".x4", ".x4" + transposed)
    severity = "error" if strict else "lint"
    assert matrix_lanes(WARP_SYNC, load, WARP_SYNC, STORE, strict=strict) == []
    assert matrix_lanes(WARP_SYNC, load, "", STORE, strict=strict) == [severity]
    assert matrix_lanes("", load, WARP_SYNC, STORE, strict=strict) == [severity]
    # Instructions after it that wait for all lanes do not order them, either.
    product = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3},
    {%r4, %r5, %r6, %r7}, {%r4, %r5}, {%f0, %f1, %f2, %f3};"""
    assert matrix_lanes(WARP_SYNC, load, product, STORE, strict=strict) == [severity]


def test_stmatrix_orders_no_memory() -> None:
    assert matrix_lanes(WARP_SYNC, LOAD, WARP_SYNC, STORE_MATRIX) == []
    assert matrix_lanes(WARP_SYNC, LOAD, "", STORE_MATRIX) == ["lint"]
    again = f"{STORE_MATRIX}\nBARRIER\nld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r2];"
    for barrier, expected in ((WARP_SYNC, []), ("", ["lint"])):
        store = again.replace("BARRIER", barrier)
        assert matrix_lanes(WARP_SYNC, LOAD, WARP_SYNC, store) == expected


def test_a_lane_does_not_release_what_ldmatrix_has_read_for_others() -> None:
    body = f"""mov.u32 %r1, smem;
    and.b32 %r2, %r0, 31;
    mad.lo.u32 %r2, %r2, 16, %r1;
    setp.ne.u32 %p1, %r0, 32;
    @!%p1 mbarrier.init.shared.b64 [smem+512], 1;
    setp.ge.u32 %p2, %r0, 32;
    @!%p2 st.shared.v4.u32 [%r2], {{%r0, %r0, %r0, %r0}};
    bar.sync 0;
    @%p2 bra LOADS;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [smem+512], 0;
    @!%p3 bra WAIT;
    st.shared.v4.u32 [%r2], {{%r0, %r0, %r0, %r0}};
    bra DONE;
    LOADS:
    {LOAD}
    BARRIER
    @!%p1 mbarrier.arrive.shared.b64 %rd5, [smem+512];
    DONE:"""
    text = program(body, shared=520)
    good = text.replace("BARRIER", WARP_SYNC)
    bad = text.replace("BARRIER", "")
    assert not findings(good, words(), words(), block=(64,), strict=True)
    only(findings(bad, words(), words(), block=(64,), strict=True), "lane-release")
    # In compilers' kernels one lane arrives for its warp, which has used the loaded values.
    assert not findings(bad, words(), words(), block=(64,))


def test_overwriting_what_another_warp_may_still_read_is_a_race() -> None:
    body = EXCHANGE.replace("BARRIER", "bar.sync 0;") + "AGAIN\nst.shared.u32 [%r2], %r4;"
    text = program(body, shared=512).replace(".align 16", ".align 512")
    good = text.replace("AGAIN", "bar.sync 0;")
    assert not findings(good, words(), words(), block=(128,))
    # Whichever of the two comes first in the run, it is reported.
    for seed in range(4):
        found = findings(text.replace("AGAIN", ""), words(), words(), block=(128,), seed=seed)
        assert found
        assert {f.kind for f in found} == {"race"}


def test_writes_of_the_same_value_are_only_a_lint() -> None:
    found = findings(program("st.shared.u32 [smem], 5;", shared=16), words(), words(), block=(64,))
    assert {(f.kind, f.severity) for f in found} == {("race", "lint")}
    found = findings(
        program("st.shared.u32 [smem], %r0;", shared=16), words(), words(), block=(64,)
    )
    assert ("race", "error") in {(f.kind, f.severity) for f in found}


def test_atomics_do_not_race_with_each_other() -> None:
    body = """setp.eq.u32 %p1, %r0, 0;
    @%p1 st.shared.u32 [smem], 0;
    bar.sync 0;
    atom.shared.add.u32 %r1, [smem], 1;
    bar.sync 0;
    ld.shared.u32 %r2, [smem];
    st.global.u32 [%rd11], %r2;"""
    out = words()
    assert not findings(program(body, shared=16), words(), out, block=(128,))
    assert (out[:128] == 128).all()
    without = body.replace("bar.sync 0;\n    ld", "ld")
    found = findings(program(without, shared=16), words(), words(), block=(128,))
    assert "race" in {f.kind for f in found}


def test_a_flag_published_with_release_orders_and_a_relaxed_one_does_not() -> None:
    body = """setp.ge.u32 %p1, %r0, 32;
    @%p1 bra READER;
    setp.ne.u32 %p2, %r0, 0;
    @%p2 bra DONE;
    st.shared.u32 [smem], 99;
    st.ORDER.cta.shared.u32 [smem+8], 1;
    bra DONE;
    READER:
    ld.acquire.cta.shared.u32 %r1, [smem+8];
    setp.ne.u32 %p3, %r1, 1;
    @%p3 bra READER;
    ld.shared.u32 %r2, [smem];
    st.global.u32 [%rd11], %r2;
    DONE:
    """
    text = program(
        "setp.eq.u32 %p4, %r0, 0;\n@%p4 st.shared.u32 [smem+8], 0;\nbar.sync 0;" + body, shared=16
    )
    out = words()
    assert not findings(text.replace("ORDER", "release"), words(), out, block=(64,))
    assert (out[32:64] == 99).all()
    found = findings(text.replace("ORDER", "relaxed"), words(), words(), block=(64,))
    assert "race" in {f.kind for f in found}


def test_ctas_that_write_the_same_bytes_are_reported() -> None:
    body = "mov.u32 %r1, %ctaid.x;\nst.global.u32 [%rd11], %r1;"
    found = findings(program(body), words(), words(), grid=(3,))
    assert "which CTA 0 writes too" in only(found, "race").message


# --- asynchronous copies ---

COPY = """
mov.u32 %r1, smem;
mad.lo.u32 %r2, %r0, 16, %r1;
mad.wide.u32 %rd5, %r0, 16, %rd0;
cp.async.cg.shared.global [%r2], [%rd5], 16;
cp.async.commit_group;
WAIT
BARRIER
xor.b32 %r3, %r2, 16;
ld.shared.u32 %r4, [%r3];
st.global.u32 [%rd11], %r4;
cp.async.wait_all;
"""


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_must_be_waited_for(mode: str) -> None:
    text = program(COPY, shared=1024)
    good = text.replace("WAIT", "cp.async.wait_group 0;").replace("BARRIER", "bar.sync 0;")
    out = words()
    assert not findings(good, words(), out, block=(64,), mode=mode)
    assert out[:64].tolist() == [4 * (i ^ 1) for i in range(64)]
    unwaited = text.replace("WAIT", "").replace("BARRIER", "bar.sync 0;")
    found = findings(unwaited, words(), words(), block=(64,), mode=mode)
    assert "in-flight" in {f.kind for f in found}
    unsynchronised = text.replace("WAIT", "cp.async.wait_group 0;").replace("BARRIER", "")
    found = findings(unsynchronised, words(), words(), block=(64,), mode=mode)
    assert {f.kind for f in found} == {"race"}


def test_a_wait_that_leaves_one_group_too_many_is_found() -> None:
    body = """mov.u32 %r1, smem;
    mad.lo.u32 %r2, %r0, 4, %r1;
    cp.async.ca.shared.global [%r2], [%rd10], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r2+128], [%rd10+128], 4;
    cp.async.commit_group;
    cp.async.wait_group N;
    ld.shared.u32 %r4, [%r2+128];
    st.global.u32 [%rd11], %r4;
    cp.async.wait_all;"""
    text = program(body, shared=256)
    out = words()
    assert not findings(text.replace("N;", "0;", 1).replace("group N", "group 0"), words(), out)
    assert out[:32].tolist() == list(range(32, 64))
    found = findings(text.replace("group N", "group 1"), words(), words())
    assert "in-flight" in {f.kind for f in found}


def test_a_copy_may_fill_with_zeros_and_skip_its_source() -> None:
    body = """mov.u32 %r1, smem;
    mad.lo.u32 %r2, %r0, 16, %r1;
    and.b32 %r5, %r0, 15;
    min.u32 %r5, %r5, 16;
    mad.wide.u32 %rd5, %r0, 16, %rd0;
    cp.async.cg.shared.global [%r2], [%rd5], 16, %r5;
    cp.async.wait_all;
    ld.shared.v4.u32 {%r6, %r7, %r8, %r9}, [%r2];
    add.u32 %r6, %r6, %r7;
    add.u32 %r6, %r6, %r8;
    add.u32 %r6, %r6, %r9;
    st.global.u32 [%rd11], %r6;"""
    source = torch.full((32, 16), 1, dtype=torch.uint8)
    out = words()
    run(program(body, shared=512), source, out)
    sums = [sum(1 << 8 * (b % 4) for b in range(i & 15)) for i in range(32)]
    assert out[:32].tolist() == sums
    # A source of size 0 is not read, wherever it points.
    nowhere = body.replace("mad.wide.u32 %rd5, %r0, 16, %rd0;", "mov.u64 %rd5, 0;")
    nowhere = nowhere.replace("min.u32 %r5, %r5, 16;", "mov.u32 %r5, 0;")
    run(program(nowhere, shared=512), source, out)
    assert (out[:32] == 0).all()


def test_a_copy_may_not_overtake_readers_of_its_destination() -> None:
    body = """mov.u32 %r1, smem;
    mad.lo.u32 %r2, %r0, 4, %r1;
    st.shared.u32 [%r2], %r0;
    bar.sync 0;
    xor.b32 %r3, %r2, 128;
    ld.shared.u32 %r4, [%r3];
    BARRIER
    cp.async.ca.shared.global [%r2], [%rd10], 4;
    cp.async.wait_all;
    st.global.u32 [%rd11], %r4;"""
    text = program(body, shared=256).replace(".align 16", ".align 256")
    assert not findings(text.replace("BARRIER", "bar.sync 0;"), words(), words(), block=(64,))
    found = findings(text.replace("BARRIER", ""), words(), words(), block=(64,))
    assert {f.kind for f in found} <= {"race", "in-flight"}
    assert any(f.kind == "race" and "asynchronous copy" in f.message for f in found)


def test_copies_pending_at_exit_are_an_error() -> None:
    body = "mov.u32 %r1, smem;\nmad.lo.u32 %r2, %r0, 4, %r1;\n"
    body += "cp.async.ca.shared.global [%r2], [%rd10], 4;\ncp.async.commit_group;"
    only(findings(program(body, shared=128), words(), words()), "pending-copy")


# --- barriers and convergence ---


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bar.sync 16;", "barrier 16 does not exist"),
        ("bar.sync 0, 33;", "multiple of 32"),
        ("bar.sync 0, 96;", "96 threads in a CTA of 64"),
        ("setp.lt.u32 %p1, %r0, 32;\n@%p1 bar.sync 1, 64;\n@!%p1 bar.sync 1;", "this arrival"),
        (
            "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra L;\nbra L;\nL: @%p1 bar.arrive 1, 64;\n"
            "@%p1 bar.arrive 1, 64;",
            "again before it has completed",
        ),
    ],
)
def test_barriers_are_checked(body: str, message: str) -> None:
    found = findings(program(body), words(), words(), block=(64,), mode="lazy")
    assert message in only(found, "barrier").message


def test_an_arrival_that_is_never_completed_is_found_at_exit() -> None:
    found = findings(program("bar.arrive 3, 96;"), words(), words(), block=(96,), mode="lazy")
    assert not found
    text = program("setp.lt.u32 %p1, %r0, 32;\n@%p1 bar.arrive 3, 96;")
    found = findings(text, words(), words(), block=(96,))
    assert "still holds 32 of 96" in only(found, "barrier").message


def test_deadlock_names_every_warp_and_barrier() -> None:
    body = """setp.lt.u32 %p1, %r0, 32;
    @%p1 bra FIRST;
    bar.sync 2, 64;
    bra DONE;
    FIRST:
    bar.sync 1, 64;
    DONE:"""
    found = only(findings(program(body), words(), words(), block=(64,)), "deadlock")
    assert found.fatal
    for text in ("warp 0", "warp 1", "barrier 1", "barrier 2", "32 of 64", "bar.sync"):
        assert text in found.message


def test_aligned_instructions_in_divergent_code_are_found() -> None:
    body = """setp.lt.u32 %p1, %r0, 16;
    @%p1 bra LOW;
    bar.sync 0;
    bra DONE;
    LOW:
    bar.sync 0;
    DONE:"""
    found = only(findings(program(body), words(), words()), "deadlock")
    assert "waits for lanes of its warp" in found.message
    guarded = program("setp.lt.u32 %p1, %r0, 16;\n@%p1 bar.sync 0;")
    only(findings(guarded, words(), words()), "divergent-aligned")


# Instructions that use the registers of all 32 lanes. %r8 is an address in shared memory.
WHOLE_WARP = (
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r8];",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r1, %r2, %r3, %r4}, [%r8];",
    "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r8], {%r1};",
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r8], {%r1, %r2, %r3, %r4};",
    "movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2;",
    "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%r1, %r2}, {%r3, %r4}, {%r5}, {%r1, %r2};",
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "setmaxnreg.dec.sync.aligned.u32 24;",
    "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r2];",
    "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r1};",
    "tcgen05.wait::ld.sync.aligned;",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r8], 32;",
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;",
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
)


def with_target(body: str) -> str:
    """A program with 512 bytes of shared memory, for a target that has its instructions."""
    return program(body, shared=512, target="sm_100a" if "tcgen05" in body else "sm_90a")


@pytest.mark.parametrize("instruction", WHOLE_WARP)
@pytest.mark.parametrize("block", [1, 17, 33, 48, 100])
def test_an_instruction_of_whole_warps_in_a_part_of_one_is_an_error(
    instruction: str, block: int
) -> None:
    body = f"""mov.u32 %r8, smem;
    setp.lt.u32 %p1, %r0, {block // 32 * 32};
    @%p1 bra DONE;
    {instruction}
    DONE:"""
    found = findings(with_target(body), words(), words(), block=(block,))
    error = next(f for f in found if f.fatal)
    assert (error.kind, error.warp, error.lane) == ("partial-warp", block // 32, 0)
    assert error.kernel == "test"
    assert error.instruction in instruction
    assert f"executed by {block % 32}: lane {block % 32}" in error.message


@pytest.mark.parametrize("instruction", WHOLE_WARP)
def test_an_instruction_of_whole_warps_after_lanes_have_returned_is_an_error(
    instruction: str,
) -> None:
    for leave, lane, first in (("ge.u32 %p1, %r0, 5", 5, 0), ("eq.u32 %p1, %r0, 0", 0, 1)):
        body = f"mov.u32 %r8, smem;\nsetp.{leave};\n@%p1 ret;\n{instruction}"
        found = findings(with_target(body), words(), words())
        error = next(f for f in found if f.fatal)
        assert (error.kind, error.lane) == ("partial-warp", first)
        assert f"lane {lane} has returned" in error.message
    # If the guard is false for all lanes that are left, none of them executes it.
    off = with_target(f"setp.ge.u32 %p1, %r0, 5;\n@%p1 ret;\n@%p1 {instruction}")
    assert not [f for f in findings(off, words(), words()) if f.kind == "partial-warp"]


@pytest.mark.slow
@pytest.mark.parametrize("name", corpus())
@pytest.mark.parametrize("block", [(17,), (100,), (5, 7), (3, 4, 5)], ids=str)
def test_lanes_that_leave_or_are_missing_anywhere_are_survived(
    name: str, block: tuple[int, ...]
) -> None:
    lines = corpus()[name].split("\n")
    assert attempt("\n".join(lines), 0, block) == "launched"
    for place, at in enumerate(instruction_lines(lines)):
        early, off = list(lines), list(lines)
        early.insert(at, without_lanes("exit;", f"ge.u32 {1 + place % 31}"))
        off[at] = without_lanes(lines[at].strip(), f"lt.u32 {1 + place % 31}")
        for text in (early, off):
            assert attempt("\n".join(text), place, block) != "unlaunchable"


def test_lanes_that_a_member_mask_names_are_waited_for() -> None:
    body = """setp.lt.u32 %p1, %r0, 16;
    @%p1 bra LATE;
    bra MEET;
    LATE:
    add.u32 %r1, %r0, 100;
    MEET:
    shfl.sync.bfly.b32 %r2, %r0, 16, 31, 0xffffffff;
    st.global.u32 [%rd11], %r2;"""
    out = words()
    assert not findings(program(body), words(), out)
    assert out[:32].tolist() == [i ^ 16 for i in range(32)]


def test_a_lane_outside_its_member_mask_is_an_error() -> None:
    found = findings(program("shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xffff;"), words(), words())
    assert only(found, "member-mask").lane == 16


def test_an_endless_loop_is_stopped() -> None:
    found = findings(program("L: bra L;"), words(), words(), max_instructions=100_000)
    assert "endless loop" in only(found, "limit").message


def test_trap_is_an_error() -> None:
    only(findings(program("trap;"), words(), words()), "trap")


# --- reports ---


def test_a_report_names_kernel_cta_warp_lane_and_both_lines() -> None:
    module = '.file 1 "kernels/sum.cu"\n.file 2 "common/load.cuh"'
    body = """.loc 1 12 3
    setp.eq.u32 %p1, %r0, 45;
    .loc 2 7 5, function_name $L__info_string0, inlined_at 1 12 3
    @%p1 ld.global.u32 %r1, [%rd0+4096];"""
    text = program(body, module=module)
    found = only(findings(text, words(), words(), block=(64,)), "out-of-bounds")
    assert (found.kernel, found.cta, found.warp, found.lane) == ("test", 0, 1, 13)
    assert found.source == "common/load.cuh:7, inlined at kernels/sum.cu:12"
    line = text.splitlines()[found.line - 1]
    assert "ld.global.u32 %r1, [%rd0+4096]" in line
    for part in ("test", "CTA 0", "warp 1", "lane 13", str(found.line), "common/load.cuh:7"):
        assert part in str(found)


def test_errors_raise_and_the_next_run_works() -> None:
    with pytest.raises(sim.SimulationError, match="out-of-bounds") as caught:
        run(program("ld.global.u32 %r1, [%rd0+4096];"), words(), words())
    assert caught.value.report.errors
    out = words()
    run(program("st.global.u32 [%rd11], %r0;"), words(), out)
    assert out[:32].tolist() == list(range(32))


@pytest.mark.parametrize("through", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_an_error_goes_from_a_process_to_another(through: Callable[[Any], Any]) -> None:
    with pytest.raises(sim.SimulationError) as caught:
        run(program("ld.global.u32 %r1, [%rd0+4096];"), words(), words())
    error = through(caught.value)
    assert type(error) is sim.SimulationError
    assert str(error) == str(caught.value)
    assert error.report == caught.value.report
    assert error.report.listing == caught.value.report.listing


def test_reports_do_not_depend_on_the_number_of_threads() -> None:
    body = """mov.u32 %r1, %ctaid.x;
    setp.ge.u32 %p1, %r1, 20;
    @%p1 ld.global.u32 %r2, [%rd0+4096];
    st.shared.u32 [smem], %r0;"""
    text = program(body, shared=16)
    reports = [
        run(text, words(), words(), grid=(64,), threads=n, check=False) for n in (1, 2, 7) * 3
    ]
    assert len({tuple(map(str, report.findings)) for report in reports}) == 1
    assert not reports[0].complete
    assert min(f.cta for f in reports[0].findings if f.fatal) == 20


def test_neighbouring_bytes_of_global_memory_are_no_race() -> None:
    body = """cvt.u64.u32 %rd5, %r0;
    add.u64 %rd6, %rd0, %rd5;
    st.global.u8 [%rd6], %r0;"""
    out = torch.zeros(256, dtype=torch.uint8)
    assert not findings(program(body), out, words(), block=(64,))
    assert out[:64].tolist() == list(range(64))
    overlap = body.replace("%r0;", "%r5;", 1).replace("cvt", "shr.u32 %r5, %r0, 1;\ncvt", 1)
    assert only(findings(program(overlap), out, words(), block=(64,)), "race")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("space", ["shared", "global"])
def test_a_plain_write_after_a_strong_read_is_a_race_in_either_order(space: str, seed: int) -> None:
    place = "smem" if space == "shared" else "%rd0"
    body = f"""setp.eq.u32 %p2, %r0, 0;
    @%p2 st.{space}.u32 [{place}], 0;
    bar.sync 0;
    setp.eq.u32 %p3, %r0, 32;
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra WRITE;
    ld.volatile.{space}.u32 %r1, [{place}];
    bra DONE;
    WRITE: @%p3 st.{space}.u32 [{place}], 7;
    DONE:"""
    found = findings(program(body, shared=16), words(), words(), block=(64,), seed=seed)
    assert only(found, "race").kind == "race"
    both = body.replace("@%p3 st.", "@%p3 st.volatile.")
    assert not findings(program(both, shared=16), words(), words(), block=(64,), seed=seed)


def test_damaged_names_of_functions_are_told_as_plain_text() -> None:
    text = corpus()["control"].replace(".b8 95,90", ".b8 200,255", 1)
    assert attempt(text, 0) == "launched"
    with pytest.raises(LaunchError) as caught:
        sim.load(text.replace("ret;", "r\u00e9t \u00e9\u00e9\u00e9\u00e9\u00e9\u00e9;"))
    assert str(caught.value).isascii()


# --- every space, and the other findings ---


@pytest.mark.parametrize(
    ("statement", "kind", "message", "lane"),
    [
        ("ld.local.u32 %r1, [stack+32];", "out-of-bounds", "at 32 of 32", 0),
        ("st.local.u32 [stack+-4], %r0;", "out-of-bounds", "local memory", 0),
        ("ld.local.u16 %r1, [stack+1];", "misaligned", "not a multiple of 2", 0),
        ("ld.local.u32 %r1, [stack+8];", "uninitialised", "local memory at 8", 0),
        ("ld.param.u32 %r1, [p1+8];", "out-of-bounds", "the parameters at 16 of 16", 0),
        ("ld.param.u64 %rd5, [p0+4];", "misaligned", "not a multiple of 8", 0),
        ("ld.const.u32 %r1, [table+16];", "out-of-bounds", "constant memory at 16 of 16", 0),
        (
            "mov.u64 %rd5, table;\ncvta.const.u64 %rd5, %rd5;\nst.u32 [%rd5], 1;",
            "read-only",
            "constant memory",
            0,
        ),
        ("ld.shared.u32 %r1, [smem+64];", "out-of-bounds", "at offset 64 of 64", 0),
        ("st.shared.u32 [smem+-4], %r0;", "out-of-bounds", "at offset -4 of 64", 0),
        ("red.shared.add.u32 [smem+2], 1;", "misaligned", "updates 4 bytes", 0),
        ("atom.shared.add.u32 %r1, [smem+8], 1;", "uninitialised", "nothing has written", 0),
        ("ld.global.u32 %r1, [values+16];", "out-of-bounds", "values+16", 0),
        ("ld.shared.u32 %r1, [%r8];", "out-of-bounds", "shared memory at offset 64", 16),
        ("cp.async.cg.shared.global [smem+64], [%rd0], 16;", "out-of-bounds", "offset 64", 0),
        ("cp.async.cg.shared.global [smem], [%rd0+8], 16;", "misaligned", "multiple of 16", 0),
        ("cp.async.cg.shared.global [smem], [%rd0+1024], 16;", "out-of-bounds", "+1024", 0),
        ("cp.async.cg.shared.global [smem], [%rd0], 16, %r7;", "copy-size", "reads 17 of 16", 0),
        ("LIST: .branchtargets A, A;\nbrx.idx %r0, LIST;\nA:", "branch", "index 2 of 2", 2),
        ("brkpt;", "trap", "brkpt", 0),
        ("bar.sync %r0;", "barrier", "lanes disagree", 1),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_lane_and_line(
    statement: str, kind: str, message: str, lane: int
) -> None:
    module = """.const .align 8 .b32 table[4] = {1, 2, 3, 4};
    .global .align 8 .b32 values[4] = {1, 2, 3, 4};"""
    body = f""".local .align 8 .b8 stack[32];
    mov.u32 %r7, 17;
    mov.u32 %r8, smem;
    mad.lo.u32 %r8, %r0, 4, %r8;
    setp.lt.u32 %p1, %r0, 16;
    @%p1 st.shared.u32 [%r8], 1;
    bar.sync 1;
    {statement}
    st.global.u32 [%rd11], %r1;"""
    if kind == "uninitialised" and "atom" in statement:
        body = body.replace("@%p1 st.shared.u32 [%r8], 1;", "")
    text = program(body, module=module, shared=64)
    found = findings(text, words(), words())
    first = next(f for f in found if f.kind == kind)
    assert message in first.message
    assert (first.warp, first.lane, first.severity) == (0, lane, "error")
    last = statement.splitlines()[-1] if "brx" not in statement else "brx.idx"
    assert last.rstrip(";") in text.splitlines()[first.line - 1]


def test_the_cta_and_warp_of_a_finding_are_those_that_did_it() -> None:
    body = """mov.u32 %r1, %ctaid.x;
    mad.lo.u32 %r1, %r1, 64, %r0;
    setp.eq.u32 %p1, %r1, 173;
    @%p1 st.global.u32 [%rd1+4096], %r1;"""
    found = findings(program(body), words(), words(), grid=(4,), block=(64,))
    place = only(found, "out-of-bounds")
    assert (place.cta, place.warp, place.lane) == (2, 1, 13)


def test_ldmatrix_is_checked_row_by_row() -> None:
    body = """mov.u32 %r8, smem;
    and.b32 %r1, %r0, 7;
    mad.lo.u32 %r2, %r1, 16, %r8;
    setp.lt.u32 %p1, %r0, 7;
    @%p1 st.shared.v4.u32 [%r2], {%r0, %r0, %r0, %r0};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2];
    st.global.u32 [%rd11], %r3;"""
    text = program(body, shared=128)
    assert only(findings(text, words(), words()), "uninitialised").lane == 7
    off = text.replace("{%r3}, [%r2]", "{%r3}, [%r2+8]")
    assert only(findings(off, words(), words()), "misaligned").lane == 0


def test_a_shuffle_from_a_lane_that_takes_no_part_is_a_lint() -> None:
    body = """setp.ge.u32 %p1, %r0, 16;
    @%p1 exit;
    shfl.sync.bfly.b32 %r1, %r0, 16, 31, 0xffff;
    st.global.u32 [%rd11], %r1;"""
    found = findings(program(body), words(), words())
    only(found, "shuffle", "lint")


def test_a_mask_with_lanes_whose_guard_is_false_is_an_error() -> None:
    body = """setp.lt.u32 %p1, %r0, 16;
    @%p1 shfl.sync.idx.b32 %r1, %r0, 0, 31, -1;"""
    found = only(findings(program(body), words(), words()), "member-mask")
    assert "names lane 16" in found.message


def test_a_copy_races_with_a_plain_write_of_its_destination() -> None:
    body = """mov.u32 %r8, smem;
    mad.lo.u32 %r8, %r0, 16, %r8;
    mad.wide.u32 %rd5, %r0, 16, %rd0;
    cp.async.cg.shared.global [%r8], [%rd5], 16;
    st.shared.u32 [%r8], 1;
    cp.async.wait_all;"""
    for mode in MODES:
        found = findings(program(body, shared=512), words(), words(), mode=mode)
        assert "an asynchronous copy of this warp" in only(found, "race").message


def test_lints_do_not_hide_errors() -> None:
    many = "shfl.sync.idx.b32 %r1, %r0, 20, 31, 0xffff;\n" * 100
    report = run(
        program(many + "st.shared.u32 [smem+2], %r1;", shared=16),
        torch.zeros(32, dtype=torch.int32),
        torch.zeros(32, dtype=torch.int32),
        block=(16,),
        check=False,
    )
    assert {f.kind for f in report.findings} == {"shuffle", "misaligned"}
    assert report.dropped == 36
    assert [f.kind for f in report.errors] == ["misaligned"]
