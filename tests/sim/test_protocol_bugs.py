"""A small matrix product as our kernels are built (TMA, mbarriers, wgmma, roles with registers of
their own, a TMA store), and bugs seeded into it: each is reported with its cause.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from archflash import sim
from archflash.sim._picture import draw
from archflash.sim._trace import chrome_trace, timeline

MODES = ("lazy", "eager", "random", "priority")
M, N, TILE_K, TILES = 64, 128, 64, 5
STAGE = 2 * M * TILE_K + 2 * N * TILE_K  # bytes

# Warps 0-3 multiply, thread 128 loads. Two stages: A (64 m, 64 k) K-major, then B (64 k, 128 n) as
# two slabs of 64 n. full[2] for one arrival with bytes, empty[2] for one of each multiplying warp.
KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(.param .align 64 .b8 amap[128], .param .align 64 .b8 bmap[128],
                     .param .align 64 .b8 cmap[128], .param .u32 tiles) .maxntid 256 .maxnreg 128
{
.reg .pred %p<10>;
.reg .b32 %r<60>;
.reg .b64 %rd<40>;
.reg .f32 %d<64>;
.shared .align 8 .b64 bars[4];
mov.u32 %r0, %tid.x;
shr.u32 %r1, %r0, 5;
and.b32 %r2, %r0, 31;
mov.u32 %r3, smem;
mov.u32 %r4, bars;
ld.param.u32 %r5, [tiles];
mov.b64 %rd0, amap;
cvta.param.u64 %rd0, %rd0;
mov.b64 %rd1, bmap;
cvta.param.u64 %rd1, %rd1;
mov.b64 %rd2, cmap;
cvta.param.u64 %rd2, %rd2;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared::cta.b64 [%r4], 1;
mbarrier.init.shared::cta.b64 [%r4+8], 1;
mbarrier.init.shared::cta.b64 [%r4+16], 4;
mbarrier.init.shared::cta.b64 [%r4+24], 4;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
setp.ge.u32 %p1, %r0, 128;
@%p1 bra LOADS;

setmaxnreg.inc.sync.aligned.u32 216;
setp.eq.u32 %p4, %r2, 0;
mov.u32 %r10, 0;
MULTIPLY:
and.b32 %r11, %r10, 1;
shr.u32 %r12, %r10, 1;
and.b32 %r12, %r12, 1;
shl.b32 %r13, %r11, 3;
add.u32 %r14, %r4, %r13;
FULL:
mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r14], %r12;
@!%p3 bra FULL;
mad.lo.u32 %r15, %r11, 24576, %r3;
shr.u32 %r16, %r15, 4;
cvt.u64.u32 %rd10, %r16;
or.b64 %rd11, %rd10, A_DESCRIPTOR;
add.u64 %rd12, %rd10, 512;
or.b64 %rd12, %rd12, B_DESCRIPTOR;
setp.ne.u32 %p2, %r10, 0;
wgmma.fence.sync.aligned;
PRODUCTS
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
@%p4 mbarrier.arrive.shared::cta.b64 _, [%r14+16];
add.u32 %r10, %r10, 1;
setp.lt.u32 %p3, %r10, %r5;
@%p3 bra MULTIPLY;

shr.u32 %r20, %r2, 2;
shl.b32 %r21, %r1, 4;
add.u32 %r20, %r20, %r21;
and.b32 %r22, %r2, 3;
shl.b32 %r22, %r22, 3;
mad.lo.u32 %r23, %r20, 512, %r22;
add.u32 %r23, %r23, %r3;
STORES
fence.proxy.async.shared::cta;
bar.sync 1, 128;
@%p0 bra DONE;
add.u32 %r24, %r3, 49152;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd2, {0, 0}], [%r24];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
bra DONE;

LOADS:
setmaxnreg.dec.sync.aligned.u32 40;
setp.ne.u32 %p5, %r0, 128;
@%p5 bra DONE;
mov.u32 %r30, 0;
LOAD:
and.b32 %r31, %r30, 1;
shr.u32 %r32, %r30, 1;
and.b32 %r32, %r32, 1;
xor.b32 %r32, %r32, 1;
shl.b32 %r33, %r31, 3;
add.u32 %r34, %r4, %r33;
EMPTY:
mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r34+16], %r32;
@!%p6 bra EMPTY;
mad.lo.u32 %r35, %r31, 24576, %r3;
shl.b32 %r36, %r30, 6;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r34], 24576;
cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
    [%r35], [%rd0, {%r36, 0}], [%r34];
cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
    [%r35+8192], [%rd1, {0, %r36}], [%r34];
cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
    [%r35+16384], [%rd1, {64, %r36}], [%r34];
add.u32 %r30, %r30, 1;
setp.lt.u32 %p6, %r30, %r5;
@%p6 bra LOAD;
DONE:
ret;
}
"""


