"""The silicon vectors' programs: one instruction each, as PTX text with its inputs.

A program's kernel takes a pointer for each input and each output buffer; thread i reads element i
of every input, executes the instruction once and writes element i of every output. The same text
runs on a GPU (record.py) and on the simulator.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from . import inputs
from .inputs import Words

BLOCK = 128
ELEMENTWISE_COUNT = 1 << 16
WARPS_OF_COLLECTIVES = 32
WARPS_OF_MATRICES = 64
PTX_VERSION = "8.7"


@dataclass(frozen=True)
class Operand:
    """A buffer of the kernel: ``bits`` of each element and the register type that holds it."""

    bits: int  # 8, 16, 32 or 64
    register: str  # b16, b32, b64, f32, f64

    @property
    def bytes(self) -> int:
        return self.bits // 8


B8 = Operand(8, "b32")
B16 = Operand(16, "b16")
B32 = Operand(32, "b32")
B64 = Operand(64, "b64")
F32 = Operand(32, "f32")
F64 = Operand(64, "f64")


@dataclass(frozen=True)
class Bound:
    """How far the simulator's result may be from the card's. One of the two bounds must hold.

    A NaN must be NaN in both results, and an infinity the same infinity.

    Attributes:
        ulp: The largest distance in steps between representable numbers.
        absolute: The largest distance of the values.
    """

    ulp: int = 0
    absolute: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.ulp} ulp"] if self.ulp else []
        if self.absolute:
            parts.append(f"2^{np.log2(self.absolute):g} absolute")
        return " or ".join(parts)


@dataclass(frozen=True)
class Program:
    """One instruction under test.

    Attributes:
        family: The group whose results are stored together.
        name: The instruction as PTX spells it; unique within the family.
        target: The lowest target that has it, ``sm_80``, ``sm_89`` or ``sm_90``.
        body: The lines that compute outputs ``%y0..`` from inputs ``%x0..`` (and ``%lane``).
        reads: The input buffers.
        writes: The output buffers.
        count: Threads, a multiple of BLOCK.
        explicit: How many elements from the start are stored; a hash covers all ``count``.
        bound: How far the simulator may be off; None if it must give the same bits.
        elements: The type of each element of the results, as in the instruction.
        shared_bytes: Static shared memory of a block, named ``tile``, 0 for none.
        make: Makes input buffer i: raw bits, (count,), uint64.
    """

    family: str
    name: str
    target: str
    body: tuple[str, ...]
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    count: int
    explicit: int
    make: Callable[[int], Words]
    bound: Bound | None = None
    shared_bytes: int = 0
    elements: str = ""

    @property
    def key(self) -> str:
        """The program's name in the recorded data."""
        return f"{self.family}/{self.name}"

    def input(self, index: int) -> Words:
        """Input buffer ``index``: raw bits, (count,), uint64."""
        values = self.make(index)
        return values & np.uint64((1 << self.reads[index].bits) - 1)

    def ptx(self) -> str:
        """The program's text, with one kernel named ``vector``."""
        parameters = [f"in{i}" for i in range(len(self.reads))]
        parameters += [f"out{i}" for i in range(len(self.writes))]
        lines = [f".version {PTX_VERSION}", f".target {self.target}", ".address_size 64", ""]
        lines.append(".visible .entry vector(")
        lines.append(",\n".join(f"    .param .u64 {name}" for name in parameters))
        lines += [")", "{", "    .reg .b32 %block, %thread, %element, %lane;", "    .reg .pred %p;"]
        lines.append("    .reg .b64 %base, %offset;")
        for prefix, operands in (("x", self.reads), ("y", self.writes)):
            for i, operand in enumerate(operands):
                lines.append(f"    .reg .{operand.register} %{prefix}{i};")
        if self.shared_bytes:
            lines.append(f"    .shared .align 128 .b8 tile[{self.shared_bytes}];")
        lines += [
            "    mov.u32 %block, %ctaid.x;",
            "    mov.u32 %thread, %tid.x;",
            f"    mad.lo.u32 %element, %block, {BLOCK}, %thread;",
            "    and.b32 %lane, %thread, 31;",
        ]
        for i, operand in enumerate(self.reads):
            lines += _address(f"in{i}", operand)
            lines.append(f"    ld.global.{_memory_type(operand)} %x{i}, [%base];")
        lines += [f"    {line}" for line in self.body]
        for i, operand in enumerate(self.writes):
            lines += _address(f"out{i}", operand)
            lines.append(f"    st.global.{_memory_type(operand)} [%base], %y{i};")
        lines += ["    ret;", "}", ""]
        return "\n".join(lines)


def _memory_type(operand: Operand) -> str:
    return "b8" if operand.bits == 8 else operand.register


