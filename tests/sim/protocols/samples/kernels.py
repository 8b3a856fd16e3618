"""Kernels that multiply matrices.

One is a pipeline of TMA, mbarriers and mma.sync, compiled from CUDA C++. The others are hand-made
PTX of wgmma, with A in shared memory or in registers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from archflash import sim

from ...hashed import wide
from . import compile

ROWS, TILE_K = 64, 64
WGMMA_COLUMNS = 128
STAGE = 2 * ROWS * TILE_K + 2 * WGMMA_COLUMNS * TILE_K  # bytes
WGMMA_SHARED = 2 * STAGE + 4 * ROWS * WGMMA_COLUMNS
PIPELINE_CTAS = 2
TILES = 5

# Warps 0-3 multiply, thread 128 loads. Each of two stages has A (64 m, 64 k), K-major, then
# B (64 k, 128 n) as two slabs of 64 n. The barriers are full[2], with one arrival and the bytes of
# TMA, and empty[2], with one arrival of each multiplying warp.
_KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(.param .align 64 .b8 amap[128], .param .align 64 .b8 bmap[128],
                     .param .align 64 .b8 cmap[128], .param .u32 tiles) .maxntid 256 .maxnreg 128
{
.reg .pred %p<10>;
.reg .b32 %r<100>;
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


_D = ", ".join(f"%d{i}" for i in range(64))
_PRODUCT = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"


def _products() -> str:
    return "\n".join(
        f"""add.u64 %rd20, %rd11, {2 * step};
        add.u64 %rd21, %rd12, {128 * step};
        {_PRODUCT} {{{_D}}}, %rd20, %rd21, {"1" if step else "%p2"}, 1, 1, 0, 1;"""
        for step in range(4)
    )


# The address of each lane's row of A, and the number of its 16-byte chunk in a k-step. TMA has
# swizzled the chunks of a row.
_FRAGMENTS = """
and.b32 %r40, %r2, 15;
shl.b32 %r41, %r1, 4;
add.u32 %r40, %r40, %r41;
and.b32 %r41, %r40, 7;
shl.b32 %r42, %r40, 7;
add.u32 %r42, %r42, %r15;
shr.u32 %r43, %r2, 4;
"""


def _loads_of_a() -> str:
    return _FRAGMENTS + "\n".join(
        f"""add.u32 %r44, %r43, {2 * step};
        xor.b32 %r44, %r44, %r41;
        shl.b32 %r44, %r44, 4;
        add.u32 %r44, %r44, %r42;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {_a(step)}, [%r44];"""
        for step in range(4)
    )


def _a(step: int) -> str:
    return "{" + ", ".join(f"%r{60 + 4 * step + i}" for i in range(4)) + "}"


def _products_of_registers() -> str:
    return "\n".join(
        f"""add.u64 %rd21, %rd12, {128 * step};
        {_PRODUCT} {{{_D}}}, {_a(step)}, %rd21, {"1" if step else "%p2"}, 1, 1, 1;"""
        for step in range(4)
    )


def _stores() -> str:
    return "\n".join(
        f"st.shared.v2.f32 [%r23+{49152 + 4096 * half + 32 * j}], "
        f"{{%d{4 * j + 2 * half}, %d{4 * j + 2 * half + 1}}};"
        for j in range(16)
        for half in range(2)
    )


def wgmma_text(a_in_registers: bool = False, **changes: str) -> str:
    """The PTX of a product by wgmma; `changes` replace its parts by name."""
    text = _KERNEL
    if a_in_registers:
        text = text.replace("wgmma.fence", _loads_of_a() + "\nwgmma.fence")
        text = text.replace("PRODUCTS", _products_of_registers())
    text = text.replace("PRODUCTS", _products()).replace("STORES\n", _stores() + "\n")
    parts = {"A_DESCRIPTOR": "0x4000004000010000", "B_DESCRIPTOR": "0x4000004002000000"} | changes
    for name, value in parts.items():
        assert name in text, name
        text = text.replace(name, value)
    return text


@dataclass(frozen=True)
class Sample:
    """A kernel `test` that multiplies: c (64, N) = a (64, K) * b.

    Attributes:
        name: unique name of the sample.
        text: the PTX.
        block, grid: threads of a CTA, CTAs.
        shared_bytes: bytes of dynamic shared memory.
        transposed: whether b is (N, K) instead of (K, N).
    """

    name: str
    text: str
    block: int
    grid: int
    shared_bytes: int
    transposed: bool

    OUTPUT = 2  # index of c among the arguments

    def operands(self, tiles: int = TILES) -> tuple[Tensor, Tensor]:
        """bf16 a (64, K) and b. Widely different exponents show how the addends are aligned."""
        columns = 64 * self.grid if self.transposed else WGMMA_COLUMNS
        depth = TILE_K * tiles
        b_shape = (columns, depth) if self.transposed else (depth, columns)
        return wide((ROWS, depth), 2 * tiles).bfloat16(), wide(b_shape, 2 * tiles + 1).bfloat16()

    def arguments(self, tiles: int = TILES) -> list[Tensor | sim.TensorMap | bytes]:
        """New arguments of a launch over `tiles` tiles of K."""
        a, b = self.operands(tiles)
        c = torch.zeros(ROWS, b.shape[0] if self.transposed else b.shape[1])
        count = struct.pack("<i", tiles)
        if self.transposed:
            maps = [
                sim.TensorMap(x[None, None], [64, 64, 1, 1], 128, writable=False, name=name)
                for x, name in ((a, "a"), (b, "b"))
            ]
            return [*maps, c, count]
        return [
            sim.TensorMap(a, [64, 64], 128, writable=False, name="a"),
            sim.TensorMap(b, [64, 64], 128, writable=False, name="b"),
            sim.TensorMap(c, [128, 64], initialised=False, name="c"),
            count,
        ]

    def worst_error(self, c: Tensor, tiles: int = TILES) -> float:
        """The largest error against float64, relative to what sums in float32 may lose: for each
        addition of 16 products one unit in the last place of the sum of magnitudes.
        """
        a, b = (x.double() for x in self.operands(tiles))
        if self.transposed:
            b = b.T
        allowed = (a.abs() @ b.abs()) * (2.0**-23 * TILE_K * tiles / 16)
        return float(((c.double() - a @ b).abs() / allowed).max())


def pipeline(architecture: str) -> Sample:
    """The pipeline for "90a" or "120f"."""
    text = compile.text_file(architecture).read_text()
    return Sample(f"pipeline-{architecture}", text, 160, PIPELINE_CTAS, 32768, True)


def samples() -> list[Sample]:
    """All sample kernels."""
    return [
        pipeline("90a"),
        pipeline("120f"),
        Sample("wgmma-shared", wgmma_text(), 256, 1, WGMMA_SHARED, False),
        Sample("wgmma-registers", wgmma_text(a_in_registers=True), 256, 1, WGMMA_SHARED, False),
    ]