def products() -> str:
    d = ", ".join(f"%d{i}" for i in range(64))
    return "\n".join(
        f"""add.u64 %rd20, %rd11, {2 * step};
        add.u64 %rd21, %rd12, {128 * step};
        wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{{d}}}, %rd20, %rd21,
            {"1" if step else "%p2"}, 1, 1, 0, 1;"""
        for step in range(4)
    )


def stores() -> str:
    return "\n".join(
        f"st.shared.v2.f32 [%r23+{49152 + 4096 * half + 32 * j}], "
        f"{{%d{4 * j + 2 * half}, %d{4 * j + 2 * half + 1}}};"
        for j in range(16)
        for half in range(2)
    )


def kernel(**changes: str) -> str:
    """The kernel; `changes` replace its parts by name."""
    text = KERNEL.replace("PRODUCTS", products()).replace("STORES\n", stores() + "\n")
    parts = {"A_DESCRIPTOR": "0x4000004000010000", "B_DESCRIPTOR": "0x4000004002000000"} | changes
    for name, value in parts.items():
        assert name in text, name
        text = text.replace(name, value)
    return text


def multiply(text: str, **options: object) -> tuple[sim.Report, torch.Tensor, torch.Tensor]:
    """The report, what the kernel gave, and what is right."""
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(-4, 5, (M, TILE_K * TILES), generator=generator).to(torch.bfloat16)
    b = torch.randint(-4, 5, (TILE_K * TILES, N), generator=generator).to(torch.bfloat16)
    c = torch.zeros(M, N)
    maps = [
        sim.TensorMap(a, [64, 64], 128, writable=False, name="a"),
        sim.TensorMap(b, [64, 64], 128, writable=False, name="b"),
        sim.TensorMap(c, [128, 64], initialised=False, name="c"),
    ]
    options = {"block": (256,), "shared_bytes": 2 * STAGE + 4 * M * N, "check": False} | options
    report = sim.launch(sim.load(text), "test", [*maps, TILES], **options)
    return report, c.double(), a.double() @ b.double()


@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_is_right(mode: str) -> None:
    for seed in range(3):
        report, result, expected = multiply(kernel(), mode=mode, seed=seed)
        assert not report.findings
        assert torch.equal(result, expected)


