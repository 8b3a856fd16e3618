// Copies an attn_mask of 16 bits to where TMA can read it: its rows are not aligned, or its keys
// are no neighbours.
#pragma once

#include <cstdint>

#include "common/ptx/grid_dependency.cuh"
#include "hopper/masks/masked_config.cuh"
#include "hopper/masks/masked_params.h"

namespace archflash::hopper {

// A warp copies rows of heads, a word of two elements of each in each lane at a time.
__device__ __forceinline__ void copy_mask(const CopiedMaskParams& params) {
  ptx::griddepcontrol_wait();               // what comes before this call is done
  ptx::griddepcontrol_launch_dependents();  // the next kernel waits for the end of this one
  if (params.taken_gmem != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *params.taken_gmem = 0;
  const int lane = threadIdx.x % 32;
  const auto rows = static_cast<unsigned>(params.rows), heads = static_cast<unsigned>(params.heads);
  const unsigned all_rows = static_cast<unsigned>(params.batches) * heads * rows;
  const unsigned first = (blockIdx.x * COPY_WARPS + threadIdx.x / 32) * COPY_WARP_ROWS;
  const uint16_t* from_gmem[COPY_WARP_ROWS];
#pragma unroll
  for (int r = 0; r < COPY_WARP_ROWS; ++r) {
    const unsigned number = min(first + r, all_rows - 1);
    const unsigned slice = number / rows, row = number - slice * rows;
    const unsigned batch = slice / heads, head = slice - batch * heads;
    from_gmem[r] = params.mask_gmem + batch * params.mask_batch + head * params.mask_head +
                   row * params.mask_row;
  }
  uint32_t* const to_gmem = params.copied_gmem + first * params.row_words;
#pragma unroll 2
  for (int word = lane; 2 * word < params.keys; word += 32) {
    const bool is_pair = 2 * word + 1 < params.keys;
    uint32_t words[COPY_WARP_ROWS];
#pragma unroll
    for (int r = 0; r < COPY_WARP_ROWS; ++r) {
      words[r] = from_gmem[r][2 * word * params.mask_key];
      if (is_pair) words[r] |= from_gmem[r][(2 * word + 1) * params.mask_key] << 16;
    }
#pragma unroll
    for (int r = 0; r < COPY_WARP_ROWS; ++r) {
      if (first + r < all_rows) to_gmem[r * params.row_words + word] = words[r];
    }
  }
}

}  // namespace archflash::hopper
