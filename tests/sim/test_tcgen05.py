"""tcgen05 and tensor memory: layouts, shapes, types, order, and the errors in each.

What is right here is right by the text of the PTX ISA; no card with tcgen05 was at hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import LaunchError, sim
from archflash import _archflash_sim as native
from archflash.sim._picture import draw
from archflash.sim._report import TraceEvent
from archflash.sim._trace import chrome_trace, timeline

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
# %r3 that with the warp's lanes, %r4 the mbarrier, %r14 the CTA, %p1 not warp 0, %p6 not the thread
# that starts products, %rd2 and %rd3 descriptors of A and B with their place, %rd9 and %rd10 the
# thread's 2 KB of out and cells. The CTAs of a pair have an image each; the second one's threads
# have the second halves of out and cells.
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
mov.u32 %r14, %cluster_ctarank;
mad.lo.u32 %r15, %r14, 128, %r0;
mul.wide.u32 %rd11, %r14, 65536;
add.u64 %rd0, %rd0, %rd11;
mul.wide.u32 %rd9, %r15, 2048;
add.u64 %rd10, %rd9, %rd4;
add.u64 %rd9, %rd9, %rd1;
and.b32 %r5, %r1, 0xffffff;
shr.u32 %r5, %r5, 4;
cvt.u64.u32 %rd5, %r5;
add.u64 %rd2, %rd2, %rd5;
add.u64 %rd3, %rd3, %rd5;
mov.u32 %r6, %r0;
FILL:
shl.b32 %r7, %r6, 4;
cvt.u64.u32 %rd6, %r7;
add.u64 %rd6, %rd6, %rd0;
ld.global.v4.u32 {%r16, %r17, %r18, %r19}, [%rd6];
add.u32 %r9, %r7, %r1;
st.shared.v4.u32 [%r9], {%r16, %r17, %r18, %r19};
add.u32 %r6, %r6, 128;
setp.lt.u32 %p0, %r6, 4096;
@%p0 bra FILL;
shr.u32 %r10, %r0, 5;
setp.ne.u32 %p1, %r10, 0;
setp.ne.u32 %p7, %r0, 0;
setp.ne.u32 %p6, %r15, 0;
STARTED
@%p1 bra READY;
tcgen05.alloc.GROUP.sync.aligned.shared::cta.b32 [slot], ALLOCATED;
tcgen05.relinquish_alloc_permit.GROUP.sync.aligned;
@%p7 bra READY;
mbarrier.init.shared::cta.b64 [%r4], 1;
fence.mbarrier_init.release.cluster;
READY:
fence.proxy.async;
tcgen05.fence::before_thread_sync;
SYNC
tcgen05.fence::after_thread_sync;
ld.shared.u32 %r2, [slot];
shl.b32 %r11, %r10, 21;
add.u32 %r3, %r2, %r11;
"""

# All threads wait for what one thread starts.
COMMIT = """
tcgen05.commit.GROUP.mbarrier::arrive::one.shared::clusterMULTICAST
"""
WAIT = """
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0;
@!%p2 bra WAIT;
tcgen05.fence::after_thread_sync;
"""

EPILOGUE = """
tcgen05.fence::before_thread_sync;
SYNC
tcgen05.fence::after_thread_sync;
@%p1 bra END;
tcgen05.dealloc.GROUP.sync.aligned.b32 %r2, ALLOCATED;
END:
ret;
}
"""
CLUSTER_SYNC = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"


def vector(count: int) -> str:
    return "{" + ", ".join(f"%d{i}" for i in range(count)) + "}"


def to_out(count: int, first: int = 0) -> str:
    return "\n".join(f"st.global.u32 [%rd9+{4 * (first + i)}], %d{i};" for i in range(count))


def from_cells(count: int, first: int = 0) -> str:
    return "\n".join(f"ld.global.u32 %d{i}, [%rd10+{4 * (first + i)}];" for i in range(count))


def load(columns: int, first: int = 0) -> str:
    """Each thread's lane, columns first .. first + columns, to out."""
    repeats = 32 if columns % 32 == 0 else 8
    return "\n".join(
        f"""tcgen05.ld.sync.aligned.32x32b.x{repeats}.b32 {vector(repeats)}, [%r3+{c}];
        tcgen05.wait::ld.sync.aligned;
        {to_out(repeats, c)}"""
        for c in range(first, first + columns, repeats)
    )


STORED = """
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
SYNC
tcgen05.fence::after_thread_sync;
"""


def store(columns: int, first: int = 0) -> str:
    """Each thread's lane from the cells to tensor memory."""
    repeats = 32 if columns % 32 == 0 else 8
    text = "\n".join(
        f"""{from_cells(repeats, c)}
        tcgen05.st.sync.aligned.32x32b.x{repeats}.b32 [%r3+{c}], {vector(repeats)};"""
        for c in range(first, first + columns, repeats)
    )
    return text + STORED


def program(body: str, *, pair: bool = False, allocated: int = 512) -> str:
    text = HEADER + PROLOGUE + body + EPILOGUE
    words = {
        "GROUP": f"cta_group::{1 + pair}",
        "SYNC": CLUSTER_SYNC if pair else "bar.sync 0;",
        "STARTED": CLUSTER_SYNC if pair else "",
        "MULTICAST": ".multicast::cluster.b64 [%r4], 3;" if pair else ".b64 [%r4];",
        "ALLOCATED": str(allocated),
    }
    for word, meaning in words.items():
        text = text.replace(word, meaning)
    return text