def _address(parameter: str, operand: Operand) -> list[str]:
    return [
        f"    ld.param.u64 %base, [{parameter}];",
        "    cvta.to.global.u64 %base, %base;",
        f"    mul.wide.u32 %offset, %element, {operand.bytes};",
        "    add.u64 %base, %base, %offset;",
    ]


# ---- Elementwise programs -----------------------------------------------------------------------

REGISTERS = {"b8": B8, "b16": B16, "b32": B32, "b64": B64, "f16": B16, "bf16": B16, "f16x2": B32,
             "bf16x2": B32, "f32": F32, "f64": F64}  # fmt: skip


def _elementwise(
    family: str, name: str, target: str, kinds: tuple[str, ...], result: str, *,
    bound: Bound | None = None, suffix: str = "", body: tuple[str, ...] = (),
) -> Program:  # fmt: skip
    """``name`` applied to operands of the given kinds of inputs.py, one result."""
    operands = ", ".join(f"%x{i}" for i in range(len(kinds)))
    key = f"{family}/{name}{suffix}"

    def make(index: int) -> Words:
        return inputs.elements(key, kinds[index], index, len(kinds), ELEMENTWISE_COUNT)

    explicit = 2048 if family == "approx" else 256 if len(kinds) == 1 else 512
    return Program(
        family=family,
        name=name + suffix,
        target=target,
        body=body or (f"{name} %y0, {operands}{suffix};",),
        reads=tuple(REGISTERS[kind] for kind in kinds),
        writes=(REGISTERS[result],),
        count=ELEMENTWISE_COUNT,
        explicit=explicit,
        make=make,
        bound=bound,
        elements=result,
    )


INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = {"f16": "f16", "bf16": "bf16", "f32": "f32", "f64": "f64"}
ROUNDS = ("rn", "rz", "rm", "rp")
INTEGRAL_ROUNDS = ("rni", "rzi", "rmi", "rpi")


def _raw(integer: str) -> str:
    return "b" + integer[1:]


def _result_of_integer(integer: str) -> str:
    """The type that a result is stored as: of 8-bit results the whole 32-bit register is stored."""
    return "b32" if integer[1:] == "8" else _raw(integer)


def _holds(to: str, source: str) -> bool:
    """Whether every value of one integer type is a value of another."""
    room = int(to[1:]) - (1 if (to[0], source[0]) == ("s", "u") else 0)
    return room >= int(source[1:]) and not (to[0] == "u" and source[0] == "s")


def _integer_cvt() -> Iterator[Program]:
    for to, source in itertools.product(INTEGERS, INTEGERS):
        if to != source:
            name = f"cvt.{to}.{source}"
            yield _elementwise("cvt", name, "sm_80", (_raw(source),), _result_of_integer(to))
            if _holds(to, source):
                continue  # PTX has no .sat where nothing can be out of range
            name = f"cvt.sat.{to}.{source}"
            yield _elementwise("cvt", name, "sm_80", (_raw(source),), _result_of_integer(to))


def _float_to_integer_cvt() -> Iterator[Program]:
    for source, to in itertools.product(FLOATS, INTEGERS):
        if source == "bf16" and to[1:] == "8":
            continue
        target = "sm_90" if source == "bf16" else "sm_80"
        rounds = INTEGRAL_ROUNDS if to[1:] in ("32", "64") else ("rni", "rzi")
        for mode in rounds:
            for ftz in ("", ".ftz") if source == "f32" else ("",):
                name = f"cvt.{mode}{ftz}.{to}.{source}"
                yield _elementwise("cvt", name, target, (source,), _result_of_integer(to))


def _integer_to_float_cvt() -> Iterator[Program]:
    for source, to in itertools.product(INTEGERS, FLOATS):
        if to == "bf16" and source[1:] == "8":
            continue
        target = "sm_90" if to == "bf16" else "sm_80"
        for mode in ROUNDS if source[1:] in ("32", "64") else ("rn",):
            yield _elementwise("cvt", f"cvt.{mode}.{to}.{source}", target, (_raw(source),), to)
        if to in ("f16", "f32"):
            yield _elementwise("cvt", f"cvt.rn.sat.{to}.{source}", target, (_raw(source),), to)


FLOAT_ORDER = {"f16": 1, "bf16": 1, "f32": 2, "f64": 3}


