// A tile layout in shared memory that TMA writes and wgmma reads, for rows that come from pages.
#pragma once

#include "common/device/host_device.h"
#include "common/swizzle.h"

namespace archflash::hopper {

// A tile of 16-bit columns whose slabs of 64 columns do not follow one another as those of a
// device::SlabTile: those of 8 rows do, then those of the next 8 rows. So all columns of a multiple
// of 8 rows are one piece of shared memory, which one box of a tensor map (columns of a slab, 8
// rows, slabs, groups of 8 rows, heads) fills. Chunks are permuted as in 128-byte rows there.
template <int COLUMNS_, int ROWS_>
struct GroupedTile {
  static constexpr int COLUMNS = COLUMNS_;
  static constexpr int ROWS = ROWS_;
  static constexpr int SLAB = 64;  // columns
  static constexpr int SLABS = COLUMNS / SLAB;
  static constexpr int ROW_BYTES = 2 * SLAB;        // from one row to the next of 8 in a slab
  static constexpr int SLAB_BYTES = 8 * ROW_BYTES;  // from one slab to the next
  static constexpr int GROUP_ROWS = 8;
  static constexpr int GROUP_BYTES = SLABS * SLAB_BYTES;  // from 8 rows to the next 8
  static constexpr int BYTES = ROWS / GROUP_ROWS * GROUP_BYTES;
  static constexpr int ALIGNMENT = 1024;
  static constexpr Swizzle SWIZZLE = Swizzle::B128;
  static constexpr int BOX_ROWS = ROWS;
  static_assert(COLUMNS % SLAB == 0, "a row is whole slabs");
  static_assert(ROWS % 16 == 0 && ROWS <= 256, "rows of products, and of one box");

  // Byte offset of a 16-byte chunk in the tile.
  ARCHFLASH_HOST_DEVICE static constexpr int offset(int row, int chunk) {
    return row / GROUP_ROWS * GROUP_BYTES + chunk / 8 * SLAB_BYTES + row % 8 * ROW_BYTES +
           (chunk % 8 ^ row % 8) * 16;
  }
};

}  // namespace archflash::hopper
