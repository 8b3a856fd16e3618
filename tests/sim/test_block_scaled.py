"""mma.sync with block scales and with 8, 6 and 4 bits, against float64 and a model of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from archflash import LaunchError, sim

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Bits of the fraction and the exponent, the bias, and an element's first bit in its byte.
FORMATS = {
    "e4m3": (3, 4, 7, 0), "e5m2": (2, 5, 15, 0), "e3m2": (2, 3, 3, 0), "e2m3": (3, 2, 1, 0),
    "e2m1": (1, 2, 1, 2), "e2m1-packed": (1, 2, 1, 0),
}  # fmt: skip
DEVICE = "RTX 5090"


def decode(kind: str, codes: Ints) -> tuple[Floats, Ints]:
    """Values of elements, and their exponents as a tensor core sees them."""
    fraction_bits, exponent_bits, bias, first = FORMATS[kind]
    bits = codes >> first & ((1 << (1 + exponent_bits + fraction_bits)) - 1)
    field = bits >> fraction_bits & ((1 << exponent_bits) - 1)
    fraction = bits & ((1 << fraction_bits) - 1)
    exponent = np.maximum(field, 1) - bias
    significand = (fraction + np.where(field > 0, 1 << fraction_bits, 0)) / 2.0**fraction_bits
    value = np.ldexp(significand, exponent)
    if kind == "e4m3":
        value = np.where((field == 15) & (fraction == 7), np.nan, value)
    if kind == "e5m2":
        value = np.where(field == 31, np.where(fraction == 0, np.inf, np.nan), value)
    sign = np.where(bits >> (exponent_bits + fraction_bits) & 1, -1.0, 1.0)
    return sign * value, exponent


def scale(kind: str, codes: Ints) -> tuple[Floats, Ints]:
    """Significands of block scales, NaN for those that are, and their exponents."""
    if kind == "ue8m0":
        return np.where(codes == 255, np.nan, 1.0), codes - 127
    value, exponent = decode("e4m3", codes & 0x7F)
    return np.ldexp(value, -exponent), exponent


@dataclass(frozen=True)
class Form:
    """An instruction. `scales` is how many a row has; 0: it has no block scales."""

    kind: str
    a: str
    b: str
    scales: int = 0
    scale: str = ""
    vector: str = ""  # the modifier .scale_vec, "" where it is left out
    accumulator: str = "f32"
    shape_first: bool = False

    @property
    def k(self) -> int:
        return 64 if "f4" in self.kind and "f8" not in self.kind else 32

    @property
    def name(self) -> str:
        kind = f"kind::{self.kind}" + (".block_scale" + self.vector if self.scales else "")
        shape = f"m16n8k{self.k}.row.col"
        first = f"{shape}.{kind}" if self.shape_first else f"{kind}.{shape}"
        types = f"{self.accumulator}.{self.a}.{self.b}.{self.accumulator}"
        return f"mma.sync.aligned.{first}.{types}" + (f".{self.scale}" if self.scales else "")


BYTES = ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"]
PAIRS = [*((x, x) for x in BYTES), *zip(BYTES, BYTES[1:] + BYTES[:1], strict=True)]
VECTOR = {1: ".scale_vec::1X", 2: ".scale_vec::2X", 4: ".scale_vec::4X"}
SCALED = [
    *(Form("mxf8f6f4", a, b, 1, "ue8m0", VECTOR[1]) for a, b in PAIRS),
    Form("mxf8f6f4", "e4m3", "e5m2", 1, "ue8m0", "", shape_first=True),
    Form("mxf4", "e2m1", "e2m1", 2, "ue8m0", VECTOR[2]),
    Form("mxf4", "e2m1", "e2m1", 2, "ue8m0", "", shape_first=True),
    Form("mxf4nvf4", "e2m1", "e2m1", 2, "ue8m0", VECTOR[2]),
    Form("mxf4nvf4", "e2m1", "e2m1", 4, "ue4m3", VECTOR[4]),
]
PLAIN = [
    Form("f8f6f4", a, b, accumulator=accumulator, shape_first=accumulator == "f16")
    for a, b in PAIRS
    for accumulator in ("f32", "f16")
]


def program(form: Form, selectors: tuple[str, str]) -> sim.Program:
    """Every lane loads 16 words of `words`, 32 words each, and stores its four words of D."""
    count = 4 if form.accumulator == "f32" else 2
    d, c = (",".join(f"%{x}{i}" for i in range(count)) for x in "dc")
    scales = f", %a4, {selectors[0]}, %b2, {selectors[1]}" if form.scales else ""
    words = ["a0", "a1", "a2", "a3", "b0", "b1", "c0", "c1", "c2", "c3", "a4", "b2"]
    loads = "\n".join(f"ld.global.b32 %{w}, [%x+{128 * i}];" for i, w in enumerate(words))
    stores = "\n".join(f"st.global.b32 [%y+{128 * i}], %d{i};" for i in range(count))
    return sim.load(f"""
