"""What instructions do with memory, lanes and control: the parts that recorded vectors do not
cover.
"""

from __future__ import annotations

import struct

import pytest
import torch

from archflash import _archflash_sim as native

from .ptx import lanes, program, run

LANES = torch.arange(32, dtype=torch.int32)


def words(count: int = 256) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


# --- ld and st ---

WIDTHS = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "b32": 4, "u32": 4, "s32": 4,
          "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}  # fmt: skip
REGISTER = {1: "%h", 2: "%h", 4: "%r", 8: "%rd"}


def registers(kind: str, count: int, first: int = 20) -> list[str]:
    name = {"f32": "%f", "f64": "%d"}.get(kind, REGISTER[WIDTHS[kind]])
    return [f"{name}{first // (2 if name == '%d' else 1) + i}" for i in range(count)]


@pytest.mark.parametrize("vector", ["", "v2", "v4"])
@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("space", ["global", "shared", "local", "generic"])
def test_every_width_of_loads_and_stores_in_every_space(space: str, kind: str, vector: str) -> None:
    count = int(vector[1:] or 1) if vector else 1
    total = count * WIDTHS[kind]
    if total > 16:
        pytest.skip("v4 of 64 bits is for global memory on newer targets")
    names = ", ".join(registers(kind, count, 10 if kind == "f64" else 20))
    operand = f"{{{names}}}" if vector else names
    modifiers = f"{'.' + vector if vector else ''}.{kind}"
    place, of = {
        "global": ("%rd12", ".global"),
        "shared": ("%r8", ".shared"),
        "local": ("stack", ".local"),
        "generic": ("%rd13", ""),
    }[space]
    body = f""".local .align 16 .b8 stack[16];
    mul.wide.u32 %rd14, %r0, {total};
    add.u64 %rd15, %rd0, %rd14;
    add.u64 %rd16, %rd1, %rd14;
    add.u64 %rd12, %rd16, 2048;
    mov.u32 %r8, smem;
    mad.lo.u32 %r8, %r0, {total}, %r8;
    cvt.u64.u32 %rd13, %r8;
    cvta.shared.u64 %rd13, %rd13;
    ld.global{modifiers} {operand}, [%rd15];
    st{of}{modifiers} [{place}], {operand};
    ld{of}{modifiers} {operand}, [{place}];
    st.global{modifiers} [%rd16], {operand};"""
    source = torch.randint(0, 256, (512,), dtype=torch.uint8, generator=torch.Generator())
    out = torch.zeros(4096, dtype=torch.uint8)
    run(program(body, shared=512), source, out)
    assert torch.equal(out[: 32 * total], source[: 32 * total])
    if space == "global":
        assert torch.equal(out[2048 : 2048 + 32 * total], source[: 32 * total])


def test_narrow_loads_extend_to_wider_registers() -> None:
    values = torch.tensor([-128, -1, 0, 127] * 8, dtype=torch.int8)
    for kind, expected in (("s8", values), ("u8", values.view(torch.uint8))):
        body = f"""cvt.u64.u32 %rd5, %r0;
        add.u64 %rd5, %rd0, %rd5;
        ld.global.{kind} %r9, [%rd5];
        ld.global.{kind} %rd6, [%rd5];
        mad.wide.u32 %rd7, %r0, 16, %rd1;
        st.global.u32 [%rd7], %r9;
        st.global.u64 [%rd7+8], %rd6;"""
        out = torch.zeros(128, dtype=torch.int32)
        run(program(body), values, out)
        assert out.view(32, 4)[:, 0].tolist() == expected.tolist()
        assert out.view(torch.int64).view(32, 2)[:, 1].tolist() == expected.tolist()


def test_narrow_stores_write_the_low_bytes_only() -> None:
    body = "mov.u32 %r1, 0x12345678;\nst.global.u16 [%rd11], %r1;\nst.global.b8 [%rd11+3], %r1;"
    out = torch.zeros(32, dtype=torch.int32)
    run(program(body), words(), out)
    assert (out == 0x78005678).all()


def test_vectors_store_the_low_bytes_of_wider_registers() -> None:
    body = """cvt.u64.u32 %rd5, %r0;
    mad.lo.u64 %rd6, %rd5, 4, %rd0;
    st.global.v2.u16 [%rd6], {%r0, 0x1234};
    mad.lo.u64 %rd6, %rd5, 4, %rd1;
    st.global.v4.u8 [%rd6], {%rd5, %rd5, %rd5, %rd5};"""
    first, second = words(32), words(32)
    run(program(body), first, second)
    assert first.tolist() == [0x12340000 + i for i in range(32)]
    assert second.tolist() == [0x01010101 * i for i in range(32)]