def _float_cvt() -> Iterator[Program]:
    for source, to in itertools.product(FLOATS, FLOATS):
        target = "sm_90" if "bf16" in (source, to) and (source, to) != ("f32", "bf16") else "sm_80"
        narrows = FLOAT_ORDER[to] < FLOAT_ORDER[source] or (
            FLOAT_ORDER[to] == FLOAT_ORDER[source] and to != source
        )
        if to == source:
            modes = [*INTEGRAL_ROUNDS] if to == "bf16" else ["", *INTEGRAL_ROUNDS]
        elif narrows:
            bf16_from_f32 = (source, to) == ("f32", "bf16")
            modes = ["rn", "rz"] if bf16_from_f32 else [*ROUNDS]
        else:
            modes = [""]
        flags = ["", ".sat"] if "bf16" not in (to, source) else [""]
        if "f32" in (source, to) and "bf16" not in (to, source):
            flags += [".ftz", ".ftz.sat"]
        for mode, flag in itertools.product(modes, flags):
            name = f"cvt{'.' + mode if mode else ''}{flag}.{to}.{source}"
            yield _elementwise("cvt", name, target, (source,), to)


def _narrow_cvt() -> Iterator[Program]:
    """Conversions with .relu and .satfinite: to f16, bf16, tf32, FP8, and back."""
    for mode, relu, finite in itertools.product(("rn", "rz"), ("", ".relu"), ("", ".satfinite")):
        flags = f"{mode}{relu}{finite}"
        for to in ("f16", "bf16"):
            if relu or finite:
                yield _elementwise("cvt", f"cvt.{flags}.{to}.f32", "sm_80", ("f32",), to)
            yield _elementwise("cvt", f"cvt.{flags}.{to}x2.f32", "sm_80", ("f32", "f32"), "b32")
        tf32 = f"cvt.{mode}{finite}{relu}.tf32.f32"
        target = "sm_100" if finite else "sm_90"
        if target == "sm_90":
            yield _elementwise("cvt", tf32, target, ("f32",), "b32")
    yield _elementwise("cvt", "cvt.rna.tf32.f32", "sm_80", ("f32",), "b32")
    yield _elementwise("cvt", "cvt.rna.satfinite.tf32.f32", "sm_80", ("f32",), "b32")
    for fp8, relu in itertools.product(("e4m3x2", "e5m2x2"), ("", ".relu")):
        flags = f"rn.satfinite{relu}"
        yield _elementwise("cvt", f"cvt.{flags}.{fp8}.f32", "sm_89", ("f32", "f32"), "b16")
        yield _elementwise("cvt", f"cvt.{flags}.{fp8}.f16x2", "sm_89", ("f16x2",), "b16")
        yield _elementwise("cvt", f"cvt.rn{relu}.f16x2.{fp8}", "sm_89", ("b16",), "b32")


def _approximations() -> Iterator[Program]:
    def case(
        name: str, kinds: tuple[str, ...], bound: Bound | None, target: str = "sm_80"
    ) -> Program:
        return _elementwise("approx", name, target, kinds, kinds[0], bound=bound)

    bounds = {
        "ex2": None,
        "lg2": None,
        "rcp": None,
        "rsqrt": None,
        "sqrt": Bound(ulp=1),
        "sin": Bound(ulp=1, absolute=2.0**-21),
        "cos": Bound(ulp=1, absolute=2.0**-21),
    }
    for function, ftz in itertools.product(bounds, ("", ".ftz")):
        yield case(f"{function}.approx{ftz}.f32", ("f32",), bounds[function])
    yield case("tanh.approx.f32", ("f32",), Bound(ulp=256))
    for kind, ftz in itertools.product(("approx", "full"), ("", ".ftz")):
        yield case(f"div.{kind}{ftz}.f32", ("f32", "f32"), None)
    for name in ("rcp.approx.ftz.f64", "rsqrt.approx.f64", "rsqrt.approx.ftz.f64"):
        yield case(name, ("f64",), None)
    for kind in ("f16", "f16x2"):
        yield case(f"ex2.approx.{kind}", (kind,), None)
        yield case(f"tanh.approx.{kind}", (kind,), Bound(ulp=1))
    for kind in ("bf16", "bf16x2"):
        yield case(f"ex2.approx.ftz.{kind}", (kind,), None, "sm_90")
        yield case(f"tanh.approx.{kind}", (kind,), Bound(ulp=1), "sm_90")


def _f32() -> Iterator[Program]:
    def case(name: str, operands: int) -> Program:
        return _elementwise("f32", name, "sm_80", ("f32",) * operands, "f32")

    for mode, flag in itertools.product(ROUNDS, ("", ".ftz", ".sat", ".ftz.sat")):
        for opcode, operands in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
            yield case(f"{opcode}.{mode}{flag}.f32", operands)
    for mode, flag in itertools.product(ROUNDS, ("", ".ftz")):
        for opcode, operands in (("div", 2), ("rcp", 1), ("sqrt", 1)):
            yield case(f"{opcode}.{mode}{flag}.f32", operands)
    for opcode, ftz, nan, sign in itertools.product(
        ("min", "max"), ("", ".ftz"), ("", ".NaN"), ("", ".xorsign.abs")
    ):
        target = "sm_86" if sign else "sm_80"
        name = f"{opcode}{ftz}{nan}{sign}.f32"
        yield _elementwise("f32", name, target, ("f32", "f32"), "f32")
    for opcode, ftz in itertools.product(("neg", "abs"), ("", ".ftz")):
        yield case(f"{opcode}{ftz}.f32", 1)
    yield case("copysign.f32", 2)


