"""The machine code of blackwell_dc: what FlashAttention-4's way of working shows as, kernel by
kernel, and that its registers go round.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

import pytest
from bench import on_the_spot

from archflash import _archflash as native

from .conftest import built_of
from .machine_code import instructions_of
from .test_kernels import IMAGES, REGISTERS_PER_SM, RESOURCES, ptx_text

TARGET, PTX = "sm_100f", "compute_100f"
KERNELS = {
    kernel: image
    for image in IMAGES
    if image.startswith("blackwell_dc/")
    for kernel in RESOURCES[image][TARGET]
    if "_attention_fwd_" in kernel
}
THREADS = 512  # 16 warps: two warpgroups of softmax, one of correction, one of the other roles
# How many of 128 exponentials of the loop over the keys are a polynomial's, by head dimension.
POLYNOMIALS = {64: 40, 96: 36, 128: 24, 192: 0, 256: 0}
E4M3_POLYNOMIALS = {64: 40, 128: 40, 192: 40, 256: 16}

every_kernel = pytest.mark.parametrize("kernel", KERNELS)


@functools.cache
def ptx_of(kernel: str) -> list[str]:
    """The statements of a kernel."""
    text = ptx_text(KERNELS[kernel], PTX)
    begin = re.search(rf"\.entry {kernel}\(", text)
    assert begin is not None
    end = text.find(".visible .entry", begin.end())
    return re.findall(r"^\s*(?:@!?%?\w+ )?([a-z][^;/]*);", text[begin.end() : end], re.MULTILINE)


def opcodes(instructions: list[str]) -> Counter[str]:
    """How often each opcode occurs."""
    return Counter(re.sub(r"^@!?\w+\s+", "", text).split()[0] for text in instructions)


def count(found: Counter[str], start: str, part: str = "") -> int:
    return sum(n for name, n in found.items() if name.startswith(start) and part in name)


@pytest.fixture
def code(kernel: str, cuobjdump: Path, nvdisasm: Path) -> list[str]:
    built_of([TARGET])
    return instructions_of(cuobjdump, native.code_of(KERNELS[kernel], TARGET))[kernel]


def test_there_is_a_kernel_for_each_head_dimension() -> None:
    assert {int(d) for kernel in KERNELS for d in re.findall(r"_d(\d+)", kernel)} == set(
        POLYNOMIALS
    )


@every_kernel
def test_tensor_memory_products_and_copies_are_in_the_code(kernel: str, code: list[str]) -> None:
    found, statements = opcodes(code), opcodes(ptx_of(kernel))
    of_16_bits = re.search(r"_(bf16|f16)_", kernel) is not None
    product, other = ("UTCHMMA", "UTCQMMA") if of_16_bits else ("UTCQMMA", "UTCHMMA")
    assert count(found, product) >= count(statements, "tcgen05.mma") > 0
    assert count(found, other) == 0
    assert count(found, "UTCBAR") > 0
    assert count(found, "UTMALDG.4D") > 0
    assert count(found, "UTMASTG.4D") > 0
    assert count(found, "LDTM.") > 0
    assert count(found, "STTM.") > 0
    # Nothing of tensor memory goes another way.
    assert count(found, "HMMA") + count(found, "QMMA") == 0


@every_kernel
def test_exponentials_are_shared_out_as_planned(kernel: str, code: list[str]) -> None:
    found, statements = opcodes(code), opcodes(ptx_of(kernel))
    (d,) = map(int, re.findall(r"_d(\d+)", kernel))
    e4m3 = "_e4m3_" in kernel
    keys = 128 if d < 256 or e4m3 else 64
    # A polynomial's floor, two numbers an instruction. The others are the MUFU's, like those of
    # softcap for each score and a few for a row.
    polynomials = 0 if "_mufu" in kernel else (E4M3_POLYNOMIALS if e4m3 else POLYNOMIALS)[d]
    floors = keys * polynomials // 128 // 2
    assert count(statements, "add.rm", "f32x2") == floors
    assert count(found, "FADD2", ".RM") == floors
    mufu = 2 * keys - 2 * floors
    assert mufu < count(statements, "ex2.approx") == count(found, "MUFU.EX2") <= mufu + 8
    # Scale and base of each pair of scores, four steps of each polynomial.
    assert count(found, "FFMA2") == keys // 2 + 4 * floors
    # P's sum, in pairs, and what the polynomials take off. Keys with descales of their own are
    # summed up apart.
    assert count(found, "FADD2") >= keys // 2 - 1 - e4m3 + 3 * floors
    # Maxima of three, in which a NaN stays.
    assert count(found, "FMNMX3.NAN") >= keys // 2 - 1


@every_kernel
def test_registers_of_the_roles_are_the_ones_at_launch(kernel: str, code: list[str]) -> None:
    used = RESOURCES[KERNELS[kernel]][TARGET][kernel]["registers"]
    assert used * THREADS == REGISTERS_PER_SM
    statements = ptx_of(kernel)
    more = [int(n) for text in statements for n in re.findall(r"setmaxnreg\.inc\S* (\d+)", text)]
    less = [int(n) for text in statements for n in re.findall(r"setmaxnreg\.dec\S* (\d+)", text)]
    assert (len(more), len(less)) == (1, 2)
    # Two warpgroups have more, one and one have less.
    assert 128 * (2 * more[0] + sum(less)) <= REGISTERS_PER_SM
    assert max(less) < used < more[0]
    moved = [text for text in code if "USETMAXREG" in text]
    values = [int(value, 16) for text in moved for value in re.findall(r"0x[0-9a-f]+", text)]
    assert sorted(values) == sorted([*more, *less])
    names = {int(n) for text in code for n in re.findall(r"\bR(\d+)\b", text)}
    assert used <= max(names) < more[0]


@pytest.mark.rest
def test_the_compiler_makes_the_same_text_for_10_x_and_11_0() -> None:
    """The build relies on it: SAME_TEXT_AS of _build/build_kernel.py."""
    nvcc = on_the_spot.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not found")
    source = on_the_spot.SOURCES / "blackwell_dc" / "kernels" / "bwd.cu"
    macros = ("ARCHFLASH_DTYPE=BF16", "ARCHFLASH_DTYPE_WORD=bf16")
    of_10, of_11 = (
        on_the_spot.compiled(source, nvcc, "ptx", f"compute_{family}", macros)
        for family in ("100f", "110f")
    )
    assert of_10.replace(b".target sm_100f", b".target sm_110f") == of_11
