"""PTX text: what loads, what does not and why; bad launches; damaged text hurts nobody."""

from __future__ import annotations

import random

import pytest
import torch

from archflash import LaunchError, sim
from archflash.sim import _launch

from .fuzz import attempt, corpus, damage
from .ptx import HEADER, program, run


def words(count: int = 64) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def refused(text: str) -> str:
    with pytest.raises(LaunchError) as caught:
        sim.load(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("frobnicate.b32 %r1, %r2;", "unknown instruction frobnicate"),
        ("add.s32.wrong %r1, %r2, %r3;", "does not take modifier .wrong"),
        ("add.rn.s32 %r1, %r2, %r3;", "does not take modifier .s32"),
        ("ld.global.v3.u32 {%r1, %r2, %r3}, [%rd0];", ".v3"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f32 {%f0, %f1, %f2, %f3}, "
         "{%r0, %r1, %r2, %r3}, {%r4, %r5}, {%f0, %f1, %f2, %f3};", "no such matrix product"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3}, "
         "{%r0, %r1, %r2}, {%r4, %r5}, {%f0, %f1, %f2, %f3};", "fragment of another size"),
        ("add.s32 %r1, %r2;", "an operand is missing"),
        ("add.s32 %r1, %r2, %r3, %r4;", "too many operands"),
        ("add.s32 %r1, %r2, %rd1;", "64 bits where 32 are due"),
        ("add.s64 %r1, %rd1, %rd2;", "32 bits where 64 are due"),
        ("add.s32 5, %r1, %r2;", "not a register"),
        ("add.s32 %r1, %nothing, 3;", "%nothing"),
        ("mov.u32 %r1, nothing;", "unknown name nothing"),
        ("bra NOWHERE;", "unknown label"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 8;", "4, 8 or 16"),
        ("cvt.rn.u8.f16x2 %r1, %r2;", "no such conversion"),
        ("lop3.b32 %r1, %r2, %r3, %r4, 256;", "0..255"),
        ("add.f32 %f1, %f2, 3;", "floating-point literal"),
        ("@%r1 add.s32 %r1, %r2, %r3;", "not a predicate"),
        ("ld.global.u32 %r1, [%r2];", "32-bit address of global memory"),
        ("call foo;", "unknown instruction call"),
    ],
)  # fmt: skip
def test_unknown_ptx_is_refused_with_its_line(statement: str, message: str) -> None:
    text = program(statement)
    told = refused(text)
    assert message in told
    line = 1 + next(i for i, row in enumerate(text.splitlines()) if row.startswith(statement[:12]))
    assert f"PTX line {line}:" in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not PTX"),
        ("hello", "expected a directive"),
        (HEADER + ".entry a() { ret; ", "has no '}'"),
        (HEADER + ".entry a() { .reg .b32 %r<99999999>; ret; }", "too many registers"),
        (HEADER + ".entry a() { .reg .x32 %r; ret; }", ".x32"),
        (HEADER + ".entry a() { .reg .b32 %r, %r; ret; }", "declared twice"),
        (HEADER + ".entry a() { L: L: ret; }", "defined twice"),
        (HEADER + ".entry a() { ret; } .entry a() { ret; }", "defined twice"),
        (HEADER + ".entry a() { " + "{" * 100 + "}" * 100 + " }", "nested too deeply"),
        (HEADER + ".shared .b8 s[99999999999];", "too large"),
        (HEADER + ".entry a(.param .b8 p[70000]) { ret; }", "too large"),
        (HEADER + "/* no end", "does not end"),
        (HEADER + ".entry a() { .reg .f32 %f; mov.f32 %f, 0f123; }", "malformed"),
        (HEADER.replace("64", "32"), "must be 64"),
    ],
)
def test_malformed_text_is_refused(text: str, message: str) -> None:
    assert message in refused(text)


def test_a_kernel_that_is_read_when_asked_for_is_refused_then_and_the_others_run() -> None:
    text = (
        HEADER + '.entry fine() { // }\n{ .pragma "}"; } ret; }\n'
        ".entry broken() { ret;\nfrobnicate.b32; }\n.entry last() { ret; }"
    )
    line = text[: text.index("frobnicate")].count("\n") + 1
    assert f"line {line}: unknown instruction frobnicate" in refused(text)
    loaded = _launch.load_when_asked(text)
    assert loaded.kernels == ("broken", "fine", "last")
    for _ in range(2):
        with pytest.raises(LaunchError, match=f"line {line}: unknown instruction frobnicate"):
            sim.launch(loaded, "broken", [], block=(1,))
        for kernel in ("last", "fine"):
            assert sim.launch(loaded, kernel, [], block=(1,)).ctas == 1
    with pytest.raises(LaunchError, match="the PTX has broken, fine, last"):
        sim.launch(loaded, "none", [], block=(1,))


