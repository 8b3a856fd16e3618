"""Bulk copies: boxes of tensors with every swizzle, bounds, groups, and what is wrong with them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from archflash import LaunchError, sim

MODES = ("lazy", "eager", "random", "priority")
SHARED = 32768
NAN_FILL = 0x7FF7


def kernel(body: str, *, parameters: str = "") -> str:
    """A kernel `test` for one CTA: `body` with the tensor map's address in %map, the output's in
    %out, an mbarrier for one arrival at `bar`, and dynamic shared memory `smem`, aligned to 1024.
    """
    return f"""
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(.param .align 64 .b8 map[128], .param .u64 out{parameters})
{{
.reg .pred %p<20>;
.reg .b32 %r<40>;
.reg .b64 %rd<40>;
.reg .b64 %map, %out;
.shared .align 8 .b64 bar;
mov.b64 %map, map;
cvta.param.u64 %map, %map;
ld.param.u64 %out, [out];
mov.u32 %r0, %tid.x;
setp.eq.u32 %p0, %r0, 0;
mov.u32 %r30, bar;
mov.u32 %r31, smem;
@!%p0 bra READY;
mbarrier.init.shared::cta.b64 [%r30], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
{body}
ret;
}}
"""


WAIT = """
WAIT{n}:
mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r30], {parity};
@!%p9 bra WAIT{n};
"""


def load_body(rank: int, coordinates: list[int], bytes_: int, offset: int = 0):
    """Loads a box to smem + offset, then writes the shared memory to the output."""
    corner = ", ".join(str(c) for c in coordinates)
    return f"""
    // What the box leaves alone is zero.
    mov.u32 %r1, %r0;
    CLEAR:
    shl.b32 %r2, %r1, 2;
    add.u32 %r2, %r2, %r31;
    st.shared.u32 [%r2], 0;
    add.u32 %r1, %r1, 32;
    setp.lt.u32 %p1, %r1, {SHARED // 4};
    @%p1 bra CLEAR;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%p0 bra LOADED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r30], {bytes_};
    cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r31+{offset}], [%map, {{{corner}}}], [%r30];
    LOADED:
    {WAIT.format(n=0, parity=0)}
    mov.u32 %r1, %r0;
    COPY:
    shl.b32 %r2, %r1, 2;
    add.u32 %r3, %r2, %r31;
    ld.shared.u32 %r4, [%r3];
    cvt.u64.u32 %rd1, %r2;
    add.u64 %rd1, %rd1, %out;
    st.global.u32 [%rd1], %r4;
    add.u32 %r1, %r1, 32;
    setp.lt.u32 %p1, %r1, {SHARED // 4};
    @%p1 bra COPY;
    """


def image(
    tensor: Tensor, box: list[int], at: list[int], swizzle: int, offset: int, nan: bool = False
) -> Tensor:
    """What a box of a 16-bit tensor looks like in shared memory: uint8, from smem on."""
    shape = list(reversed(tensor.shape))
    row = box[0] * 2
    pitch = swizzle or row
    result = torch.zeros(SHARED, dtype=torch.uint8)
    flat = tensor.view(torch.int16)
    outer = [range(n) for n in reversed(box[1:])]
    for index, place in enumerate(itertools.product(*outer)):
        place = tuple(reversed(place))
        for x in range(box[0]):
            coordinate = [at[0] + x] + [at[1 + i] + p for i, p in enumerate(place)]
            inside = all(0 <= c < n for c, n in zip(coordinate, shape, strict=True))
            value = int(flat[tuple(reversed(coordinate))]) & 0xFFFF if inside else NAN_FILL * nan
            address = offset + index * pitch + 2 * x
            bits = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
            address ^= ((address >> 7) & bits) << 4
            result[address] = value & 0xFF
            result[address + 1] = value >> 8
    return result


def tensor(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randint(-999, 999, shape, generator=generator, dtype=torch.int16)


def run(
    text: str, map_: sim.TensorMap, out: Tensor, *more: object, **options: object
) -> sim.Report:
    options = {"block": (32,), "shared_bytes": SHARED} | options
    return sim.launch(sim.load(text), "test", [map_, out, *more], **options)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(
    ("width", "at", "offset"),
    [
        (64, [0, 0], 0),  # cut to the span below
        (64, [8, 3], 0),
        (8, [16, 1], 0),  # shorter than any span
        (64, [-8, -3], 0),
        (64, [216, 30], 0),  # crosses both ends
        (64, [304, 2], 0),  # wholly outside
        (64, [8, 3], 128 * 3),  # the pattern follows the address, not the box
    ],
)
def test_a_box_lands_as_on_an_h200(swizzle: int, width: int, at: list[int], offset: int) -> None:
    source = tensor(40, 256)[:, :250]
    box = [min(width, swizzle // 2 or width), 16]
    map_ = sim.TensorMap(source.view(torch.float16), box, swizzle)
    out = torch.zeros(SHARED, dtype=torch.uint8)
    body = load_body(2, at, box[0] * box[1] * 2, offset)
    report = run(kernel(body), map_, out, mode="eager", seed=1)
    kinds = {(f.kind, f.severity) for f in report.findings}
    assert kinds <= {("alignment", "lint")}
    assert bool(kinds) == (swizzle > 0 and offset > 0 and offset % (4 * swizzle * 2) != 0)
    assert torch.equal(out, image(source, box, at, swizzle, offset))


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("mode", MODES)
def test_every_rank_and_schedule(rank: int, mode: str) -> None:
    source = tensor(*[3, 4, 5, 6, 32][-rank:])
    box = [16, 4, 3, 2, 2][:rank]
    at = [8, 3, 2, 1, 2][:rank]
    out = torch.zeros(SHARED, dtype=torch.uint8)
    size = 2
    for extent in box:
        size *= extent
    map_ = sim.TensorMap(source, box, 32)
    report = run(kernel(load_body(rank, at, size)), map_, out, mode=mode, seed=rank)
    assert not report.findings
    assert torch.equal(out, image(source, box, at, 32, 0))


def test_out_of_bounds_can_be_nan_and_elements_can_be_skipped() -> None:
    source = tensor(8, 16)
    out = torch.zeros(SHARED, dtype=torch.uint8)
    map_ = sim.TensorMap(source.view(torch.bfloat16), [16, 4], nan_fill=True)
    run(kernel(load_body(2, [8, 6], 128)), map_, out)
    assert torch.equal(out, image(source, [16, 4], [8, 6], 0, 0, nan=True))
    skipping = sim.TensorMap(source, [16, 5], element_steps=[1, 2])
    run(kernel(load_body(2, [0, 1], 96)), skipping, out)
    assert torch.equal(out, image(source[1::2].contiguous(), [16, 3], [0, 0], 0, 0))


def test_a_tensor_map_needs_an_alignment_of_64_only() -> None:
    text = kernel(load_body(2, [8, 3], 2048)).replace("test(", "test(.param .u64 first, ")
    source, out = tensor(16, 128), torch.zeros(SHARED, dtype=torch.uint8)
    arguments = [bytes(8), sim.TensorMap(source, [64, 16], 128), out]  # at 0, 64 and 192
    sim.launch(sim.load(text), "test", arguments, shared_bytes=SHARED)
    assert torch.equal(out, image(source, [64, 16], [8, 3], 128, 0))


@pytest.mark.parametrize("change", [-16, 16])
@pytest.mark.parametrize("mode", MODES)
def test_wrong_transaction_bytes_are_a_deadlock_that_says_so(change: int, mode: str) -> None:
    map_ = sim.TensorMap(tensor(16, 64), [64, 16], 128)
    out = torch.zeros(SHARED, dtype=torch.uint8)
    text = kernel(load_body(2, [0, 0], 2048 + change))
    found = run(text, map_, out, mode=mode, check=False).findings
    assert [f.kind for f in found] == ["deadlock"]
    expected = "16 bytes are expected" if change > 0 else "16 bytes have come"
    assert expected in found[0].message


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("[%r31+0]", "[%r31+64]", "misaligned"),
        ("{0, 0}", "{4, 0}", "tensor-coordinate"),
        ("tensor.2d", "tensor.3d", "tensor-map"),
        ("[%map,", "[%map+64,", "out-of-bounds"),
        ("[%map,", "[%map+32,", "misaligned"),
        ("[%map,", "[%out,", "tensor-map"),
        ("[%r31+0]", "[%r31+31744]", "out-of-bounds"),
        ("fence.proxy.async.shared::cta;", "", "proxy"),
        ("fence.mbarrier_init.release.cluster;", "", "mbarrier-fence"),
        ("[%map, {0, 0}], [%r30]", "[%map, {0, 0}], [%r30+8]", "mbarrier"),
    ],
)
def test_what_is_wrong_with_a_load_is_named(old: str, new: str, kind: str) -> None:
    map_ = sim.TensorMap(tensor(16, 64), [64, 16], 128)
    text = kernel(load_body(2, [0, 0], 2048))
    if "3d" in new:
        text = text.replace("{0, 0}", "{0, 0, 0}")
    if kind == "mbarrier-fence":
        text = text.replace("fence.proxy.async.shared::cta;", "").replace(
            "st.shared.u32 [%r2], 0;", ""
        )
    assert old in text
    text = text.replace(old, new)
    for mode in MODES:
        out = torch.zeros(SHARED, dtype=torch.uint8)
        found = run(text, map_, out, mode=mode, check=False).findings
        assert kind in {f.kind for f in found}, (mode, found)


def test_a_wait_that_is_not_repeated_is_found_by_some_seed() -> None:
    map_ = sim.TensorMap(tensor(16, 64), [64, 16], 128)
    text = kernel(load_body(2, [0, 0], 2048)).replace("@!%p9 bra WAIT0;", "")
    seen = set()
    for seed in range(40):
        out = torch.zeros(SHARED, dtype=torch.uint8)
        seen |= {f.kind for f in run(text, map_, out, seed=seed, check=False).findings}
    assert "race" in seen


# Warp 1 reads what a load has brought, uses it and hands the place back to warp 0, which loads
# there again.
REUSE = f"""
@!%p0 bra START;
mbarrier.init.shared::cta.b64 [%r31+4096], 1;
fence.mbarrier_init.release.cluster;
START:
bar.sync 0;
@!%p0 bra FIRST;
LOAD
FIRST:
{WAIT.format(n=0, parity=0)}
setp.lt.u32 %p1, %r0, 32;
@%p1 bra AGAIN;
and.b32 %r1, %r0, 31;
mad.lo.u32 %r2, %r1, 16, %r31;
READ
add.u32 %r8, %r4, %r5;
BEFORE
bar.warp.sync -1;
setp.eq.u32 %p2, %r0, 32;
@%p2 mbarrier.arrive.shared::cta.b64 _, [%r31+4096];
AGAIN:
@!%p0 bra LAST;
FREE:
mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r31+4096], 0;
@!%p9 bra FREE;
BEHIND
LOAD
LAST:
{WAIT.format(n=1, parity=1)}
@%p1 bra END;
cvt.u64.u32 %rd1, %r0;
shl.b64 %rd1, %rd1, 2;
add.u64 %rd1, %rd1, %out;
st.global.u32 [%rd1], %r8;
END:
""".replace(
    "LOAD\n",
    """mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r30], 2048;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
    [%r31], [%map, {0, 0}], [%r30];
