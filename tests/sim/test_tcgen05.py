"""tcgen05 and tensor memory: layouts, shapes, types, order, and what is wrong with each.

What is right here is right by the text of the PTX ISA; no card with tcgen05 was at hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import sim

from . import tiles

MODES = ("lazy", "eager", "random", "priority")
LANES, WARPS = 128, 4
SHARED = 65536
B_PLACE = 32768  # of matrix B in the image; A is at 0
COLUMNS = 512
HEADER = """.version 8.7
.target sm_100a
.address_size 64
"""

# Registers of every kernel here: %r0 thread, %r1 shared memory, %r2 the address that alloc gave,
# %r3 that with the warp's lanes, %r4 the mbarrier, %p7 thread 0 (after its election),
# %rd2 and %rd3 descriptors of A and B with their place, %rd9 out + 2 KB for each thread.
PROLOGUE = """
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(.param .u64 image, .param .u64 out, .param .u64 adesc, .param .u64 bdesc,
                     .param .u64 cells) .maxntid 128
{
.reg .pred %p<10>;
.reg .b32 %r<40>;
.reg .b32 %d<260>;
.reg .b64 %rd<20>;
.shared .align 8 .b64 bar;
.shared .align 4 .b32 slot;
ld.param.u64 %rd0, [image];
ld.param.u64 %rd1, [out];
ld.param.u64 %rd2, [adesc];
ld.param.u64 %rd3, [bdesc];
ld.param.u64 %rd4, [cells];
mov.u32 %r0, %tid.x;
mov.u32 %r1, smem;
mov.u32 %r4, bar;
mul.wide.u32 %rd9, %r0, 2048;
add.u64 %rd10, %rd9, %rd4;
add.u64 %rd9, %rd9, %rd1;
shr.u32 %r5, %r1, 4;
cvt.u64.u32 %rd5, %r5;
add.u64 %rd2, %rd2, %rd5;
add.u64 %rd3, %rd3, %rd5;
mov.u32 %r6, %r0;
FILL:
shl.b32 %r7, %r6, 2;
cvt.u64.u32 %rd6, %r7;
add.u64 %rd6, %rd6, %rd0;
ld.global.u32 %r8, [%rd6];
add.u32 %r9, %r7, %r1;
st.shared.u32 [%r9], %r8;
add.u32 %r6, %r6, 128;
setp.lt.u32 %p0, %r6, WORDS;
@%p0 bra FILL;
shr.u32 %r10, %r0, 5;
setp.ne.u32 %p1, %r10, 0;
setp.ne.u32 %p7, %r0, 0;
@%p1 bra READY;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], ALLOCATED;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
@%p7 bra READY;
mbarrier.init.shared::cta.b64 [%r4], 1;
READY:
fence.proxy.async;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.u32 %r2, [slot];
shl.b32 %r11, %r10, 21;
add.u32 %r3, %r2, %r11;
"""

# What is started by thread 0 is waited for by all of them.
COMMIT = """
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];
"""
WAIT = """
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0;
@!%p2 bra WAIT;
tcgen05.fence::after_thread_sync;
"""

EPILOGUE = """
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
@%p1 bra END;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, ALLOCATED;
END:
ret;
}
"""


def vector(count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%d{first + i}" for i in range(count)) + "}"


def load(columns: int, first: int = 0, at: str = "%rd9", repeats: int = 32) -> str:
    """Each thread's lane, columns first .. first + columns, to global memory."""
    text = ""
    for c in range(first, first + columns, repeats):
        text += f"""tcgen05.ld.sync.aligned.32x32b.x{repeats}.b32 {vector(repeats)}, [%r3+{c}];
        tcgen05.wait::ld.sync.aligned;
        """
        text += "\n".join(f"st.global.u32 [{at}+{4 * (c + i)}], %d{i};" for i in range(repeats))
        text += "\n"
    return text


def store(columns: int, first: int = 0, repeats: int = 32) -> str:
    """Each thread's lane from the `cells` argument to tensor memory."""
    text = ""
    for c in range(first, first + columns, repeats):
        text += "\n".join(f"ld.global.u32 %d{i}, [%rd10+{4 * (c + i)}];" for i in range(repeats))
        text += f"""
        tcgen05.st.sync.aligned.32x32b.x{repeats}.b32 [%r3+{c}], {vector(repeats)};
        """
    return (
        text
        + """tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    """
    )


