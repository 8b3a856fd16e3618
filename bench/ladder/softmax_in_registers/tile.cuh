// What all rungs of this ladder share. A CTA of four warps owns 64 query rows of one head, 16 for
// each warp, and visits the 64-key blocks up to the diagonal. Inputs are fp16 with head dim 64; row
// i sees the keys up to i; lengths are multiples of 64.
#pragma once

#include <cstdint>

#include "../params.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"

namespace archflash::ladder {

constexpr int HEAD_DIM = 64;
constexpr int BLOCK = 64;  // query rows of a CTA, and keys of a block
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr unsigned FULL_WARP = 0xFFFFFFFFu;

using Params = RungParams<uint16_t>;

// The first query row of this CTA. CTAs with many keys start first.
__device__ __forceinline__ int first_row() { return (gridDim.x - 1 - blockIdx.x) * BLOCK; }

__device__ __forceinline__ int64_t head_start(const Params& params) {
  return static_cast<int64_t>(blockIdx.y) * params.n * HEAD_DIM;
}

// How rows lie in shared memory: fp16 rows of STRIDE elements, fp32 rows of FLOAT_STRIDE elements.
struct PlainRows {
  static constexpr int STRIDE = HEAD_DIM, FLOAT_STRIDE = BLOCK;
};
struct PaddedRows {  // eight neighbouring rows begin in different banks
  static constexpr int STRIDE = HEAD_DIM + 8, FLOAT_STRIDE = BLOCK + 4;
};

// All threads copy 64 rows, one element at a time.
template <class Rows>
__device__ __forceinline__ void copy_elements(uint16_t* tile_smem, const uint16_t* rows_gmem) {
  for (int i = threadIdx.x; i < BLOCK * HEAD_DIM; i += THREADS)
    tile_smem[i / HEAD_DIM * Rows::STRIDE + i % HEAD_DIM] = rows_gmem[i];
}

// All threads copy 64 rows, 16 bytes at a time.
template <class Rows>
__device__ __forceinline__ void copy_chunks(uint16_t* tile_smem, const uint16_t* rows_gmem) {
#pragma unroll
  for (int i = threadIdx.x; i < BLOCK * HEAD_DIM / 8; i += THREADS) {
    *reinterpret_cast<uint4*>(tile_smem + i / 8 * Rows::STRIDE + i % 8 * 8) =
        *reinterpret_cast<const uint4*>(rows_gmem + 8 * i);
  }
}

// The softmax of rungs that keep scores in shared memory: two neighbouring threads share a row, and
// each has 32 of the 64 scores. Base and sum stay in their registers.
struct RowOfTwoThreads {
  int row = threadIdx.x / 2, half = threadIdx.x % 2 * (BLOCK / 2);
  float base = -INFINITY, sum = 0.0f;

  // Replaces a row's scores by P = 2^(score * exp2_scale - base), which `store(key, p)` takes.
  // `visible` keys of the block count. Returns the factor of the row's earlier outputs.
  template <class Store>
  __device__ __forceinline__ float exponentiate(const float* s_row, int visible, float exp2_scale,
                                                const Store& store) {
    float max = -INFINITY;
    for (int key = half; key < half + BLOCK / 2; ++key)
      if (key < visible) max = fmaxf(max, s_row[key]);
    max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 1));
    const float raised = fmaxf(base, max * exp2_scale);
    const float correction = ptx::ex2_approx_ftz(base - raised);
    base = raised;
    sum *= correction;
    for (int key = half; key < half + BLOCK / 2; ++key) {
      const float p = key < visible ? ptx::ex2_approx_ftz(s_row[key] * exp2_scale - raised) : 0.0f;
      sum += p;
      store(key, p);
    }
    return correction;
  }
  __device__ __forceinline__ float row_sum() const {
    return sum + __shfl_xor_sync(FULL_WARP, sum, 1);
  }
};

}  // namespace archflash::ladder
