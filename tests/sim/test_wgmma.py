"""wgmma: layouts, types, order, and what is wrong with descriptors and waits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import LaunchError, sim

from . import tiles
from .tiles import strides

MODES = ("lazy", "eager", "random", "priority")
M, N = 64, 128
SHARED = 49152
HEADER = """.version 8.7
.target sm_90a
.address_size 64
"""

# Copies `image` to shared memory, multiplies once or twice, writes the accumulators.
KERNEL = """
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(.param .u64 image, .param .u64 out, .param .u64 fragments, .param .u64 adesc,
                     .param .u64 bdesc) .maxntid 128
{{
.reg .pred %p<4>;
.reg .b32 %r<40>;
.reg .b32 %d<{count}>;
.reg .b64 %rd<20>;
ld.param.u64 %rd0, [image];
ld.param.u64 %rd1, [out];
ld.param.u64 %rd2, [fragments];
ld.param.u64 %rd3, [adesc];
ld.param.u64 %rd4, [bdesc];
mov.u32 %r0, %tid.x;
mov.u32 %r1, smem;
// Descriptors come with the tile's place in shared memory: add where that is.
shr.u32 %r2, %r1, 4;
cvt.u64.u32 %rd5, %r2;
add.u64 %rd3, %rd3, %rd5;
add.u64 %rd4, %rd4, %rd5;
mov.u32 %r3, %r0;
FILL:
shl.b32 %r4, %r3, 2;
cvt.u64.u32 %rd6, %r4;
add.u64 %rd6, %rd6, %rd0;
ld.global.u32 %r5, [%rd6];
add.u32 %r6, %r4, %r1;
st.shared.u32 [%r6], %r5;
add.u32 %r3, %r3, 128;
setp.lt.u32 %p0, %r3, {words};
@%p0 bra FILL;
fence.proxy.async;
bar.sync 0;
mul.wide.u32 %rd7, %r0, 16;
add.u64 %rd7, %rd7, %rd2;
ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%rd7];
{zero}
wgmma.fence.sync.aligned;
{products}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %rd8, %r0, {bytes};
add.u64 %rd8, %rd8, %rd1;
{store}
ret;
}}
"""


def kernel(shape: str, types: str, count: int, a: str, tail: str, *, twice: bool = False) -> str:
    """A wgmma with A "%rd3" (a descriptor) or in registers; with `twice` also added to itself."""
    d = ", ".join(f"%d{i}" for i in range(count))
    product = f"wgmma.mma_async.sync.aligned.{shape}.{types} {{{d}}}, {a}, %rd4, SCALE{tail};"
    return HEADER + KERNEL.format(
        count=count,
        words=SHARED // 4,
        zero="\n".join(f"mov.b32 %d{i}, 0x7fc00000;" for i in range(count)),
        products=product.replace("SCALE", "0") + (product.replace("SCALE", "1") if twice else ""),
        bytes=4 * count,
        store="\n".join(f"st.global.u32 [%rd8+{4 * i}], %d{i};" for i in range(count)),
    )


REGISTERS = "{%r10, %r11, %r12, %r13}"


def put(
    image: Tensor, start: int, matrix: Tensor, k_major: bool, span: int, lead: int, stride: int
) -> int:
    """Writes a (rows, k) matrix to the image; returns its descriptor without smem's own place."""
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[span]
    return tiles.put(image, start, matrix, k_major, span, lead, stride) | mode << 62