def test_wide_vectors_of_global_memory() -> None:
    body = """mad.wide.u32 %rd5, %r0, 32, %rd0;
    mad.wide.u32 %rd6, %r0, 32, %rd1;
    ld.global.v4.u64 {%rd20, %rd21, %rd22, %rd23}, [%rd5];
    st.global.v8.b32 [%rd6], {%r0, %r0, %r0, %r0, %r0, %r0, %r0, %r0};
    st.global.v4.u64 [%rd6], {%rd23, %rd22, %rd21, %rd20};"""
    source = torch.arange(128, dtype=torch.int64).clone()
    out = torch.zeros(128, dtype=torch.int64)
    base = [t for t in (source, out) if t.data_ptr() % 32]
    if base:
        pytest.skip("torch gave memory that is not aligned to 32 bytes")
    run(program(body, target="sm_100a"), source, out)
    assert torch.equal(out.view(32, 4), source.view(32, 4).flip(1))


def test_parameters_of_every_width_and_structures() -> None:
    text = program("").replace(
        ".param .u64 p0, .param .u64 p1",
        ".param .u64 p0, .param .u32 a, .param .u16 b, .param .f64 c, "
        ".param .align 16 .b8 s[32], .param .u8 d",
    )
    text = text.replace("ld.param.u64 %rd1, [p1];", "").replace("%rd1;", "%rd0;")
    body = """ld.param.u32 %r1, [a];
    ld.param.u16 %r2, [b];
    ld.param.f64 %d0, [c];
    cvt.rzi.s32.f64 %r3, %d0;
    ld.param.v2.u32 {%r4, %r5}, [s+8];
    mov.u64 %rd5, s;
    ld.param.u32 %r6, [%rd5+16];
    ld.param.u8 %r7, [d];
    st.global.v4.u32 [%rd0], {%r1, %r2, %r3, %r4};
    st.global.v2.u32 [%rd0+16], {%r5, %r6};
    st.global.u32 [%rd0+24], %r7;"""
    out = torch.zeros(32, dtype=torch.int32)
    structure = struct.pack("<8I", *range(100, 108))
    packed = struct.pack("<iHxxd8x", -7, 65000, 12.75) + structure + b"\xfe"
    run(text.replace("ret;", body + "\nret;"), out, packed, block=(1,))
    assert out[:7].tolist() == [-7, 65000, 12, 102, 103, 104, 254]


# --- atom and red ---