def program(body: str, *, allocated: int = 512, words: int = SHARED // 4) -> str:
    text = HEADER + PROLOGUE + body + EPILOGUE
    return text.replace("ALLOCATED", str(allocated)).replace("WORDS", str(words))


def run(
    text: str,
    image: Tensor | None = None,
    adesc: int = 0,
    bdesc: int = 0,
    cells: Tensor | None = None,
    **options: Any,
) -> tuple[sim.Report, Tensor]:
    """Launches; returns what each lane (128, 512) stored, int32."""
    out = torch.zeros(LANES, COLUMNS, dtype=torch.int32)
    image = torch.zeros(SHARED, dtype=torch.uint8) if image is None else image
    cells = torch.zeros(LANES, COLUMNS, dtype=torch.int32) if cells is None else cells
    arguments = [image, out, *(x.to_bytes(8, "little") for x in (adesc, bdesc)), cells]
    report = sim.launch(
        sim.load(text), "test", arguments, block=(128,), shared_bytes=SHARED,
        **({"check": False} | options),
    )  # fmt: skip
    return report, out


def put(
    image: Tensor, start: int, matrix: Tensor, k_major: bool, span: int, lead: int, stride: int
) -> int:
    """Writes a (rows, k) matrix to the image; returns its descriptor without smem's own place."""
    mode = {0: 0, 128: 2, 64: 4, 32: 6}[span]
    return tiles.put(image, start, matrix, k_major, span, lead, stride) | 1 << 46 | mode << 61


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = {F16: "f16", BF16: "f16", F32: "tf32", E4M3: "f8f6f4", E5M2: "f8f6f4"}
CODES = {F16: 0, BF16: 1, F32: 2, E4M3: 0, E5M2: 1}


def instruction(
    m: int, n: int, a: torch.dtype, b: torch.dtype, *, a_mn: bool = False, b_mn: bool = False,
    half: bool = False,
) -> int:  # fmt: skip
    """An instruction descriptor."""
    return (
        (0 if half else 1) << 4 | CODES[a] << 7 | CODES[b] << 10 | a_mn << 15 | b_mn << 16
        | n >> 3 << 17 | m >> 4 << 24
    )  # fmt: skip


def random(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    values = torch.randint(-8, 9, (rows, columns), generator=generator)
    return (values / 2).clamp(-3, 3).to(dtype)


def lane_of(m: int, row: int, lane: int = 0) -> int:
    """Where a row of D is with cta_group::1."""
    return row if m == 128 else row % 16 + row // 16 * 32 + lane


def accumulators(out: Tensor, m: int, n: int, *, half: bool = False, lane: int = 0) -> Tensor:
    """D (m, n) from the columns 0 .. n of all lanes."""
    rows = out[[lane_of(m, row, lane) for row in range(m)], :n].contiguous()
    return rows.view(F16)[:, ::2].double() if half else rows.view(F32).double()


def packed(a: Tensor, m: int, lane: int = 0) -> Tensor:
    """Tensor memory (128, 8) that holds A (m, 32 bytes)."""
    cells = torch.zeros(LANES, 8, dtype=torch.int32)
    cells[[lane_of(m, row, lane) for row in range(m)]] = a.contiguous().view(torch.int32)
    return cells


def multiply(
    a: Tensor,
    b: Tensor,
    *,
    a_tmem: bool = False,
    a_major: bool = True,
    b_major: bool = True,
    a_span: int = 128,
    b_span: int = 128,
    half: bool = False,
    twice: bool = False,
    lane: int = 0,
    change: int = 0,
    a_change: int = 0,
    b_change: int = 0,
    extra: str = "",
    **options: Any,
) -> tuple[sim.Report, Tensor]:
    """a (m, k) times b (n, k)."""
    (m, n), e = (a.shape[0], b.shape[0]), a.element_size()
    image = torch.zeros(SHARED, dtype=torch.uint8)
    a_lead, a_stride = tiles.strides(a_major, a_span, m, e)
    b_lead, b_stride = tiles.strides(b_major, b_span, n, e)
    adesc = 0 if a_tmem else put(image, 0, a, a_major, a_span, a_lead, a_stride) ^ a_change
    bdesc = put(image, B_PLACE, b, b_major, b_span, b_lead, b_stride) ^ b_change
    idesc = instruction(m, n, a.dtype, b.dtype, a_mn=not a_major, b_mn=not b_major, half=half)
    operand = f"[%r12+{COLUMNS - 32}]" if a_tmem else "%rd2"
    product = (
        f"tcgen05.mma.cta_group::1.kind::{KINDS[a.dtype]} [%r12], {operand}, %rd3, "
        f"{idesc ^ change}, {extra}ENABLE;\n"
    )
    cells = torch.zeros(LANES, COLUMNS, dtype=torch.int32)
    if a_tmem:
        cells[:, COLUMNS - 32 : COLUMNS - 24] = packed(a, m, lane)
    body = store(8, COLUMNS - 32, 8) if a_tmem else ""
    body += f"add.u32 %r12, %r2, {lane << 16};\n@%p7 bra WAIT;\n"
    body += product.replace("ENABLE", "0")
    if twice:
        body += product.replace("ENABLE", "1")
    body += COMMIT + WAIT + load(n, repeats=32 if n % 32 == 0 else 8)
    report, out = run(program(body), image, adesc, bdesc, cells, **options)
    return report, accumulators(out, m, n, half=half, lane=lane)


def clean(report: sim.Report, m: int) -> bool:
    """No findings, but for those of loading 32 lanes of which 16 have been written."""
    return all(
        f.kind == "uninitialised" and f.severity == "lint" and m == 64 for f in report.findings
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("m", [64, 128])
def test_a_product(m: int, mode: str) -> None:
    a, b = random(m, 16, BF16), random(64, 16, BF16)
    for a_tmem in (False, True):
        report, d = multiply(a, b, mode=mode, a_tmem=a_tmem, twice=True)
        assert clean(report, m), report
        assert torch.equal(d, 2 * (a.double() @ b.double().T))
