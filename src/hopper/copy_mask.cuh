// Copies an attn_mask of 16 bits to where TMA can read it: its rows are not aligned, or its keys
// are no neighbours.
#pragma once

#include <cstdint>

#include "common/ptx/grid_dependency.cuh"
#include "hopper/masked_config.cuh"
#include "hopper/masked_params.h"

namespace archflash::hopper {

// A warp copies a row of a head, a word of two elements in each lane at a time.
__device__ __forceinline__ void copy_mask(const CopiedMaskParams& params) {
  ptx::griddepcontrol_wait();               // what comes before this call is done
  ptx::griddepcontrol_launch_dependents();  // the next kernel waits for the end of this one
  if (params.taken_gmem != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *params.taken_gmem = 0;
  const int lane = threadIdx.x % 32;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * COPY_ROWS + threadIdx.x / 32;
  const auto row_of_all = static_cast<unsigned>(number);
  const auto rows = static_cast<unsigned>(params.rows), heads = static_cast<unsigned>(params.heads);
  const unsigned slice = row_of_all / rows, row = row_of_all - slice * rows;
  const unsigned batch = slice / heads, head = slice - batch * heads;
  if (batch >= static_cast<unsigned>(params.batches)) return;
  const uint16_t* const from_gmem = params.mask_gmem + batch * params.mask_batch +
                                    head * params.mask_head + row * params.mask_row;
  uint32_t* const to_gmem = params.copied_gmem + number * params.row_words;
#pragma unroll 4
  for (int word = lane; 2 * word < params.keys; word += 32) {
    const uint32_t low = from_gmem[2 * word * params.mask_key];
    uint32_t high = 0;
    if (2 * word + 1 < params.keys) high = from_gmem[(2 * word + 1) * params.mask_key];
    to_gmem[word] = low | high << 16;
  }
}

}  // namespace archflash::hopper
