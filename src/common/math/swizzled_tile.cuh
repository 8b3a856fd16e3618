// The layout of a tile in shared memory that ldmatrix reads without bank conflicts.
#pragma once

#include "common/math/host_device.h"

namespace archflash::math {

// A tile of 16-bit elements in shared memory, rows without padding. The 16-byte chunks of a row are
// permuted inside groups of GROUP by an XOR with the row, so that the eight rows which ldmatrix
// reads at one chunk, and those which a warp writes, lie in different banks:
//   rows of 64n elements (128n bytes):          chunk ^ (row % 8) inside groups of eight
//   rows of 32n, n odd (64 bytes past a line):  chunk ^ (row / 2 % 4) inside groups of four
template <int COLUMNS_>
struct SwizzledTile {
  static constexpr int COLUMNS = COLUMNS_;
  static constexpr int ROW_BYTES = 2 * COLUMNS;
  static constexpr int CHUNKS = COLUMNS / 8;
  static constexpr int GROUP = COLUMNS % 64 == 0 ? 8 : 4;
  static_assert(COLUMNS % 32 == 0, "a row is whole groups of chunks");

  ARCHFLASH_HOST_DEVICE static constexpr int swizzle(int row) {
    // mutants: never-negative
    return GROUP == 8 ? row % 8 : row / 2 % 4;
  }
  // Byte offset of a chunk.
  ARCHFLASH_HOST_DEVICE static constexpr int offset(int row, int chunk) {
    // mutants: never-negative
    return row * ROW_BYTES + chunk / GROUP * GROUP * 16 + (chunk % GROUP ^ swizzle(row)) * 16;
  }
  // From a lane's own chunk (0 or 1) to the one `chunks` (even) further.
  template <typename Address>
  ARCHFLASH_HOST_DEVICE static constexpr Address advance(Address offset, int chunks) {
    return (offset ^ static_cast<Address>(chunks % GROUP * 16)) +
           static_cast<Address>(chunks / GROUP * GROUP * 16);
  }
};

}  // namespace archflash::math
