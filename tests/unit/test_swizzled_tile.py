"""swizzled_tile.cuh, compiled for the host: its layout is one, and has no bank conflicts."""

from __future__ import annotations

import pytest
from tests.host_code import compiled, needs_compiler, printed

ROWS = 64
CHUNK_BYTES = 16  # a row of an ldmatrix matrix, a cp.async copy
BANK_GROUPS = 8  # groups of 16 bytes: 32 banks of 4 bytes
WIDTHS = (32, 64, 96, 128, 160, 192, 256)
BASES = (0, 128, 640, 4096)  # addresses of tiles in shared memory, multiples of 128 bytes

pytestmark = needs_compiler
every_width = pytest.mark.parametrize("columns", WIDTHS)

PROGRAM = f"""
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include "common/device/swizzled_tile.cuh"

template <int COLUMNS>
void print() {{
  using Tile = archflash::device::SwizzledTile<COLUMNS>;
  static_assert(Tile::offset(0, 0) == 0, "usable in constant expressions");
  std::printf("tile %d %d %d\\n", COLUMNS, Tile::CHUNKS, Tile::GROUP);
  for (int row = 0; row < {ROWS}; ++row) {{
    for (int chunk = 0; chunk < Tile::CHUNKS; ++chunk) {{
      std::printf("offset %d %d %d\\n", row, chunk, Tile::offset(row, chunk));
    }}
    for (uint32_t base : {{{", ".join(f"{base}u" for base in BASES)}}}) {{
      for (int own = 0; own < 2; ++own) {{
        for (int further = 0; own + further < Tile::CHUNKS; further += 2) {{
          const uint32_t lane = base + Tile::offset(row, own);
          std::printf("advance %d %d %u %u\\n", row, own + further, base,
                      Tile::advance(lane, further));
        }}
      }}
    }}
  }}
}}

int main() {{
  {" ".join(f"print<{columns}>();" for columns in WIDTHS)}
}}
"""


class Tile:
    """What the program printed for one width."""

    def __init__(self, columns: int, chunks: int, group: int) -> None:
        self.columns, self.chunks, self.group = columns, chunks, group
        self.offsets: dict[tuple[int, int], int] = {}  # (row, chunk)
        self.advances: list[tuple[int, int, int, int]] = []  # row, chunk, base, address

    def bank_group(self, row: int, chunk: int) -> int:
        return self.offsets[row, chunk] // CHUNK_BYTES % BANK_GROUPS


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Tile]:
    found: dict[int, Tile] = {}
    for kind, *fields in printed(compiled(PROGRAM, tmp_path_factory.mktemp("swizzled"))):
        numbers = [int(field) for field in fields]
        if kind == "tile":
            tile = found[numbers[0]] = Tile(*numbers)
        elif kind == "offset":
            tile.offsets[numbers[0], numbers[1]] = numbers[2]
        else:
            tile.advances.append((numbers[0], numbers[1], numbers[2], numbers[3]))
    return found


@every_width
def test_offsets_are_a_permutation_of_the_chunks_of_each_row(
    columns: int, tiles: dict[int, Tile]
) -> None:
    tile, row_bytes = tiles[columns], 2 * columns
    assert tile.chunks * CHUNK_BYTES == row_bytes
    for row in range(ROWS):
        places = sorted(tile.offsets[row, chunk] for chunk in range(tile.chunks))
        assert places == [row * row_bytes + CHUNK_BYTES * i for i in range(tile.chunks)]


@every_width
def test_the_eight_rows_that_ldmatrix_reads_at_a_chunk_fall_in_eight_bank_groups(
    columns: int, tiles: dict[int, Tile]
) -> None:
    tile = tiles[columns]
    for first in range(0, ROWS, 8):
        for chunk in range(tile.chunks):
            groups = {tile.bank_group(row, chunk) for row in range(first, first + 8)}
            assert len(groups) == BANK_GROUPS, (first, chunk)


@every_width
def test_the_eight_chunks_that_eight_threads_write_fall_in_eight_bank_groups(
    columns: int, tiles: dict[int, Tile]
) -> None:
    """Neighbouring threads copy the chunks of a group, then those of the next row."""
    tile = tiles[columns]
    rows_of_eight = BANK_GROUPS // tile.group
    for first in range(0, ROWS, rows_of_eight):
        for start in range(0, tile.chunks, tile.group):
            groups = {
                tile.bank_group(row, start + chunk)
                for row in range(first, first + rows_of_eight)
                for chunk in range(tile.group)
            }
            assert len(groups) == BANK_GROUPS, (first, start)


@every_width
def test_the_swizzle_of_a_row_returns_every_eight_rows(
    columns: int, tiles: dict[int, Tile]
) -> None:
    """A thread can use one offset for all the rows that it copies or reads."""
    tile, row_bytes = tiles[columns], 2 * columns
    for row in range(ROWS - 8):
        for chunk in range(tile.chunks):
            expected = tile.offsets[row, chunk] + 8 * row_bytes
            assert tile.offsets[row + 8, chunk] == expected


@every_width
def test_advancing_from_a_lanes_own_chunk_gives_the_offset_of_the_one_further(
    columns: int, tiles: dict[int, Tile]
) -> None:
    tile = tiles[columns]
    assert len(tile.advances) == ROWS * len(BASES) * tile.chunks
    for row, chunk, base, address in tile.advances:
        assert address == base + tile.offsets[row, chunk], (row, chunk, base)
