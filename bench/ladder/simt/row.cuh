// What all rungs of this ladder share. A thread owns one query row; a CTA of 64 threads owns 64
// rows of one head. Inputs are fp32 with head dim 64; lengths are any. With `causal`, row i sees
// the keys up to i.
#pragma once

#include <cstdint>

#include "../params.cuh"
#include "common/ptx/ex2.cuh"

namespace archflash::ladder {

constexpr int HEAD_DIM = 64;
constexpr int THREADS = 64;  // and query rows of a CTA
constexpr int BLOCK = 32;    // keys of a block, where there are blocks

using Params = RungParams<float>;

// The row of this thread, and how many keys it sees; 0 behind the last row.
struct Row {
  int64_t head;  // offset of the CTA's head in each tensor, in elements
  int index, visible;
  int cta_visible;  // some row of the CTA sees these

  __device__ __forceinline__ explicit Row(const Params& params)
      : head(static_cast<int64_t>(blockIdx.y) * params.n * HEAD_DIM),
        index(blockIdx.x * THREADS + threadIdx.x),
        visible(index >= params.n ? 0
                : params.causal   ? index + 1
                                  : params.n),
        cta_visible(params.causal ? min(params.n, static_cast<int>(blockIdx.x + 1) * THREADS)
                                  : params.n) {}
  // Offset of the row's first element.
  __device__ __forceinline__ int64_t start() const { return head + int64_t{index} * HEAD_DIM; }
};

}  // namespace archflash::ladder
