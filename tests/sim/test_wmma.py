"""wmma: the product of 16 x 16 matrices in every layout, and what is wrong with addresses.

PTX leaves open which lane holds which element, so that a program can only load, multiply and store.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from .ptx import findings, program, run

STRIDE, SUM_STRIDE = 24, 20  # elements from one line to the next: not those of a whole matrix
LAYOUTS = ("row", "col")


def registers(first: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(8)) + "}"


def product(a: str, b: str, c: str, d: str, change: str = "") -> str:
    """D = A B + C from the buffers 0 to 3, with layouts of the four."""
    return program(
        f"""
        mov.u32 %r50, {STRIDE};
        {change}
        wmma.load.a.sync.aligned.{a}.m16n16k16.global.f16 {registers(10)}, [%rd0], %r50;
        wmma.load.b.sync.aligned.{b}.m16n16k16.f16 {registers(18)}, [%rd1], {STRIDE};
        wmma.load.c.sync.aligned.{c}.m16n16k16.global.f32 {registers(26)}, [%rd2], {SUM_STRIDE};
        wmma.mma.sync.aligned.{a}.{b}.m16n16k16.f32.f32
          {registers(26)}, {registers(10)}, {registers(18)}, {registers(26)};
        wmma.store.d.sync.aligned.{d}.m16n16k16.global.f32 [%rd3], {registers(26)}, {SUM_STRIDE};
        """,
        parameters=4,
    )


def in_memory(x: Tensor, layout: str, stride: int) -> Tensor:
    """A matrix as its lines lie in memory, with NaN between them."""
    lines = torch.full((16, stride), float("nan"), dtype=x.dtype)
    lines[:, :16] = x if layout == "row" else x.T
    return lines


def matrices() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randint(-8, 9, (16, 16), generator=generator).double() for _ in range(3))
    return a.half(), b.half(), c.float()


@pytest.mark.parametrize(
    "layouts", itertools.product(LAYOUTS, repeat=4), ids=lambda layouts: "-".join(layouts)
)
def test_a_product_in_every_layout(layouts: tuple[str, str, str, str]) -> None:
    a, b, c = matrices()
    stored = [
        in_memory(x, layout, stride)
        for x, layout, stride in zip((a, b, c), layouts, (STRIDE, STRIDE, SUM_STRIDE), strict=False)
    ]
    out = torch.full((16, SUM_STRIDE), float("nan"))
    report = run(product(*layouts), *stored, out, block=(32,))
    assert not report.findings
    expected = a.double() @ b.double() + c.double()
    found = out[:, :16] if layouts[3] == "row" else out[:, :16].T
    assert torch.equal(found.double(), expected)
    assert out[:, 16:].isnan().all()
    assert report.opcodes["wmma.mma.sync.aligned." + ".".join(layouts[:2]) + ".m16n16k16.f32.f32"]


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ("mad.lo.u32 %r50, %r0, 8, %r50;", "wmma", "lanes disagree about the address or the str"),
        ("add.u64 %rd0, %rd0, 16;", "misaligned", "not a multiple of 32"),
        ("mov.u32 %r50, 20;", "misaligned", "the stride is not a multiple of 16 bytes"),
        ("add.u64 %rd0, %rd0, 32;", "out-of-bounds", "16 bytes"),
    ],
    ids=["lanes", "address", "stride", "bounds"],
)
def test_what_is_wrong_with_an_address_is_found(change: str, kind: str, said: str) -> None:
    a, b, c = matrices()
    stored = [
        torch.nn.functional.pad(x, (0, stride - 16))
        for x, stride in ((a, STRIDE), (b, STRIDE), (c, SUM_STRIDE))
    ]
    out = torch.zeros(16, SUM_STRIDE)
    text = product("row", "row", "row", "row", change)
    (finding,) = findings(text, *stored, out, block=(32,))
    assert (finding.severity, finding.kind) == ("error", kind)
    assert said in finding.message


def test_what_other_lanes_wrote_needs_a_barrier() -> None:
    """A fragment is loaded for all lanes, from what some of them have written."""
    body = f"""
        mov.u32 %r1, smem;
        mad.lo.u32 %r2, %r0, 16, %r1;
        mov.u32 %r3, 0;
        st.shared.v4.b32 [%r2], {{%r3, %r3, %r3, %r3}};
        BARRIER
        wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {registers(10)}, [%r1], 16;
        """
    text = program(body, shared=512).replace(".align 16 .b8 smem", ".align 32 .b8 smem")
    unused = torch.zeros(32, dtype=torch.int32)
    ordered = text.replace("BARRIER", "bar.warp.sync 0xffffffff;")
    assert findings(ordered, unused, unused, block=(32,)) == []
    found = findings(text.replace("BARRIER", ""), unused, unused, block=(32,))
    assert "race" in {finding.kind for finding in found}
