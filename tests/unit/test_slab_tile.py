"""slab_tile.cuh, compiled for the host: its layout is what TMA writes, without bank conflicts."""

from __future__ import annotations

import pytest
from tests.host_code import compiled, needs_compiler, printed

CHUNK_BYTES = 16  # a row of an ldmatrix matrix
BANK_GROUPS = 8  # groups of 16 bytes: 32 banks of 4 bytes
SHAPES = ((32, 64), (64, 64), (96, 64), (96, 256), (128, 32), (128, 256), (192, 64), (256, 128))
BASES = (0, 1024, 5 * 1024)  # addresses of tiles in shared memory

pytestmark = needs_compiler
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")

PROGRAM = f"""
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include "common/device/slab_tile.cuh"

template <int COLUMNS, int ROWS>
void print() {{
  using Tile = archflash::device::SlabTile<COLUMNS, ROWS>;
  static_assert(Tile::offset(0, 0) == 0, "usable in constant expressions");
  std::printf("tile %d %d %d %d %d %d %d\\n", COLUMNS, ROWS, Tile::SLAB, Tile::SLABS,
              Tile::ROW_BYTES, Tile::SLAB_BYTES, static_cast<int>(Tile::SWIZZLE));
  for (int row = 0; row < ROWS; ++row) {{
    for (int chunk = 0; chunk < COLUMNS / 8; ++chunk) {{
      std::printf("offset %d %d %d %d %d\\n", COLUMNS, ROWS, row, chunk, Tile::offset(row, chunk));
    }}
    for (uint32_t base : {{{", ".join(f"{base}u" for base in BASES)}}}) {{
      for (int own = 0; own < 2; ++own) {{
        for (int further = 0; own + further < COLUMNS / 8; further += 2) {{
          const uint32_t lane = base + Tile::offset(row, own);
          std::printf("advance %d %d %d %d %u %u\\n", COLUMNS, ROWS, row, own + further, base,
                      Tile::advance(lane, further));
        }}
      }}
    }}
  }}
}}

int main() {{
  {" ".join(f"print<{columns}, {rows}>();" for columns, rows in SHAPES)}
}}
"""


class Tile:
    """What the program printed for one shape."""

    def __init__(self, slab: int, slabs: int, row_bytes: int, slab_bytes: int, swizzle: int):
        self.slab, self.slabs = slab, slabs
        self.row_bytes, self.slab_bytes, self.swizzle = row_bytes, slab_bytes, swizzle
        self.offsets: dict[tuple[int, int], int] = {}  # (row, chunk)
        self.advances: list[tuple[int, int, int, int]] = []  # row, chunk, base, address


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Tile]:
    found: dict[tuple[int, int], Tile] = {}
    for kind, *fields in printed(compiled(PROGRAM, tmp_path_factory.mktemp("slabs"))):
        columns, rows, *numbers = (int(field) for field in fields)
        if kind == "tile":
            found[columns, rows] = Tile(*numbers)
        elif kind == "offset":
            found[columns, rows].offsets[numbers[0], numbers[1]] = numbers[2]
        else:
            found[columns, rows].advances.append((numbers[0], numbers[1], numbers[2], numbers[3]))
    return found


def written_by_tma(tile: Tile, row: int, chunk: int) -> int:
    """The offset at which TMA puts a chunk, if a box is one slab.

    As many address bits as the swizzle has, from bit 7 on, are XORed into the bits from bit 4 on
    (measured on an H200 for all swizzles).
    """
    per_slab = tile.slab * 2 // CHUNK_BYTES
    linear = chunk // per_slab * tile.slab_bytes + row * tile.row_bytes
    linear += chunk % per_slab * CHUNK_BYTES
    bits = {2: 3, 3: 7}[tile.swizzle]  # 64 and 128 bytes
    return linear ^ ((linear >> 7 & bits) << 4)


@every_shape
def test_a_slab_is_as_wide_as_its_swizzle_and_slabs_cover_the_columns(
    shape: tuple[int, int], tiles: dict[tuple[int, int], Tile]
) -> None:
    columns, rows = shape
    tile = tiles[shape]
    assert tile.slab * tile.slabs == columns
    assert tile.row_bytes == 2 * tile.slab == {2: 64, 3: 128}[tile.swizzle]
    assert tile.slab_bytes == rows * tile.row_bytes


@every_shape
def test_chunks_lie_where_the_copy_engine_writes_them(
    shape: tuple[int, int], tiles: dict[tuple[int, int], Tile]
) -> None:
    tile = tiles[shape]
    assert len(tile.offsets) == shape[0] // 8 * shape[1]
    for (row, chunk), offset in tile.offsets.items():
        assert offset == written_by_tma(tile, row, chunk)


@every_shape
def test_the_eight_rows_that_ldmatrix_reads_at_a_chunk_fall_in_eight_bank_groups(
    shape: tuple[int, int], tiles: dict[tuple[int, int], Tile]
) -> None:
    columns, rows = shape
    tile = tiles[shape]
    for first in range(0, rows, 8):
        for chunk in range(columns // 8):
            groups = {
                tile.offsets[row, chunk] // CHUNK_BYTES % BANK_GROUPS
                for row in range(first, first + 8)
            }
            assert len(groups) == BANK_GROUPS, (first, chunk)


@every_shape
def test_a_lane_finds_every_chunk_from_its_own(
    shape: tuple[int, int], tiles: dict[tuple[int, int], Tile]
) -> None:
    tile = tiles[shape]
    assert tile.advances
    for row, chunk, base, address in tile.advances:
        assert address == base + tile.offsets[row, chunk]