COMMIT = "wgmma.commit_group.sync.aligned;"
ARRIVE = "@%p4 mbarrier.arrive.shared::cta.b64 _, [%r14+16];\n"
# What is changed, the kinds of finding of which one must be there, and what one of them must say.
BUGS = {
    "tx-bytes-high": ({"_, [%r34], 24576": "_, [%r34], 24592"}, {"deadlock"}, "16 bytes are exp"),
    "tx-bytes-low": ({"_, [%r34], 24576": "_, [%r34], 24560"}, {"deadlock"}, "16 bytes have come"),
    "arrive-count": ({"[%r4+16], 4;": "[%r4+16], 5;"}, {"deadlock"}, "1 of 5 arrivals pending"),
    "arrive-count-low": (
        {"[%r4+16], 4;": "[%r4+16], 3;"}, {"race", "mbarrier", "deadlock"}, "",
    ),
    "parity": ({"xor.b32 %r32, %r32, 1;": ""}, {"deadlock"}, "mbarrier"),
    "early-release": (
        {ARRIVE: "", COMMIT: ARRIVE + COMMIT},
        {"race"},
        "a wgmma of",
    ),
    "no-full-wait": (
        {"FULL:\nmbarrier.try_wait.parity.shared::cta.b64 %p3, [%r14], %r12;\n@!%p3 bra FULL;": ""},
        {"race", "uninitialised", "in-flight"},
        "wgmma",
    ),
    "no-empty-wait": (
        {
            "EMPTY:\nmbarrier.try_wait.parity.shared::cta.b64 %p6, [%r34+16], %r32;\n"
            "@!%p6 bra EMPTY;": ""
        },
        {"race", "mbarrier"},
        "",
    ),
    "no-proxy-fence": ({"fence.proxy.async.shared::cta;": ""}, {"proxy"}, "fence.proxy.async"),
    "no-mbarrier-fence": (
        {"fence.mbarrier_init.release.cluster;": ""}, {"mbarrier-fence"}, "fence.mbarrier_init",
    ),
    "tile-base": (
        {"mov.u32 %r3, smem;": "mov.u32 %r3, smem;\nadd.u32 %r3, %r3, 256;"},
        {"alignment"},
        "the pattern does not start",
    ),
    "sbo": ({"A_DESCRIPTOR": "0x4000002000010000"}, {"descriptor"}, "stride offset of 512"),
    "lbo": ({"B_DESCRIPTOR": "0x4000004001000000"}, {"descriptor"}, "leading offset of 4096"),
    "swizzle": ({"A_DESCRIPTOR": "0x8000004000010000"}, {"descriptor"}, "where TMA wrote with 128"),
    "registers": ({"aligned.u32 216": "aligned.u32 224"}, {"deadlock"}, "waits for 224 registers"),
    "no-store-wait": ({"cp.async.bulk.wait_group.read 0;": ""}, {"pending-copy"}, "wait_group"),
    "no-product-wait": ({"wgmma.wait_group.sync.aligned 0;": ""}, {"wgmma"}, "wait_group"),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_reported_with_its_cause(bug: str, mode: str) -> None:
    changes, kinds, words = BUGS[bug]
    extra = {"shared_bytes": 2 * STAGE + 4 * M * N + 256} if bug == "tile-base" else {}
    report, _, _ = multiply(kernel(**changes), mode=mode, **extra)
    named = [f for f in report.findings if f.kind in kinds]
    assert named, report.findings
    assert any(words in f.message for f in named), named


def test_a_trace_shows_copies_and_what_waits_waited_for() -> None:
    report, _, _ = multiply(kernel(), mode="lazy", traced_ctas=1)
    trace = report.traces[0]
    work = [e for e in trace.events if e.kind == "async"]
    copies = [e for e in work if trace.tracks[e.track] == "bulk copies"]
    assert sum(e.bytes for e in copies) == TILES * STAGE + 4 * M * N
    assert all(e.end > e.begin for e in copies)
    waits = [e for e in trace.events if e.kind == "wait" and e.label.startswith("mbarrier")]
    by_copies = {e.track for e in waits if e.cause == copies[0].track}
    assert by_copies == {0, 1, 2, 3}  # full: ended by the bytes
    by_warps = [e for e in waits if e.cause in (0, 1, 2, 3)]
    assert by_warps  # empty: ended by the last of the warps that multiply
    assert {e.track for e in by_warps} == {4}
    products = [e for e in work if e not in copies]
    assert {trace.tracks[e.track] for e in products} == {"tensor pipe"}
    assert Counter(e.label for e in products) == {f"of warp {w}": 4 * TILES for w in range(4)}
    # Under way from the issue to the wait, which shows what it waited for.
    waits = [e for e in trace.events if e.kind == "wait" and e.label == "4 wgmma"]
    assert Counter(e.track for e in waits) == dict.fromkeys(range(4), TILES)
    assert {trace.tracks[e.cause] for e in waits} == {"tensor pipe"}
    assert all(e.begin < e.end <= e.seen and e.bytes == 0 for e in products)


def test_the_tensor_pipe_is_in_the_files_of_a_trace() -> None:
    report, _, _ = multiply(kernel(), mode="lazy", traced_ctas=1)
    line = timeline(report, 0)
    events = chrome_trace([line], report.listing)["traceEvents"]
    rows = {
        e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"
    }
    for warp in range(4):
        groups = [
            e["args"]["products"]
            for e in events
            if e["ph"] == "X" and e["tid"] == rows[f"tensor pipe of warp {warp}"]
        ]
        assert groups == [4] * TILES
    texts = [shape["text"] for kind, shape in draw(line, "t").shapes if kind == "text"]
    assert "tensor pipe" in texts
