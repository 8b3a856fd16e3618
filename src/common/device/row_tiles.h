// Which rows of a sequence its tiles of rows have.
#pragma once

#include "common/device/host_device.h"

namespace archflash::device {

struct RowTile {
  int first_row;
  int end_row;  // one behind its last row
};

// The tile that would have the rows [first_row, first_row + block_rows) if the tiles began at row 0
// and the last one had the rows that are left. Here tiles end with the sequence, so far as they can
// move by whole `step`s, and the first one has the rows that are left: under a causal mask the last
// tile sees the most keys and the first tile the fewest, so that is where a tile with few rows
// costs the least.
ARCHFLASH_HOST_DEVICE inline RowTile row_tile_from_end(int rows, int first_row, int block_rows,
                                                       int step) {
  const int left = rows % block_rows;
  const int shift = left == 0 ? 0 : (block_rows - left) / step * step;
  const int first = first_row - shift, end = first + block_rows;
  return {first < 0 ? 0 : first, end < rows ? end : rows};
}

}  // namespace archflash::device
