// Which keys a query row sees where positions are cut into chunks, as in models whose layers attend
// within chunks.
#pragma once

#include "common/device/host_device.h"
#include "common/device/visible_keys.cuh"

namespace archflash::device {

// Row i has position i + position among the keys. Of the keys that VisibleKeys allow it sees those
// of its own chunk: chunk number n has the positions from n * chunk to (n + 1) * chunk - 1. As a
// row's first and last key never fall with the row number, masks() and hides() may look at the ends
// of a range of rows only.
struct ChunkedKeys : VisibleKeys {
  int chunk;  // 0: no chunks. At most 2^30
  int position;

  // The first position of a row's chunk; negative for a row before the first key.
  ARCHFLASH_HOST_DEVICE int start(int row) const {
    const int remainder = (row + position) % chunk;
    return row + position - (remainder < 0 ? remainder + chunk : remainder);
  }
  ARCHFLASH_HOST_DEVICE int first(int row) const {
    const int first = VisibleKeys::first(row);
    if (chunk == 0) return first;
    const int of_chunk = start(row);
    return first > of_chunk ? first : of_chunk;
  }
  ARCHFLASH_HOST_DEVICE int last(int row) const {
    const int last = VisibleKeys::last(row);
    if (chunk == 0) return last;
    const int of_chunk = start(row) + chunk - 1;
    return last < of_chunk ? last : of_chunk;
  }
  ARCHFLASH_HOST_DEVICE int begin() const { return first(0); }
  ARCHFLASH_HOST_DEVICE int end(int rows) const { return last(rows - 1) + 1; }
  ARCHFLASH_HOST_DEVICE bool masks(int row_first, int row_last, int key_first, int key_last) const {
    return key_last > last(row_first) || key_first < first(row_last);
  }
  ARCHFLASH_HOST_DEVICE bool hides(int row_first, int row_last, int key_first, int key_last) const {
    return key_first > last(row_last) || key_last < first(row_first);
  }

  // What one row sees, as the VisibleKeys of a row 0.
  ARCHFLASH_HOST_DEVICE VisibleKeys of_row(int row) const { return {first(row), last(row), nk}; }
};

}  // namespace archflash::device