""",
)
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r2];"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("read", [LDMATRIX, "ld.shared.v2.u32 {%r4, %r5}, [%r2];"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_load_over_what_threads_have_read_wants_a_fence_between(
    read: str, mode: str, strict: bool
) -> None:
    fence = "fence.proxy.async.shared::cta;"
    for before, behind, expected in (
        (fence, "", []),
        ("", fence, []),
        ("", "", [("proxy-read", "error" if strict else "lint")]),
        # A use of the registers is no fence, and a fence of the generic proxy is none either.
        (
            "add.u32 %r8, %r8, %r4;",
            "fence.acq_rel.cta;",
            [("proxy-read", "error" if strict else "lint")],
        ),
    ):
        text = REUSE.replace("READ", read).replace("BEFORE", before).replace("BEHIND", behind)
        report = run(
            kernel(text),
            sim.TensorMap(tensor(16, 64), [64, 16], 128),
            torch.zeros(64, dtype=torch.int32),
            mode=mode,
            block=(64,),
            strict=strict,
            check=False,
        )
        assert [(f.kind, f.severity) for f in report.findings] == expected, report.findings
        assert all("a read by warp 1" in f.message for f in report.findings)
    # Reads behind the fence are not covered by it.
    text = REUSE.replace("READ", fence).replace("BEFORE", read).replace("BEHIND", "")
    text = text.replace("add.u32 %r8, %r4, %r5;", "mov.u32 %r8, 0;")
    found = run(
        kernel(text),
        sim.TensorMap(tensor(16, 64), [64, 16], 128),
        torch.zeros(64, dtype=torch.int32),
        mode=mode,
        block=(64,),
    ).findings
    assert [f.kind for f in found] == ["proxy-read"]


STORE = """
mov.u32 %r1, %r0;
FILL:
shl.b32 %r2, %r1, 2;
add.u32 %r3, %r2, %r31;
mad.lo.u32 %r4, %r1, 131074, 65536;
st.shared.u32 [%r3], %r4;
add.u32 %r1, %r1, 32;
setp.lt.u32 %p1, %r1, {words};
@%p1 bra FILL;
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p0 bra DONE;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%map, {{{at}}}], [%r31];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
DONE:
"""


def filled(words: int) -> Tensor:
    index = torch.arange(words, dtype=torch.int64)
    return (index * 131074 + 65536).to(torch.int32).view(torch.int16)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_a_store_is_clipped_at_16_bytes(swizzle: int, mode: str) -> None:
    width = min(64, swizzle // 2 or 64)
    source = filled(width * 8 // 2)
    target = torch.zeros(16, 256, dtype=torch.int16)
    map_ = sim.TensorMap(target, [width, 8], swizzle, dims=[250, 10])
    x = 256 - width // 2
    report = run(
        kernel(STORE.format(words=width * 4, at=f"{x}, 4")),
        map_,
        torch.zeros(8, dtype=torch.int32),
        mode=mode,
    )
    assert not report.findings
    linear = torch.zeros(8, width, dtype=torch.int16)
    flat = source.view(torch.uint8)
    for row, column in itertools.product(range(8), range(width)):
        address = row * (swizzle or width * 2) + 2 * column
        address ^= ((address >> 7) & {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]) << 4
        linear[row, column] = flat[address : address + 2].view(torch.int16)[0]
    expected = torch.zeros(16, 256, dtype=torch.int16)
    # 6 rows are inside. So are columns up to 250; the last 16 bytes are written whole, up to 256.
    if x < 250:
        expected[4:10, x:256] = linear[:6, : 256 - x]
    assert torch.equal(target, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("fence.proxy.async.shared::cta;", "", "proxy"),
        ("cp.async.bulk.wait_group.read 0;", "", "pending-copy"),
        ("cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group.read 1;", "pending-copy"),
        ("cp.async.bulk.commit_group;", "", "pending-copy"),
        ("bar.sync 0;\n@!%p0 bra DONE;", "@!%p0 bra DONE;", "race"),
        ("{0, 0}", "{0, -1}", "tensor-coordinate"),
        ("DONE:", "DONE:\nst.shared.u32 [%r31], %r1;", "race"),
    ],
    ids=["fence", "wait", "wait-1", "commit", "barrier", "negative", "overwrite"],
)
def test_what_is_wrong_with_a_store_is_named(old: str, new: str, kind: str, mode: str) -> None:
    target = torch.zeros(16, 64, dtype=torch.int16)
    map_ = sim.TensorMap(target, [64, 8], 128)
    text = kernel(STORE.format(words=256, at="0, 0"))
    assert old in text
    text = text.replace(old, new)
    found = run(
        text, map_, torch.zeros(8, dtype=torch.int32), mode=mode, check=False, block=(64,)
    ).findings
    assert kind in {f.kind for f in found}, found


@pytest.mark.parametrize("mode", MODES)
def test_lanes_that_start_one_store_together_are_a_lint(mode: str) -> None:
    target = torch.zeros(16, 64, dtype=torch.int16)
    map_ = sim.TensorMap(target, [64, 8], 128)
    together = kernel(STORE.format(words=256, at="0, 0")).replace("@!%p0 bra DONE;", "")
    out = torch.zeros(8, dtype=torch.int32)
    (finding,) = run(together, map_, out, mode=mode, check=False).findings
    assert (finding.kind, finding.severity) == ("race", "lint")
    assert finding.message.endswith("both write the same value")
    assert target[:8].any()
    # Other rows of shared memory go to the same place.
    apart = together.replace("[%r31];\ncp.async.bulk.commit", "[%r5];\ncp.async.bulk.commit")
    apart = apart.replace("DONE:", "").replace(
        "cp.async.bulk.tensor", "and.b32 %r5, %r0, 1;\nmad.lo.u32 %r5, %r5, 1024, %r31;\n"
        "cp.async.bulk.tensor", 1,
    )  # fmt: skip
    found = run(apart, map_, out, mode=mode, check=False).findings
    assert ("race", "error") in {(f.kind, f.severity) for f in found}


def test_reducing_stores_add_up() -> None:
    text = kernel(STORE.format(words=256, at="0, 8")).replace(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile",
    )
    target = torch.ones(16, 32, dtype=torch.int32)
    map_ = sim.TensorMap(target, [32, 8])
    run(text, map_, torch.zeros(8, dtype=torch.int32), grid=(3,))
    words = filled(256).view(torch.int32).reshape(8, 32)
    assert torch.equal(target[8:], 1 + 3 * words)
    assert torch.equal(target[:8], torch.ones(8, 32, dtype=torch.int32))


FLAT = (
    """
