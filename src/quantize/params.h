// The one parameter of every kernel of quantize_fp8.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace archflash::quantize {

// A tile is SCALE_ROWS rows of one head. A group is the tiles that share a descale. Strides in
// elements.
struct Params {
  const void* x_gmem;   // (batch, heads, rows, d)
  uint8_t* out_gmem;    // the same shape
  float* descale_gmem;  // one for each group
  float* largest_gmem;  // of each tile; unused where a group is a tile
  int64_t x_batch, x_head, x_row;
  int64_t out_batch, out_head, out_row;
  int64_t heads, rows;
  int64_t tiles_per_head;
  int64_t tiles_per_group;
  int64_t
      first;  // the tile of the launch's first CTA; for the kernel that makes descales the group
  int32_t d;
  DType out_dtype;  // E4M3 or E5M2
};

constexpr int THREADS = 256;
constexpr int CHUNK = 8;           // neighbouring elements that a thread reads at once
constexpr int MOST_COLUMNS = 256;  // of a row

}  // namespace archflash::quantize
