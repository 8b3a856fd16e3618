"""The order of operations in the tensor pipe: mode "shuffled" changes it where the ISA allows that,
and the findings name the pairs of operations that rely on more.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import sim

from . import tiles
from .tcgen05_samples import attention, gemm
from .test_tcgen05 import (
    B_PLACE,
    BF16,
    COMMIT,
    LANES,
    SHARED,
    WAIT,
    instruction,
    load,
    packed,
    program,
    put,
    store,
)
from .test_tcgen05 import random as values
from .test_tcgen05 import run as launch

SEEDS = 16
X = 480  # columns of a matrix A in tensor memory; D is at 0, E at 64
MMA = "tcgen05.mma.GROUP.kind::f16"
OF_64, OF_32, OF_16 = (instruction(128, n, BF16, BF16) for n in (64, 32, 16))

OPERATIONS = {
    "D = X B": f"{MMA} [%r2], [%r2+{X}], %rd3, {OF_64}, 0;",
    "D = A B": f"{MMA} [%r2], %rd2, %rd3, {OF_64}, 0;",
    "D += X B": f"{MMA} [%r2], [%r2+{X}], %rd3, {OF_64}, 1;",
    "D = A B, 32 columns": f"{MMA} [%r2], %rd2, %rd3, {OF_32}, 0;",
    "E = A B": f"{MMA} [%r2+64], %rd2, %rd3, {OF_32}, 0;",
    "X = A B": f"{MMA} [%r2+{X}], %rd2, %rd3, {OF_16}, 0;",
    "copy A to X": f"tcgen05.cp.GROUP.128x256b [%r2+{X}], %rd2;",
    "copy B to X": f"tcgen05.cp.GROUP.128x256b [%r2+{X}], %rd3;",
    "shift X": f"tcgen05.shift.GROUP.down [%r2+{X}];",
    "shift X from lane 32": f"tcgen05.shift.GROUP.down [%r2+{X + (32 << 16)}];",
    "shift D": "tcgen05.shift.GROUP.down [%r2];",
}

# What a thread starts one after another, and whether the ISA promises every order that matters.
CASES = {
    ("D = X B", "D += X B"): True,
    ("D = X B", "D = A B"): True,
    ("D = X B", "E = A B"): True,  # they have nothing in common
    ("D = X B", "D = A B, 32 columns"): False,  # another shape
    ("D = X B", "X = A B"): False,  # overwrites what is read
    ("X = A B", "D = X B"): False,  # reads what is written
    ("copy A to X", "D = X B"): True,
    ("D = X B", "copy A to X"): False,
    ("copy A to X", "copy B to X"): False,
    ("copy A to X", "X = A B"): True,
    ("X = A B", "copy B to X"): False,
    ("shift X", "D = X B"): True,
    ("D = A B", "shift D"): True,
    ("shift D", "D += X B"): True,
    ("copy A to X", "shift X"): False,
    ("shift X", "copy A to X"): False,
    ("shift X", "shift X from lane 32"): False,
    # Promised, because a product or a shift stands between the two.
    ("shift X", "E = A B", "shift X from lane 32"): True,
    ("D = X B", "shift D", "X = A B"): True,
    ("copy A to X", "E = A B", "shift X"): True,
    ("D = X B", "E = A B", "X = A B"): False,
}


def run(operations: tuple[str, ...], **options: Any) -> tuple[sim.Report, Tensor]:
    """What one thread starts, and all of tensor memory at the end."""
    image = torch.zeros(SHARED, dtype=torch.uint8)
    places = tiles.strides(True, 128, 128, 2)
    a, b, x = values(128, 16, BF16), -values(128, 16, BF16).flip(0), values(127, 16, BF16)
    adesc = put(image, 0, a, True, 128, *places)
    bdesc = put(image, B_PLACE, b, True, 128, *places)
    cells = torch.arange(LANES, dtype=torch.float32)[:, None].expand(LANES, 512).contiguous()
    cells = cells.view(torch.int32)
    cells[:, X : X + 8] = packed(torch.cat([x, x[:1]]))
    body = f"""{store(96)}{store(32, X)}
    @%p6 bra WAIT;
    {"".join(OPERATIONS[name] for name in operations)}
    {COMMIT}{WAIT}{load(96)}{load(32, X)}"""
    return launch(program(body), image, adesc, bdesc, cells, **options)


@pytest.mark.parametrize("operations", CASES, ids=", ".join)
def test_the_findings_name_what_another_order_breaks(operations: tuple[str, ...]) -> None:
    report, expected = run(operations, mode="lazy")
    kinds = {finding.kind for finding in report.findings}
    assert kinds <= {"tcgen05-order", "race"}, report
    for mode in ("eager", "random", "priority"):  # one pipe, in the order of issue
        assert torch.equal(run(operations, mode=mode)[1], expected)
    broken = set()
    for seed in range(SEEDS):
        shuffled, out = run(operations, mode="shuffled", seed=seed)
        assert {finding.kind for finding in shuffled.findings} == kinds
        broken.add(not torch.equal(out, expected))
    promised = CASES[operations]
    assert bool(kinds) != promised
    assert broken == ({False} if promised else {False, True})


def test_a_seed_gives_one_order() -> None:
    operations = ("D = X B", "X = A B")
    for seed in range(4):
        first, second = (run(operations, mode="shuffled", seed=seed)[1] for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["attention", "ss-64", "ts-128", "relay-128", "pair-256"])
def test_kernels_without_such_pairs_are_right_in_any_order(name: str) -> None:
    form, _, m = name.partition("-")
    sample = gemm(form, int(m)) if m else attention()
    tolerance = 0.0 if m else 2.0**-6
    for seed in range(4):
        report, out = sample.run(mode="shuffled", seed=seed)
        assert not report.findings
        assert bool(((out - sample.expected).abs() <= tolerance).all())