def accumulators(out: Tensor, n: int) -> Tensor:
    """(64, n) from what the 128 threads wrote, n/2 values each."""
    result = torch.zeros(64, n, dtype=out.dtype)
    flat = out.reshape(128, n // 2)
    for thread, i in itertools.product(range(128), range(n // 2)):
        warp, lane = divmod(thread, 32)
        row = 16 * warp + lane // 4 + 8 * (i >> 1 & 1)
        result[row, 2 * (lane % 4) + (i & 1) + 8 * (i >> 2)] = flat[thread, i]
    return result


def fragments(a: Tensor) -> Tensor:
    """The four registers of A of each thread, (128, 4) int32, of a (64, 32 bytes) matrix."""
    raw = a.contiguous().view(torch.uint8).reshape(64, 32)
    result = torch.zeros(128, 4, 4, dtype=torch.uint8)
    for thread, j in itertools.product(range(128), range(4)):
        warp, lane = divmod(thread, 32)
        row = 16 * warp + lane // 4 + 8 * (j & 1)
        column = 4 * (lane % 4) + 16 * (j >> 1)
        result[thread, j] = raw[row, column : column + 4]
    return result.reshape(128, 16).view(torch.int32)


def random(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    values = torch.randint(-8, 9, (rows, columns), generator=generator)
    return (values / 2 if dtype.is_floating_point else values).to(dtype)


def problem(
    a: Tensor, b: Tensor, types: str, *, a_major: bool | None = True, b_major: bool = True,
    a_span: int = 128, b_span: int = 128, tail: str = "", twice: bool = False, change: int = 0,
) -> tuple[str, list[Tensor | bytes]]:  # fmt: skip
    """a (64, k) times b (n, k): PTX and the arguments, the second of which is the output. `a_major`
    None: A in registers; `change`: bits of B's descriptor to flip.
    """
    e, n = a.element_size(), b.shape[0]
    image = torch.zeros(SHARED, dtype=torch.uint8)
    a_lead, a_stride = strides(bool(a_major), a_span, 64, e)
    b_lead, b_stride = strides(b_major, b_span, n, e)
    adesc = put(image, 0, a, a_major, a_span, a_lead, a_stride) if a_major is not None else 0
    bdesc = put(image, 16384, b, b_major, b_span, b_lead, b_stride)
    half = types.startswith("f16.")
    text = kernel(
        f"m64n{n}k{32 // e}",
        types,
        n // 4 if half else n // 2,
        REGISTERS if a_major is None else "%rd3",
        tail,
        twice=twice,
    )
    dtype = torch.int32 if types.startswith("s32") else torch.float16 if half else torch.float32
    out = torch.zeros(128, n // 2, dtype=dtype)
    pack = [x.to_bytes(8, "little") for x in (adesc, (bdesc ^ change) & ((1 << 64) - 1))]
    return text, [image, out, fragments(a), *pack]


def multiply(
    a: Tensor, b: Tensor, types: str, *, mode: str = "random", **options: Any
) -> tuple[sim.Report, Tensor]:
    """The product on the simulator, accumulators in their places."""
    text, arguments = problem(a, b, types, **options)
    report = sim.launch(
        sim.load(text), "test", arguments, block=(128,), shared_bytes=SHARED, mode=mode, check=False
    )
    out = arguments[1]
    assert isinstance(out, Tensor)
    return report, accumulators(out, b.shape[0])


@pytest.mark.parametrize("b_span", [0, 32, 64, 128])
@pytest.mark.parametrize("b_major", [True, False], ids=["b-k", "b-mn"])
@pytest.mark.parametrize("a_major", [True, False, None], ids=["a-k", "a-mn", "a-registers"])
def test_every_layout_of_16_bit_operands(a_major: bool | None, b_major: bool, b_span: int) -> None:
    a, b = random(M, 16, torch.bfloat16), random(N, 16, torch.bfloat16)
    for a_span in (0, 32, 64, 128) if a_major is not None else (0,):
        trans = "" if a_major is None else f", {int(not a_major)}"
        report, d = multiply(
            a,
            b,
            "f32.bf16.bf16",
            a_major=a_major,
            b_major=b_major,
            a_span=a_span,
            b_span=b_span,
            tail=f", 1, 1{trans}, {int(not b_major)}",
            mode=MODES[(a_span + b_span) // 32 % 4],
        )
        assert not report.findings
        assert torch.equal(d.double(), a.double() @ b.double().T)


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize(
    ("types", "dtype", "tail"),
    [
        ("f32.f16.f16", torch.float16, ", 1, 1{t}, 0"),
        ("f16.f16.f16", torch.float16, ", 1, 1{t}, 0"),
        ("f32.tf32.tf32", torch.float32, ", 1, 1"),
        ("f32.e4m3.e4m3", torch.float8_e4m3fn, ", 1, 1"),
        ("f32.e5m2.e5m2", torch.float8_e5m2, ", 1, 1"),
        ("f16.e4m3.e4m3", torch.float8_e4m3fn, ", 1, 1"),
        ("s32.s8.s8", torch.int8, ""),
    ],
)
def test_every_type_and_accumulation(
    types: str, dtype: torch.dtype, tail: str, registers: bool
) -> None:
    k = 32 // dtype.itemsize
    a, b = random(M, k, dtype), random(64, k, dtype)
    if dtype == torch.float8_e5m2:
        a, b = a.float().clamp(-2, 2).to(dtype), b.float().clamp(-2, 2).to(dtype)
    report, d = multiply(
        a,
        b,
        types,
        a_major=None if registers else True,
        tail=tail.format(t="" if registers else ", 0"),
        twice=True,
    )
    assert not report.findings
    assert torch.equal(d.double(), 2 * (a.double() @ b.double().T))


@pytest.mark.parametrize(
    ("rows", "k_major", "lead", "stride", "high"),
    [
        (64, True, 16, 1024, 0x4000004000010000),  # Q or K, rows of 128 bytes
        (64, False, 0, 1024, 0x4000004000000000),  # V of one slab
        (128, False, 16384, 1024, 0x4000004004000000),  # V of two slabs, 16384 bytes apart
    ],
)
def test_descriptors_are_those_of_cutlass(
    rows: int, k_major: bool, lead: int, stride: int, high: int
) -> None:
    # A host program that uses CUTLASS's headers printed these for the same tiles.
    image = torch.zeros(SHARED, dtype=torch.uint8)
    tile = random(rows, 16, torch.bfloat16)
    assert put(image, 0x4400, tile, k_major, 128, lead, stride) == high | 0x440


def test_scales_negate() -> None:
    a, b = random(M, 16, torch.bfloat16), random(N, 16, torch.bfloat16)
    product = a.double() @ b.double().T
    for sa, sb in ((-1, 1), (1, -1), (-1, -1)):
        _, d = multiply(a, b, "f32.bf16.bf16", tail=f", {sa}, {sb}, 0, 0")
        assert torch.equal(d.double(), sa * sb * product)


@pytest.mark.parametrize(
    ("bit", "words"), [(14, "14-15"), (30, "30-31"), (46, "46-48"), (52, "52-61"), (49, "pattern")]
)
def test_fields_of_a_descriptor_are_checked(bit: int, words: str) -> None:
    a, b = random(M, 16, torch.bfloat16), random(N, 16, torch.bfloat16)
    report, _ = multiply(a, b, "f32.bf16.bf16", tail=", 1, 1, 0, 0", change=1 << bit)
    assert [f.kind for f in report.findings] == ["descriptor"]
    assert words in report.findings[0].message


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("fence.proxy.async;", "", "proxy"),
        ("bar.sync 0;", "", "race"),
        ("wgmma.wait_group.sync.aligned 0;", "", "wgmma"),
        ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;", "wgmma"),
        ("wgmma.commit_group.sync.aligned;", "", "wgmma"),
        ("wgmma.fence.sync.aligned;", "", "wgmma-fence"),
        ("wgmma.commit", "mov.b32 %r10, 0;\nwgmma.commit", "wgmma"),
        ("wgmma.commit", "st.shared.u32 [%r1+16384], %r0;\nwgmma.commit", "race"),
    ],
    ids=["proxy", "barrier", "wait", "wait-1", "commit", "fence", "register-a", "overwrite"],
)
def test_a_broken_order_is_named(old: str, new: str, kind: str, mode: str) -> None:
    a, b = random(M, 16, torch.bfloat16), random(64, 16, torch.bfloat16)
    image = torch.zeros(SHARED, dtype=torch.uint8)
    bdesc = put(image, 16384, b, True, 128, 16, 1024)
    text = kernel("m64n64k16", "f32.bf16.bf16", 32, REGISTERS, ", 1, 1, 0")
    assert old in text
    found = sim.launch(
        sim.load(text.replace(old, new)),
        "test",
        [image, torch.zeros(128, 32), fragments(a), bytes(8), bdesc.to_bytes(8, "little")],
        block=(128,),
        shared_bytes=SHARED,
        mode=mode,
        check=False,
    ).findings
    assert kind in {f.kind for f in found}, found


@pytest.mark.parametrize("threads", [96, 160])
def test_a_warpgroup_has_four_warps(threads: int) -> None:
    text = kernel("m64n8k16", "f32.bf16.bf16", 4, REGISTERS, ", 1, 1, 0").replace("128\n", "160\n")
    found = sim.launch(
        sim.load(text),
        "test",
        [torch.zeros(SHARED, dtype=torch.uint8), torch.zeros(160, 4), torch.zeros(160, 4),
         bytes(8), (1 << 62).to_bytes(8, "little")],
        block=(threads,),
        shared_bytes=SHARED,
        check=False,
    ).findings  # fmt: skip
    assert "warps" in next(f.message for f in found if f.kind == "wgmma")


# TMA writes a tile of B, and the descriptor has to follow its boxes.
TILE = """
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(.param .align 64 .b8 map[128], .param .u64 out, .param .u64 bdesc) .maxntid 128
{{
.reg .pred %p<10>;
.reg .b32 %r<40>;
.reg .b32 %d<32>;
.reg .b64 %rd<20>;
.shared .align 8 .b64 bar;
mov.b64 %rd0, map;
cvta.param.u64 %rd0, %rd0;
ld.param.u64 %rd1, [out];
ld.param.u64 %rd4, [bdesc];
mov.u32 %r0, %tid.x;
mov.u32 %r1, smem;
mov.u32 %r30, bar;
shr.u32 %r2, %r1, 4;
cvt.u64.u32 %rd5, %r2;
add.u64 %rd4, %rd4, %rd5;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared::cta.b64 [%r30], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r30], 16384;
{copies}
READY:
bar.sync 0;
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r30], 0;
@!%p1 bra WAIT;
mov.b32 %r10, 0x3f803f80;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{d}}}, {{%r10, %r10, %r10, %r10}}, %rd4, 0,
    1, 1, {trans};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %rd8, %r0, 128;
add.u64 %rd8, %rd8, %rd1;
{store}
ret;
}}
"""


COPY = "cp.async.bulk.tensor.{dims}d.shared::cta.global.mbarrier::complete_tx::bytes\n"
TWO_BOXES = (
    COPY.format(dims=2) + "    [%r1+{base}], [%rd0, {{0, 0}}], [%r30];\n"
    + COPY.format(dims=2) + "    [%r1+{base}+8192], [%rd0, {{{step}, 0}}], [%r30];"
)  # fmt: skip
ONE_BOX = COPY.format(dims=3) + "    [%r1+{base}], [%rd0, {{0, 0, 0}}], [%r30];"
GROUPS = COPY.format(dims=5) + "    [%r1+{base}], [%rd0, {{0, 0, 0, 0, 0}}], [%r30];"
COPIES = {"two-boxes": TWO_BOXES, "one-box": ONE_BOX, "groups": GROUPS}


def tile_run(
    *, mn_major: bool, lead: int, stride: int, mode: int, base: int = 0, boxes: str = "two-boxes"
) -> tuple[sim.Report, Tensor, Tensor]:
    # A K-major B is two slabs of (64 n, 64 k). An MN-major one is slabs of 32 n and 128 k. Each is
    # a box, or both are one, in which the slabs follow one another or those of 8 rows do.
    swizzle = 64 if mn_major else 128
    tensor = random(128, 128, torch.bfloat16)
    rows = 8192 // swizzle
    step = swizzle // 2
    map_ = sim.TensorMap(tensor[:rows], [step, rows], swizzle)
    if boxes == "one-box":
        slabs = tensor[:rows].as_strided((2, rows, step), (step, 128, 1))
        map_ = sim.TensorMap(slabs, [step, rows, 2], swizzle)
    elif boxes == "groups":
        groups = tensor[:rows].as_strided((1, rows // 8, 2, 8, step), (16384, 1024, step, 128, 1))
        map_ = sim.TensorMap(groups, [step, 8, 2, rows // 8, 1], swizzle)
    text = HEADER + TILE.format(
        copies=COPIES[boxes].format(base=base, step=step),
        d=", ".join(f"%d{i}" for i in range(32)),
        store="\n".join(f"st.global.u32 [%rd8+{4 * i}], %d{i};" for i in range(32)),
        trans=int(mn_major),
    )
    desc = base >> 4 | lead >> 4 << 16 | stride >> 4 << 32 | mode << 62
    out = torch.zeros(128, 32)
    report = sim.launch(
        sim.load(text),
        "test",
        [map_, out, desc.to_bytes(8, "little")],
        block=(128,),
        shared_bytes=SHARED,
        check=False,
    )
    expected = (
        tensor[:16, :64].double().sum(0) if mn_major else tensor[:64, :16].double().sum(1)
    ).expand(64, 64)
    return report, accumulators(out, 64), expected


K_MAJOR = {"mn_major": False, "lead": 16, "stride": 1024, "mode": 1}
MN_MAJOR = {"mn_major": True, "lead": 8192, "stride": 512, "mode": 2}


IN_GROUPS = {"k": {"stride": 2048}, "mn": {"lead": 512, "stride": 1024}}


@pytest.mark.parametrize("boxes", COPIES)
@pytest.mark.parametrize(("good", "name"), [(K_MAJOR, "k"), (MN_MAJOR, "mn")], ids=["k", "mn"])
def test_tiles_that_tma_wrote(good: dict[str, int], name: str, boxes: str) -> None:
    changes = IN_GROUPS[name] if boxes == "groups" else {}
    report, d, expected = tile_run(**(good | changes), boxes=boxes)
    assert not report.findings
    assert torch.equal(d.double(), expected)


def test_a_tile_inside_its_pattern_follows_its_addresses() -> None:
    # An H200 gives this result, although the manual asks for a base offset.
    report, d, expected = tile_run(**(K_MAJOR | {"base": 256}))
    assert {(f.kind, f.severity) for f in report.findings} == {("alignment", "lint")}
    assert any("matrix B of wgmma" in f.message for f in report.findings)
    assert torch.equal(d.double(), expected)


@pytest.mark.parametrize("boxes", ["two-boxes", "one-box"])
@pytest.mark.parametrize(
    ("good", "change", "words"),
    [
        (K_MAJOR, {"stride": 512}, "stride offset of 512"),
        (K_MAJOR, {"stride": 2048}, "stride offset of 2048"),
        (K_MAJOR, {"mode": 2}, "swizzle of 64 bytes where TMA wrote with 128"),
        (MN_MAJOR, {"lead": 4096}, "leading offset of 4096"),
        (MN_MAJOR, {"lead": 1024}, "leading offset of 1024"),
        (MN_MAJOR, {"stride": 1024}, "stride offset of 1024"),
        (MN_MAJOR, {"mode": 1}, "swizzle of 128 bytes where TMA wrote with 64"),
    ],
)
def test_a_descriptor_that_does_not_follow_the_tile_is_named(
    good: dict[str, int], change: dict[str, int], words: str, boxes: str
) -> None:
    report, _, _ = tile_run(**(good | change), boxes=boxes)
    named = [f.message for f in report.findings if f.kind == "descriptor"]
    assert named, report.findings
    assert words in named[0]


@pytest.mark.parametrize(
    ("good", "change", "words"),
    [
        (K_MAJOR, {"stride": 1024}, "stride offset of 1024"),  # the other slab of 8 rows
        (K_MAJOR, {"stride": 4096}, "stride offset of 4096"),
        (MN_MAJOR, {"lead": 512, "stride": 512}, "stride offset of 512"),
        (MN_MAJOR, {"lead": 1024, "stride": 1024}, "leading offset of 1024"),
    ],
)
def test_groups_of_rows_that_a_descriptor_does_not_follow_are_named(
    good: dict[str, int], change: dict[str, int], words: str
) -> None:
    report, _, _ = tile_run(**(good | change), boxes="groups")
    named = [f.message for f in report.findings if f.kind == "descriptor"]
    assert named, report.findings
    assert words in named[0]


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("wgmma.mma_async.sync.aligned.m64n8k8.f32.bf16.bf16 {%d0}, %rd4, %rd4, 0, 1, 1, 0, 0;",
         "no such matrix product"),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0}, %rd4, %rd4, 0, 1, 1, 0, 0;",
         "another size"),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0, %d0, %d0, %d0}, %rd4, %rd4, "
         "0, 2, 1, 0, 0;", "scale must be"),
        ("wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {%d0}, %rd4, %rd4, 0, 1, 1, 0, 0;",
         "m64n12k16"),
    ],
)  # fmt: skip
def test_forms_that_do_not_exist_do_not_load(statement: str, words: str) -> None:
    body = f".visible .entry test() {{ .reg .b32 %d<4>; .reg .b64 %rd<9>; {statement} ret; }}"
    with pytest.raises(LaunchError, match=words):
        sim.load(HEADER + body)
