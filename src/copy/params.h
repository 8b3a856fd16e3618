// The one parameter of the kernels that copy tensors between the layout that a call gave them and
// the one that kernels of attention read and write.
#pragma once

#include <cstdint>

namespace archflash::copy {

// A tensor (batch, heads, rows, columns) in two places. In the dense one a row is a whole number of
// chunks of 16 bytes; its last columns may be more than the tensor has. In the given one it has any
// strides. All strides are in bytes.
struct Copy {
  void* given_gmem;
  void* dense_gmem;
  int64_t given_batch, given_head, given_row;
  int64_t given_unit;  // from one unit of a row to the next
  int64_t dense_batch, dense_head, dense_row;
  int32_t heads, rows;
  int32_t units;       // of a row in the given place
  int32_t unit_bytes;  // 1, 2, 4 or 8: what is moved at once there
  int32_t chunks;      // of a row in the dense place
  int32_t row_blocks;  // blocks of ROWS rows
  int32_t first_block;
  int32_t rows_first;  // neighbouring threads take neighbouring rows, not chunks of one row
};

constexpr int MOST_COPIES = 8;  // of one launch

struct Params {
  Copy copy[MOST_COPIES];
  int32_t copies;
  int32_t unused;
};

// A log-sum-exp whose rows that see no key get +infinity.
struct LseParams {
  float* lse_gmem;
  int64_t count;
};

constexpr int ROWS = 64;  // of a CTA
constexpr int THREADS = 256;
constexpr int CHUNK_BYTES = 16;

}  // namespace archflash::copy
