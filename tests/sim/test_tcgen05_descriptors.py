"""Descriptors of tcgen05: an encoder of our own, from the PTX manual's tables, against worked
values and against what the simulator makes of every layout of 16-bit and 8-bit elements and of
every bit.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from archflash import sim

from . import tiles
from .tcgen05_samples import HEADER, lines, registers, wait
from .test_wgmma import random

MODES = ("lazy", "eager", "random", "priority")
A_PLACE, B_PLACE, SHARED = 0, 32768, 65536
CUDA = Path("/usr/local/cuda/include")
SWIZZLES = {0: 0, 128: 2, 64: 4, 32: 6}  # bytes -> field


def matrix_descriptor(start: int, leading: int, stride: int, span: int) -> int:
    """Of a tile in shared memory; all in bytes."""
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLES[span] << 61


@dataclass(frozen=True)
class Instruction:
    """What an instruction descriptor says. Types are their codes.

    Attributes:
        m, n: of the product.
        a, b, d: types.
        a_k, b_k: whether the matrices are K-major.
    """

    m: int
    n: int
    a: int
    b: int
    d: int = 1
    a_k: bool = True
    b_k: bool = True

    @property
    def bits(self) -> int:
        return (
            self.d << 4
            | self.a << 7
            | self.b << 10
            | (not self.a_k) << 15
            | (not self.b_k) << 16
            | self.n >> 3 << 17
            | self.m >> 4 << 24
        )


# A host program that uses CUTLASS's headers printed these, for 16-bit elements: the tile, leading
# offset, stride offset, swizzle.
WORKED_MATRICES = {
    "128 x 64, K-major": (16, 1024, 128, 0x4000404000010000),
    "V 128 x 64": (0, 1024, 128, 0x4000404000000000),
    "V 128 x 128, slabs of 16384 bytes": (16384, 1024, 128, 0x4000404004000000),
    "V 64 x 128, slabs of 8192 bytes": (8192, 1024, 128, 0x4000404002000000),
    "128 x 32, K-major": (16, 512, 64, 0x8000402000010000),
    "128 x 16, K-major": (16, 256, 32, 0xC000401000010000),
    "128 x 64, K-major, no swizzle": (2048, 128, 0, 0x0000400800800000),
    "V 128 x 128, slabs of 32 columns": (8192, 512, 64, 0x8000402002000000),
    "V 128 x 128, slabs of 16 columns": (4096, 256, 32, 0xC000401001000000),
}


@pytest.mark.parametrize("name", WORKED_MATRICES)
def test_matrix_descriptors_are_those_of_cutlass(name: str) -> None:
    leading, stride, span, worked = WORKED_MATRICES[name]
    assert matrix_descriptor(0, leading, stride, span) == worked
    assert matrix_descriptor(0x8400, leading, stride, span) == worked | 0x840


BF16, F16, TF32, E4M3, E5M2 = 1, 0, 2, 0, 1
WORKED_INSTRUCTIONS = [
    *((Instruction(128, n, BF16, BF16), word) for n, word in (
        (64, 0x08100490), (128, 0x08200490), (256, 0x08400490))),
    *((Instruction(128, n, BF16, BF16, b_k=False), word) for n, word in (
        (32, 0x08090490), (64, 0x08110490), (96, 0x08190490), (128, 0x08210490), (192, 0x08310490),
        (256, 0x08410490))),
    (Instruction(64, 128, BF16, BF16), 0x04200490),
    (Instruction(64, 128, BF16, BF16, b_k=False), 0x04210490),
    (Instruction(256, 128, BF16, BF16), 0x10200490),
    (Instruction(256, 128, BF16, BF16, b_k=False), 0x10210490),
    (Instruction(128, 128, BF16, BF16, a_k=False, b_k=False), 0x08218490),
    (Instruction(128, 64, F16, F16), 0x08100010),
    (Instruction(128, 128, F16, F16, b_k=False), 0x08210010),
    (Instruction(128, 128, F16, F16, d=0), 0x08200000),
    (Instruction(128, 128, TF32, TF32), 0x08200910),
    (Instruction(128, 128, E4M3, E4M3), 0x08200010),
    (Instruction(128, 128, E4M3, E4M3, b_k=False), 0x08210010),
    (Instruction(128, 128, E5M2, E4M3), 0x08200090),
]  # fmt: skip


@pytest.mark.parametrize(("instruction", "worked"), WORKED_INSTRUCTIONS)
def test_instruction_descriptors_are_those_of_cutlass(
    instruction: Instruction, worked: int
) -> None:
    assert instruction.bits == worked


# cutlass_descriptors.cpp prints these.
COMPILED = {
    "tcgen05-k-128": matrix_descriptor(0, 16, 1024, 128),
    "tcgen05-k-64": matrix_descriptor(0, 16, 512, 64),
    "tcgen05-k-32": matrix_descriptor(0, 16, 256, 32),
    "tcgen05-k-0": matrix_descriptor(0, 2048, 128, 0),
    "tcgen05-mn-128-one-slab": matrix_descriptor(0, 0, 1024, 128),
    "tcgen05-mn-128-slabs": matrix_descriptor(0, 8192, 1024, 128),
    "tcgen05-mn-64-slabs": matrix_descriptor(0, 8192, 512, 64),
    "tcgen05-mn-32-slabs": matrix_descriptor(0, 4096, 256, 32),
    "wgmma-k-128": 16 >> 4 << 16 | 1024 >> 4 << 32 | 1 << 62,
    "wgmma-k-64": 16 >> 4 << 16 | 512 >> 4 << 32 | 2 << 62,
    "wgmma-k-32": 16 >> 4 << 16 | 256 >> 4 << 32 | 3 << 62,
    "instruction-bf16-128-64-k-k": Instruction(128, 64, BF16, BF16).bits,
    "instruction-bf16-128-256-k-mn": Instruction(128, 256, BF16, BF16, b_k=False).bits,
    "instruction-bf16-64-128-mn-mn": Instruction(64, 128, BF16, BF16, 1, False, False).bits,
    "instruction-bf16-256-128-k-mn": Instruction(256, 128, BF16, BF16, b_k=False).bits,
    "instruction-f16-f16-128-128-k-k": Instruction(128, 128, F16, F16, 0).bits,
    "instruction-tf32-128-128-k-k": Instruction(128, 128, TF32, TF32).bits,
    "instruction-e5m2-e4m3-128-128-k-k": Instruction(128, 128, E5M2, E4M3).bits,
    # blackwell_dc: a slab of K, V (rows x columns); S = Q K^T, O += P V.
    "tcgen05-dc-k-64x64": matrix_descriptor(0, 16, 1024, 128),
    "tcgen05-dc-v-128x64": matrix_descriptor(0, 0, 1024, 128),
    "tcgen05-dc-v-128x96": matrix_descriptor(0, 128 * 64, 512, 64),
    "tcgen05-dc-v-128x128": matrix_descriptor(0, 128 * 128, 1024, 128),
    "tcgen05-dc-v-64x256": matrix_descriptor(0, 64 * 128, 1024, 128),
    **{
        f"instruction-dc-{name}-{product}": Instruction(m, n, code, code, b_k=b_k).bits
        for name, code in (("bf16", BF16), ("f16", F16))
        for product, m, n, b_k in (
            ("s-128", 128, 128, True),
            ("s-64", 128, 64, True),
            ("s-pair", 256, 128, True),
            ("o-64", 128, 64, False),
            ("o-96", 128, 96, False),
            ("o-128", 128, 128, False),
            ("o-256", 128, 256, False),
            ("o-pair", 256, 128, False),
        )
    },
}


@pytest.mark.skipif(
    "ARCHFLASH_CUTLASS" not in os.environ or not CUDA.is_dir(),
    reason=f"ARCHFLASH_CUTLASS, a checkout of CUTLASS, is not set, or there is no {CUDA}",
)
def test_descriptors_are_those_that_cutlass_headers_make(tmp_path: Path) -> None:
    includes = [Path(os.environ["ARCHFLASH_CUTLASS"]) / "include", CUDA / "cccl", CUDA]
    flags = [f"-I{folder}" for folder in includes]
    source = Path(__file__).parent / "cutlass_descriptors.cpp"
    program = tmp_path / "descriptors"
    subprocess.run(["c++", "-std=c++17", "-w", *flags, "-o", program, source], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in printed.splitlines()]
    assert {row[0]: int(row[1]) for row in rows if len(row) == 2} == COMPILED


# Copies `image` to shared memory, multiplies, reads the result.
KERNEL = """
.visible .entry test(.param .u64 image, .param .u64 out, .param .u64 adesc,
                     .param .u64 bdesc, .param .u32 idesc) .maxntid 128
{{
.reg .pred %p<16>;
.reg .b32 %r<40>;
.reg .b32 %d<256>;
.reg .b64 %rd<20>;
.shared .align 8 .b64 bar;
.shared .align 4 .b32 slot;
ld.param.u64 %rd0, [image];
ld.param.u64 %rd1, [out];
ld.param.u64 %rd3, [adesc];
ld.param.u64 %rd4, [bdesc];
ld.param.u32 %r20, [idesc];
mov.u32 %r0, %tid.x;
mov.u32 %r1, smem;
mov.u32 %r2, bar;
mov.u32 %r3, slot;
shr.u32 %r4, %r0, 5;
and.b32 %r5, %r0, 31;
// Descriptors come with the tile's place in shared memory: add where that is.
shr.u32 %r6, %r1, 4;
cvt.u64.u32 %rd5, %r6;
add.u64 %rd3, %rd3, %rd5;
add.u64 %rd4, %rd4, %rd5;
mov.u32 %r7, %r0;
FILL:
mul.wide.u32 %rd6, %r7, 16;
add.u64 %rd6, %rd6, %rd0;
ld.global.v4.b32 {{%d0, %d1, %d2, %d3}}, [%rd6];
mad.lo.u32 %r8, %r7, 16, %r1;
st.shared.v4.b32 [%r8], {{%d0, %d1, %d2, %d3}};
add.u32 %r7, %r7, 128;
setp.lt.u32 %p0, %r7, {units};
@%p0 bra FILL;
fence.proxy.async;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra MADE;
mbarrier.init.shared::cta.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
MADE:
bar.warp.sync 0xffffffff;
setp.ne.u32 %p2, %r4, 0;
@%p2 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 256;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.b32 %r9, [%r3];
shl.b32 %r10, %r4, 21;
add.u32 %r10, %r10, %r9;
@%p1 bra READ;
tcgen05.mma.cta_group::1.kind::{kind} [%r9], %rd3, %rd4, %r20, 0;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];
READ:
{done}
tcgen05.fence::after_thread_sync;
bar.warp.sync 0xffffffff;
{read}
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
@%p2 bra FREED;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 256;
FREED:
ret;
}}
"""


def kernel(n: int, kind: str) -> str:
    """A product of M 128 and this N, a row of which each thread writes out."""
    read = [
        *(
            f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers('d', 8, 8 * i)}, [%r10+{8 * i}];"
            for i in range(n // 8)
        ),
        "tcgen05.wait::ld.sync.aligned;",
        f"mul.wide.u32 %rd8, %r0, {4 * n};",
        "add.u64 %rd8, %rd8, %rd1;",
        *(f"st.global.v4.b32 [%rd8+{16 * i}], {registers('d', 4, 4 * i)};" for i in range(n // 4)),
    ]
    return HEADER + KERNEL.format(
        kind=kind, units=SHARED // 16, done=wait("%r2", "0"), read=lines(read)
    )


def put(image: Tensor, start: int, matrix: Tensor, k_major: bool, span: int) -> int:
    """Writes a (rows, k) matrix, 32 bytes of k, to the image as compactly as its layout allows;
    returns its descriptor.
    """
    offsets = tiles.strides(k_major, span, matrix.shape[0], matrix.element_size())
    tiles.put(image, start, matrix, k_major, span, *offsets)
    return matrix_descriptor(start, *offsets, span)


def multiply(
    a: Tensor, b: Tensor, instruction: Instruction, *, a_span: int = 128, b_span: int = 128,
    a_place: int = A_PLACE, flip: int = 0, mode: str = "random",
) -> tuple[sim.Report, Tensor]:  # fmt: skip
    """a (128, 32 bytes) times b (n, 32 bytes), of 16 or of 8 bits: the report, (128, n). `flip`:
    bits to change in the instruction descriptor.
    """
    image = torch.zeros(SHARED, dtype=torch.uint8)
    adesc = put(image, a_place, a, instruction.a_k, a_span)
    bdesc = put(image, B_PLACE, b, instruction.b_k, b_span)
    out = torch.full((128, b.shape[0]), torch.nan)
    report = sim.launch(
        sim.load(kernel(b.shape[0], "f16" if a.element_size() == 2 else "f8f6f4")),
        "test",
        [
            image,
            sim.Buffer(out, initialised=False),
            adesc.to_bytes(8, "little"),
            bdesc.to_bytes(8, "little"),
            instruction.bits ^ flip,
        ],
        block=(128,),
        shared_bytes=SHARED,
        mode=mode,
        check=False,
    )
    return report, out.double()


@pytest.mark.parametrize("b_span", SWIZZLES)
@pytest.mark.parametrize("b_k", [True, False], ids=["b-k", "b-mn"])
@pytest.mark.parametrize("a_k", [True, False], ids=["a-k", "a-mn"])
@pytest.mark.parametrize(
    ("dtype", "code"), [(torch.bfloat16, BF16), (torch.float8_e4m3fn, E4M3)], ids=["bf16", "e4m3"]
)
def test_every_layout(dtype: torch.dtype, code: int, a_k: bool, b_k: bool, b_span: int) -> None:
    depth = 32 // dtype.itemsize
    a, b = random(128, depth, dtype), random(64, depth, dtype)
    instruction = Instruction(128, 64, code, code, a_k=a_k, b_k=b_k)
    for a_span in SWIZZLES:
        mode = MODES[(a_span + b_span) // 32 % 4]
        report, d = multiply(a, b, instruction, a_span=a_span, b_span=b_span, mode=mode)
        assert not report.findings
        assert torch.equal(d, a.double() @ b.double().T)


@pytest.mark.parametrize("span", [64, 128])
def test_a_tile_inside_its_pattern_follows_its_addresses(span: int) -> None:
    # wgmma did this on an H200.
    a, b = random(128, 16, torch.bfloat16), random(64, 16, torch.bfloat16)
    report, d = multiply(a, b, Instruction(128, 64, BF16, BF16), a_span=span, a_place=128)
    assert {(f.kind, f.severity) for f in report.findings} == {("alignment", "lint")}
    assert "matrix A of tcgen05.mma" in report.findings[0].message
    assert torch.equal(d, a.double() @ b.double().T)


def test_every_bit_of_an_instruction_descriptor_matters() -> None:
    a, b = random(128, 16, torch.bfloat16), random(256, 16, torch.bfloat16)
    instruction = Instruction(128, 256, BF16, BF16)
    named = 0
    for bit in range(32):
        report, d = multiply(a, b, instruction, flip=1 << bit, mode="eager")
        named += any(f.kind == "descriptor" for f in report.findings)
        # Cells that nothing has written are NaN.
        assert report.errors or not torch.equal(d, a.double() @ b.double().T), bit
    assert named >= 24  # what is reserved, no type, no size