.version 8.8
.target sm_120a
.address_size 64
.visible .entry product(.param .u64 words, .param .u64 out)
{{
.reg .b16 %h<4>;
.reg .b32 %t, %l, %a<5>, %b<3>, %c<4>, %d<4>;
.reg .b64 %x, %y;
ld.param.u64 %x, [words];
ld.param.u64 %y, [out];
mov.u32 %t, %tid.x;
mad.wide.u32 %x, %t, 4, %x;
mad.wide.u32 %y, %t, 4, %y;
{loads}
cvt.u16.u32 %h0, %c3;
shr.u32 %l, %t, 4;
cvt.u16.u32 %h1, %l;
mov.u16 %h2, 1;
mov.u16 %h3, 9;
{form.name} {{{d}}}, {{%a0,%a1,%a2,%a3}}, {{%b0,%b1}}, {{{c}}}{scales};
{stores}
ret;
}}
""")


def run(form: Form, words: Ints, selectors: tuple[str, str] = ("{0, 0}", "{0, 0}")) -> Ints:
    """The words of D, (4, 32)."""
    source = torch.from_numpy(words.astype(np.uint32).view(np.int32))
    out = torch.zeros(4, 32, dtype=torch.int32)
    sim.launch(program(form, selectors), "product", [source, out], block=(32,), device=DEVICE)
    return out.numpy().view(np.uint32).astype(np.int64)


def elements(form: Form, words: Ints, which: str) -> Ints:
    """The codes of A (16, k) or B (8, k), after the ISA's figures."""
    registers = words[0:4] if which == "A" else words[4:6]
    per_word = 8 if form.k == 64 else 4
    found = np.full((16 if which == "A" else 8, form.k), -1, np.int64)
    for j, register in enumerate(registers):
        for lane in range(32):
            for i in range(per_word):
                code = register[lane] >> 32 // per_word * i & (1 << 32 // per_word) - 1
                block, half = (j // 2, j % 2) if which == "A" else (j, 0)
                column = block * form.k // 2 + lane % 4 * per_word + i
                found[lane // 4 + 8 * half, column] = code
    assert (found >= 0).all()
    return found


def scales_of(form: Form, words: Ints, which: str, byte: int, thread: int) -> Ints:
    """The codes of the scales, (16, scales) or (8, scales)."""
    register = words[10] if which == "A" else words[11]
    lanes = (
        [row % 8 * 4 + 2 * thread + row // 8 for row in range(16)]
        if which == "A"
        else [column * 4 + thread for column in range(8)]
    )
    found = [[register[x] >> 8 * (byte + i) & 255 for i in range(form.scales)] for x in lanes]
    return np.array(found, np.int64)


def accumulators(form: Form, words: Ints) -> Floats:
    """C or D, (16, 8), of registers (n, 32)."""
    found = np.empty((16, 8))
    for lane in range(32):
        for i in range(4):
            row, column = lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2
            if form.accumulator == "f32":
                bits = np.array(words[i, lane], np.uint32)
                found[row, column] = bits.view(np.float32)
            else:
                bits = np.array(words[i // 2, lane] >> 16 * (i % 2) & 0xFFFF, np.uint16)
                found[row, column] = bits.view(np.float16)
    return found


def toward_zero(values: Floats) -> Floats:
    """As float32, cut off."""
    with np.errstate(over="ignore"):
        nearest = values.astype(np.float32)
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(values)
    cut = np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)
    return np.where(np.abs(values) >= 2.0**128, np.copysign(np.inf, values), cut.astype(float))


def model(form: Form, words: Ints, selected: tuple[int, int, int, int]) -> Floats:
    """D in one addition: terms are cut off below the largest exponent among them."""
    packed = "-packed" if form.k == 64 else ""
    a, a_exponent = decode(form.a + packed, elements(form, words, "A"))
    b, b_exponent = decode(form.b + packed, elements(form, words, "B"))
    c = accumulators(form, words[6:10])
    with np.errstate(divide="ignore", invalid="ignore"):
        c_exponent = np.where(c == 0, -500, np.maximum(np.frexp(c)[1] - 1, -126))
        terms = a[:, None, :] * b[None, :, :]
    exponents = a_exponent[:, None, :] + b_exponent[None, :, :]
    nothing = (a == 0)[:, None, :] | (b == 0)[None, :, :]
    bits = 25
    if form.scales:
        sa, sa_exponent = scale(form.scale, scales_of(form, words, "A", *selected[:2]))
        sb, sb_exponent = scale(form.scale, scales_of(form, words, "B", *selected[2:]))
        both = sa[:, None, :] * sb[None, :, :]
        both_exponents = sa_exponent[:, None, :] + sb_exponent[None, :, :]
        if form.k == 64:  # 16 products have one exponent, that of their scales
            bits = 35
            share = 4 // form.scales
            terms = terms.reshape(16, 8, 4, 16).sum(-1) * both.repeat(share, -1)
            exponents, nothing = both_exponents.repeat(share, -1), np.zeros(1, bool)
            terms = np.ldexp(terms, exponents)
        else:
            terms = np.ldexp(terms * both, both_exponents)
            exponents = exponents + both_exponents
    exponents = np.where(nothing, -500, exponents)
    largest = np.maximum(exponents.max(-1), c_exponent)
    finite = np.isfinite(terms).all(-1) & np.isfinite(c)
    with np.errstate(invalid="ignore"):
        units = np.where(finite[..., None], np.ldexp(terms, (bits - largest)[..., None]), 0)
        total = np.trunc(units).sum(-1)
        total += np.trunc(np.where(finite, np.ldexp(c, bits - largest), 0))
        total = np.ldexp(total, largest - bits)
        whole = terms.sum(-1) + c
    return np.where(finite, toward_zero(total), whole)


def registers(seed: int, form: Form, exact: bool) -> Ints:
    """Random registers. `exact`: scales and C are such that float64 has every sum."""
    draw = np.random.default_rng(seed)
    words: Ints = draw.integers(0, 1 << 32, (12, 32), np.int64)
    numbers = (draw.integers(-64, 65, (4, 32)) / 4.0).astype(np.float32)
    if not exact:
        numbers *= np.exp2(draw.integers(-30, 31, (4, 32))).astype(np.float32)
    words[6:10] = numbers.view(np.uint32)
    if form.accumulator == "f16":
        words[6:8] = numbers[:2].astype(np.float16).view(np.uint16).astype(np.int64) * 0x10001
    middle, spread = (127, 6) if form.scale == "ue8m0" else (56, 24)
    for i in (10, 11):
        codes = draw.integers(middle - spread, middle + spread + 1, (4, 32))
        words[i] = (codes << 8 * np.arange(4)[:, None]).sum(0)
    return words


@pytest.mark.parametrize("form", SCALED, ids=lambda form: form.name.split("aligned.")[1])
def test_scaled_products_have_the_models_bits(form: Form) -> None:
    step = form.scales
    for seed in range(4):
        selected = (seed * step % 4, seed % 2, (seed + 1) * step % 4, seed)
        words = registers(seed, form, exact=False)
        if seed == 3:  # any scales, NaN among them
            words[10:12] = np.random.default_rng(9).integers(0, 1 << 32, (2, 32), np.int64)
        selectors = (f"{{{selected[0]}, {selected[1]}}}", f"{{{selected[2]}, {selected[3]}}}")
        result = accumulators(form, run(form, words, selectors))
        np.testing.assert_array_equal(result, model(form, words, selected))
        assert np.isfinite(result).any() or seed == 3


@pytest.mark.parametrize("form", SCALED, ids=lambda form: form.name.split("aligned.")[1])
def test_scaled_products_are_those_of_float64(form: Form) -> None:
    words = registers(7, form, exact=True)
    # Elements of at most four bits besides the sign, so that each product counts.
    if form.k == 32:
        kinds = [form.a] * 4 + [form.b] * 2
        for i, kind in enumerate(kinds):
            small = {"e4m3": 0x8F8F8F8F | 0x30303030, "e5m2": 0xBFBFBFBF}.get(kind, 0xFFFFFFFF)
            words[i] &= small
    packed = "-packed" if form.k == 64 else ""
    a, _ = decode(form.a + packed, elements(form, words, "A"))
    b, _ = decode(form.b + packed, elements(form, words, "B"))
    share = form.k // form.scales
    for operand, which in ((a, "A"), (b, "B")):
        significand, exponent = scale(form.scale, scales_of(form, words, which, 0, 0))
        operand *= np.ldexp(significand, exponent).repeat(share, -1)
    c = accumulators(form, words[6:10])
    expected, magnitude = a @ b.T + c, np.abs(a) @ np.abs(b).T + np.abs(c)
    result = accumulators(form, run(form, words))
    assert (np.abs(result - expected) <= 2.0**-19 * magnitude).all()


@pytest.mark.parametrize("form", PLAIN, ids=lambda form: form.name.split("aligned.")[1])
def test_products_of_fewer_bits(form: Form) -> None:
    words = registers(3, form, exact=True)
    result = accumulators(form, run(form, words))
    if form.accumulator == "f32":
        np.testing.assert_array_equal(result, model(form, words, (0, 0, 0, 0)))
        return
    a, _ = decode(form.a, elements(form, words, "A"))
    b, _ = decode(form.b, elements(form, words, "B"))
    c = accumulators(form, words[6:10])
    with np.errstate(invalid="ignore", over="ignore"):
        expected, magnitude = a @ b.T + c, np.abs(a) @ np.abs(b).T + np.abs(c)
        clear = np.isfinite(magnitude) & (magnitude < 60000)
        assert (np.abs(result - expected) <= 2.0**-10 * magnitude)[clear].all()
    assert clear.any() or {form.a, form.b} & {"e4m3", "e5m2"}


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_scales_of_one_give_the_bits_of_the_plain_product(kind: str) -> None:
    """Where the instruction is emulated (10.x) and where it is not."""
    scaled = Form("mxf8f6f4", kind, kind, 1, "ue8m0", VECTOR[1])
    for seed in range(8):
        words = registers(seed, scaled, exact=False)
        words[10:12] = 0x7F7F7F7F
        np.testing.assert_array_equal(run(scaled, words), run(Form("f8f6f4", kind, kind), words))


def test_selectors_may_be_registers() -> None:
    form = SCALED[0]
    words = registers(1, form, exact=True)
    result = accumulators(form, run(form, words, ("{%h2, %h2}", "{3, %h2}")))
    np.testing.assert_array_equal(result, model(form, words, (1, 1, 3, 1)))


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ("{%h1, 0}", "the byte-id of matrix A is 1"),  # lanes differ
        ("{%h3, 0}", "the byte-id of matrix A is 9: one of 0 to 3"),
        ("{0, %h3}", "the thread-id of matrix A is 9: one of 0 to 1"),
    ],
)
def test_a_wrong_selector_is_found(selector: str, words: str) -> None:
    form = SCALED[0]
    with pytest.raises(sim.SimulationError, match=f"block-scale: {words}"):
        run(form, registers(1, form, exact=True), (selector, "{0, 0}"))


@pytest.mark.parametrize(
    ("form", "selectors", "words"),
    [
        (SCALED[0], ("{4, 0}", "{0, 0}"), "a byte-id or thread-id of 4"),
        (SCALED[0], ("{0, 2}", "{0, 0}"), "a byte-id or thread-id of 2"),
        (SCALED[-2], ("{0, 0}", "{1, 0}"), "a byte-id or thread-id of 1"),
        (SCALED[-1], ("{0, 0}", "{2, 0}"), "a byte-id or thread-id of 2"),
        (SCALED[0], ("0", "{0, 0}"), "{byte-id, thread-id}"),
        (Form("mxf4nvf4", "e2m1", "e2m1", 4, "ue4m3", ""), ("{0, 0}", "{0, 0}"), "scale_vec"),
        (Form("mxf4", "e2m1", "e2m1", 4, "ue4m3", VECTOR[4]), ("{0, 0}", "{0, 0}"), "no such"),
        (Form("mxf4nvf4", "e2m1", "e2m1", 2, "ue4m3", VECTOR[2]), ("{0, 0}",) * 2, "no such"),
        (Form("mxf8f6f4", "e4m3", "e4m3", 2, "ue8m0", VECTOR[2]), ("{0, 0}",) * 2, "no such"),
        (Form("mxf8f6f4", "e4m3", "e4m3", 1, "ue4m3", VECTOR[1]), ("{0, 0}",) * 2, "no such"),
    ],
)
def test_what_ptxas_refuses_does_not_load(
    form: Form, selectors: tuple[str, str], words: str
) -> None:
    with pytest.raises(LaunchError, match=re.escape(words)):
        program(form, selectors)