def run(
    text: str,
    image: Tensor | None = None,
    adesc: int = 0,
    bdesc: int = 0,
    cells: Tensor | None = None,
    **options: Any,
) -> tuple[sim.Report, Tensor]:
    """Launches; returns what each lane (128 of each CTA, 512) stored, int32."""
    ctas = 2 if "cta_group::2" in text else 1
    out = torch.zeros(LANES * ctas, COLUMNS, dtype=torch.int32)
    image = torch.zeros(SHARED * ctas, dtype=torch.uint8) if image is None else image
    cells = out.clone() if cells is None else cells
    arguments = [image, out, *(x.to_bytes(8, "little") for x in (adesc, bdesc)), cells]
    report = sim.launch(
        sim.load(text),
        "test",
        arguments,
        grid=(ctas,),
        cluster=(ctas,),
        block=(128,),
        shared_bytes=SHARED,
        **({"check": False} | options),
    )
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
    m: int,
    n: int,
    a: torch.dtype,
    b: torch.dtype,
    *,
    a_mn: bool = False,
    b_mn: bool = False,
    half: bool = False,
) -> int:
    """An instruction descriptor."""
    types = (0 if half else 1) << 4 | CODES[a] << 7 | CODES[b] << 10
    return types | a_mn << 15 | b_mn << 16 | n >> 3 << 17 | m >> 4 << 24