@pytest.mark.parametrize(
    ("operation", "kind", "start", "expected"),
    [
        ("add", "u32", 5, 5 + 32 * 31 // 2),
        ("min", "s32", -3, -3),
        ("max", "s32", -3, 31),
        ("min", "u32", -3, 0),
        ("max", "u32", -3, -3),
        ("and", "b32", 0xFF, 0),
        ("or", "b32", 0x100, 0x11F),
        ("xor", "b32", 0, 0),
        ("inc", "u32", 0, 0),
        ("exch", "b32", 9, 31),
    ],
)
@pytest.mark.parametrize("space", ["shared", "global"])
def test_atomics_act_one_lane_after_the_other(
    space: str, operation: str, kind: str, start: int, expected: int
) -> None:
    place = "smem" if space == "shared" else "%rd0"
    source = "0x1f" if operation == "inc" else "%r0"
    body = f"""setp.eq.u32 %p1, %r0, 0;
    @%p1 st.{space}.b32 [{place}], {start};
    bar.sync 0;
    atom.{space}.{operation}.{kind} %r1, [{place}], {source};
    bar.sync 0;
    ld.{space}.u32 %r2, [{place}];
    @%p1 st.global.u32 [%rd1], %r2;
    st.global.u32 [%rd11+128], %r1;"""
    out = torch.zeros(64, dtype=torch.int32)
    run(program(body, shared=16), torch.zeros(32, dtype=torch.int32), out)
    assert int(out[0]) == expected
    assert start in out[32:].tolist()
    if operation == "add":  # what each lane saw: all sums on the way
        assert len(set(out[32:].tolist())) >= 31


def test_compare_and_swap_and_reductions_without_a_result() -> None:
    body = """setp.eq.u32 %p1, %r0, 0;
    @%p1 st.shared.u64 [smem], 0;
    bar.sync 0;
    cvt.u64.u32 %rd5, %r0;
    add.u64 %rd6, %rd5, 1;
    atom.shared.cas.b64 %rd7, [smem], 0, %rd6;
    red.global.add.f32 [%rd0], 0f3F000000;
    red.global.max.u64 [%rd0+8], %rd5;
    st.global.u32 [%rd11], 0;
    bar.sync 0;
    ld.shared.u32 %r1, [smem];
    st.global.u32 [%rd11], %r1;"""
    first, out = torch.zeros(8, dtype=torch.int32), words(32)
    run(program(body, shared=16), first, out)
    assert first.view(torch.float32)[0] == 16
    assert first[2] == 31
    assert len(set(out.tolist())) == 1
    assert 1 <= int(out[0]) <= 32


# --- exchanges between lanes ---


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("shfl.sync.up.b32 %r9|%p1, %r1, 3, 0, -1", [max(i - 3, 0) if i < 3 else i - 3 for i in
                                                    range(32)]),
        ("shfl.sync.down.b32 %r9|%p1, %r1, 5, 31, -1", [i + 5 if i + 5 < 32 else i for i in
                                                       range(32)]),
        ("shfl.sync.bfly.b32 %r9|%p1, %r1, 7, 31, -1", [i ^ 7 for i in range(32)]),
        ("shfl.sync.idx.b32 %r9|%p1, %r1, 2, 0x181f, -1", [i // 8 * 8 + 2 for i in range(32)]),
    ],
)  # fmt: skip
def test_shuffles_and_their_ranges(statement: str, expected: list[int]) -> None:
    values = LANES * 10 + 1
    if ".up" in statement:
        expected = [i - 3 if i >= 3 else i for i in range(32)]
    assert lanes(statement + ";", values).tolist() == [values[i].item() for i in expected]


def test_a_shuffle_says_whether_its_source_is_in_range() -> None:
    body = "shfl.sync.down.b32 %r2|%p1, %r1, 5, 31, -1;\nselp.u32 %r9, 1, 0, %p1;"
    assert lanes(body, LANES).tolist() == [int(i + 5 < 32) for i in range(32)]


def test_votes_and_matches() -> None:
    values = LANES % 3
    odd = "setp.eq.u32 %p1, %r1, 1;\n"
    ballot = sum(1 << i for i in range(32) if i % 3 == 1)
    assert lanes(odd + "vote.sync.ballot.b32 %r9, %p1, -1;", values)[0].item() & 0xFFFFFFFF == (
        ballot
    )
    for kind, expected in (("any", 1), ("all", 0), ("uni", 0)):
        vote = f"vote.sync.{kind}.pred %p2, %p1, -1;\nselp.u32 %r9, 1, 0, %p2;"
        assert (lanes(odd + vote, values) == expected).all()
    matched = lanes("match.any.sync.b32 %r9, %r1, -1;", values)
    for lane in range(32):
        same = sum(1 << i for i in range(32) if i % 3 == lane % 3)
        assert matched[lane].item() & 0xFFFFFFFF == same
    everyone = "match.all.sync.b32 %r2|%p1, %r1, -1;\nselp.u32 %r9, %r2, 7, %p1;"
    assert (lanes(everyone, values * 0) == -1).all()


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("add.s32", 496 - 32 * 9), ("min.s32", -9), ("max.s32", 22), ("max.u32", -1)],
)
def test_reductions_over_lanes(operation: str, expected: int) -> None:
    assert (lanes(f"redux.sync.{operation} %r9, %r1, -1;", LANES - 9) == expected).all()


def test_members_may_be_a_part_of_the_warp() -> None:
    body = """mov.u32 %r9, 0;
    setp.ge.u32 %p1, %r0, 8;
    @%p1 bra DONE;
    redux.sync.add.s32 %r9, %r1, 0xff;
    activemask.b32 %r2;
    add.u32 %r9, %r9, %r2;
    DONE:"""
    assert lanes(body, LANES).tolist() == [28 + 0xFF] * 8 + [0] * 24


# --- barriers with counts and reductions ---