@!%p0 bra LOADED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r30], 512;
ld.param.u64 %rd5, [from];
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r31], [%rd5+64], 512, [%r30];
LOADED:
"""
    + WAIT.format(n=0, parity=0)
    + """
shl.b32 %r2, %r0, 4;
add.u32 %r3, %r2, %r31;
ld.shared.u32 %r4, [%r3];
add.u32 %r4, %r4, 1;
st.shared.u32 [%r3], %r4;
fence.proxy.async;
bar.sync 0;
@!%p0 bra DONE;
cp.async.bulk.global.shared::cta.bulk_group [%out], [%r31], 512;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%out+512], [%r31], 512;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""
)


@pytest.mark.parametrize("mode", MODES)
def test_plain_bulk_copies(mode: str) -> None:
    source = torch.arange(256, dtype=torch.int32)
    out = torch.full((256,), 7, dtype=torch.int32)
    map_ = sim.TensorMap(tensor(8, 8), [8, 8])
    report = run(kernel(FLAT, parameters=", .param .u64 from"), map_, out, source, mode=mode)
    assert not report.findings
    moved = source[16:144] + (torch.arange(128) % 4 == 0)
    assert torch.equal(out[:128], moved)
    assert torch.equal(out[128:], moved + 7)
    for old, new in (("[%rd5+64], 512", "[%rd5+64], 520"), ("[%rd5+64]", "[%rd5+60]")):
        text = kernel(FLAT, parameters=", .param .u64 from").replace(old, new)
        found = run(text, map_, out, source, mode=mode, check=False).findings
        assert {f.kind for f in found} & {"copy-size", "misaligned"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"box": [257, 1]}, "1 to 256"),
        ({"box": [4, 1]}, "multiple of 16"),
        ({"box": [72, 1], "swizzle": 128}, "at most"),
        ({"box": [8]}, "box sizes"),
        ({"tensor": tensor(8, 252)[:, :64]}, "stride"),
        ({"tensor": tensor(8, 64)[:, 4:]}, "address"),
        ({"element_steps": [1, 9]}, "1 to 8"),
        ({"nan_fill": True}, "NaN"),
        ({"tensor": tensor(8, 64).T}, "contiguous"),
        ({"swizzle": 16}, "32, 64 or 128"),
    ],
)
def test_what_the_driver_refuses_is_refused(fields: dict[str, object], words: str) -> None:
    arguments = {"tensor": tensor(8, 64), "box": [64, 1]} | fields
    with pytest.raises(LaunchError, match=words):
        run(kernel(""), sim.TensorMap(**arguments), torch.zeros(8))