def random(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    values = torch.randint(-6, 7, (rows, columns), generator=generator)
    return (values / 2).to(dtype)


def lane_of(m: int, row: int, lane: int = 0) -> int:
    """Where a row of D is with cta_group::1."""
    return row if m == 128 else row % 16 + row // 16 * 32 + lane


def accumulators(out: Tensor, m: int, n: int, *, half: bool = False, lane: int = 0) -> Tensor:
    """D (m, n) from the columns 0 .. n of all lanes."""
    rows = out[[lane_of(m, row, lane) for row in range(m)], :n].contiguous()
    return rows.view(F16)[:, ::2].double() if half else rows.view(F32).double()


def packed(a: Tensor, lane: int = 0) -> Tensor:
    """Tensor memory (128, 8) that holds A (m, 32 bytes)."""
    cells = torch.zeros(LANES, 8, dtype=torch.int32)
    m = a.shape[0]
    cells[[lane_of(m, row, lane) for row in range(m)]] = a.contiguous().view(torch.int32)
    return cells


A_COLUMN = COLUMNS - 32  # of A in tensor memory; D is at 0


def multiply(
    a: Tensor, b: Tensor, *, a_tmem: bool = False, half: bool = False, lane: int = 0,
    products: str = "MMA, 0;", change: int = 0, a_change: int = 0, b_change: int = 0,
    **options: Any,
) -> tuple[sim.Report, Tensor]:  # fmt: skip
    """a (m, k) times b (n, k), both K-major with a swizzle of 128 bytes: D (m, n). `products`: MMA
    stands for a tcgen05.mma up to its instruction descriptor.
    """
    (m, n), e = (a.shape[0], b.shape[0]), a.element_size()
    image = torch.zeros(SHARED, dtype=torch.uint8)
    adesc = put(image, 0, a, True, 128, *tiles.strides(True, 128, m, e))
    bdesc = put(image, B_PLACE, b, True, 128, *tiles.strides(True, 128, n, e))
    idesc = instruction(m, n, a.dtype, b.dtype, half=half) ^ change
    operand = f"[%r12+{A_COLUMN}]" if a_tmem else "%rd2"
    mma = f"tcgen05.mma.GROUP.kind::{KINDS[a.dtype]} [%r12], {operand}, %rd3, {idesc}"
    cells = torch.zeros(LANES, COLUMNS, dtype=torch.int32)
    if a_tmem:
        cells[:, A_COLUMN : A_COLUMN + 8] = packed(a, lane)
    body = f"""{store(8, A_COLUMN) if a_tmem else ""}
    add.u32 %r12, %r2, {lane << 16};
    @%p6 bra WAIT;
    {products.replace("MMA", mma)}
    {COMMIT}{WAIT}{load(n)}"""
    report, out = run(program(body), image, adesc ^ a_change, bdesc ^ b_change, cells, **options)
    return report, accumulators(out, m, n, half=half, lane=lane)


def clean(report: sim.Report) -> bool:
    """No findings, but for those of loading 32 lanes of which 16 have been written."""
    return all(f.kind == "uninitialised" and f.severity == "lint" for f in report.findings)


# ---- Products ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lane", [0, 16])
@pytest.mark.parametrize("m", [64, 128])
def test_a_from_shared_and_from_tensor_memory(m: int, lane: int, mode: str) -> None:
    if lane and m == 128:
        report, _ = multiply(random(m, 16, BF16), random(64, 16, BF16), lane=lane, mode=mode)
        assert "the lane of D of tcgen05.mma is 16" in report.errors[0].message
        return
    a, b = random(m, 16, BF16), random(64, 16, BF16)
    for a_tmem in (False, True):
        report, d = multiply(a, b, mode=mode, a_tmem=a_tmem, lane=lane, products="MMA, 0;\nMMA, 1;")
        assert clean(report), report
        assert torch.equal(d, 2 * (a.double() @ b.double().T))


SWEEP = [
    (F16, F16), (BF16, BF16), (F32, F32), (E4M3, E4M3), (E5M2, E5M2), (E4M3, E5M2),
]  # fmt: skip


@pytest.mark.parametrize("types", SWEEP, ids=[f"{KINDS[a]}-{a}-{b}"[:30] for a, b in SWEEP])
@pytest.mark.parametrize(("m", "pair"), [(64, False), (128, False), (128, True), (256, True)])
def test_every_n_of_every_kind(m: int, pair: bool, types: tuple[torch.dtype, torch.dtype]) -> None:
    """D is right, and nothing beyond D is written."""
    (a_type, b_type), ctas, most = types, 1 + pair, 256
    e, step = a_type.itemsize, 16 if pair else 8
    a, b = random(m, 32 // e, a_type), random(most, 32 // e, b_type)
    offsets = tiles.strides(True, 128, 128, e)
    image = torch.zeros(SHARED * ctas, dtype=torch.uint8)
    bdesc = put(image, B_PLACE, b, True, 128, *offsets)
    all_of_b = image[B_PLACE:SHARED].clone()
    for cta in range(ctas):
        part = a[cta * m // ctas : (cta + 1) * m // ctas]
        adesc = put(image[cta * SHARED :], 0, part, True, 128, *offsets)
    before = torch.full((LANES * ctas, COLUMNS), 0x7FC00000, dtype=torch.int32)
    product = a.float() @ b.float().T
    for n in [step, 3 * step, *range(2 * step, most + 1, 48), most]:
        columns = -(-n // 32) * 32
        if pair:  # the second CTA has rows n / 2 .. n of B; 8 rows take 1024 bytes
            rest = all_of_b[n // 16 * 1024 :]
            image[SHARED + B_PLACE : SHARED + B_PLACE + len(rest)] = rest
        body = f"""{store(columns)}
        @%p6 bra WAIT;
        tcgen05.mma.GROUP.kind::{KINDS[a_type]} [%r2], %rd2, %rd3,
            {instruction(m, n, a_type, b_type)}, 0;
        {COMMIT}{WAIT}{load(columns)}"""
        arguments = image, adesc, bdesc, before
        report, out = run(program(body, pair=pair), *arguments, mode="lazy", race_check=False)
        assert not report.findings, report
        expected = before[:, :columns].clone()
        values = product.view(torch.int32)
        if m == 128 and pair:
            low = torch.arange(128) % 64 + torch.arange(128) // 64 * LANES
            expected[low, : n // 2] = values[:, : n // 2]
            expected[low + 64, : n // 2] = values[:, n // 2 : n]
        else:
            expected[[row if pair else lane_of(m, row) for row in range(m)], :n] = values[:, :n]
        assert torch.equal(out[:, :columns], expected), n


@pytest.mark.parametrize("a_tmem", [False, True])
@pytest.mark.parametrize("dtype", [F32, E4M3])
def test_other_types_of_a_in_tensor_memory(dtype: torch.dtype, a_tmem: bool) -> None:
    a, b = random(128, 32 // dtype.itemsize, dtype), random(64, 32 // dtype.itemsize, dtype)
    report, d = multiply(a, b, a_tmem=a_tmem)
    assert not report.findings
    assert torch.equal(d, a.double() @ b.double().T)


@pytest.mark.parametrize("dtype", [F16, E4M3])
@pytest.mark.parametrize("m", [64, 128])
def test_sums_of_16_bits_are_in_the_lower_halves(m: int, dtype: torch.dtype) -> None:
    a, b = random(m, 32 // dtype.itemsize, dtype), random(64, 32 // dtype.itemsize, dtype)
    report, d = multiply(a, b, half=True, products="MMA, 0;\nMMA, 1;")
    assert clean(report), report
    once = (a.double() @ b.double().T).half().double()
    assert torch.equal(d, (once + a.double() @ b.double().T).half().double())


def test_signs_scale_and_lanes_that_are_not_written() -> None:
    a, b = random(128, 16, BF16), random(64, 16, BF16)
    product = a.double() @ b.double().T
    for bits, sign in ((1 << 13, -1), (1 << 14, -1), (3 << 13, 1)):
        _, d = multiply(a, b, change=bits)
        assert torch.equal(d, sign * product)
    report, d = multiply(a, b, products="MMA, 0;\nMMA, 1, 3;")
    assert not report.findings
    assert torch.equal(d, product + product / 8)
    masks = (0x0000FFFF, 0, 0xFFFFFFFF, 0x80000001)
    skipped = torch.tensor([bool(masks[row // 32] >> row % 32 & 1) for row in range(128)])
    registers = "".join(f"mov.b32 %r{20 + i}, {mask};\n" for i, mask in enumerate(masks))
    report, d = multiply(a, b, products=f"MMA, 0;\n{registers}MMA, {{%r20, %r21, %r22, %r23}}, 1;")
    assert not report.findings
    assert torch.equal(d, torch.where(skipped[:, None], product, 2 * product))


def test_values_that_are_not_finite() -> None:
    a, b = random(128, 16, BF16), random(64, 16, BF16)
    a[3, 5] = torch.inf
    a[4, 6] = torch.nan
    _, d = multiply(a, b)
    expected = (a.float() @ b.float().T).double()
    assert torch.equal(d.isnan(), expected.isnan())
    assert torch.equal(d[:3], expected[:3])


def test_sums_have_25_bits_and_are_cut_off() -> None:
    """A row of A is 1 and then small numbers, so that D shows what of them is left beside 1."""
    tiny = 2.0**-12
    a, b = torch.zeros(128, 16), torch.zeros(8, 16)
    a[0], b[:, 0] = tiny, 1
    a[0, 0] = 1
    b[0, 1:5] = tiny / 2  # four times 2^-25
    b[1, 1:] = tiny / 4  # 15 times 2^-26: each is cut off
    b[2, 1] = 1.5 * tiny  # 1.5 * 2^-24, which rounding would make 2^-23
    b[3, 1:] = -tiny / 4
    _, d = multiply(a.to(F16), b.to(F16))
    assert d[0, :4].tolist() == [1 + 2.0**-23, 1.0, 1.0, 1.0]
    a, b = torch.zeros(128, 32), torch.zeros(8, 32)
    a[0], b[0] = tiny / 2, tiny  # 31 times 2^-25
    a[0, 0] = b[0, 0] = 1
    _, d = multiply(a.to(E5M2), b.to(E5M2))
    assert d[0, 0] == 1 + 7 * 2.0**-23


def test_sums_are_the_same_without_avx2() -> None:
    generator = torch.Generator().manual_seed(1)
    results = []
    for dtype in (BF16, F32):
        k = 32 // dtype.itemsize
        a = torch.randn(128, k, generator=generator).to(dtype)
        b = torch.randn(64, k, generator=generator).to(dtype)
        for enabled in (True, False):
            native.set_avx2(enabled)
            try:
                results.append(multiply(a, b, products="MMA, 0;\nMMA, 1;")[1])
            finally:
                native.set_avx2(True)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[3])


# ---- Loads and stores ----

# For each shape: a thread's registers and the columns for one repeat, the most repeats, and the
# cell (lane, column) of register r of lane L.
Place = Callable[[int, int], tuple[int, int]]
SHAPES: dict[str, tuple[int, int, int, Place]] = {
    "32x32b": (1, 1, 128, lambda t, r: (t, r)),
    "16x64b": (1, 2, 128, lambda t, r: (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r)),
    "16x128b": (2, 4, 64, lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2))),
    "16x256b": (
        4, 8, 32, lambda t, r: (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)),
    ),
    "16x32bx2": (1, 1, 128, lambda t, r: (t % 16, r)),
}  # fmt: skip
REPEATS = (1, 2, 4, 8, 16, 32, 64, 128)


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_loads_and_stores(shape: str, is_packed: bool) -> None:
    per, width, most, place = SHAPES[shape]
    generator = torch.Generator().manual_seed(1)
    cells = torch.randint(-(1 << 31), 1 << 31, (LANES, COLUMNS), generator=generator)
    cells = cells.to(torch.int32)
    unit = 2 if is_packed else 1
    for index, repeats in enumerate(r for r in REPEATS if r <= most):
        count, span = per * repeats, width * repeats * unit
        second = span if shape == "16x32bx2" else 0
        lane = 16 * (index % 2) if shape != "32x32b" else 0
        column = 0 if span + second > 500 else 4
        end = min(COLUMNS, -(-(column + span + second) // 32) * 32)
        at = f"[%r3+{column + (lane << 16)}]" + (f", {second}" if second else "")
        pack = ".pack::16b" if is_packed else ""
        mnemonic = f"sync.aligned.{shape}.x{repeats}"
        body = f"""{store(end)}
        tcgen05.ld.{mnemonic}{pack}.b32 {vector(count)}, {at};
        tcgen05.wait::ld.sync.aligned;
        {to_out(count)}"""
        report, loaded = run(program(body), cells=cells, mode="eager", race_check=False)
        assert not report.findings, report
        # The cells behind the loaded ones have the values to store.
        body = f"""{store(end)}
        {from_cells(count)}
        tcgen05.st.{mnemonic}{pack.replace("pack", "unpack")}.b32 {at}, {vector(count)};
        {STORED}{load(end)}"""
        report, stored = run(program(body), cells=cells, mode="eager", race_check=False)
        assert not report.findings, report
        places = [
            [
                (row + 32 * (thread // 32) + lane, column + c * unit + second * (t >= 16))
                for row, c in (place(t, r) for r in range(count))
            ]
            for thread, t in ((thread, thread % 32) for thread in range(LANES))
        ]
        rows, columns = torch.tensor(places).unbind(-1)
        expected_load = torch.zeros_like(loaded)
        expected_store = cells.clone()
        expected_store[:, end:] = 0
        values = cells[:, :count]
        if is_packed:
            high = cells[rows, columns + 1] << 16
            expected_load[:, :count] = cells[rows, columns] & 0xFFFF | high
            expected_store[rows, columns] = values & 0xFFFF
            expected_store[rows, columns + 1] = values >> 16 & 0xFFFF
        else:
            expected_load[:, :count] = cells[rows, columns]
            expected_store[rows, columns] = values
        assert torch.equal(loaded, expected_load), repeats
        assert torch.equal(stored, expected_store), repeats


def test_the_window_of_a_warp() -> None:
    at = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [%r12];\ntcgen05.wait::ld.sync.aligned;"

    def found(change: str) -> list[sim.Finding]:
        return list(run(program(store(8) + change + at))[0].findings)

    assert not found("mov.u32 %r12, %r3;\n")
    wrong = found("add.u32 %r12, %r3, 0x200000;\n")
    assert wrong[0].kind == "tmem"
    assert "by warp" in wrong[0].message
    assert "window" in wrong[0].message
    # DeepGEMM's kernels rely on getting the warp's own lanes here.
    assert {(f.kind, f.severity) for f in found("mov.u32 %r12, %r2;\n")} == {("tmem", "lint")}
    odd = found("add.u32 %r12, %r3, 0x100000;\n")
    assert "tcgen05.ld of this shape at lane" in odd[0].message


# ---- Copies and shifts ----

COPIES = {
    "128x256b": (128, 8, (0, 32, 64, 96)),
    "128x128b": (128, 4, (0, 32, 64, 96)),
    "64x128b.warpx2::02_13": (64, 4, (0, 32, 0, 32)),
    "64x128b.warpx2::01_23": (64, 4, (0, 0, 32, 32)),
    "32x128b.warpx4": (32, 4, (0, 0, 0, 0)),
}


@pytest.mark.parametrize("span", [0, 128])
@pytest.mark.parametrize("shape", COPIES)
def test_copies_from_shared_memory(shape: str, span: int) -> None:
    rows, columns, first = COPIES[shape]
    words = torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)
    image = torch.zeros(SHARED, dtype=torch.uint8)
    desc = put(image, 0, words, True, span, *tiles.strides(True, span, rows, 4))
    body = f"""@%p6 bra WAIT;
    tcgen05.cp.GROUP.{shape} [%r2+8], %rd2;
    {COMMIT}{WAIT}
    {load(columns if columns == 8 else 8, 8)}"""
    if columns == 4:
        body = body.replace("x8.b32 " + vector(8), "x4.b32 " + vector(4)).replace(
            to_out(8, 8), to_out(4, 8)
        )
    report, out = run(program(body), image, desc)
    assert not report.findings, report
    for lane in range(LANES):
        row = first[lane // 32] + lane % 32
        assert torch.equal(out[lane, 8 : 8 + columns], words[row])


def test_a_copy_comes_before_the_shift_of_the_same_thread_but_no_promise_says_so() -> None:
    body = f"""{store(8, 8)}
    @%p6 bra WAIT;
    tcgen05.cp.GROUP.128x256b [%r2+8], %rd2;
    tcgen05.shift.GROUP.down [%r2+8];
    {COMMIT}{WAIT}{load(8, 8)}"""
    words = torch.arange(1024, dtype=torch.int32).reshape(128, 8)
    image = torch.zeros(SHARED, dtype=torch.uint8)
    desc = put(image, 0, words, True, 128, *tiles.strides(True, 128, 128, 4))
    report, out = run(program(body), image, desc)
    assert [(f.kind, f.severity) for f in report.findings] == [("tcgen05-order", "lint")]
    assert torch.equal(out[1:, 8:16], words[:-1])
    assert torch.equal(out[0, 8:16], words[0])


# ---- Descriptors ----


@pytest.mark.parametrize(
    ("m", "n", "dtype", "mn", "half", "value"),
    [
        (128, 128, BF16, False, False, 0x08200490),
        (128, 128, BF16, True, False, 0x08210490),
        (64, 128, BF16, True, False, 0x04210490),
        (256, 128, BF16, False, False, 0x10200490),
        (128, 64, F16, False, False, 0x08100010),
        (128, 128, F16, False, True, 0x08200000),
        (128, 128, F32, False, False, 0x08200910),
        (128, 128, E4M3, True, False, 0x08210010),
    ],
)
def test_instruction_descriptors_are_those_of_cutlass(
    m: int, n: int, dtype: torch.dtype, mn: bool, half: bool, value: int
) -> None:
    # A host program that uses CUTLASS's headers printed these.
    assert instruction(m, n, dtype, dtype, b_mn=mn, half=half) == value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (1 << 0, "sparsity selector (bits 0-1)"),
        (1 << 2, "sparsity (bit 2)"),
        (1 << 3, "saturation (bit 3)"),
        (3 << 4, "type of D (bits 4-5) is 2"),
        (1 << 4, "type of D (bits 4-5) is f16 with A in bf16"),
        (1 << 6, "bit 6"),
        (1 << 8, "type of A (bits 7-9) is 3"),
        (1 << 10, "type of B (bits 10-12) is 0"),
        (8 << 17, "N (bits 17-22, in 8) is 0"),
        (0x29 << 17, "N (bits 17-22, in 8) is 264"),
        (1 << 23, "bit 23"),
        (1 << 24, "M (bits 24-28, in 16) is 144"),
        (24 << 24, "M (bits 24-28, in 16) is 256"),
        (1 << 29, "bit 29"),
        (1 << 30, "bits 30-31"),
    ],
)
def test_fields_of_an_instruction_descriptor_are_checked(change: int, words: str) -> None:
    report, _ = multiply(random(128, 16, BF16), random(64, 16, BF16), change=change)
    assert [f.kind for f in report.findings] == ["descriptor"]
    assert words in report.findings[0].message


@pytest.mark.parametrize(
    ("dtype", "a_tmem", "change", "words"),
    [
        (BF16, True, 1 << 15, "transposition of A (bit 15)"),
        (BF16, True, 1 << 17, "N (bits 17-22, in 8) is 72: a multiple of 16 with A in tensor"),
        (F32, False, 1 << 16, "MN-major"),
        (F32, False, 1 << 4, "f32 for tf32"),
        (F32, False, 3 << 7, "type of A (bits 7-9) is 1: 2 (tf32)"),
        (E4M3, False, 3 << 7, "types of 6 and 4 bits"),
        (E4M3, False, 2 << 7, "type of A (bits 7-9) is 2"),
        (E4M3, False, 1 << 16 | 1 << 17, "N (bits 17-22, in 8) is 72: a multiple of 16 up to"),
    ],
)
def test_fields_that_depend_on_the_kind(
    dtype: torch.dtype, a_tmem: bool, change: int, words: str
) -> None:
    k = 32 // dtype.itemsize
    report, _ = multiply(random(128, k, dtype), random(64, k, dtype), a_tmem=a_tmem, change=change)
    assert [f.kind for f in report.errors] == ["descriptor"]
    assert words in report.errors[0].message


@pytest.mark.parametrize("matrix", ["A", "B"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (1 << 14, "bits 14-15"),
        (1 << 30, "bits 30-31"),
        (1 << 46, "bits 46-48 are 0"),
        (1 << 47, "bits 46-48 are 3"),
        (1 << 49, "base offset (bits 49-51)"),
        (1 << 52, "bit 52"),
        (1 << 53, "bits 53-60"),
        (1 << 60, "bits 53-60"),
        (3 << 61, "swizzle (bits 61-63) 1"),
        (1 << 61, "swizzle (bits 61-63) 3 does not exist"),
    ],
)
def test_fields_of_a_matrix_descriptor_are_checked(change: int, words: str, matrix: str) -> None:
    changes = {"a_change" if matrix == "A" else "b_change": change}
    report, _ = multiply(random(128, 16, BF16), random(64, 16, BF16), **changes)
    assert [f.kind for f in report.findings] == ["descriptor"]
    assert words in report.findings[0].message
    assert f"matrix {matrix}" in report.findings[0].message


# ---- Order ----

# A comes from tensor memory, D is loaded, and A is stored anew.
FLOW = f"""{store(8, 64)}
@%p6 bra WAIT;
tcgen05.mma.GROUP.kind::f16 [%r2], [%r2+64], %rd3, {instruction(128, 64, BF16, BF16)}, 0;
{COMMIT}{WAIT}{load(64)}
tcgen05.st.sync.aligned.32x32b.x8.b32 [%r3+64], {vector(8)};
tcgen05.wait::st.sync.aligned;
"""
SECOND = f"tcgen05.mma.GROUP.kind::f16 [%r2+D], [%r2+64], %rd3, {instruction(128, 32, BF16, BF16)}"
FROM_SHARED = SECOND.replace("[%r2+64]", "%rd3")
BEFORE_WAIT = "\nWAIT:\n"


def flow(text: str = FLOW, **options: Any) -> sim.Report:
    image = torch.zeros(SHARED, dtype=torch.uint8)
    desc = put(image, B_PLACE, random(64, 16, BF16), True, 128, 16, 1024)
    return run(program(text), image, 0, desc, **options)[0]


@pytest.mark.parametrize("mode", MODES)
def test_the_flow_is_right(mode: str) -> None:
    assert not flow(mode=mode).findings


BROKEN = {
    "no wait::st": ("tcgen05.wait::st.sync.aligned;\ntcgen05.fence", "tcgen05.fence", "race",
                    "no tcgen05.wait::st covers it"),
    "no barrier": ("SYNC", "", "race", "is not ordered after the"),
    "no fence before": ("tcgen05.fence::before_thread_sync;\nSYNC", "SYNC", "tcgen05-fence",
                        "without tcgen05.fence::before_thread_sync"),
    "no fence after": ("SYNC\ntcgen05.fence::after_thread_sync;", "SYNC", "tcgen05-fence",
                       "without tcgen05.fence::after_thread_sync"),
    "no wait": (WAIT, BEFORE_WAIT, "race", "no tcgen05.commit that covers it"),
    "no fence after the wait": ("@!%p2 bra WAIT;\ntcgen05.fence::after_thread_sync;",
                                "@!%p2 bra WAIT;", "tcgen05-fence", "after_thread_sync"),
    "no wait::ld": ("tcgen05.wait::ld.sync.aligned;", "", "tcgen05-wait", "uses a register"),
    "no wait::ld before the next product": (
        "tcgen05.wait::ld.sync.aligned;", "setp.ne.u32 %p5, %d31, 0;", "tcgen05-wait",
        "uses a register"),
    "A overwritten": (BEFORE_WAIT, BEFORE_WAIT.replace("WAIT", "GO") + """
        tcgen05.st.sync.aligned.32x32b.x8.b32 [%r3+64], """ + vector(8) + ";" + BEFORE_WAIT,
        "race", "not ordered after the read by tcgen05.mma"),
    "B overwritten": (BEFORE_WAIT, "st.shared.u32 [%r1+32768], %r0;" + BEFORE_WAIT, "race",
                      "an operation of the tensor pipe"),
    "another shape": (COMMIT, SECOND.replace("D", "0") + ", 0;" + COMMIT, "race",
                      "not ordered after the write by tcgen05.mma"),
    "A overwritten by a product": (COMMIT, FROM_SHARED.replace("D", "64") + ", 0;" + COMMIT,
                                   "tcgen05-order", "the ISA promises no order"),
    "A and D in one place": (COMMIT, SECOND.replace("D", "60") + ", 0;" + COMMIT, "tcgen05",
                             "D has columns 60-91, A from 64 on"),
    "commit of another thread": (COMMIT, "bra WAIT;", "deadlock", "1 of 1 arrivals pending"),
    "no second accumulator": (COMMIT, SECOND.replace("D", "96") + ", 1;" + COMMIT, "uninitialised",
                              "tcgen05.mma that adds to D reads tensor memory"),
    "a second accumulator beyond the last column": (
        COMMIT, SECOND.replace("D", "600") + ", 1;" + COMMIT, "out-of-bounds",
        "column 600 is not allocated"),
    "all lanes": ("@%p6 bra WAIT;", "", "tcgen05", "by 32 lanes"),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_order_is_named(name: str, mode: str) -> None:
    old, new, kind, words = BROKEN[name]
    assert old in FLOW
    count = -1 if name == "no wait::ld" else 1
    text = FLOW.replace(old, new, count)
    if name == "A overwritten":
        text = text.replace("bra WAIT;", "bra GO;", 1)
    found = flow(text, mode=mode).findings
    assert any(f.kind == kind and words in f.message for f in found), found


LENIENT = [name for name, case in BROKEN.items() if case[2] in ("tcgen05-fence", "tcgen05-wait")]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", LENIENT)
def test_what_compilers_leave_out_is_an_error_where_strict(name: str, strict: bool) -> None:
    old, new, kind, _ = BROKEN[name]
    found = flow(FLOW.replace(old, new), strict=strict).findings
    assert {f.severity for f in found if f.kind == kind} == {"error" if strict else "lint"}


@pytest.mark.parametrize("fence", ["before", "after"])
def test_tensor_memory_is_given_back_behind_fences(fence: str) -> None:
    # Other warps have written and read the columns that one warp gives back.
    image = torch.zeros(SHARED, dtype=torch.uint8)
    desc = put(image, B_PLACE, random(64, 16, BF16), True, 128, 16, 1024)
    before, removed, behind = program(FLOW).rpartition(f"tcgen05.fence::{fence}_thread_sync;")
    assert removed
    found = run(before + behind, image, 0, desc)[0].findings
    assert {(f.kind, f.severity) for f in found} == {("tcgen05-fence", "lint")}
    assert "by tcgen05.dealloc" in found[0].message


@pytest.mark.parametrize("mode", MODES)
def test_an_arrival_that_nobody_waits_for_is_named(mode: str) -> None:
    again = "@!%p6 tcgen05.commit.GROUP.mbarrier::arrive::one.shared::cluster.b64 [%r4];\n"
    text = FLOW.replace(WAIT, WAIT + "SYNC\n" + again)
    found = flow(text, mode=mode, strict=True).findings
    assert {(f.kind, f.severity) for f in found} == {("pending-copy", "lint")}
    assert "the arrival of a tcgen05.commit" in found[0].message
    assert not flow(text, mode=mode).findings  # what others leave out has done no harm


REPLY = """
bar.sync 1, 128;
@%p6 bra DONE;
MMA
tcgen05.commit.GROUP.mbarrier::arrive::one.shared::cluster.b64 [%r4];
DONE:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 1;
@!%p2 bra DONE;
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("use", "severities"), [(0, {"error"}), (1, {"lint"}), (2, {"lint", "error"})]
)
def test_a_load_whose_registers_were_used_has_read(
    use: int, severities: set[str], mode: str
) -> None:
    # D is loaded and overwritten. The loaded registers are not used, are used before the barrier,
    # or are used only by the warp that overwrites D.
    uses = "xor.b32 %r30, %d0, %d31;\n"
    mma = FLOW[FLOW.index("tcgen05.mma") : FLOW.index(COMMIT)]
    loads = f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {vector(32)}, [%r3];\n"
    reply = REPLY.replace("MMA", mma)
    body = FLOW[: FLOW.index(WAIT)] + WAIT + loads + (uses if use == 1 else "")
    body += reply.replace("@%p6 bra DONE;", "@%p6 bra DONE;\n" + (uses if use == 2 else ""))
    found = flow(body + "tcgen05.wait::ld.sync.aligned;\n", mode=mode).findings
    about = [f for f in found if "the read by tcgen05.ld" in f.message]
    assert {f.severity for f in about} == severities, about


@pytest.mark.parametrize("mode", MODES)
def test_a_commit_speaks_for_its_own_thread(mode: str) -> None:
    # Thread 1 commits what thread 0 has started.
    text = FLOW.replace("@%p6 bra WAIT;", "setp.gt.u32 %p3, %r0, 1;\n@%p3 bra WAIT;", 1)
    text = text.replace("tcgen05.mma", "@!%p6 tcgen05.mma", 1)
    text = text.replace("tcgen05.commit", "@%p6 tcgen05.commit", 1)
    found = flow(text, mode=mode).errors
    assert any("no tcgen05.commit that covers it" in f.message for f in found), found
    assert "pending-copy" in {f.kind for f in found}


@pytest.mark.parametrize("mode", MODES)
def test_the_products_of_two_threads_are_in_no_order(mode: str) -> None:
    # Thread 0 starts a product, and thread 1 another one into the same accumulator.
    text = FLOW.replace("@%p6 bra WAIT;", "setp.gt.u32 %p3, %r0, 1;\n@%p3 bra WAIT;", 1)
    begin, end = text.index("tcgen05.mma"), text.index(COMMIT)
    mma = text[begin:end]
    text = text[:begin] + f"@!%p6 {mma}bar.warp.sync 3;\n@%p6 {mma}" + text[end:]
    text = text.replace("tcgen05.commit", "@%p6 tcgen05.commit", 1)
    found = flow(text, mode=mode).errors
    assert any("not ordered after the write by tcgen05.mma" in f.message for f in found), found


@pytest.mark.parametrize("mode", MODES)
def test_generic_writes_need_a_proxy_fence(mode: str) -> None:
    text = program(FLOW).replace("fence.proxy.async;", "")
    image = torch.zeros(SHARED, dtype=torch.uint8)
    desc = put(image, B_PLACE, random(64, 16, BF16), True, 128, 16, 1024)
    found = run(text, image, 0, desc, mode=mode)[0].errors
    assert "proxy" in {f.kind for f in found}, found


# ---- Allocation ----


@pytest.mark.parametrize(
    ("old", "new", "kind", "words"),
    [
        ("tcgen05.dealloc.GROUP.sync.aligned.b32 %r2, ALLOCATED;", "", "tmem",
         "not deallocated at the exit"),
        ("%r2, ALLOCATED;", "%r2, 64;", "tmem", "of columns 384-447, which no tcgen05.alloc"),
        ("%r2, ALLOCATED;", "%r3, ALLOCATED;\ntcgen05.dealloc.GROUP.sync.aligned.b32 %r2, 128;",
         "tmem", "allocated are none"),
        ("[slot], ALLOCATED", "[slot], 48", "tmem", "a power of two from 32 to 512"),
        ("[slot], ALLOCATED", "[slot], 1024", "tmem", "a power of two from 32 to 512"),
        ("[slot], ALLOCATED", "[slot], 64", "out-of-bounds",
         "column 512 is not allocated; allocated are columns 448-511"),
        ("@%p7 bra READY;", "tcgen05.alloc.GROUP.sync.aligned.shared::cta.b32 [slot], 32;", "tmem",
         "after tcgen05.relinquish_alloc_permit"),
        ("tcgen05.relinquish_alloc_permit.GROUP.sync.aligned;",
         "tcgen05.alloc.GROUP.sync.aligned.shared::cta.b32 [slot], 256;", "tmem",
         "after one of 128: later allocations"),
        ("tcgen05.relinquish_alloc_permit.GROUP.sync.aligned;",
         4 * "tcgen05.alloc.GROUP.sync.aligned.shared::cta.b32 [slot], 128;\n", "deadlock",
         "tcgen05.alloc waits for 128 columns"),
    ],
    ids=["exit", "size", "twice", "48", "1024", "beyond", "permit", "growing", "full"],
)  # fmt: skip
def test_what_is_wrong_with_allocations(old: str, new: str, kind: str, words: str) -> None:
    text = HEADER + PROLOGUE + store(96) + EPILOGUE
    assert old in text
    plain = {"GROUP": "cta_group::1", "SYNC": "bar.sync 0;", "STARTED": "", "ALLOCATED": "128"}

    def filled(source: str) -> str:
        for word, meaning in plain.items():
            source = source.replace(word, meaning)
        return source

    assert not run(filled(text))[0].findings
    found = run(filled(text.replace(old, new)))[0].errors
    assert any(f.kind == kind and words in f.message for f in found), found


def test_tensor_memory_holds_nothing_at_first() -> None:
    found = run(program(load(8)))[0].errors
    assert [f.kind for f in found] == ["uninitialised"]
    assert "that nothing has written: column 0" in found[0].message


@pytest.mark.parametrize("pair", [False, True])
def test_the_permit_to_allocate_is_given_up(pair: bool) -> None:
    text = program("", pair=pair)
    kept = re.sub(r"tcgen05\.relinquish_alloc_permit.*;", "", text)
    assert kept != text
    assert not run(text, strict=True)[0].findings
    assert not run(kept)[0].findings
    found = run(kept, strict=True)[0].errors
    assert {f.kind for f in found} == {"tmem-permit"}


def test_a_pair_allocates_together() -> None:
    report, _ = run(program("", pair=True, allocated=128))
    assert not report.findings
    # All columns are free again once both have given theirs back.
    again = """SYNC
    @%p1 bra ON;
    tcgen05.dealloc.GROUP.sync.aligned.b32 %r2, 512;
    tcgen05.alloc.GROUP.sync.aligned.shared::cta.b32 [slot], 512;
    ON:
    """
    text = program(again, pair=True)
    text = text.replace("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;", "")
    for mode in MODES:
        assert not run(text, mode=mode)[0].findings
    only = "setp.ne.u32 %p5, %r14, 0;\n@%p5 bra READY;\n@%p1 bra READY;"
    alone = program("", pair=True).replace("@%p1 bra READY;", only, 1)
    found = run(alone)[0].errors
    assert "both CTAs of a pair must ask" in found[0].message


# ---- Loading ----


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r1], %rd1, %rd1, %r1, [%r1], [%r1],"
         " 0;", "block-scaled products of tcgen05 are not simulated"),
        ("tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd1, %r1, 0;",
         "tcgen05.mma.ws is not simulated"),
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd1, [%r1], %r1, 0;",
         "sparse products"),
        ("tcgen05.mma.cta_group::1.kind::i8 [%r1], %rd1, %rd1, %r1, 0;", "integer products"),
        ("tcgen05.mma.cta_group::1.kind::f16.ashift [%r1], [%r1], %rd1, %r1, 0;", "ashift"),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd1, %r1, 0, 16;", "from 0 to 15"),
        ("tcgen05.mma.cta_group::1.kind::f8f6f4 [%r1], %rd1, %rd1, %r1, 0, 1;", "scale D"),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd1, %r1, {%r1, %r1}, 0;",
         "another size"),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1}, [%r2];", "another size"),
        ("tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r1}, [%r2];", "more than 128 registers"),
        ("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r1}, [%r2], 512;", "a second half outside"),
        ("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cta.b64 [%r1];", "shared::cta"),
        ("tcgen05.cp.cta_group::1.64x128b [%r1], %rd1;", "no such shape"),
        ("tcgen05.cp.cta_group::1.4x256b [%r1], %rd1;", "of 4 rows is not simulated"),
        ("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
         "tcgen05.shift.cta_group::2.down [%r1];", "with cta_group::1 and cta_group::2"),
    ],
)  # fmt: skip
def test_what_does_not_load(statement: str, words: str) -> None:
    body = f".visible .entry test() {{ .reg .b32 %r<4>; .reg .b64 %rd<9>; {statement} ret; }}"
    with pytest.raises(LaunchError, match=words):
        sim.load(HEADER + body)


# ---- Traces ----


def test_traces_show_the_tensor_pipe_and_tensor_memory() -> None:
    report = flow(traced_ctas=1, mode="lazy")
    trace = report.traces[0]
    by_track: dict[str, list[TraceEvent]] = {}
    for event in trace.events:
        by_track.setdefault(trace.tracks[event.track], []).append(event)
    (product,) = by_track["tensor pipe"]
    assert product.label == "of warp 0"
    assert product.begin < product.end <= product.seen
    uses = {event.label: event for event in by_track["tensor memory"]}
    whole = uses.pop("allocated: columns 0-511")
    assert whole.begin < product.begin < product.end < whole.end
    # A is shown from its store to the product, D from the product to its last load, in two halves.
    stores = [e for e in by_track["tensor memory"] if e.label == "tcgen05.st: columns 64-71"]
    assert [(e.begin < product.begin <= e.end, e.end <= product.end) for e in stores] == [
        (True, True), (False, False),
    ]  # fmt: skip
    result = uses["tcgen05.mma: columns 0-63"]
    assert result.begin <= product.begin
    assert product.end < result.end
    pipe = trace.tracks.index("tensor pipe")
    waits = [e for e in trace.events if e.kind == "wait" and e.cause == pipe]
    assert {e.track for e in waits} == set(range(WARPS))
    assert all("mbarrier" in wait.label for wait in waits)
    line = timeline(report, 0)
    events = chrome_trace([line], report.listing)["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {
        "tensor pipe of warp 0",
        "tensor memory allocated: columns 0-511",
        "tensor memory tcgen05.mma: columns 0-63",
    } <= names
    shapes = draw(line, "t").shapes
    texts = {shape["text"] for kind, shape in shapes if kind == "text"}
    assert {
        "tensor pipe",
        "tensor memory",
        "tensor memory: allocated",
        "tensor memory: results of products",
        "tensor memory: stored by warps",
    } <= texts
    # The map shows 512 columns on 96 pixels.
    heights = [shape["h"] for kind, shape in shapes if kind == "rectangle"]
    assert heights.count(96) == 2  # all of it, and what is allocated
    assert heights.count(12) == 1  # D
    assert heights.count(1.5) == 2  # A, twice
