"""How the tensor core of each card adds up: examples that were worked out by hand, and a model of
its own in exact fractions, against the simulator, with AVX2 and without.
"""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from archflash import LaunchError, sim

from . import inputs
from .fragments import gather, shape_of
from .inputs import Words
from .programs import BLOCK, programs
from .test_silicon import avx2, simulated

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICES = ("A100", "RTX 4090", "H200", "B200", "RTX 5090")
PROGRAMS = {program.name.removeprefix("mma.sync.aligned."): program for program in programs("mma")}
F16, BF16 = (f"m16n8k16.row.col.f32.{x}.{x}.f32" for x in ("f16", "bf16"))
TF32 = "m16n8k8.row.col.f32.tf32.tf32.f32"
INTO_F16 = "m16n8k16.row.col.f16.f16.f16.f16"
E4M3, E5M2 = (f"m16n8k32.row.col.f32.{x}.{x}.f32" for x in ("e4m3", "e5m2"))
E4M3_K16 = "m16n8k16.row.col.f32.e4m3.e4m3.f32"
FP8_INTO_F16 = "m16n8k32.row.col.f16.e4m3.e4m3.f16"
FP8 = re.compile("e4m3|e5m2")
FORMS = [F16, BF16, TF32, INTO_F16, E4M3, E5M2, E4M3_K16, FP8_INTO_F16]

# Bits of the fraction and of the exponent, and the bias.
FORMATS = {
    "f16": (10, 5, 15), "bf16": (7, 8, 127), "tf32": (10, 8, 127), "f32": (23, 8, 127),
    "e4m3": (3, 4, 7), "e5m2": (2, 5, 15),
}  # fmt: skip


def code(kind: str, value: float) -> int:
    """The bits of a number that the type has."""
    fraction_bits, _, bias = FORMATS[kind]
    sign = int(math.copysign(1, value) < 0)
    if value == 0:
        exponent, fraction = 0, 0
    else:
        exponent = max(math.frexp(value)[1] - 1 + bias, 1)
        scaled = abs(value) * 2.0 ** (fraction_bits - (exponent - bias))
        fraction = int(scaled)
        assert fraction == scaled, f"{kind} does not have {value}"
        exponent -= fraction < 1 << fraction_bits
        fraction &= (1 << fraction_bits) - 1
    bits = (sign << FORMATS[kind][1] | exponent) << fraction_bits | fraction
    return bits << 13 if kind == "tf32" else bits