def _f64() -> Iterator[Program]:
    for mode in ROUNDS:
        for opcode, operands in (
            ("add", 2), ("sub", 2), ("mul", 2), ("fma", 3), ("div", 2), ("rcp", 1), ("sqrt", 1)
        ):  # fmt: skip
            yield _elementwise("f64", f"{opcode}.{mode}.f64", "sm_80", ("f64",) * operands, "f64")
    for opcode, operands in (("min", 2), ("max", 2), ("neg", 1), ("abs", 1), ("copysign", 2)):
        yield _elementwise("f64", f"{opcode}.f64", "sm_80", ("f64",) * operands, "f64")


def _halves() -> Iterator[Program]:
    for kind in ("f16", "f16x2"):
        for opcode, flag in itertools.product(
            ("add.rn", "sub.rn", "mul.rn", "fma.rn"), ("", ".ftz", ".sat", ".ftz.sat")
        ):
            operands = 3 if opcode.startswith("fma") else 2
            name = f"{opcode}{flag}.{kind}"
            yield _elementwise("half", name, "sm_80", (kind,) * operands, kind)
        for flag in (".relu", ".ftz.relu"):
            yield _elementwise("half", f"fma.rn{flag}.{kind}", "sm_80", (kind,) * 3, kind)
        for flag in (".oob", ".oob.relu"):
            yield _elementwise("half", f"fma.rn{flag}.{kind}", "sm_90", (kind,) * 3, kind)
        for opcode, ftz in itertools.product(("neg", "abs"), ("", ".ftz")):
            yield _elementwise("half", f"{opcode}{ftz}.{kind}", "sm_80", (kind,), kind)
    for kind in ("bf16", "bf16x2"):
        for opcode in ("add.rn", "sub.rn", "mul.rn"):
            yield _elementwise("half", f"{opcode}.{kind}", "sm_90", (kind,) * 2, kind)
        yield _elementwise("half", f"fma.rn.{kind}", "sm_80", (kind,) * 3, kind)
        yield _elementwise("half", f"fma.rn.relu.{kind}", "sm_80", (kind,) * 3, kind)
        for flag in (".oob", ".oob.relu"):
            yield _elementwise("half", f"fma.rn{flag}.{kind}", "sm_90", (kind,) * 3, kind)
        for opcode in ("neg", "abs"):
            yield _elementwise("half", f"{opcode}.{kind}", "sm_80", (kind,), kind)
    for kind, opcode in itertools.product(("f16", "f16x2", "bf16", "bf16x2"), ("min", "max")):
        for ftz in ("", ".ftz") if kind.startswith("f") else ("",):
            for nan, sign in itertools.product(("", ".NaN"), ("", ".xorsign.abs")):
                target = "sm_86" if sign else "sm_80"
                name = f"{opcode}{ftz}{nan}{sign}.{kind}"
                yield _elementwise("half", name, target, (kind, kind), kind)


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num",
               "nan")  # fmt: skip


def _compare() -> Iterator[Program]:
    def case(name: str, target: str, kinds: tuple[str, ...]) -> Program:
        operands = ", ".join(f"%x{i}" for i in range(len(kinds)))
        body = (f"{name} %p, {operands};", "selp.b32 %y0, 1, 0, %p;")
        return _elementwise("compare", name, target, kinds, "b32", body=body)

    for comparison in COMPARISONS:
        yield case(f"setp.{comparison}.f32", "sm_80", ("f32", "f32"))
        yield case(f"setp.{comparison}.f16", "sm_80", ("f16", "f16"))
        yield case(f"setp.{comparison}.bf16", "sm_90", ("bf16", "bf16"))
        yield case(f"setp.{comparison}.f64", "sm_80", ("f64", "f64"))
    for comparison in ("lt", "eq"):
        yield case(f"setp.{comparison}.ftz.f32", "sm_80", ("f32", "f32"))
        yield case(f"setp.{comparison}.ftz.f16", "sm_80", ("f16", "f16"))
    for kind in ("u16", "s16", "u32", "s32", "u64", "s64"):
        for comparison in ("eq", "ne", "lt", "le", "gt", "ge"):
            yield case(f"setp.{comparison}.{kind}", "sm_80", (_raw(kind),) * 2)
    for comparison in ("lo", "ls", "hi", "hs"):
        yield case(f"setp.{comparison}.u32", "sm_80", ("b32", "b32"))
    for test in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        for kind in ("f32", "f64"):
            yield case(f"testp.{test}.{kind}", "sm_80", (kind,))


