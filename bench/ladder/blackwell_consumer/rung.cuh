// The sizes and the parameters that all rungs of the ladder share. A CTA owns 64 query rows of one
// head and visits its keys in blocks of 64. Inputs are bf16 with head dim 64; there is no mask, and
// lengths are multiples of 64.
#pragma once

#include <cstdint>

#include "../params.cuh"

namespace archflash::ladder {

constexpr int HEAD_DIM = 64;
constexpr int BLOCK_Q = 64;  // rows
constexpr int BLOCK_K = 64;  // keys
constexpr unsigned FULL_WARP = 0xFFFFFFFFu;

using Params = RungParams<uint16_t>;  // tensors of bf16

// The offset of this CTA's head in each tensor, in elements.
__device__ __forceinline__ int64_t head_start(const Params& params) {
  return static_cast<int64_t>(blockIdx.y) * params.n * HEAD_DIM;
}

__device__ __forceinline__ float to_float(uint32_t bf16) { return __uint_as_float(bf16 << 16); }

}  // namespace archflash::ladder
