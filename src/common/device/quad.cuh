// The four lanes of a quad, which hold neighbouring columns of the rows of a fragment.
#pragma once

#include <cstdint>

#include "common/device/uniform.cuh"

namespace archflash::device {

// The sum of what the lanes of a quad have, in each of them: of a row, of which they have parts.
__device__ __forceinline__ float sum_of_quad(float x) {
  x += __shfl_xor_sync(FULL_WARP, x, 1);
  x += __shfl_xor_sync(FULL_WARP, x, 2);
  return x;
}

// Transposes 4 x 4 words among the lanes of a quad: lane t of it gets word t of each of its lanes.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t given = upper ? words[i] : words[i + step];
      const uint32_t taken = __shfl_xor_sync(FULL_WARP, given, step);
      words[i] = upper ? taken : words[i];
      words[i + step] = upper ? words[i + step] : taken;
    }
  }
}

}  // namespace archflash::device