def _integer() -> Iterator[Program]:
    def case(name: str, kinds: tuple[str, ...], result: str, suffix: str = "") -> Program:
        return _elementwise("integer", name, "sm_80", kinds, result, suffix=suffix)

    for kind in ("u16", "s16", "u32", "s32", "u64", "s64"):
        raw = _raw(kind)
        for opcode in ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max"):
            yield case(f"{opcode}.{kind}", (raw, raw), raw)
        yield case(f"mad.lo.{kind}", (raw, raw, raw), raw)
        yield case(f"mad.hi.{kind}", (raw, raw, raw), raw)
        yield case(f"sad.{kind}", (raw, raw, raw), raw)
        yield case(f"shr.{kind}", (raw, "b32"), raw)
    for kind, wide in (("u16", "b32"), ("s16", "b32"), ("u32", "b64"), ("s32", "b64")):
        raw = _raw(kind)
        yield case(f"mul.wide.{kind}", (raw, raw), wide)
        yield case(f"mad.wide.{kind}", (raw, raw, wide), wide)
    for kind, half in itertools.product(("u32", "s32"), ("lo", "hi")):
        yield case(f"mul24.{half}.{kind}", ("b32", "b32"), "b32")
        yield case(f"mad24.{half}.{kind}", ("b32",) * 3, "b32")
    for name, operands in (("add.sat.s32", 2), ("sub.sat.s32", 2), ("mad.hi.sat.s32", 3),
                           ("mad24.hi.sat.s32", 3)):  # fmt: skip
        yield case(name, ("b32",) * operands, "b32")
    for kind in ("s16", "s32", "s64"):
        yield case(f"neg.{kind}", (_raw(kind),), _raw(kind))
        yield case(f"abs.{kind}", (_raw(kind),), _raw(kind))
    for kind in ("b16", "b32", "b64"):
        for opcode in ("and", "or", "xor"):
            yield case(f"{opcode}.{kind}", (kind, kind), kind)
        yield case(f"not.{kind}", (kind,), kind)
        yield case(f"cnot.{kind}", (kind,), kind)
        yield case(f"shl.{kind}", (kind, "b32"), kind)
    for kind in ("b32", "b64"):
        yield case(f"popc.{kind}", (kind,), "b32")
        yield case(f"clz.{kind}", (kind,), "b32")
        yield case(f"brev.{kind}", (kind,), kind)
        yield case(f"bfi.{kind}", (kind, kind, "b32", "b32"), kind)
    for kind in ("u32", "s32", "u64", "s64"):
        yield case(f"bfind.{kind}", (_raw(kind),), "b32")
        yield case(f"bfind.shiftamt.{kind}", (_raw(kind),), "b32")
        yield case(f"bfe.{kind}", (_raw(kind), "b32", "b32"), _raw(kind))
    for side, mode in itertools.product(("l", "r"), ("wrap", "clamp")):
        yield case(f"shf.{side}.{mode}.b32", ("b32",) * 3, "b32")
    for mode in ("wrap", "clamp"):
        yield case(f"bmsk.{mode}.b32", ("b32", "b32"), "b32")
        yield case(f"szext.{mode}.u32", ("b32", "b32"), "b32")
        yield case(f"szext.{mode}.s32", ("b32", "b32"), "b32")
    yield case("fns.b32", ("b32",) * 3, "b32")
    # A table selects among eight products of a, b, c: each alone, all but each, and some others.
    tables = [1 << i for i in range(8)] + [0xFF ^ (1 << i) for i in range(8)]
    for table in [*tables, 0x00, 0xFF, 0x96, 0xE8, 0xCA, 0xEA, 0x3C, 0x6A]:
        yield case("lop3.b32", ("b32",) * 3, "b32", suffix=f", {table:#04x}")
    yield case("prmt.b32", ("b32",) * 3, "b32")
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        yield case(f"prmt.b32.{mode}", ("b32",) * 3, "b32")
    for a, b in itertools.product(("u32", "s32"), ("u32", "s32")):
        yield case(f"dp4a.{a}.{b}", ("b32",) * 3, "b32")
        yield case(f"dp2a.lo.{a}.{b}", ("b32",) * 3, "b32")
        yield case(f"dp2a.hi.{a}.{b}", ("b32",) * 3, "b32")
    yield _carries("add.cc.u32", "addc.u32")
    yield _carries("sub.cc.u32", "subc.u32")


