"""matrix_descriptor.h, compiled for the host: the descriptors of blackwell_dc's tiles.

They are compared field by field with the ISA's tables, and with what CUTLASS's headers print.
"""

from __future__ import annotations

import pytest
from tests import host_code

pytestmark = host_code.needs_compiler

# Columns and rows of every tile of Q, K and V in blackwell_dc. Two 8-bit numbers are one column.
# A pair's half of K has 64 rows.
TILES = (
    (32, 128), (64, 128), (96, 128), (128, 64), (128, 128), (192, 64), (192, 128), (256, 64),
    (256, 128),
)  # fmt: skip
DTYPES = {"F16": 0, "BF16": 1, "E4M3": 0, "E5M2": 1}  # f16 and f8f6f4 share codes
# (m, n) of Q K^T, where n counts keys, and of P V, where n counts columns of V. Pairs have m = 256.
SHAPES = ((128, 64), (128, 96), (128, 128), (128, 256), (256, 128))

INSTRUCTIONS = [
    f'instruction(DType::{name}, "{name}", {m}, {n}, {mn});'
    for name in DTYPES
    for m, n in SHAPES
    for mn in ("false", "true")
]
PROGRAM = f"""
#include <cstdio>
#include "common/device/matrix_descriptor.h"
#include "common/device/slab_tile.cuh"
using namespace archflash;
using namespace archflash::device;

template <int COLUMNS, int ROWS>
void print() {{
  using Tile = SlabTile<COLUMNS, ROWS>;
  std::printf("fields %d %d %llx %llx\\n", COLUMNS, ROWS, (unsigned long long)K_MAJOR_FIELDS<Tile>,
              (unsigned long long)MN_MAJOR_FIELDS<Tile>);
  for (int k = 0; k < COLUMNS / 16; ++k)
    std::printf("k %d %d %d %d\\n", COLUMNS, ROWS, k, (int)k_major_step<Tile>(k));
  for (int k = 0; k < ROWS / 16; ++k)
    std::printf("mn %d %d %d %d\\n", COLUMNS, ROWS, k, (int)mn_major_step<Tile, 16>(k));
  for (int k = 0; k < ROWS / 32; ++k)
    std::printf("mn_of_8_bits %d %d %d %d\\n", COLUMNS, ROWS, k, (int)mn_major_step<Tile, 32>(k));
}}

void instruction(DType dtype, const char* name, int m, int n, bool mn_major) {{
  std::printf("instruction %s %d %d %d %x\\n", name, m, n, (int)mn_major,
              instruction_descriptor(dtype, m, n, mn_major));
}}

int main() {{
  {" ".join(f"print<{columns}, {rows}>();" for columns, rows in TILES)}
  std::printf("address %llx\\n", (unsigned long long)matrix_descriptor_address(0x8400));
  {" ".join(INSTRUCTIONS)}
}}
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    program = host_code.compiled(PROGRAM, tmp_path_factory.mktemp("descriptor"))
    return host_code.printed(program)


def encoded(leading: int, stride: int, swizzle: int) -> int:
    """Encodes a descriptor without an address from its offsets in bytes and its swizzle field."""
    value = 0
    for shift, bits, field in (
        (16, 14, leading // 16),
        (32, 14, stride // 16),
        (46, 3, 1),
        (61, 3, swizzle),
    ):
        assert 0 <= field < 1 << bits
        value |= field << shift
    return value


def slab_of(columns: int) -> int:
    return 64 if columns % 64 == 0 else 32


def test_fields_are_those_of_the_isas_table(printed: list[list[str]]) -> None:
    rows = [line[1:] for line in printed if line[0] == "fields"]
    assert [(int(columns), int(count)) for columns, count, _, _ in rows] == list(TILES)
    for columns_text, rows_text, k_major, mn_major in rows:
        columns, count = int(columns_text), int(rows_text)
        span = 2 * slab_of(columns)  # bytes of a row of a slab
        swizzle = {128: 2, 64: 4}[span]
        # The stride leads to the next eight rows; MN-major, the leading offset to the next slab.
        assert int(k_major, 16) == encoded(16, 8 * span, swizzle)
        slabs = columns // slab_of(columns)
        assert int(mn_major, 16) == encoded(span * count if slabs > 1 else 0, 8 * span, swizzle)


def test_steps_go_through_the_slabs(printed: list[list[str]]) -> None:
    """Walks over the tile's bytes to the first element of each step.

    A K-major step is 32 bytes of a row; an MN-major step is 16 rows of 16 bits or 32 rows of 8.
    """
    depths = {"k": 16, "mn": 16, "mn_of_8_bits": 32}
    for line in printed:
        if line[0] not in depths:
            continue
        columns, rows, step, units = map(int, line[1:])
        slab = slab_of(columns)
        first = depths[line[0]] * step
        column, row = (first, 0) if line[0] == "k" else (0, first)
        offset = 0
        while column >= slab:
            column -= slab
            offset += 2 * slab * rows
        assert units * 16 == offset + 2 * slab * row + 2 * column


# What a program with CUTLASS's headers (include/cute, UMMA descriptors) printed for K-major and
# MN-major tiles of 16-bit elements, and for their steps.
CUTLASS_FIELDS = {
    (64, 128): (0x4000404000010000, 0x4000404000000000),
    (128, 64): (0x4000404000010000, 0x4000404002000000),
    (128, 128): (0x4000404000010000, 0x4000404004000000),
}
CUTLASS_K_STEPS = [0, 2, 4, 6, 1024, 1026, 1028, 1030]  # 128 x 128
CUTLASS_INSTRUCTIONS = {
    ("BF16", 128, 64, 0): 0x08100490,
    ("BF16", 128, 128, 0): 0x08200490,
    ("BF16", 128, 256, 0): 0x08400490,
    ("BF16", 128, 64, 1): 0x08110490,
    ("BF16", 128, 96, 1): 0x08190490,
    ("BF16", 128, 128, 1): 0x08210490,
    ("BF16", 128, 256, 1): 0x08410490,
    ("F16", 128, 64, 0): 0x08100010,
    ("F16", 128, 128, 0): 0x08200010,
    ("F16", 128, 64, 1): 0x08110010,
    ("F16", 128, 128, 1): 0x08210010,
    ("BF16", 256, 128, 0): 0x10200490,
    ("BF16", 256, 128, 1): 0x10210490,
    ("E4M3", 128, 128, 0): 0x08200010,
    ("E4M3", 128, 128, 1): 0x08210010,
}


def test_descriptors_are_what_cutlass_makes(printed: list[list[str]]) -> None:
    fields = {
        (int(line[1]), int(line[2])): (int(line[3], 16), int(line[4], 16))
        for line in printed
        if line[0] == "fields"
    }
    for tile, expected in CUTLASS_FIELDS.items():
        assert fields[tile] == expected
    steps = {
        name: [int(x[4]) for x in printed if x[:3] == [name, "128", "128"]] for name in ("k", "mn")
    }
    assert steps["k"] == CUTLASS_K_STEPS
    assert steps["mn"] == [128 * step for step in range(8)]
    (address,) = [int(line[1], 16) for line in printed if line[0] == "address"]
    assert fields[64, 128][0] | address == 0x4000404000010840


def test_instructions_are_what_cutlass_makes_and_the_isa_says(printed: list[list[str]]) -> None:
    found = {
        (line[1], int(line[2]), int(line[3]), int(line[4])): int(line[5], 16)
        for line in printed
        if line[0] == "instruction"
    }
    assert len(found) == len(DTYPES) * len(SHAPES) * 2
    for (name, m, n, transposed), value in found.items():
        kind = DTYPES[name]
        expected = 1 << 4 | kind << 7 | kind << 10 | transposed << 16 | n // 8 << 17 | m // 16 << 24
        assert value == expected
        assert CUTLASS_INSTRUCTIONS.get((name, m, n, transposed), value) == value