def test_named_barriers_hand_work_from_warp_to_warp() -> None:
    # Warp 0 produces and warp 1 consumes; warp 2 takes no part.
    body = """shr.u32 %r1, %r0, 5;
    mov.u32 %r8, smem;
    and.b32 %r2, %r0, 31;
    mad.lo.u32 %r8, %r2, 4, %r8;
    setp.eq.u32 %p1, %r1, 0;
    setp.eq.u32 %p2, %r1, 1;
    @!%p1 bra OTHERS;
    st.shared.u32 [%r8], %r0;
    bar.arrive 5, 64;
    bra DONE;
    OTHERS: @!%p2 bra DONE;
    bar.sync 5, 64;
    ld.shared.u32 %r3, [%r8];
    mad.wide.u32 %rd5, %r2, 4, %rd1;
    st.global.u32 [%rd5], %r3;
    DONE:"""
    for mode in ("lazy", "eager", "random", "priority"):
        out = torch.full((32,), -1, dtype=torch.int32)
        run(program(body, shared=128), words(), out, block=(96,), mode=mode)
        assert out.tolist() == list(range(32))


def test_barriers_that_reduce() -> None:
    body = """setp.lt.u32 %p1, %r0, 40;
    bar.red.popc.u32 %r1, 0, %p1;
    barrier.cta.red.or.aligned.pred %p2, 1, 64, %p1;
    bar.red.and.pred %p3, 2, !%p1;
    selp.u32 %r2, 100, 0, %p2;
    selp.u32 %r3, 1000, 0, %p3;
    add.u32 %r1, %r1, %r2;
    add.u32 %r1, %r1, %r3;
    st.global.u32 [%rd10], %r1;"""
    out = words(64)
    run(program(body), out, words(), block=(64,))
    assert (out == 140).all()


def test_an_exited_warp_counts_as_arrived_at_barriers_of_all() -> None:
    body = """setp.ge.u32 %p1, %r0, 32;
    @%p1 exit;
    bar.sync 0;
    st.global.u32 [%rd10], 5;"""
    out = words(64)
    run(program(body), out, words(), block=(64,))
    assert out.tolist() == [5] * 32 + list(range(32, 64))


# --- cp.async ---