def _carries(first: str, second: str) -> Program:
    """Two instructions, the second of which reads the carry flag that the first one writes."""

    def make(index: int) -> Words:
        return inputs.elements(f"integer/{first}", "b32", index, 4, ELEMENTWISE_COUNT)

    return Program(
        family="integer",
        name=f"{first} {second}",
        target="sm_80",
        body=(f"{first} %y0, %x0, %x2;", f"{second} %y1, %x1, %x3;"),
        reads=(B32,) * 4,
        writes=(B32, B32),
        count=ELEMENTWISE_COUNT,
        explicit=512,
        make=make,
    )


# ---- Collectives of a warp ----------------------------------------------------------------------


def _collective(
    name: str, body: tuple[str, ...], kinds: tuple[str, ...], results: tuple[Operand, ...],
    target: str = "sm_80", shared_bytes: int = 0, family: str = "warp",
    make: Callable[[int], Words] | None = None,
) -> Program:  # fmt: skip
    count = WARPS_OF_COLLECTIVES * 32

    def values(index: int) -> Words:
        words = inputs.random_words(f"{family}/{name}/{index}", count)
        if kinds[index].startswith("small"):  # few different values, so that lanes meet
            return words % np.uint64(int(kinds[index][5:]))
        if kinds[index] == "uniform":  # the same in all lanes of every other warp
            warp = np.arange(count) // 32
            return np.where(warp % 2 == 0, words[warp * 32], words)
        return words

    return Program(
        family=family,
        name=name,
        target=target,
        body=body,
        reads=(B32,) * len(kinds),
        writes=results,
        count=count,
        explicit=count,
        make=make or values,
        shared_bytes=shared_bytes,
    )


def _warp() -> Iterator[Program]:
    for mode in ("up", "down", "bfly", "idx"):
        # c: the clamp in bits 0-4, the segment mask in bits 8-12
        for c in (0x1F, 0x00, 0x181F, 0x1C03, 0x1807, 0x1000):
            yield _collective(
                f"shfl.sync.{mode}.b32 {c:#06x}",
                (
                    f"shfl.sync.{mode}.b32 %y0|%p, %x0, %x1, {c:#06x}, -1;",
                    "selp.b32 %y1, 1, 0, %p;",
                ),
                ("any", "small40"),
                (B32, B32),
            )
        yield _collective(
            f"shfl.sync.{mode}.b32",
            (f"shfl.sync.{mode}.b32 %y0|%p, %x0, %x1, %x2, -1;", "selp.b32 %y1, 1, 0, %p;"),
            ("any", "any", "any"),
            (B32, B32),
        )
    for mode in ("all", "any", "uni"):
        yield _collective(
            f"vote.sync.{mode}.pred",
            (
                "setp.ne.b32 %p, %x0, 0;",
                f"vote.sync.{mode}.pred %p, %p, -1;",
                "selp.b32 %y0, 1, 0, %p;",
            ),
            ("small40",) if mode == "all" else ("small2",),
            (B32,),
        )
    yield _collective(
        "vote.sync.ballot.b32",
        ("setp.ne.b32 %p, %x0, 0;", "vote.sync.ballot.b32 %y0, %p, -1;"),
        ("small2",),
        (B32,),
    )
    for bits in (32, 64):
        read = "%x0" if bits == 32 else "%offset"
        widen = () if bits == 32 else ("cvt.u64.u32 %offset, %x0;",)
        yield _collective(
            f"match.any.sync.b{bits}",
            (*widen, f"match.any.sync.b{bits} %y0, {read}, -1;"),
            ("small6",),
            (B32,),
        )
        yield _collective(
            f"match.all.sync.b{bits}",
            (*widen, f"match.all.sync.b{bits} %y0|%p, {read}, -1;", "selp.b32 %y1, 1, 0, %p;"),
            ("uniform",),
            (B32, B32),
        )
    for operation in ("add.u32", "min.u32", "max.u32", "add.s32", "min.s32", "max.s32", "and.b32",
                      "or.b32", "xor.b32"):  # fmt: skip
        yield _collective(
            f"redux.sync.{operation}", (f"redux.sync.{operation} %y0, %x0, -1;",), ("any",), (B32,)
        )
    # Each half of the warp by itself, with its own mask.
    yield _collective(
        "redux.sync.add.u32 halves",
        (
            "setp.lt.u32 %p, %lane, 16;",
            "selp.b32 %thread, 0x0000FFFF, 0xFFFF0000, %p;",
            "redux.sync.add.u32 %y0, %x0, %thread;",
        ),
        ("any",),
        (B32,),
    )
    yield _collective(
        "elect.sync",
        ("elect.sync %y0|%p, -1;", "selp.b32 %y1, 1, 0, %p;"),
        ("any",),
        (B32, B32),
        target="sm_90",
    )
    yield _collective(
        "movmatrix.sync.aligned.m8n8.trans.b16",
        ("movmatrix.sync.aligned.m8n8.trans.b16 %y0, %x0;",),
        ("any",),
        (B32,),
    )


