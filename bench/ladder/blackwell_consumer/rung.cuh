// What all rungs of the ladder share: sizes and the parameter. A CTA owns 64 query rows of one head
// and walks over its keys, 64 at a time; bf16, head dim 64, no mask, lengths are multiples of 64.
#pragma once

#include <cstdint>

#include "common/tensor_map.h"

namespace archflash::ladder {

constexpr int HEAD_DIM = 64;
constexpr int BLOCK_Q = 64;  // rows
constexpr int BLOCK_K = 64;  // keys
constexpr unsigned FULL_WARP = 0xFFFFFFFFu;

// The one parameter; python writes it (bench/ladder/rungs.py).
struct Params {
  const uint16_t* q_gmem;  // (heads, n, 64), bf16; k, v and out likewise
  const uint16_t* k_gmem;
  const uint16_t* v_gmem;
  uint16_t* out_gmem;
  int32_t n;
  float exp2_scale;               // log2(e) / 8
  TensorMap q_map, k_map, v_map;  // of the rungs that use TMA: (64, n, heads, 1), boxes of 64 rows
};

// First element of this CTA's head.
__device__ __forceinline__ int64_t head_start(const Params& params) {
  return static_cast<int64_t>(blockIdx.y) * params.n * HEAD_DIM;
}

__device__ __forceinline__ float to_float(uint32_t bf16) { return __uint_as_float(bf16 << 16); }

}  // namespace archflash::ladder
