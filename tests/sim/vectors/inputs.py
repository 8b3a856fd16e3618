"""Inputs of the silicon vectors. They are made from names and a fixed seed, so none is stored.

Every value is raw bits. Random numbers come from a counter-based generator written out here,
because NumPy's own streams may change between versions.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

SEED = "archflash silicon vectors 1"

F32_SPECIALS = [
    0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345,
    0x7F800001, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000, 0x7F7FFFFF,
    0xFF7FFFFF, 0x3F000000, 0xBF000000, 0x3FC00000, 0x40200000, 0xC0200000, 0x3F7FFFFF, 0x3F800001,
    # numbers in 2^-149 .. 2^-126, whose squares underflow; 2^-63, 2^-64; 2^63, 2^64, neighbours
    0x00400000, 0x80400001, 0x20000000, 0x1F800000, 0x5F000000, 0x5EFFFFFF, 0xDF000000, 0xDF000001,
    0x5F800000, 0x5F7FFFFF, 0x4F000000, 0x4EFFFFFF, 0xCF000000, 0xCF000001, 0x4F800000, 0x4F7FFFFF,
    # 65504, 65519.996, 65520, 65536; 2^-14, 2^-24, 2^-25 and neighbours: the edges of f16
    0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x38800000, 0x387FC000, 0x33800000, 0x33000000,
    0x33000001, 0x387FE000, 0xC77FF000, 0xB3000000,
    # bf16: ties above and below, and the value that rounds to infinity
    0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7F7FFF, 0x7F7F8000, 0xFF7F8000, 0x00008000, 0x00018000,
    # 448, 464, 464.0001, 480: the edge of e4m3; 2^-9, 2^-10, 2^-6
    0x43E00000, 0x43E80000, 0x43E80001, 0x43F00000, 0x3B000000, 0x3A800000, 0x3A800001, 0x3C800000,
    # 57344, 61440, 61441: the edge of e5m2; 2^-16, 2^-17
    0x47600000, 0x47700000, 0x47700100, 0x37800000, 0x37000000, 0x37000001,
    # integers' edges: 127.5, 128, 255.5, 256, 32767.5, 65535.5, -128.5, -32768.5, 0.49999997
    0x42FF0000, 0x43000000, 0x437F8000, 0x43800000, 0x46FFFF00, 0x477FFF80, 0xC3008000, 0xC7000080,
    0x3EFFFFFF, 0xBEFFFFFF, 0x4B000001, 0x4A800001,
    # ex2's and lg2's edges: 127.99999, 128, -125.5, -126, -126.5, -149, -149.5, -150
    0x42FFFFFF, 0xC2FB0000, 0xC2FC0000, 0xC2FD0000, 0xC3150000, 0xC3158000, 0xC3160000, 0x34000000,
    # tf32 ties
    0x3F801000, 0x3F803000, 0x3F800FFF, 0x7F7FF000, 0x7F7FEFFF,
]  # fmt: skip

F64_SPECIALS = [
    0x0000000000000000, 0x8000000000000000, 0x3FF0000000000000, 0xBFF0000000000000,
    0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0xFFF8000000012345,
    0x7FF0000000000001, 0x0000000000000001, 0x800FFFFFFFFFFFFF, 0x0010000000000000,
    0x7FEFFFFFFFFFFFFF, 0x3FE0000000000000, 0xBFE0000000000000, 0x3FF8000000000000,
    0x4004000000000000, 0x43E0000000000000, 0x43DFFFFFFFFFFFFF, 0xC3E0000000000000,
    0xC3E0000000000001, 0x43F0000000000000, 0x43EFFFFFFFFFFFFF, 0x41E0000000000000,
    0x41DFFFFFFFC00000, 0xC1E0000000200000, 0x41F0000000000000, 0x41EFFFFFFFF00000,
    # the edges of f32, f16 and bf16 as doubles, and ties that rounding to f32 first would lose
    0x47EFFFFFEFFFFFFF, 0x47EFFFFFF0000000, 0x36A0000000000000, 0x3690000000000000,
    0x3690000000000001, 0x380FFFFFE0000000, 0x40EFFC0000000000, 0x40EFFDFFFFFFFFFF,
    0x40EFFE0000000000, 0x3E60000000000000, 0x3E60000000000001, 0x3FF0020000000000,
    0x3FF0020000000001, 0x3FF001FFFFFFFFFF, 0x3FF0000010000000, 0x3FF0000010000001,
    0x3FF0100000000000, 0x3FF0100000000001, 0x3CA0000000000000, 0x405FE00000000000,
]  # fmt: skip

F16_SPECIALS = [
    0x0000, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 0x7FF7, 0x0001, 0x8001,
    0x03FF, 0x83FF, 0x0400, 0x8400, 0x7BFF, 0xFBFF, 0x3800, 0xB800, 0x3E00, 0x4100, 0x3BFF, 0x3C01,
    0x5BF0, 0x7800, 0x2000, 0xA000, 0x0200, 0x4900, 0xC900, 0x7FFF,
]  # fmt: skip

BF16_SPECIALS = [
    0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x7FF7, 0x0001, 0x8001,
    0x007F, 0x807F, 0x0080, 0x8080, 0x7F7F, 0xFF7F, 0x3F00, 0xBF00, 0x3FC0, 0x4020, 0x3F7F, 0x3F81,
    0x4B80, 0x2000, 0x9F80, 0x5F00, 0x0040, 0x42C8, 0xC2FC, 0x7FFF,
]  # fmt: skip

INTEGER_SPECIALS = [0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256]

# Element types of matrices: bits, mantissa bits, exponent bias.
FLOAT_LAYOUTS = {
    "f16": (16, 10, 15),
    "bf16": (16, 7, 127),
    "tf32": (32, 23, 127),  # as float: the tensor core drops the low bits itself
    "f32": (32, 23, 127),
    "f64": (64, 52, 1023),
    "e4m3": (8, 3, 7),
    "e5m2": (8, 2, 15),
}
MATRIX_SPECIALS = {
    "f16": [0x7C00, 0xFC00, 0x7E00, 0x0001, 0x83FF, 0x8000, 0x7BFF, 0xFBFF],
    "bf16": [0x7F80, 0xFF80, 0x7FC0, 0x0001, 0x807F, 0x8000, 0x7F7F, 0xFF7F],
    "tf32": [0x7F800000, 0xFF800000, 0x7FC00000, 0x00000001, 0x807FFFFF, 0x80000000, 0x7F7FFFFF,
             0x7F801000],
    "f32": [0x7F800000, 0xFF800000, 0x7FC00000, 0x00000001, 0x807FFFFF, 0x80000000, 0x7F7FFFFF,
            0xFF7FFFFF],
    "f64": [0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, 1, 0x800FFFFFFFFFFFFF, 1 << 63,
            0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF],
    "e4m3": [0x7F, 0xFF, 0x7E, 0xFE, 0x01, 0x87, 0x80, 0x08],
    "e5m2": [0x7C, 0xFC, 0x7F, 0x7B, 0xFB, 0x01, 0x83, 0x80],
}  # fmt: skip


def random_words(key: str, count: int) -> Words:
    """``count`` random 64-bit words that depend on ``key`` alone (SplitMix64 over a counter)."""
    digest = hashlib.sha256(f"{SEED}/{key}".encode()).digest()
    start = np.uint64(int.from_bytes(digest[:8], "little"))
    with np.errstate(over="ignore"):
        state = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)), dtype=np.uint64)


def _below(words: Words, limit: int) -> Words:
    """Each word reduced to 0 .. limit - 1 by its high bits (limit at most 2^31)."""
    scaled = (words >> np.uint64(33)) * np.uint64(limit)
    return np.asarray(scaled >> np.uint64(31), dtype=np.uint64)


def _floats(key: str, count: int, layout: tuple[int, int, int], low: int, high: int) -> Words:
    """Random sign and mantissa, exponent uniform in low .. high (clamped to normal numbers)."""
    bits, mantissa_bits, bias = layout
    words = random_words(key, count)
    low = max(low, 1 - bias)
    high = min(high, (1 << (bits - 1 - mantissa_bits)) - 2 - bias)
    exponent = _below(random_words(key + "/exponent", count), high - low + 1)
    field = exponent + np.uint64(low + bias)
    sign = words >> np.uint64(63)
    mantissa = words & np.uint64((1 << mantissa_bits) - 1)
    value = sign << np.uint64(bits - 1) | field << np.uint64(mantissa_bits) | mantissa
    return np.asarray(value, dtype=np.uint64)


def _specials(kind: str) -> list[int]:
    if kind == "f32":
        return F32_SPECIALS
    if kind == "f64":
        return F64_SPECIALS
    if kind in ("f16", "f16x2"):
        return F16_SPECIALS
    if kind in ("bf16", "bf16x2"):
        return BF16_SPECIALS
    bits = int(kind[1:])
    edges = [(1 << (bits - 1)) + step for step in (-1, 0, 1)] + [(1 << bits) - 1, (1 << bits) - 2]
    halves = [(1 << (bits // 2)) + step for step in (-1, 0, 1)]
    small = [value for value in INTEGER_SPECIALS if value < 1 << bits]
    return list(dict.fromkeys(small + edges + halves))


def _width(kind: str) -> int:
    return 32 if kind.endswith("x2") else int(kind.lstrip("abcdefghijklmnopqrstuvwxyz"))


def elements(key: str, kind: str, operand: int, operand_count: int, count: int) -> Words:
    """Operand ``operand`` of ``count`` elementwise inputs.

    The first quarter of the first 512 (all of them for one operand) are special values, in
    combinations where there are several operands; of the rest a third is uniform in the bits, a
    third of moderate size and a third close to a rounding boundary.

    Args:
        key: Names the case.
        kind: ``f32``, ``f64``, ``f16``, ``bf16``, ``f16x2``, ``bf16x2`` or ``b8`` .. ``b64``.
        operand: Its index, 0 .. operand_count - 1.
        operand_count: How many operands the case has.
        count: Elements wanted, a multiple of 32.

    Returns:
        Raw bits, (count,), uint64.
    """
    if operand_count == 1 and _width(kind) <= 16 and count >= 1 << 16:
        return np.arange(count, dtype=np.uint64) & np.uint64(0xFFFF)  # every input
    name = f"{key}/{operand}"
    if kind.endswith("x2"):
        single = kind[:-2]
        lower = _single(name + "/lower", single, operand, operand_count, count)
        upper = _single(name + "/upper", single, operand, operand_count, count)
        return upper << np.uint64(16) | lower
    return _single(name, kind, operand, operand_count, count)


def _single(name: str, kind: str, operand: int, operand_count: int, count: int) -> Words:
    width = _width(kind)
    mask = np.uint64((1 << width) - 1)
    values = random_words(name, count) & mask
    if kind in FLOAT_LAYOUTS:
        moderate = _floats(name + "/moderate", count, FLOAT_LAYOUTS[kind], -6, 6)
        third = np.arange(count) % 3
        values = np.where(third == 1, moderate, values)
        # Low bits that are all ones or all zeros, plus or minus one: near ties of narrower formats.
        edge = _floats(name + "/edge", count, FLOAT_LAYOUTS[kind], -20, 17)
        keep = _below(random_words(name + "/keep", count), FLOAT_LAYOUTS[kind][1])
        cut = (edge >> keep) << keep
        step = _below(random_words(name + "/step", count), 3)
        values = np.where(third == 2, (cut + step - np.uint64(1)) & mask, values)
    elif width > 8:
        small = _below(random_words(name + "/small", count), 80)
        values = np.where(np.arange(count) % 4 == 3, small, values)
    specials = np.array(_specials(kind), dtype=np.uint64)
    if operand_count == 1:
        prefix = min(count, len(specials))
        values[:prefix] = specials[:prefix]
    else:
        prefix = min(count, 256)
        pick = _below(random_words(name + "/pick", prefix), len(specials))
        values[:prefix] = specials[pick.astype(np.int64)]
        if operand_count == 2:  # all pairs of the first sixteen
            index = np.arange(prefix)
            values[:prefix] = specials[index % 16 if operand == 0 else index // 16]
    return values


# What the elements of a matrix case are like, warp by warp in turn: of similar size; of widely
# different sizes; of similar size, with a C so large that low bits of the products are cut off; of
# similar size, with a few special values.
MATRIX_KINDS = ("moderate", "wide", "large C", "special")


def matrix_register(key: str, element: str, warps: int, accumulator: bool) -> Words:
    """One register of a fragment: ``warps`` * 32 lanes of packed elements.

    Args:
        key: Names the case and the register.
        element: The element's type, as in the instruction.
        warps: Warp w has values of kind MATRIX_KINDS[w % 4].
        accumulator: Whether this is a register of C.

    Returns:
        Raw bits, (warps * 32,), uint64.
    """
    count = warps * 32
    if element in ("s8", "u8", "s4", "u4", "b1"):
        return random_words(key, count) & np.uint64(0xFFFFFFFF)
    if element == "s32":  # in every other warp the values are close to where .satfinite clamps
        words = random_words(key, count)
        near = np.uint64(0x7FFFF000) ^ ((words >> np.uint64(63)) * np.uint64(0xFFFFFFFF))
        small = words & np.uint64(0xFFFF)
        return np.where(np.arange(count) // 32 % 2 == 0, small, near)
    layout = FLOAT_LAYOUTS[element]
    width = layout[0]
    warp_kind = np.arange(count) // 32 % len(MATRIX_KINDS)
    packed = np.zeros(count, dtype=np.uint64)
    for index in range(max(1, 32 // width)):
        name = f"{key}/{index}"
        specials = np.array(MATRIX_SPECIALS[element], dtype=np.uint64)
        choice = random_words(name + "/special", count)
        special = specials[_below(choice, len(specials)).astype(np.int64)]
        large = (9, 14) if accumulator else (0, 0)
        value = _floats(name, count, layout, -2, 1)
        value = np.where(warp_kind == 1, _floats(name + "/wide", count, layout, -12, 10), value)
        value = np.where(warp_kind == 2, _floats(name + "/large", count, layout, *large), value)
        value = np.where((warp_kind == 3) & (choice % np.uint64(32) == 0), special, value)
        packed |= value << np.uint64(width * index)
    return packed


def edge_register(key: str, element: str, warps: int, accumulator: bool) -> Words:
    """Like matrix_register, with floating-point values that test the edges of summation.

    Warps are of four kinds in turn: most elements of A and B are zeros and C is small; A and B are
    zeros and C is small or zero; all values are as small as the type allows; all are as large.
    """
    count = warps * 32
    layout = FLOAT_LAYOUTS[element]
    width, mantissa_bits, bias = layout
    warp_kind = np.arange(count) // 32 % 4
    packed = np.zeros(count, dtype=np.uint64)
    for index in range(max(1, 32 // width)):
        name = f"{key}/{index}"
        words = random_words(name + "/choice", count)
        zero = (words >> np.uint64(63)) << np.uint64(width - 1)  # of either sign
        choice = words % np.uint64(4)
        least = 1 - bias
        small = _floats(name + "/small", count, layout, max(-30, least), max(-16, least + 4))
        moderate = _floats(name + "/moderate", count, layout, -3, 9)
        value = small if accumulator else np.where(choice == 0, moderate, zero)
        other = np.where(choice < 2, small, zero) if accumulator else zero
        value = np.where(warp_kind == 1, other, value)
        # A and B with the exponents of float32 start at 2^-75: their products are as small as C's
        # smallest numbers.
        low = -75 if bias == 127 and not accumulator else least
        tiny = _floats(name + "/tiny", count, layout, low, low + 12)
        mantissa = tiny & np.uint64((1 << mantissa_bits) - 1)
        subnormal = zero | mantissa
        value = np.where(warp_kind == 2, np.where(choice == 0, subnormal, tiny), value)
        high = bias if accumulator else 62 if bias == 127 else 8
        large = _floats(name + "/huge", count, layout, high - 6, high)
        value = np.where(warp_kind == 3, large, value)
        packed |= value << np.uint64(width * index)
    return packed