TILE_BYTES = 512  # a warp's tile: what .x4 moves


def _shared_matrices() -> Iterator[Program]:
    """ldmatrix and stmatrix. Every lane fills 16 bytes of the warp's tile; rows are permuted."""
    count = WARPS_OF_COLLECTIVES * 32
    # The last input is a row for each lane: a permutation, so that stmatrix writes each row once.
    order = np.argsort(inputs.random_words("ldmatrix/rows", count).reshape(-1, 32), axis=1)
    rows = order.reshape(-1).astype(np.uint64)
    tile_of_warp = (
        ".reg .b32 %tile, %mine, %row;",
        "shr.u32 %tile, %thread, 5;",
        f"mul.lo.u32 %tile, %tile, {TILE_BYTES};",
        "mov.u32 %mine, tile;",
        "add.u32 %tile, %tile, %mine;",
        "mad.lo.u32 %mine, %lane, 16, %tile;",
        "mad.lo.u32 %row, %x4, 16, %tile;",
    )
    for number, trans in itertools.product((1, 2, 4), ("", ".trans")):
        for opcode in ("ldmatrix", "stmatrix"):
            name = f"{opcode}.sync.aligned.m8n8.x{number}{trans}.shared.b16"

            def make(index: int, name: str = name) -> Words:
                return rows if index == 4 else inputs.random_words(f"{name}/{index}", count)

            fill = "st.shared.v4.b32 [%mine], {%x0, %x1, %x2, %x3};"
            if opcode == "ldmatrix":
                listed = ", ".join(f"%y{i}" for i in range(number))
                body = [fill, "bar.warp.sync -1;", f"{name} {{{listed}}}, [%row];"]
                results = (B32,) * number
            else:
                listed = ", ".join(f"%x{i}" for i in range(number))
                mark = "st.shared.v4.b32 [%mine], {%lane, %lane, %lane, %lane};"
                store = f"{name} [%row], {{{listed}}};"
                read = "ld.shared.v4.b32 {%y0, %y1, %y2, %y3}, [%mine];"
                body = [mark, "bar.warp.sync -1;", store, "bar.warp.sync -1;", read]
                results = (B32,) * 4
            yield _collective(
                name,
                (*tile_of_warp, *body),
                ("any",) * 5,
                results,
                target="sm_80" if opcode == "ldmatrix" else "sm_90",
                shared_bytes=TILE_BYTES * BLOCK // 32,
                family="ldmatrix",
                make=make,
            )


# ---- mma.sync -----------------------------------------------------------------------------------

ELEMENT_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "f64": 64, "e4m3": 8, "e5m2": 8,
                "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1, "s32": 32}  # fmt: skip