@cache
def places(kind: str, count: int, which: str) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Register, lane and first bit of each element of a fragment, as `gather` reads them."""
    size = {"f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8}.get(kind, 32)
    per_register = 32 // size
    rows = {"A": 16, "B": 4 * per_register * count, "C": 16}[which]
    columns = {"A": 4 * per_register * (count // 2), "B": 8, "C": 8}[which]
    found = {}
    # One element is 1 in each warp, and all others are zero.
    elements = list(itertools.product(range(count), range(32), range(0, 32, size)))
    probes = [np.zeros(32 * len(elements), np.uint64) for _ in range(count)]
    for warp, (register, lane, bit) in enumerate(elements):
        probes[register][32 * warp + lane] = code(kind, 1.0) << bit
    for warp, row, column in np.argwhere(gather(kind, probes, rows, columns, which) == 1).tolist():
        found[row, column] = elements[warp]
    return found


def fragment(
    kind: str, count: int, which: str, values: dict[tuple[int, int], float]
) -> list[Words]:
    """Registers of a fragment, for a block of threads, that is zero but for some elements."""
    registers = [np.zeros(BLOCK, np.uint64) for _ in range(count)]
    for place, value in values.items():
        register, lane, bit = places(kind, count, which)[place]
        registers[register][lane::32] |= np.uint64(code(kind, value) << bit)
    return registers


def words_of(form: str, values: list[Words], device: str) -> list[Words]:
    """The registers of D."""
    return [x.astype(np.uint64) for x in simulated(PROGRAMS[form], values, device)]


def product(form: str, a: dict[int, float], b: dict[int, float], c: float, device: str) -> float:
    """Row a (by k) times column b, plus c, as the element (3, 5) of a product; others are zero."""
    program = PROGRAMS[form]
    shape = shape_of(program)
    _, a_count, b_count, c_count = shape.registers()
    values = [
        *fragment(shape.a, a_count, "A", {(3, k): x for k, x in a.items()}),
        *fragment(shape.b, b_count, "B", {(k, 5): x for k, x in b.items()}),
        *fragment(shape.c, c_count, "C", {(3, 5): c}),
    ]
    d = gather(shape.d, words_of(form, values, device), 16, 8, "C")[0]
    result = float(d[3, 5])
    d[3, 5] = 0
    assert not d.any()
    return result


def row(*terms: tuple[int, float, float]) -> tuple[dict[int, float], dict[int, float]]:
    """(k, a, b): the rows A and B."""
    return {k: a for k, a, _ in terms}, {k: b for k, _, b in terms}


def many(first: int, last: int, a: float, b: float) -> list[tuple[int, float, float]]:
    return [(k, a, b) for k in range(first, last)]


TINY = 2.0**-7  # in e4m3 a subnormal; its square is 2^-14
A100, ADA, H200, DC, GEFORCE = DEVICES
# Name: form, terms, c, and the result on each card.
EXAMPLES: dict[
    str, tuple[str, list[tuple[int, float, float]], float, dict[tuple[str, ...], float]]
] = {
    "the 13th bit of FP8 is kept": (
        E4M3, [(0, 1, 1), (1, 2 * TINY, TINY)], 0.0, {DEVICES[1:]: 1 + 2.0**-13}
    ),
    "what is below is cut off on 8.9 alone": (
        E4M3, [(0, 1, 1), *many(1, 16, TINY, TINY)], 0.0,
        {(ADA,): 1.0, (H200, DC, GEFORCE): 1 + 15 * 2.0**-14},
    ),
    "each product is cut off toward zero": (
        E4M3, [(0, 1, 1), *many(1, 16, -TINY, TINY)], 0.0,
        {(ADA,): 1.0, (H200, DC, GEFORCE): 1 - 15 * 2.0**-14},
    ),
    "8.9 takes 16 products at a time": (
        E4M3, [*many(0, 16, TINY, TINY), (16, 1, 1)], 0.0, {DEVICES[1:]: 1 + 2.0**-10}
    ),
    "8.9 takes no more than these": (
        E4M3, [(0, 1, 1), *many(16, 32, TINY, TINY)], 0.0,
        {(ADA,): 1.0, (H200, DC, GEFORCE): 1 + 2.0**-10},
    ),
    "the accumulator loses its bits, too": (
        E4M3, [(0, TINY, TINY)], 1 + 2.0**-13 + 2.0**-20,
        {(ADA,): 1 + 2.0**-13, (H200, DC, GEFORCE): 1 + 2.0**-13 + 2.0**-14 + 2.0**-20},
    ),
    "even where all products are zero": (
        E4M3, [], -1 - 2.0**-20, {(ADA,): -1.0, (H200, DC, GEFORCE): -1 - 2.0**-20}
    ),
    "a sum that grows has fewer bits behind the point": (
        E4M3, [(0, 1.5, 1), (1, 1.5, 1), (2, 2 * TINY, TINY)], 0.0,
        {(ADA,): 3.0, (H200, DC, GEFORCE): 3 + 2.0**-13},
    ),
    "e5m2 loses the same": (
        E5M2, [(0, 1, 1), *many(1, 16, TINY, TINY)], 0.0,
        {(ADA,): 1.0, (H200, DC, GEFORCE): 1 + 15 * 2.0**-14},
    ),
    "12.x adds 32 products up in 25 bits and cuts off toward zero": (
        E5M2, [(0, 1, 1), *many(1, 32, 2.0**-13, 2.0**-12)], 0.0,
        # 31 * 2^-25 is 7.75 * 2^-23. Where FP8 becomes f16 there are two additions, from zero: 15
        # products of 2^-25 are 3.75 * 2^-23, then 16 are 2^-21.
        {(ADA,): 1.0, (H200, DC): 1 + 3 * 2.0**-23 + 2.0**-21,
         (GEFORCE,): 1 + 7 * 2.0**-23},
    ),
    "24 bits on 8.x, 25 from 9.0 on": (
        F16, [(0, 1, 1), *many(1, 5, 2.0**-12, 2.0**-13)], 0.0,
        {(A100, ADA): 1.0, (H200, DC, GEFORCE): 1 + 2.0**-23},
    ),
    "8 products at a time on 8.x": (
        F16, [*many(0, 8, 2.0**-13, 2.0**-13), (8, 1, 1)], 0.0,
        {(A100, ADA): 1 + 2.0**-23, (H200, DC, GEFORCE): 1.0},
    ),
    "bf16 as f16": (
        BF16, [(0, 1, 1), *many(1, 5, 2.0**-12, 2.0**-13)], 0.0,
        {(A100, ADA): 1.0, (H200, DC, GEFORCE): 1 + 2.0**-23},
    ),
    "4 products of tf32 at a time on 8.x": (
        TF32, [*many(0, 4, 2.0**-13, 1.5 * 2.0**-13), (4, 1, 1)], 2.0**-24,
        {(A100, ADA): 1 + 2.0**-23, (H200, DC, GEFORCE): 1.0},
    ),
    "the sum is cut off, not rounded": (
        F16, [(0, 1, 1), (1, 2.0**-12, 1.5 * 2.0**-12)], 0.0, {DEVICES: 1.0}
    ),
    "f16 sums are rounded in each step": (
        INTO_F16, [(0, 1, 1), (1, 2.0**-11, 1), (8, 2.0**-11, 1)], 0.0,
        {(A100, ADA): 1.0, (H200, DC, GEFORCE): 1 + 2.0**-10},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "device"),
    [(name, device) for name, (*_, by) in EXAMPLES.items() for group in by for device in group],
)
def test_sums_that_were_worked_out_by_hand(name: str, device: str) -> None:
    form, terms, c, by = EXAMPLES[name]
    (expected,) = (value for group, value in by.items() if device in group)
    for enabled in (True, False):
        with avx2(enabled):
            assert product(form, *row(*terms), c, device) == expected


# ---- A model in exact fractions ----


def exponent_of(kind: str, value: float) -> int:
    """Of a number that is not zero; those of subnormals are one."""
    _, _, bias = FORMATS[kind]
    return max(math.frexp(value)[1] - 1, 1 - bias)


def cut(value: Fraction, unit: Fraction) -> Fraction:
    return math.trunc(value / unit) * unit


def added(
    kinds: tuple[str, str, str],
    a: npt.NDArray[np.float64],
    b: npt.NDArray[np.float64],
    c: float,
    bits: int,
) -> float:
    """One addition of finite numbers."""
    terms = [
        (exponent_of(kinds[0], x) + exponent_of(kinds[1], y), Fraction(x) * Fraction(y))
        for x, y in zip(a.tolist(), b.tolist(), strict=True)
        if x != 0 and y != 0
    ]
    if c != 0:
        terms.append((exponent_of(kinds[2], c), Fraction(c)))
    if not terms:
        return 0.0
    unit = Fraction(2) ** (max(exponent for exponent, _ in terms) - bits)
    total = sum((cut(value, unit) for _, value in terms), Fraction(0))
    if total == 0:
        return 0.0
    if kinds[2] == "f16":
        return float(np.float16(float(total)))  # a float64 has all bits of such a sum
    exponent = exponent_of("f32", float(total))
    result = cut(total, Fraction(2) ** (exponent - min(bits, 23)))
    return math.copysign(math.inf, result) if abs(result) >= 2**128 else float(result)


# Bytes of a row of A in one addition, and bits; in FP8, too, where the card has an instruction.
CARDS = {
    A100: (16, 24, None),
    ADA: (16, 24, (16, 13)),
    H200: (32, 25, None),
    DC: (32, 25, None),
    GEFORCE: (32, 25, (32, 25)),
}


@pytest.mark.parametrize(
    ("device", "form"),
    [
        (device, form)
        for device, (_, _, fp8) in CARDS.items()
        for form in FORMS
        if fp8 is not None or not FP8.search(form)
    ],
)
def test_any_sums_are_those_of_exact_fractions(device: str, form: str) -> None:
    shape = shape_of(PROGRAMS[form])
    size, bits, fp8 = CARDS[device]
    if FP8.search(form):
        assert fp8 is not None
        size, bits = fp8
    depth = size * 8 // {"tf32": 32, "f16": 16, "bf16": 16}.get(shape.a, 8)
    counts = dict(zip("ABC", shape.registers()[1:], strict=True))
    registers = {
        which: [
            inputs.matrix_register(f"{form}/{which}/{i}", kind, BLOCK // 32, False)
            for i in range(counts[which])
        ]
        for which, kind in (("A", shape.a), ("B", shape.b), ("C", shape.c))
    }
    a = gather(shape.a, registers["A"], 16, shape.k, "A")
    b = gather(shape.b, registers["B"], shape.k, 8, "B")
    c = gather(shape.c, registers["C"], 16, 8, "C")
    values = [word for words in registers.values() for word in words]
    results = []
    for enabled in (True, False):
        with avx2(enabled):
            d = words_of(form, values, device)
            results.append(gather(shape.d, d, 16, 8, "C"))
    compared = 0
    for warp, m, n in itertools.product(range(BLOCK // 32), range(0, 16, 2), range(8)):
        factors = a[warp, m], b[warp, :, n]
        total = float(c[warp, m, n])
        for first in range(0, shape.k, depth):
            parts = [x[first : first + depth] for x in factors]
            if not (math.isfinite(total) and all(np.isfinite(x).all() for x in parts)):
                total = math.nan
                break
            total = added((shape.a, shape.b, shape.d), parts[0], parts[1], total, bits)
        if math.isnan(total):
            continue
        compared += 1
        for result in results:
            assert float(result[warp, m, n]) == total
    assert compared > 100


@pytest.mark.parametrize(
    ("target", "device", "runs"),
    [
        ("sm_89", "A100", False),
        ("sm_89", "RTX 5090", True),
        ("sm_90a", "H200", True),
        ("sm_90a", "RTX 5090", False),
        ("sm_100f", "B300", True),
        ("sm_100f", "RTX 5090", False),
    ],
)
def test_ptx_runs_where_its_target_allows(target: str, device: str, runs: bool) -> None:
    header = f".version 8.8 .target {target} .address_size 64 "
    program = sim.load(header + ".entry nothing() { ret; }")
    if runs:
        sim.launch(program, "nothing", [], device=device)
        return
    with pytest.raises(LaunchError, match=f"PTX for {target} on a device of capability"):
        sim.launch(program, "nothing", [], device=device)


def test_a_target_without_fp8_products_is_refused() -> None:
    text = PROGRAMS[E4M3].ptx().replace(".target sm_89", ".target sm_80")
    with pytest.raises(
        LaunchError, match=r"e4m3.* needs target sm_89 or higher, and this is sm_80"
    ):
        sim.load(text)
