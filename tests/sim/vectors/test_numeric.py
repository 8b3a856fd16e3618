"""The simulator's arithmetic against NumPy, PyTorch and exact rationals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch

from . import inputs
from .direct import Direct, Words

# NaN and infinity are among the inputs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Floats = npt.NDArray[np.float64]

F32_NAN = 0x7FFFFFFF
HALF_NAN = 0x7FFF


def f32_values(bits: Words) -> npt.NDArray[np.float32]:
    return bits.astype(np.uint32).view(np.float32)


def f32_bits(values: npt.ArrayLike) -> Words:
    bits = np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return np.where(np.isnan(np.asarray(values)), np.uint64(F32_NAN), bits)


def decoded(format_name: str) -> Floats:
    """The value of every code of a narrow format, from NumPy or PyTorch."""
    if format_name == "f16":
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)
    if format_name == "bf16":
        return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    if format_name == "tf32":
        return (np.arange(1 << 19, dtype=np.uint32) << 13).view(np.float32).astype(np.float64)
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format_name]
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values: Floats = codes.view(dtype).to(torch.float64).numpy()
    return values


def rounded(format_name: str, values: Floats, mode: str, satfinite: bool) -> Words:
    """The codes nearest to ``values`` in the direction ``mode``, by search in all codes."""
    table = decoded(format_name)
    half = len(table) // 2  # the codes of one sign, in order
    finite = table[:half][np.isfinite(table[:half])]
    magnitude = np.abs(values)
    negative = np.signbit(values)
    below = np.searchsorted(finite, magnitude, side="right") - 1
    above = np.minimum(below + 1, len(finite) - 1)
    # One step beyond the largest finite value stands for infinity.
    step = finite[-1] - finite[-2]
    upper = np.where(below + 1 < len(finite), finite[above], finite[-1] + step)
    low_gap = magnitude - finite[below]
    high_gap = upper - magnitude
    if mode == "rn":
        up = (high_gap < low_gap) | ((high_gap == low_gap) & (below % 2 == 1))
    elif mode == "rna":
        up = high_gap <= low_gap
    elif mode == "rz":
        up = np.zeros(values.shape, dtype=bool)
    else:
        up = (low_gap > 0) & (negative == (mode == "rm"))
    up = up & (low_gap > 0)
    code = below + up
    code = np.where(np.isinf(values), len(finite), code)
    if satfinite:
        code = np.minimum(code, len(finite) - 1)
    code = code + negative * half
    nan = {"f16": 0x7FFF, "bf16": 0x7FFF, "tf32": 0x3FFFF, "e4m3": 0x7F, "e5m2": 0x7F}[format_name]
    return np.where(np.isnan(values), nan, code).astype(np.uint64)


def samples(kind: str, count: int = 1 << 17) -> Words:
    return inputs.elements("test_numeric", kind, 0, 1, count)


def assert_same(actual: Words, expected: Words, *operands: Words) -> None:
    wrong = np.flatnonzero(actual != expected)
    if wrong.size:
        i = int(wrong[0])
        given = ", ".join(f"{int(operand[i]):#x}" for operand in operands)
        pytest.fail(
            f"{wrong.size} differ; first: ({given}) -> {int(actual[i]):#x}, "
            f"expected {int(expected[i]):#x}"
        )


@pytest.mark.parametrize("to", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_half_conversions_round_as_a_search_in_all_codes_does(
    direct: Direct, to: str, mode: str
) -> None:
    bits = samples("f32")
    values = f32_values(bits).astype(np.float64)
    assert_same(direct.run(f"cvt.{mode}.{to}.f32", bits), rounded(to, values, mode, False), bits)
    bits = samples("f64")
    bits = bits[~np.isnan(bits.view(np.float64))]  # NaN keeps its sign and payload
    values = bits.view(np.float64)
    assert_same(direct.run(f"cvt.{mode}.{to}.f64", bits), rounded(to, values, mode, False), bits)


@pytest.mark.parametrize(("to", "mode"), list(itertools.product(("f16", "bf16"), ("rn", "rz"))))
def test_satfinite_and_relu_clamp_halves(direct: Direct, to: str, mode: str) -> None:
    bits = samples("f32")
    values = f32_values(bits).astype(np.float64)
    assert_same(
        direct.run(f"cvt.{mode}.satfinite.{to}.f32", bits), rounded(to, values, mode, True), bits
    )
    clamped = np.where(values <= 0, 0.0, values)
    assert_same(
        direct.run(f"cvt.{mode}.relu.{to}.f32", bits), rounded(to, clamped, mode, False), bits
    )


@pytest.mark.parametrize("flags", ["rna", "rna.satfinite", "rn", "rz", "rn.relu", "rz.relu"])
def test_tf32_conversions_round_as_a_search_in_all_codes_does(direct: Direct, flags: str) -> None:
    bits = samples("f32")
    if "rna" in flags:  # test_silicon.py has the results for NaN
        bits = bits[~np.isnan(f32_values(bits))]
    values = f32_values(bits).astype(np.float64)
    if "relu" in flags:
        values = np.where(values <= 0, 0.0, values)
    mode = flags.split(".")[0]
    expected = rounded("tf32", values, mode, "satfinite" in flags) << np.uint64(13)
    assert_same(direct.run(f"cvt.{flags}.tf32.f32", bits), expected, bits)


@pytest.mark.parametrize(("to", "relu"), list(itertools.product(("e4m3", "e5m2"), ("", ".relu"))))
def test_fp8_conversions_round_as_a_search_in_all_codes_does(
    direct: Direct, to: str, relu: str
) -> None:
    upper, lower = samples("f32"), samples("f32")[::-1].copy()
    halves = np.arange(1 << 16, dtype=np.uint64)
    pairs = halves << np.uint64(16) | halves[::-1]

    def element(values: Floats) -> Words:
        values = np.where(values <= 0, 0.0, values) if relu else values
        return rounded(to, values, "rn", True)

    def of_f32(bits: Words) -> Words:
        return element(f32_values(bits).astype(np.float64))

    expected = of_f32(upper) << np.uint64(8) | of_f32(lower)
    name = f"cvt.rn.satfinite{relu}.{to}x2"
    assert_same(direct.run(f"{name}.f32", upper, lower), expected, upper, lower)
    code = element(decoded("f16"))
    expected = code << np.uint64(8) | code[::-1]
    assert_same(direct.run(f"{name}.f16x2", pairs), expected, pairs)


@pytest.mark.parametrize("source", ["e4m3", "e5m2"])
def test_fp8_widens_exactly(direct: Direct, source: str) -> None:
    codes = np.arange(1 << 16, dtype=np.uint64)
    single = decoded(source).astype(np.float16)
    bits = np.where(np.isnan(single), HALF_NAN, single.view(np.uint16)).astype(np.uint64)
    expected = bits[codes >> np.uint64(8)] << np.uint64(16) | bits[codes & np.uint64(0xFF)]
    assert_same(direct.run(f"cvt.rn.f16x2.{source}x2", codes), expected, codes)


@pytest.mark.parametrize("source", ["f16", "bf16"])
def test_halves_widen_exactly(direct: Direct, source: str) -> None:
    codes = np.arange(1 << 16, dtype=np.uint64)
    if source == "bf16":  # bits are only shifted, also those of a NaN, which NumPy would change
        codes = codes[~np.isnan(decoded(source))]
    expected = f32_bits(decoded(source).astype(np.float32)[codes.astype(np.int64)])
    assert_same(direct.run(f"cvt.f32.{source}", codes), expected, codes)


INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def integer_range(name: str) -> tuple[int, int]:
    bits = int(name[1:])
    return (0, (1 << bits) - 1) if name[0] == "u" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def integer_value(name: str, bits: int) -> int:
    low, high = integer_range(name)
    bits &= (1 << int(name[1:])) - 1
    return bits if bits <= high else bits + 2 * low


@pytest.mark.parametrize(("to", "source"), list(itertools.product(INTEGERS, INTEGERS)))
def test_integer_conversions_wrap_or_clamp(direct: Direct, to: str, source: str) -> None:
    bits = samples(f"b{source[1:]}", 1024)
    values = [integer_value(source, int(b)) for b in bits]
    low, high = integer_range(to)
    all_bits = (1 << 64) - 1
    wrapped = [integer_value(to, value) & all_bits for value in values]
    assert_same(direct.run(f"cvt.{to}.{source}", bits), np.array(wrapped, dtype=np.uint64), bits)
    source_low, source_high = integer_range(source)
    if low <= source_low and source_high <= high:  # every value fits: PTX has no .sat
        with pytest.raises(KeyError):
            direct.run(f"cvt.sat.{to}.{source}", bits)
        return
    clamped = [min(max(value, low), high) & all_bits for value in values]
    expected = np.array(clamped, dtype=np.uint64)
    assert_same(direct.run(f"cvt.sat.{to}.{source}", bits), expected, bits)


@pytest.mark.parametrize(
    ("source", "mode"), list(itertools.product(("f16", "f32", "f64"), ("rni", "rzi", "rmi", "rpi")))
)
def test_floats_become_clamped_integers(direct: Direct, source: str, mode: str) -> None:
    bits = samples(source, 4096)
    if source == "f16":
        values = decoded("f16")[bits]
    else:
        values = f32_values(bits).astype(np.float64) if source == "f32" else bits.view(np.float64)
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    for to in INTEGERS:
        low, high = integer_range(to)
        width = int(to[1:])
        # PTX ISA, cvt: NaN becomes 0, or the top bit alone if either type has 64 bits.
        nan = integer_value(to, 1 << (width - 1)) if "64" in to + source else 0
        expected = []
        for value in function(values):
            if np.isnan(value):
                result = nan
            elif np.isinf(value):
                result = high if value > 0 else low
            else:
                result = min(max(int(value), low), high)
            expected.append(result & ((1 << 64) - 1))
        actual = direct.run(f"cvt.{mode}.{to}.{source}", bits)
        assert_same(actual, np.array(expected, dtype=np.uint64), bits)


def exact_f32(value: Fraction, mode: str) -> np.float32:
    """A nonzero rational rounded to float32."""
    with np.errstate(over="ignore"):
        near = np.float32(float(value)) if abs(value) < Fraction(2) ** 1000 else np.float32(np.inf)
    near = np.copysign(near, np.float32(-1 if value < 0 else 1))
    largest = np.finfo(np.float32).max

    def step(start: np.float32, toward: float) -> np.float32:
        neighbour: np.float32 = np.nextafter(start, np.float32(toward))
        return neighbour

    # The neighbours below and above: `near` may be off by one after two roundings.
    if np.isinf(near):
        near = np.copysign(largest, near)
    low = near
    while Fraction(float(low)) > value:
        low = step(low, -np.inf)
        if np.isinf(low):
            break
    while not np.isinf(low):
        following = step(low, np.inf)
        if np.isinf(following) or Fraction(float(following)) > value:
            break
        low = following
    if not np.isinf(low) and Fraction(float(low)) == value:
        return np.float32(low)
    high = step(low, np.inf) if not np.isinf(low) else np.float32(-largest)
    if mode == "rm":
        result = low
    elif mode == "rp":
        result = high
    elif mode == "rz":
        result = low if value > 0 else high
    else:
        unbounded = [
            Fraction(2) ** 128 if np.isposinf(x) else -(Fraction(2) ** 128) if np.isneginf(x)
            else Fraction(float(x)) for x in (low, high)
        ]  # fmt: skip
        gaps = value - unbounded[0], unbounded[1] - value
        even = int(low.view(np.uint32)) % 2 == 0
        result = low if gaps[0] < gaps[1] or (gaps[0] == gaps[1] and even) else high
    return np.float32(np.copysign(result, np.float32(-1 if value < 0 else 1)))


OPERATIONS: dict[str, Callable[[Fraction, Fraction, Fraction], Fraction]] = {
    "add": lambda a, b, c: a + b,
    "mul": lambda a, b, c: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b, c: a / b if b else Fraction(0),
}


@pytest.mark.parametrize(
    ("operation", "mode"), list(itertools.product(OPERATIONS, ("rn", "rz", "rm", "rp")))
)
def test_f32_arithmetic_is_the_exact_result_rounded_once(
    direct: Direct, operation: str, mode: str
) -> None:
    operands = [inputs.elements("exact", "f32", i, 3, 4096) for i in range(3)]
    # Exponents close enough for sums to round, with results at both ends of the range.
    for i in range(3):
        operands[i][1024:] = (operands[i][1024:] & np.uint64(0x83FFFFFF)) | np.uint64(0x3C000000)
    values = [f32_values(operand) for operand in operands]
    count = 3 if operation == "fma" else 2
    actual = direct.run(f"{operation}.{mode}.f32", *operands[:count])
    checked = 0
    for i in range(4096):
        a, b, c = (float(value[i]) for value in values)
        if not all(np.isfinite(x) for x in (a, b, c)):
            continue
        exact = OPERATIONS[operation](Fraction(a), Fraction(b), Fraction(c))
        if exact == 0:
            continue
        expected = int(exact_f32(exact, mode).view(np.uint32))
        assert int(actual[i]) == expected, (operation, mode, a, b, c, hex(int(actual[i])))
        checked += 1
    assert checked > 2000


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_f32_square_roots_are_rounded_once(direct: Direct, mode: str) -> None:
    bits = samples("f32", 4096) & np.uint64(0x7FFFFFFF)
    values = f32_values(bits)
    actual = f32_values(direct.run(f"sqrt.{mode}.f32", bits))
    for value, root in zip(values, actual, strict=True):
        if not np.isfinite(value) or value == 0:
            continue
        square = Fraction(float(value))
        low, high = (Fraction(float(np.nextafter(root, np.float32(to)))) for to in (0, np.inf))
        exact = Fraction(float(root))
        if mode == "rn":
            assert ((low + exact) / 2) ** 2 <= square <= ((high + exact) / 2) ** 2
        elif mode == "rp":
            assert low**2 < square <= exact**2
        else:
            assert exact**2 <= square < high**2


def test_f32_special_values_of_sums_and_products(direct: Direct) -> None:
    zero, minus_zero, one, minus_one = 0, 0x80000000, 0x3F800000, 0xBF800000
    infinity, minus_infinity, nan = 0x7F800000, 0xFF800000, 0xFFC12345

    def one_of(name: str, *operands: int) -> int:
        return int(direct.run(name, *([operand] for operand in operands))[0])

    for mode in ("rn", "rz", "rp"):
        assert one_of(f"add.{mode}.f32", one, minus_one) == zero
        assert one_of(f"fma.{mode}.f32", one, one, minus_one) == zero
        assert one_of(f"add.{mode}.f32", minus_zero, zero) == zero
    assert one_of("add.rm.f32", one, minus_one) == minus_zero
    assert one_of("fma.rm.f32", one, one, minus_one) == minus_zero
    assert one_of("add.rn.f32", minus_zero, minus_zero) == minus_zero
    assert one_of("add.rn.f32", infinity, minus_infinity) == F32_NAN
    assert one_of("mul.rz.f32", infinity, zero) == F32_NAN
    assert one_of("add.rn.f32", one, nan) == F32_NAN
    assert one_of("fma.rn.sat.f32", one, one, nan) == zero
    assert one_of("add.rn.sat.f32", one, one) == one
    assert one_of("add.rn.sat.f32", one, minus_infinity) == zero
    assert one_of("mul.rn.ftz.f32", 0x807FFFFF, one) == minus_zero
    assert one_of("mul.rn.f32", 0x807FFFFF, one) == 0x807FFFFF
    assert one_of("div.rn.f32", one, minus_zero) == minus_infinity
    assert one_of("min.f32", zero, minus_zero) == minus_zero
    assert one_of("max.f32", minus_zero, zero) == zero
    assert one_of("max.f32", nan, one) == one
    assert one_of("max.NaN.f32", nan, one) == F32_NAN
    assert one_of("min.xorsign.abs.f32", minus_one, 0x40000000) == minus_one


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_f64_directions_bracket_the_exact_result(direct: Direct, mode: str) -> None:
    a, b, c = (
        (inputs.random_words(f"f64/{i}", 2048) & np.uint64(0x801FFFFFFFFFFFFF))
        | np.uint64(0x3FE0000000000000)
        for i in range(3)
    )
    operands = [value.view(np.float64) for value in (a, b, c)]
    for name, count in (("add", 2), ("mul", 2), ("fma", 3), ("div", 2)):
        actual = direct.run(f"{name}.{mode}.f64", *(a, b, c)[:count]).view(np.float64)
        for i in range(2048):
            x, y, z = (Fraction(float(operand[i])) for operand in operands)
            exact = OPERATIONS[name](x, y, z)
            got = Fraction(float(actual[i]))
            above = Fraction(float(np.nextafter(actual[i], np.inf)))
            below = Fraction(float(np.nextafter(actual[i], -np.inf)))
            if mode == "rn":
                assert (below + got) / 2 <= exact <= (above + got) / 2
            elif mode == "rp" or (mode == "rz" and exact < 0):
                assert below < exact <= got
            else:
                assert got <= exact < above


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_arithmetic_is_the_exact_result_rounded_once(direct: Direct, kind: str) -> None:
    operands = [inputs.elements("half", kind, i, 3, 1 << 16) for i in range(3)]
    values = [decoded(kind)[operand] for operand in operands]
    with np.errstate(invalid="ignore", over="ignore"):
        results = {
            "mul.rn": values[0] * values[1],  # exact in double
            "add.rn": values[0] + values[1],  # exact for f16; within an odd-rounded bit for bf16
        }
    for name, exact in results.items():
        # A sum of two bf16 is exact in double unless one of them is negligible beside the other.
        # Then both the double and the bf16 result are the larger addend, which is no tie of bf16.
        actual = direct.run(f"{name}.{kind}", *operands[:2])
        assert_same(actual, rounded(kind, exact, "rn", False), *operands[:2])
    actual = direct.run(f"fma.rn.{kind}", *operands)
    checked = 0
    for i in range(0, 1 << 16, 16):
        a, b, c = (float(value[i]) for value in values)
        if not all(np.isfinite(x) for x in (a, b, c)):
            continue
        exact_sum = Fraction(a) * Fraction(b) + Fraction(c)
        near = float(exact_sum)
        if near == 0:
            continue
        if Fraction(near) != exact_sum:  # round to odd, so that the next rounding is right
            toward = near if abs(Fraction(near)) < abs(exact_sum) else np.nextafter(near, 0)
            near = float((np.float64(toward).view(np.uint64) | np.uint64(1)).view(np.float64))
        expected = rounded(kind, np.array([near]), "rn", False)[0]
        assert int(actual[i]) == int(expected), (a, b, c, hex(int(actual[i])), hex(int(expected)))
        checked += 1
    assert checked > 2500


def test_packed_halves_are_two_single_ones(direct: Direct) -> None:
    operands = [inputs.elements("packed", "f16x2", i, 3, 4096) for i in range(3)]
    low = [operand & np.uint64(0xFFFF) for operand in operands]
    high = [operand >> np.uint64(16) for operand in operands]
    for name, count in (("fma.rn.relu.{}", 3), ("add.rn.ftz.sat.{}", 2), ("max.NaN.{}", 2)):
        expected = direct.run(name.format("f16"), *high[:count]) << np.uint64(16)
        expected |= direct.run(name.format("f16"), *low[:count])
        assert_same(direct.run(name.format("f16x2"), *operands[:count]), expected)


APPROXIMATIONS: dict[str, Callable[[Floats], Floats]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


# The bounds in units of the last place. Where PTX promises less, PTX's bound.
DISTANCE = {"ex2": 2, "lg2": 2, "rcp": 1, "sqrt": 1, "rsqrt": 2, "tanh": 1 << 13}


@pytest.mark.parametrize("name", APPROXIMATIONS)
def test_approximations_stay_within_the_bounds_of_ptx(direct: Direct, name: str) -> None:
    bits = samples("f32", 1 << 14)
    if name in ("sin", "cos"):
        bits = bits[np.abs(f32_values(bits)) <= 6.2]
    values = f32_values(bits).astype(np.float64)
    with np.errstate(all="ignore"):
        exact = APPROXIMATIONS[name](values)
    actual = direct.run(f"{name}.approx.f32", bits)
    if name in ("sin", "cos"):
        assert np.all(np.abs(f32_values(actual).astype(np.float64) - exact) < 2.0**-20.5)
        return
    distance = np.abs(actual.astype(np.int64) - f32_bits(exact.astype(np.float32)).astype(np.int64))
    near = np.abs(f32_values(actual).astype(np.float64) - exact) < 2.0**-22  # lg2's bound near 1
    assert np.all((distance <= DISTANCE[name]) | (near if name == "lg2" else False))


HOT = {"fma.rn.f32": 3, "fma.rn.ftz.f32": 3, "ex2.approx.ftz.f32": 1, "cvt.rn.f16x2.f32": 2,
       "cvt.rn.bf16x2.f32": 2}  # fmt: skip


@pytest.mark.parametrize("name", HOT)
@pytest.mark.parametrize("avx2", [False, True], ids=["baseline", "avx2"])
def test_whole_warps_give_the_bits_of_single_values(direct: Direct, name: str, avx2: bool) -> None:
    count = HOT[name]
    operands = [inputs.elements(name, "f32", i, count, 1 << 16) for i in range(count)]
    expected = direct.run(name, *operands)
    try:
        if direct.set_avx2(avx2) != avx2:
            pytest.skip("this machine has no AVX2")
        assert_same(direct.warp(name, operands), expected, *operands)
    finally:
        direct.set_avx2(True)


def test_bit_fields(direct: Direct) -> None:
    a = inputs.elements("bits", "b32", 0, 3, 4096)
    start = inputs.random_words("bits/start", 4096) % np.uint64(48)
    length = inputs.random_words("bits/length", 4096) % np.uint64(48)
    unsigned = direct.run("bfe.u32", a, start, length)
    signed = direct.run("bfe.s32", a, start, length)
    inserted = direct.run("bfi.b32", a, a[::-1].copy(), start, length)
    for i in range(4096):
        value, s, n = int(a[i]), int(start[i]), int(length[i])
        field = (value >> s) & ((1 << n) - 1)
        assert int(unsigned[i]) == field
        sign = value >> min(s + n - 1, 31) & 1 if n else 0
        known = max(0, min(n, 32 - s))
        extended = field & ((1 << known) - 1) | (-sign << known)
        assert int(signed[i]) == extended & 0xFFFFFFFF
        mask = ((1 << n) - 1) << s & 0xFFFFFFFF
        expected = int(a[::-1][i]) & ~mask | (value << s) & mask
        assert int(inserted[i]) == expected


def test_permutes_shifts_and_tables(direct: Direct) -> None:
    a, b, c = (inputs.elements("permute", "b32", i, 3, 1024) for i in range(3))
    generic = direct.run("prmt.b32", a, b, c)
    left = direct.run("shf.l.wrap.b32", a, b, c)
    right = direct.run("shf.r.clamp.b32", a, b, c)
    table = inputs.random_words("table", 1024) & np.uint64(0xFF)
    logic = direct.run("lop3.b32", a, b, c, table)
    for i in range(1024):
        x, y, z, t = int(a[i]), int(b[i]), int(c[i]), int(table[i])
        source = (y << 32 | x).to_bytes(8, "little")
        picked = []
        for n in range(4):
            selector = z >> 4 * n & 0xF
            byte = source[selector & 7]
            picked.append((0xFF if byte & 0x80 else 0) if selector & 8 else byte)
        assert int(generic[i]) == int.from_bytes(bytes(picked), "little")
        both = y << 32 | x
        assert int(left[i]) == both << (z & 31) >> 32 & 0xFFFFFFFF
        assert int(right[i]) == both >> min(z, 32) & 0xFFFFFFFF
        expected = 0
        for bit in range(32):
            index = (x >> bit & 1) << 2 | (y >> bit & 1) << 1 | (z >> bit & 1)
            expected |= (t >> index & 1) << bit
        assert int(logic[i]) == expected
