"""Every product that a blackwell_dc kernel starts, as a simulated run records it: which ones, in
which order, and each descriptor and address that it names, against encodings of the test's own.

Where tiles lie is written down here once more, from the budgets in docs/lab/blackwell_dc.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from archflash import sim

from .test_blackwell_dc import one_after_another
from .test_tcgen05_descriptors import BF16, E4M3, F16, Instruction, matrix_descriptor

CODES = {torch.bfloat16: BF16, torch.float16: F16, torch.float8_e4m3fn: E4M3}
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}
STEP_BYTES = 32  # of a row of Q or K: what one product sums over
Operands = tuple[int, ...]


@dataclass(frozen=True)
class Tile:
    """A tile in shared memory: slabs one after another, swizzled rows.

    Attributes:
        rows, columns: of elements.
        element: bytes of one.
    """

    rows: int
    columns: int
    element: int = 2

    @property
    def row_bytes(self) -> int:
        """Of all slabs."""
        return self.columns * self.element

    @property
    def span(self) -> int:
        """Bytes of a slab's row, over which the swizzle goes."""
        return 128 if self.row_bytes % 128 == 0 else 64

    def k_major(self, start: int, step: int) -> int:
        """Descriptor of the columns of a step, which are summed over."""
        slab, byte = divmod(STEP_BYTES * step, self.span)
        return matrix_descriptor(
            start + slab * self.rows * self.span + byte, 16, 8 * self.span, self.span
        )

    def mn_major(self, start: int, step: int) -> int:
        """Descriptor of the rows of a step, which are summed over."""
        one_slab = self.row_bytes == self.span
        return matrix_descriptor(
            start + STEP_BYTES // self.element * step * self.span,
            0 if one_slab else self.rows * self.span,
            8 * self.span,
            self.span,
        )


