// A tile layout in shared memory that TMA can write and ldmatrix reads without bank conflicts.
#pragma once

#include "common/device/host_device.h"
#include "common/swizzle.h"

namespace archflash::device {

// A tile of 16-bit columns is stored as slabs of SLAB columns, one after another. A TMA box is all
// rows of a slab, or half of them. A row of a slab is one swizzle span (128 or 64 bytes), whose
// 16-byte chunks the copy engine permutes by bits of the shared-memory address. Tiles start at
// multiples of ALIGNMENT, so that these bits come from the row number. Then the chunks
// that ldmatrix reads from eight rows lie in different banks. A chunk's position in its span is
//   128-byte rows: chunk ^ (row % 8)        64-byte rows: chunk ^ (row / 2 % 4)
template <int COLUMNS_, int ROWS_>
struct SlabTile {
  static constexpr int COLUMNS = COLUMNS_;
  static constexpr int ROWS = ROWS_;
  static constexpr int SLAB = COLUMNS % 64 == 0 ? 64 : 32;  // columns
  static constexpr int SLABS = COLUMNS / SLAB;
  static constexpr int GROUP = SLAB / 8;      // chunks in a row of a slab
  static constexpr int ROW_BYTES = 2 * SLAB;  // from one row to the next in a slab
  static constexpr int SLAB_BYTES = ROWS * ROW_BYTES;
  static constexpr int BYTES = SLABS * SLAB_BYTES;
  static constexpr int ALIGNMENT = 1024;
  static constexpr Swizzle SWIZZLE = SLAB == 64 ? Swizzle::B128 : Swizzle::B64;
  static_assert(COLUMNS % 32 == 0, "a row is whole slabs");
  static constexpr int BOX_ROWS = ROWS <= 256 ? ROWS : ROWS / 2;  // TMA: at most 256
  static_assert(ROWS % 16 == 0 && ROWS <= 512, "boxes are whole row tiles of ldmatrix and wgmma");
  static_assert(SLAB_BYTES % (8 * ROW_BYTES) == 0 && BYTES % ALIGNMENT == 0,
                "the next slab and the next tile must start where their swizzle does");

  ARCHFLASH_HOST_DEVICE static constexpr int swizzle(int row) {
    return GROUP == 8 ? row % 8 : row / 2 % 4;
  }
  // Byte offset of a 16-byte chunk in the tile.
  ARCHFLASH_HOST_DEVICE static constexpr int offset(int row, int chunk) {
    return chunk / GROUP * SLAB_BYTES + row * ROW_BYTES + (chunk % GROUP ^ swizzle(row)) * 16;
  }
  // From the offset of chunk 0 or 1 of a row to the chunk that is `chunks` (even) further right.
  template <typename Address>
  ARCHFLASH_HOST_DEVICE static constexpr Address advance(Address offset, int chunks) {
    return (offset ^ static_cast<Address>(chunks % GROUP * 16)) +
           static_cast<Address>(chunks / GROUP * SLAB_BYTES);
  }
};

}  // namespace archflash::device
