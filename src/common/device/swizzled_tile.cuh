// A tile layout in shared memory that ldmatrix reads without bank conflicts.
#pragma once

#include "common/device/host_device.h"

namespace archflash::device {

// A tile of 16-bit columns, rows without padding. The 16-byte chunks of a row are permuted inside
// groups of GROUP chunks by an XOR with the row number, so that the chunks which ldmatrix reads
// from eight rows, and those which a warp writes, lie in different banks. A chunk's position is
//   chunk ^ (row % 8) in groups of eight       if rows are a multiple of 128 bytes
//   chunk ^ (row / 2 % 4) in groups of four    if rows are an odd multiple of 64 bytes
template <int COLUMNS_>
struct SwizzledTile {
  static constexpr int COLUMNS = COLUMNS_;
  static constexpr int ROW_BYTES = 2 * COLUMNS;
  static constexpr int CHUNKS = COLUMNS / 8;
  static constexpr int GROUP = COLUMNS % 64 == 0 ? 8 : 4;
  static_assert(COLUMNS % 32 == 0, "a row is whole groups of chunks");

  ARCHFLASH_HOST_DEVICE static constexpr int swizzle(int row) {
    // mutants: never-negative (tests/sim/tags.py)
    return GROUP == 8 ? row % 8 : row / 2 % 4;
  }
  // Byte offset of a 16-byte chunk in the tile.
  ARCHFLASH_HOST_DEVICE static constexpr int offset(int row, int chunk) {
    // mutants: never-negative
    return row * ROW_BYTES + chunk / GROUP * GROUP * 16 + (chunk % GROUP ^ swizzle(row)) * 16;
  }
  // From the offset of chunk 0 or 1 of a row to the chunk that is `chunks` (even) further right.
  template <typename Address>
  ARCHFLASH_HOST_DEVICE static constexpr Address advance(Address offset, int chunks) {
    return (offset ^ static_cast<Address>(chunks % GROUP * 16)) +
           static_cast<Address>(chunks / GROUP * GROUP * 16);
  }
};

}  // namespace archflash::device