@dataclass(frozen=True)
class Layout:
    """Where a kernel has its tiles.

    Attributes:
        d, dv: head dimensions.
        tiles: of query rows that a CTA owns.
        k_stages: of K in the ring, or of both.
        v_stages: of V; 0: one ring.
        keys: of a block.
        ctas: that multiply together: each has half of K's rows and of V's columns.
        element: bytes of one.
    """

    d: int
    dv: int
    tiles: int
    k_stages: int
    v_stages: int
    keys: int = 128
    ctas: int = 1
    element: int = 2

    @property
    def q(self) -> Tile:
        return Tile(128, self.d, self.element)

    @property
    def k(self) -> Tile:
        return Tile(self.keys // self.ctas, self.d, self.element)

    @property
    def v(self) -> Tile:
        return Tile(self.keys, self.dv // self.ctas, self.element)


LAYOUTS = {
    "d64": Layout(64, 64, 2, 8, 0),
    "d64_few": Layout(64, 64, 1, 6, 6),
    "d96": Layout(96, 96, 2, 5, 0),
    "d96_few": Layout(96, 96, 1, 4, 3),
    "d128": Layout(128, 128, 2, 3, 0),
    "d128_few": Layout(128, 128, 1, 3, 2),
    "d128_pair": Layout(128, 128, 2, 6, 0, ctas=2),
    "d192": Layout(192, 128, 2, 2, 1),
    "d192_pair": Layout(192, 128, 2, 4, 2, ctas=2),
    "d192_few": Layout(192, 128, 1, 2, 2),
    "d256": Layout(256, 256, 1, 2, 2, keys=64),
}
E4M3_LAYOUTS = {
    "d64": Layout(64, 64, 2, 8, 0, element=1),
    "d128": Layout(128, 128, 2, 8, 0, element=1),
    "d192": Layout(192, 128, 2, 3, 2, element=1),
    "d256": Layout(256, 256, 1, 2, 2, element=1),
}
BLOCKS = 9  # each stage of each ring is used


def size(tile: Tile) -> int:
    return tile.rows * tile.row_bytes


class Kernel:
    """What a kernel multiplies for one row tile, in order.

    Args:
        layout: where things are.
        dtype: its code.
        shared: where shared memory begins.
    """

    def __init__(self, layout: Layout, dtype: int, shared: int) -> None:
        self.layout = layout
        self.shared = shared
        m = 128 * layout.ctas
        self.qk = Instruction(m, layout.keys, dtype, dtype).bits
        self.pv = Instruction(m, layout.dv, dtype, dtype, b_k=False).bits
        ring = shared + layout.tiles * size(layout.q)
        k_slots = [ring + i * size(layout.k) for i in range(layout.k_stages)]
        if layout.v_stages:
            v_slots = [
                ring + layout.k_stages * size(layout.k) + i * size(layout.v)
                for i in range(layout.v_stages)
            ]
            self.k_starts = list(itertools.islice(itertools.cycle(k_slots), BLOCKS))
            self.v_starts = list(itertools.islice(itertools.cycle(v_slots), BLOCKS))
        else:
            assert size(layout.k) == size(layout.v)
            both = list(itertools.islice(itertools.cycle(k_slots), 2 * BLOCKS))
            self.k_starts, self.v_starts = both[::2], both[1::2]

    def s(self, tile: int, block: int) -> Iterator[Operands]:
        """S = Q K^T of a tile and a block, in its buffer's columns."""
        layout = self.layout
        buffer = tile if layout.tiles == 2 else block % 2
        for step in range(layout.q.row_bytes // STEP_BYTES):
            yield (
                layout.keys * buffer,
                layout.q.k_major(self.shared + tile * size(layout.q), step),
                layout.k.k_major(self.k_starts[block], step),
                self.qk,
            )

    def o(self, tile: int, block: int) -> Iterator[Operands]:
        """O += P V: P over the last columns of its S, whose 32 bits hold two or four elements."""
        layout = self.layout
        buffer = tile if layout.tiles == 2 else block % 2
        p_columns = layout.keys * layout.element // 4
        for step in range(layout.keys * layout.element // STEP_BYTES):
            yield (
                256 + tile * layout.dv,
                layout.keys * buffer + layout.keys - p_columns + step * STEP_BYTES // 4,
                layout.v.mn_major(self.v_starts[block], step),
                self.pv,
            )

    def products(self) -> Iterator[Operands]:
        steps = [(tile, block) for block in range(BLOCKS) for tile in range(self.layout.tiles)]
        for step in steps[:2]:
            yield from self.s(*step)
        for number, step in enumerate(steps):
            yield from self.o(*step)
            if number + 2 < len(steps):
                yield from self.s(*steps[number + 2])


CASES = [
    (name, dtype) for dtype in CODES for name in (LAYOUTS if dtype.itemsize == 2 else E4M3_LAYOUTS)
]


@pytest.mark.parametrize(
    ("name", "dtype"), CASES, ids=[f"{name}-{TYPES[dtype]}" for name, dtype in CASES]
)
def test_products_and_their_descriptors(name: str, dtype: torch.dtype) -> None:
    layout = (LAYOUTS if dtype.itemsize == 2 else E4M3_LAYOUTS)[name]
    q = torch.ones(1, 1, 128 * layout.tiles * layout.ctas, layout.d).to(dtype)
    k = torch.ones(1, 1, BLOCKS * layout.keys, layout.d).to(dtype)
    v = torch.ones(1, 1, BLOCKS * layout.keys, layout.dv).to(dtype)
    plan = one_after_another(name, q, k, v)
    assert plan.to_dict()["launches"][0]["kernel"].endswith(f"{TYPES[dtype]}_{name}")
    report = sim.run(
        q,
        k,
        v,
        implementation="blackwell_dc",
        plan=plan,
        race_check=False,
        traced_ctas=1,
        return_lse=True,
    ).report
    events = sorted(report.traces[0].events, key=lambda event: event.begin)
    started = [event.operands for event in events if event.operands]
    shared = (started[0][1] & 0x3FFF) << 4  # Q comes first
    assert shared % 1024 == 0
    expected = list(Kernel(layout, CODES[dtype], shared).products())
    assert len(started) == len(expected) == report.opcodes[mma_of(report)]
    for number, (found, wanted) in enumerate(zip(started, expected, strict=True)):
        assert found == wanted, (number, [f"{x:#x}" for x in found], [f"{x:#x}" for x in wanted])


def mma_of(report: sim.Report) -> str:
    (opcode,) = {name for name in report.opcodes if name.startswith("tcgen05.mma")}
    return opcode
