// The one parameter of the kernel of merge_attention.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/merge_parts.h"

namespace archflash::merge {

// Attention of the same rows over some of the keys. Strides in elements.
struct Part {
  const void* out_gmem;   // (batch, heads, rows, dv)
  const float* lse_gmem;  // (batch, heads, rows): natural logarithms; -inf: the row saw no key
  int64_t out_batch, out_head, out_row;
  int64_t lse_batch, lse_head, lse_row;
};

struct Params {
  Part part[MERGE_PARTS];
  void* out_gmem;   // (batch, heads, rows, dv)
  float* lse_gmem;  // (batch, heads, rows), dense
  int64_t out_batch, out_head, out_row;
  int64_t heads, rows;
  int64_t all_rows;   // batch * heads * rows
  int64_t first_row;  // of the launch's first CTA
  int32_t parts, dv;
  DType dtype[MERGE_PARTS];  // F32, F16 or BF16
  DType out_dtype;           // one of these
  int32_t lane_bits;         // 2^lane_bits threads have FEWEST_COLUMNS columns of a row each
};

constexpr int THREADS = 128;       // of a CTA
constexpr int ROWS = 32;           // of a CTA
constexpr int FEWEST_COLUMNS = 4;  // neighbouring ones that a thread takes; they divide dv

}  // namespace archflash::merge
