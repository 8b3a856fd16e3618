"""The simulator's matrix instructions against NumPy, with fragment maps written out afresh."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from . import inputs
from .direct import Direct, Words
from .programs import ELEMENT_BITS, MatrixShape, Program, programs
from .test_numeric import decoded

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Floats = npt.NDArray[np.float64]
WARPS = 8


def element(kind: str, word: Words, index: int) -> Floats:
    """Element ``index`` of packed registers as float64 (exact for every type here)."""
    bits = ELEMENT_BITS[kind]
    if kind == "f64":
        return word.view(np.float64)
    code: Words = word >> np.uint64(bits * index) & np.uint64((1 << bits) - 1)
    if kind == "f32":
        return code.astype(np.uint32).view(np.float32).astype(np.float64)
    if kind == "tf32":
        return np.take(decoded("tf32"), (code >> np.uint64(13)).astype(np.int64))
    if kind in ("f16", "bf16", "e4m3", "e5m2"):
        return np.take(decoded(kind), code.astype(np.int64))
    signed = kind[0] == "s" and bits < 64
    values = code.astype(np.int64)
    return np.where(signed & (values >> (bits - 1) == 1), values - (1 << bits), values).astype(
        np.float64
    )


def gather(kind: str, registers: list[Words], rows: int, columns: int, which: str) -> Floats:
    """Registers of a fragment as matrices (warps, rows, columns), by PTX's figures."""
    per_register = max(1, 32 // ELEMENT_BITS[kind])
    warps = registers[0].size // 32
    matrix = np.full((warps, rows, columns), np.nan)
    lane = np.arange(32)
    group, thread = lane // 4, lane % 4
    for j, register in enumerate(registers):
        for i in range(per_register):
            values = element(kind, register, i).reshape(warps, 32)
            if which == "A":
                row = group + 8 * (j % (rows // 8))
                column = thread * per_register + i + 4 * per_register * (j // (rows // 8))
            elif which == "B":
                row = thread * per_register + i + 4 * per_register * j
                column = group
            elif per_register == 2:  # C of .f16: both columns of a row in one register
                row, column = group + 8 * j, 2 * thread + i
            else:
                row, column = group + 8 * (j // 2), 2 * thread + j % 2
            matrix[:, row, column] = values
    return matrix


def shape_of(program: Program) -> MatrixShape:
    parts = program.name.split(".")
    m, rest = parts[3][1:].split("n")
    n, k = rest.split("k")
    types = [part for part in parts[6:] if part in ELEMENT_BITS]
    return MatrixShape(int(m), int(n), int(k), *types)


def instruction(program: Program) -> str:
    """The text that direct.cpp takes: layouts of m8n8k4 as `colA` and `rowB`."""
    parts = program.name.split(".")
    flags = (["colA"] if parts[4] == "col" else []) + (["rowB"] if parts[5] == "row" else [])
    return ".".join(parts[:4] + flags + parts[6:])


def run(direct: Direct, program: Program, values: list[Words]) -> list[Words]:
    return direct.mma(instruction(program), values, len(program.writes))


def inputs_of(program: Program) -> list[Words]:
    return [program.input(i)[: WARPS * 32] for i in range(len(program.reads))]


ALL = programs("mma")
QUAD_PAIRS = [program for program in ALL if "m8n8k4." in program.name and "f64" not in program.name]
INTEGER = [program for program in ALL if ".s32." in program.name]
FLOAT = [program for program in ALL if program not in QUAD_PAIRS and program not in INTEGER]


def name_of(program: Program) -> str:
    return program.name.removeprefix("mma.sync.aligned.")


# For each type of D: NumPy's type, the gap between 1 and the next number, the smallest subnormal.
LIMITS = {
    "f16": (np.dtype(np.float16), 2.0**-10, 2.0**-24),
    "f32": (np.dtype(np.float32), 2.0**-23, 2.0**-149),
    "f64": (np.dtype(np.float64), 2.0**-52, 2.0**-1074),
}


@pytest.mark.parametrize("program", FLOAT, ids=name_of)
def test_float_products_are_numpys(direct: Direct, program: Program) -> None:
    shape = shape_of(program)
    _, a_count, b_count, _ = shape.registers()
    values = inputs_of(program)
    a = gather(shape.a, values[:a_count], shape.m, shape.k, "A")
    b = gather(shape.b, values[a_count : a_count + b_count], shape.k, shape.n, "B")
    c = gather(shape.c, values[a_count + b_count :], shape.m, shape.n, "C")
    d = gather(shape.d, run(direct, program, values), shape.m, shape.n, "C")
    exact = np.einsum("wmk,wkn->wmn", a, b) + c
    # The bound is an ulp of the result's type, plus the low bits that are cut off each product
    # because another one is larger, or that are lost where partial sums are .f16.
    magnitude = np.einsum("wmk,wkn->wmn", np.abs(a), np.abs(b)) + np.abs(c)
    kind, epsilon, smallest = LIMITS[shape.d]
    rounded = exact.astype(kind).astype(np.float64)
    finite = np.isfinite(rounded) & np.isfinite(magnitude)
    if shape.a in ("e4m3", "e5m2"):  # a partial sum may overflow .f16 though the whole sum does not
        finite &= np.isfinite(d)
    assert finite.sum() > finite.size / 2
    bound = (
        np.abs(exact) * epsilon + smallest + magnitude * epsilon * (8 if shape.d == "f32" else 2)
    )
    assert np.all(np.abs(d - exact)[finite] <= bound[finite])
    # In f64 and FP8 the order of the additions decides what overflows.
    if shape.a not in ("f64", "e4m3", "e5m2"):
        assert np.array_equal(d[~finite], rounded[~finite], equal_nan=True)


@pytest.mark.parametrize("program", INTEGER, ids=name_of)
def test_integer_products_are_exact(direct: Direct, program: Program) -> None:
    shape = shape_of(program)
    _, a_count, b_count, _ = shape.registers()
    values = inputs_of(program)
    a = gather(shape.a, values[:a_count], shape.m, shape.k, "A").astype(np.int64)
    b = gather(shape.b, values[a_count : a_count + b_count], shape.k, shape.n, "B")
    c = gather("s32", values[a_count + b_count :], shape.m, shape.n, "C").astype(np.int64)
    b_integers = b.astype(np.int64)
    if ".xor." in program.name:
        products = np.not_equal(a[:, :, :, None], b_integers[:, None, :, :]).sum(axis=2)
    else:
        products = np.einsum("wmk,wkn->wmn", a, b_integers)
    exact = products + c
    if ".satfinite" in program.name:
        exact = np.clip(exact, -(2**31), 2**31 - 1)
    exact = (exact + 2**31) % 2**32 - 2**31
    d = gather("s32", run(direct, program, values), shape.m, shape.n, "C")
    assert np.array_equal(d, exact)


@pytest.mark.parametrize("program", QUAD_PAIRS, ids=name_of)
def test_quad_pairs_are_four_products(direct: Direct, program: Program) -> None:
    parts = program.name.split(".")
    d_type, c_type = parts[6], parts[9]
    values = inputs_of(program)

    def index(lane: int, i: int, which: str) -> tuple[int, int]:
        upper = 4 * (lane // 16)
        if which == "A":
            return (lane % 4 + upper, i) if parts[4] == "row" else (i + upper, lane % 4)
        if which == "B":
            return (lane % 4, i + upper) if parts[5] == "row" else (i, lane % 4 + upper)
        if which == "f16":
            return lane % 4 + upper, i
        return (lane & 1) + (i & 2) + upper, (i & 4) + (lane & 2) + (i & 1)

    def matrices(kind: str, registers: list[Words], which: str, size: tuple[int, int]) -> Floats:
        result = np.full((WARPS, 4, *size), np.nan)
        per_register = 32 // ELEMENT_BITS[kind]
        for j, register in enumerate(registers):
            for part, lane in itertools.product(range(per_register), range(32)):
                row, column = index(lane, j * per_register + part, which)
                lanes = element(kind, register, part).reshape(WARPS, 32)
                result[:, lane % 16 // 4, row, column] = lanes[:, lane]
        return result

    a = matrices("f16", values[:2], "A", (8, 4))
    b = matrices("f16", values[2:4], "B", (4, 8))
    c = matrices(c_type, values[4:], c_type, (8, 8))
    d = matrices(d_type, run(direct, program, values), d_type, (8, 8))
    exact = np.einsum("wqmk,wqkn->wqmn", a, b) + c
    magnitude = np.einsum("wqmk,wqkn->wqmn", np.abs(a), np.abs(b)) + np.abs(c)
    kind, epsilon, smallest = LIMITS[d_type]
    with np.errstate(over="ignore"):
        rounded = exact.astype(kind).astype(np.float64)
    finite = np.isfinite(rounded)
    bound = np.abs(exact) * epsilon + smallest + magnitude * 2.0**-21
    assert np.all(np.abs(d - exact)[finite] <= bound[finite])
    assert np.array_equal(d[~finite], rounded[~finite], equal_nan=True)


@pytest.mark.parametrize("program", FLOAT + QUAD_PAIRS + INTEGER, ids=name_of)
def test_avx2_and_baseline_give_the_same_bits(direct: Direct, program: Program) -> None:
    values = [program.input(i) for i in range(len(program.reads))]
    try:
        if not direct.set_avx2(True):
            pytest.skip("this machine has no AVX2")
        fast = run(direct, program, values)
        assert not direct.set_avx2(False)
        plain = run(direct, program, values)
    finally:
        direct.set_avx2(True)
    assert all(np.array_equal(x, y) for x, y in zip(fast, plain, strict=True))


@pytest.mark.parametrize(
    "text",
    [
        "mma.sync.aligned.m16n8k16.f16.bf16.bf16.f16",
        "mma.sync.aligned.m16n8k16.f32.f16.bf16.f32",
        "mma.sync.aligned.m16n8k32.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.satfinite.f32.f16.f16.f32",
        "mma.sync.aligned.m16n16k16.f32.f16.f16.f32",
        "mma.sync.aligned.m8n8k4.f16.f16.f16.f32",
        "mma.sync.aligned.m16n8k8.colA.f32.f16.f16.f32",
    ],
)
def test_forms_that_ptx_lacks_are_refused(direct: Direct, text: str) -> None:
    with pytest.raises(KeyError):
        direct.mma(text, [np.zeros(32, dtype=np.uint64)] * 18, 8)


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_and_stmatrix_place_elements_as_the_isa_says(direct: Direct, trans: bool) -> None:
    words = inputs.random_words("ldmatrix", 32) & np.uint64(0xFFFFFFFF)
    matrix = words.astype(np.uint32).view(np.uint16).reshape(8, 8)
    loaded = direct.matrix_map("ldmatrix", trans, words)
    source = matrix.T if trans else matrix
    for lane in range(32):
        low, high = source[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
        assert int(loaded[lane]) == int(high) << 16 | int(low)
    assert np.array_equal(direct.matrix_map("stmatrix", trans, loaded), words)
    moved = direct.matrix_map("movmatrix", True, direct.matrix_map("ldmatrix", False, words))
    assert np.array_equal(moved, direct.matrix_map("ldmatrix", True, words))


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "e4m3", "e5m2"])
@pytest.mark.parametrize("avx2", [False, True], ids=["baseline", "avx2"])
def test_dense_products_decode_and_add_up(direct: Direct, kind: str, avx2: bool) -> None:
    m, n, k = 5, 13, 24
    bits = ELEMENT_BITS[kind]

    def operand(name: str, rows: int, columns: int) -> tuple[bytes, Floats]:
        words = rows * columns * bits // 32 + 1
        register = inputs.matrix_register(name, kind, 4 * (words // 96 + 1), False)
        # Without every fourth warp, which has special values.
        register = register.reshape(-1, 4, 32)[:, :3].reshape(-1)
        register = register & np.uint64(0xFFFFFFFF)
        values = [element(kind, register, i) for i in range(32 // bits)]
        flat = np.stack(values, axis=1).reshape(-1)[: rows * columns]
        return register.astype(np.uint32).tobytes(), flat.reshape(rows, columns)

    a_bytes, a = operand("dense/a", m, k)
    b_bytes, b = operand("dense/b", k, n)
    c = np.arange(m * n, dtype=np.float32).reshape(m, n)
    try:
        direct.set_avx2(avx2)
        product = direct.multiply((kind, kind), (m, n, k), a_bytes, b_bytes)
        summed = direct.multiply((kind, kind), (m, n, k), a_bytes, b_bytes, c)
    finally:
        direct.set_avx2(True)
    for result, exact in ((product, a @ b), (summed, a @ b + c)):
        # In FP8 all addends and the sum are cut off 13 bits below the largest addend.
        unit = (k + 2) * 2.0**-13 if kind in ("e4m3", "e5m2") else 2.0**-20
        bound = unit * (np.abs(a) @ np.abs(b) + c)
        assert np.all(np.abs(result - exact) <= bound)