@pytest.mark.parametrize("mode", ["lazy", "eager", "random", "priority"])
@pytest.mark.parametrize("read", range(0, 17, 4))
def test_copies_fill_what_they_do_not_read_with_zeros(read: int, mode: str) -> None:
    body = f"""mov.u32 %r8, smem;
    mad.lo.u32 %r8, %r0, 16, %r8;
    mad.wide.u32 %rd5, %r0, 16, %rd0;
    mad.wide.u32 %rd6, %r0, 16, %rd1;
    cp.async.cg.shared.global [%r8], [%rd5], 16, {read};
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.v4.u32 {{%r1, %r2, %r3, %r4}}, [%r8];
    st.global.v4.u32 [%rd6], {{%r1, %r2, %r3, %r4}};"""
    out = torch.full((128,), -1, dtype=torch.int32)
    run(program(body, shared=512), words(128) + 1, out, mode=mode)
    expected = (words(128) + 1).view(32, 4).clone()
    expected[:, read // 4 :] = 0
    assert torch.equal(out.view(32, 4), expected)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_groups_complete_in_order(size: int) -> None:
    # There are three groups. After a wait for all but the newest one, the first two have landed.
    copies = "".join(
        f"""add.u64 %rd7, %rd5, {512 * i};
        add.u32 %r7, %r8, {512 * i};
        cp.async.ca.shared.global [%r7], [%rd7], {size};
        cp.async.commit_group;"""
        for i in range(3)
    )
    body = f"""mov.u32 %r8, smem;
    mad.lo.u32 %r8, %r0, 16, %r8;
    mad.wide.u32 %rd5, %r0, 16, %rd0;
    {copies}
    cp.async.wait_group 1;
    ld.shared.u32 %r1, [%r8];
    ld.shared.u32 %r2, [%r8+512];
    add.u32 %r1, %r1, %r2;
    st.global.u32 [%rd11], %r1;
    cp.async.wait_all;"""
    out = words(32)
    for mode in ("lazy", "eager", "random", "priority"):
        run(program(body, shared=2048), words(512), out, mode=mode)
        assert out.tolist() == [8 * i + 128 for i in range(32)]


# --- control ---


def test_loops_of_different_lengths_end_together() -> None:
    body = """mov.u32 %r9, 0;
    LOOP: add.u32 %r9, %r9, 2;
    sub.u32 %r1, %r1, 1;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra LOOP;
    shfl.sync.idx.b32 %r9, %r9, 31, 31, -1;"""
    assert (lanes(body, LANES + 1) == 64).all()


def test_code_behind_an_exit_of_some_lanes_goes_on_with_the_others() -> None:
    body = """and.b32 %r1, %r0, 1;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 ret;
    activemask.b32 %r2;
    bar.warp.sync 0xaaaaaaaa;
    st.global.u32 [%rd10], %r2;"""
    out = torch.zeros(32, dtype=torch.int32)
    run(program(body), out, words())
    assert out.tolist() == [0, 0xAAAAAAAA - (1 << 32)] * 16


def test_special_registers_say_where_a_thread_is() -> None:
    names = ["%tid.x", "%tid.y", "%tid.z", "%ntid.y", "%ctaid.x", "%ctaid.y", "%nctaid.x",
             "%laneid", "%warpid", "%nwarpid", "%lanemask_lt"]  # fmt: skip
    moves = "\n".join(
        f"mov.u32 %r5, {name};\nst.global.u32 [%rd6+{4 * i}], %r5;" for i, name in enumerate(names)
    )
    body = f"""mov.u32 %r1, %tid.y;
    mov.u32 %r2, %ntid.x;
    mad.lo.u32 %r1, %r1, %r2, %r0;
    mov.u32 %r2, %ctaid.x;
    mad.lo.u32 %r1, %r2, 40, %r1;
    mul.lo.u32 %r1, %r1, 44;
    cvt.u64.u32 %rd5, %r1;
    add.u64 %rd6, %rd0, %rd5;
    {moves}"""
    out = torch.zeros(3 * 40, 11, dtype=torch.int32)
    run(program(body), out, words(), grid=(3,), block=(20, 2))
    for cta in range(3):
        for thread in range(40):
            lane, warp = thread % 32, thread // 32
            below = (1 << lane) - 1
            assert out[cta * 40 + thread].tolist() == [
                thread % 20, thread // 20, 0, 2, cta, 0, 3, lane, warp, 2, below
            ]  # fmt: skip


# --- Pairs of floats ---

PAIRS = """
ld.global.v2.f32 {%f0, %f1}, [%rd12];
ld.global.v2.f32 {%f2, %f3}, [%rd12+256];
ld.global.v2.f32 {%f4, %f5}, [%rd12+512];
mov.b64 %rd5, {%f0, %f1};
mov.b64 %rd6, {%f2, %f3};
mov.b64 %rd7, {%f4, %f5};
mov.f32 %f9, 0f3f800000;
mov.f32 %f10, 0f40000000;
mov.b64 %rd8, {%f9, %f10};
and.b32 %r1, %r0, 5;
setp.eq.u32 %p1, %r1, 1;
"""


@pytest.mark.parametrize("guard", ["", "@%p1 "])
@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize("rounding", ["rn", "rm"])
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
def test_pairs_are_two_of_the_plain_instructions(
    operation: str, rounding: str, ftz: str, guard: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 1 << 32, (192,), generator=generator)
    special = torch.tensor([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x807FFFFF])
    bits[::3] = special[torch.randint(0, len(special), (64,), generator=generator)]
    bits[1::3] = bits[1::3] & 0x80FFFFFF | 0x3F000000
    inputs = bits.to(torch.uint32).view(torch.int32)
    mnemonic = f"{guard}{operation}.{rounding}{ftz}"
    third = operation == "fma"
    packed = f"""{mnemonic}.f32x2 %rd8, %rd5, %rd6{", %rd7" if third else ""};
    mov.b64 {{%f9, %f10}}, %rd8;"""
    plain = "\n".join(
        f"{mnemonic}.f32 %f{9 + i}, %f{i}, %f{2 + i}{f', %f{4 + i}' if third else ''};"
        for i in (0, 1)
    )
    results = []
    for avx2 in (True, False):
        for body in (packed, plain):
            out = torch.zeros(64, dtype=torch.int32)
            text = f"""mad.wide.u32 %rd12, %r0, 8, %rd1;
            mad.wide.u32 %rd13, %r0, 8, %rd0;
            {PAIRS}{body}
            st.global.v2.f32 [%rd13], {{%f9, %f10}};"""
            native.set_avx2(avx2)
            try:
                run(program(text, target="sm_100a"), out, inputs)
            finally:
                native.set_avx2(True)
            results.append(out)
    assert all(torch.equal(result, results[0]) for result in results)