def test_scopes_hide_registers_and_labels_of_inline_assembly() -> None:
    body = """mov.u32 %r1, 1;
    {
    .reg .b32 %r1;
    .reg .pred q;
    mov.u32 %r1, 20;
    LOOP: add.u32 %r1, %r1, 1;
    setp.lt.u32 q, %r1, 30;
    @q bra LOOP;
    st.global.u32 [%rd11], %r1;
    }
    {
    .reg .b32 %r1;
    mov.u32 %r1, 0;
    LOOP: add.u32 %r1, %r1, 2;
    st.global.u32 [%rd11+128], %r1;
    }
    st.global.u32 [%rd10], %r1;"""
    first, second = words(), words()
    run(program(body), first, second)
    assert first[0] == 1
    assert second[0] == 30
    assert second[32] == 2


def test_numbers_and_variables_are_read_as_ptx_spells_them() -> None:
    module = """.const .align 4 .b32 table[4] = {0x10, 0b11, 017, 4};
    .global .align 4 .f32 weights[2] = {1.5, 0f40200000};
    .global .align 8 .b8 bytes[3] = {1, -1, 255};"""
    body = """ld.const.u32 %r1, [table+4];
    ld.global.f32 %f1, [weights];
    ld.global.f32 %f2, [weights+4];
    add.f32 %f1, %f1, %f2;
    cvt.rzi.u32.f32 %r2, %f1;
    ld.global.s8 %r3, [bytes+1];
    mov.u64 %rd5, table;
    cvta.const.u64 %rd5, %rd5;
    ld.u32 %r4, [%rd5+8];
    st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};
    mov.f32 %f3, 0d3FF8000000000000;
    mov.b32 %r5, %f3;
    st.global.u32 [%rd1+16], %r5;"""
    out = words()
    run(program(body, module=module), words(), out, block=(1,))
    assert out[:5].tolist() == [3, 4, -1, 15, 0x3FC00000]


def test_switches_jump_through_their_table() -> None:
    body = """and.b32 %r1, %r0, 3;
    targets: .branchtargets A, B, C, A;
    brx.idx %r1, targets;
    A: mov.u32 %r2, 10; bra DONE;
    B: mov.u32 %r2, 20; bra DONE;
    C: mov.u32 %r2, 30;
    DONE: st.global.u32 [%rd11], %r2;"""
    out = words()
    run(program(body), words(), out)
    assert out[:32].tolist() == [[10, 20, 30, 10][i % 4] for i in range(32)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": (1025,)}, "1024"),
        ({"block": (0,)}, "at least 1"),
        ({"block": (1, 1, 65)}, "64 along z"),
        ({"grid": (1, 65536)}, "65535"),
        ({"grid": (1 << 31,)}, "2147483647"),
        ({"shared_bytes": 300 * 1024}, "shared memory"),
    ],
)
def test_launches_beyond_the_limits_are_refused(options: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(LaunchError, match=message):
        run(program(""), words(), words(), **options)
    run(program(""), words(), words())


def test_wrong_launches_name_what_is_wrong() -> None:
    with pytest.raises(LaunchError, match="no kernel is called other: the PTX has test"):
        sim.launch(sim.load(program("")), "other", [words(), words()])
    with pytest.raises(LaunchError, match="8 parameter bytes: test takes 16"):
        run(program(""), words())
    required = program("").replace("{\n.reg", ".reqntid 64, 1, 1\n{\n.reg", 1)
    with pytest.raises(LaunchError, match="reqntid 64, 1, 1"):
        run(required, words(), words())
    limited = program("").replace("{\n.reg", ".maxntid 32, 1, 1\n{\n.reg", 1)
    with pytest.raises(LaunchError, match="maxntid 32"):
        run(limited, words(), words(), block=(64,))
    with pytest.raises(ValueError, match="mode sideways"):
        run(program(""), words(), words(), mode="sideways")


@pytest.mark.parametrize("name", corpus())
def test_programs_of_the_corpus_run_cleanly(name: str) -> None:
    buffers = [torch.zeros(1024, dtype=torch.int32) for _ in range(2)]
    for mode in ("lazy", "eager", "random", "priority"):
        report = sim.launch(
            sim.load(corpus()[name]), "test", buffers, block=(64,), shared_bytes=1024, mode=mode
        )
        assert report.complete


@pytest.mark.parametrize("name", corpus())
def test_damaged_text_is_refused_or_runs(name: str) -> None:
    text = corpus()[name]
    outcomes = [attempt(damage(text, random.Random(seed)), seed) for seed in range(300)]
    assert outcomes.count("refused") > 100
    assert outcomes.count("launched") > 30
    assert attempt(text, 0) == "launched"