@dataclass(frozen=True)
class MatrixShape:
    """A form of mma.sync: m, n, k and the element types."""

    m: int
    n: int
    k: int
    d: str
    a: str
    b: str
    c: str

    def registers(self) -> tuple[int, int, int, int]:
        """How many registers D, A, B and C have in each lane."""
        if (self.m, self.k, self.a) == (8, 4, "f16"):
            return (4 if self.d == "f16" else 8), 2, 2, (4 if self.c == "f16" else 8)
        width = 64 if self.a == "f64" else 32
        a = self.m * self.k * ELEMENT_BITS[self.a] // 32 // width
        b = self.k * self.n * ELEMENT_BITS[self.b] // 32 // width
        of = {"f16": self.m * self.n // 64}
        return of.get(self.d, self.m * self.n // 32), a, b, of.get(self.c, self.m * self.n // 32)


def _mma(
    shape: MatrixShape,
    target: str,
    layouts: str = "row.col",
    flags: str = "",
    operation: str = "",
    family: str = "mma",
) -> Program:
    types = f"{shape.d}.{shape.a}.{shape.b}.{shape.c}"
    size = f"m{shape.m}n{shape.n}k{shape.k}"
    name = f"mma.sync.aligned.{size}.{layouts}{flags}.{types}{operation}"
    d, a, b, c = shape.registers()
    elements = [shape.a] * a + [shape.b] * b + [shape.c] * c
    operand = B64 if shape.a == "f64" else B32
    reads = tuple(F64 if shape.a == "f64" else F32 if e == "f32" else B32 for e in elements)
    result = F64 if shape.d == "f64" else F32 if shape.d == "f32" else operand

    def make(index: int) -> Words:
        accumulator = index >= a + b
        register = inputs.matrix_register if family == "mma" else inputs.edge_register
        return register(f"{family}/{name}/{index}", elements[index], WARPS_OF_MATRICES, accumulator)

    def listed(first: int, count: int) -> str:
        return "{" + ", ".join(f"%x{first + i}" for i in range(count)) + "}"

    outputs = "{" + ", ".join(f"%y{i}" for i in range(d)) + "}"
    return Program(
        family=family,
        name=name,
        target=target,
        body=(f"{name} {outputs}, {listed(0, a)}, {listed(a, b)}, {listed(a + b, c)};",),
        reads=reads,
        writes=(result,) * d,
        count=WARPS_OF_MATRICES * 32,
        explicit=12 * 32,
        make=make,
        elements=shape.d,
    )


def _matrices() -> Iterator[Program]:
    def shape(m: int, k: int, d: str, a: str, b: str, c: str) -> MatrixShape:
        return MatrixShape(m, 8, k, d, a, b, c)

    for accumulator, k in itertools.product(("f32", "f16"), (8, 16)):
        yield _mma(shape(16, k, accumulator, "f16", "f16", accumulator), "sm_80")
    for k in (8, 16):
        yield _mma(shape(16, k, "f32", "bf16", "bf16", "f32"), "sm_80")
    for k in (4, 8):
        yield _mma(shape(16, k, "f32", "tf32", "tf32", "f32"), "sm_80")
    for a, b, accumulator, k in itertools.product(
        ("e4m3", "e5m2"), ("e4m3", "e5m2"), ("f32", "f16"), (16, 32)
    ):
        yield _mma(shape(16, k, accumulator, a, b, accumulator), "sm_89")
    for a, b, flags in itertools.product(("s8", "u8"), ("s8", "u8"), ("", ".satfinite")):
        for m, k in ((8, 16), (16, 16), (16, 32)):
            yield _mma(shape(m, k, "s32", a, b, "s32"), "sm_80", flags=flags)
    for a, b, flags in itertools.product(("s4", "u4"), ("s4", "u4"), ("", ".satfinite")):
        for m, k in ((8, 32), (16, 32), (16, 64)):
            yield _mma(shape(m, k, "s32", a, b, "s32"), "sm_80", flags=flags)
    for operation, (m, k) in itertools.product((".xor.popc", ".and.popc"),
                                               ((8, 128), (16, 128), (16, 256))):  # fmt: skip
        yield _mma(shape(m, k, "s32", "b1", "b1", "s32"), "sm_80", operation=operation)
    yield _mma(shape(8, 4, "f64", "f64", "f64", "f64"), "sm_80")
    for k in (4, 8, 16):
        yield _mma(shape(16, k, "f64", "f64", "f64", "f64"), "sm_90")
    for a_layout, b_layout in itertools.product(("row", "col"), ("row", "col")):
        for d, c in (("f32", "f32"), ("f16", "f16"), ("f32", "f16")):
            layouts = f"{a_layout}.{b_layout}"
            yield _mma(shape(8, 4, d, "f16", "f16", c), "sm_80", layouts=layouts)


def _matrix_edges() -> Iterator[Program]:
    """Zeros, subnormals and overflow in what a tensor core adds up."""
    for a, accumulator, k in (
        ("f16", "f32", 16), ("f16", "f16", 16), ("f16", "f32", 8), ("bf16", "f32", 16),
        ("bf16", "f32", 8), ("tf32", "f32", 8), ("tf32", "f32", 4),
    ):  # fmt: skip
        shape = MatrixShape(16, 8, k, accumulator, a, a, accumulator)
        yield _mma(shape, "sm_80", family="mma_edges")
    for accumulator in ("f32", "f16"):
        for a, b in (("e4m3", "e4m3"), ("e5m2", "e5m2")):
            shape = MatrixShape(16, 8, 32, accumulator, a, b, accumulator)
            yield _mma(shape, "sm_89", family="mma_edges")


FAMILIES: dict[str, tuple[Callable[[], Iterator[Program]], ...]] = {
    "cvt": (_integer_cvt, _float_to_integer_cvt, _integer_to_float_cvt, _float_cvt, _narrow_cvt),
    "approx": (_approximations,),
    "f32": (_f32,),
    "f64": (_f64,),
    "half": (_halves,),
    "compare": (_compare,),
    "integer": (_integer,),
    "warp": (_warp,),
    "ldmatrix": (_shared_matrices,),
    "mma": (_matrices,),
    "mma_edges": (_matrix_edges,),
}


def programs(family: str) -> list[Program]:
    """Every program of a family, in a fixed order."""
    return [program for make in FAMILIES[family] for program in make()]
