// The sizes and the parameters that all rungs of the ladder share. A CTA owns 64 query rows of one
// head and visits its keys in blocks of 64. Inputs are bf16 with head dim 64; there is no mask, and
// lengths are multiples of 64.
#pragma once

#include <cstdint>

#include "common/tensor_map.h"

namespace archflash::ladder {

constexpr int HEAD_DIM = 64;
constexpr int BLOCK_Q = 64;  // rows
constexpr int BLOCK_K = 64;  // keys
constexpr unsigned FULL_WARP = 0xFFFFFFFFu;

// The parameter block of every rung, which bench/ladder/rungs.py writes. All tensors are
// (heads, n, 64) in bf16.
struct Params {
  const uint16_t* q_gmem;
  const uint16_t* k_gmem;
  const uint16_t* v_gmem;
  uint16_t* out_gmem;
  int32_t n;
  float exp2_scale;               // log2(e) / 8
  TensorMap q_map, k_map, v_map;  // for rungs that use TMA: (64, n, heads, 1), boxes of 64 rows
};

// The offset of this CTA's head in each tensor, in elements.
__device__ __forceinline__ int64_t head_start(const Params& params) {
  return static_cast<int64_t>(blockIdx.y) * params.n * HEAD_DIM;
}

__device__ __forceinline__ float to_float(uint32_t bf16) { return __uint_as_float(bf16 << 16); }

}  // namespace archflash::ladder
