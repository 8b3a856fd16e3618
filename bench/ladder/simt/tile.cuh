// Rungs 2 to 4: blocks of K and V in shared memory, which 64 rows share, and Q in registers.
#pragma once

#include "row.cuh"

namespace archflash::ladder {

// All threads copy the rows of a block from `first` on, one element at a time.
__device__ __forceinline__ void copy_elements(float (*tile_smem)[HEAD_DIM], const float* head_gmem,
                                              int first, int n) {
  const int rows = min(BLOCK, n - first);
  for (int i = threadIdx.x; i < rows * HEAD_DIM; i += THREADS)
    tile_smem[i / HEAD_DIM][i % HEAD_DIM] = head_gmem[int64_t{first} * HEAD_DIM + i];
}

// The same, 16 bytes at a time.
__device__ __forceinline__ void copy_chunks(float (*tile_smem)[HEAD_DIM], const float* head_gmem,
                                            int first, int n) {
  const int rows = min(BLOCK, n - first);
  const auto* from = reinterpret_cast<const float4*>(head_gmem + int64_t{first} * HEAD_DIM);
  for (int i = threadIdx.x; i < rows * HEAD_DIM / 4; i += THREADS)
    reinterpret_cast<float4*>(tile_smem)[i] = from[i];
}

// The rows of Q, and of the outputs, of a thread that owns one.
__device__ __forceinline__ void load_row(float (&q)[HEAD_DIM], const float* row_gmem, bool valid) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) q[d] = valid ? row_gmem[d] : 0.0f;
}
__device__ __forceinline__ void store_row(const float (&o)[HEAD_DIM], float sum, float* row_gmem) {
  const float factor = 1.0f / sum;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) row_gmem[d] = o[d] * factor;
}

// The elements of a row of shared memory one after another: the compiler must not join their loads.
__device__ __forceinline__ float element(const float* row_smem, int d) {
  return *reinterpret_cast<const volatile float*>(row_smem + d);
}

// The scalar product of rungs 2 and 3.
__device__ __forceinline__ float dot(const float (&q)[HEAD_DIM], const float* k_smem) {
  float sum = 0.0f;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) sum += q[d] * element(k_smem, d);
  return sum;
}

// The online softmax of one row: `base` is the largest scaled score so far.
struct OnlineSoftmax {
  float base = -INFINITY, sum = 0.0f;

  // Raises the base to `max` where that is larger; returns the factor of earlier outputs.
  __device__ __forceinline__ float raise(float max) {
    const float raised = fmaxf(base, max);
    const float correction = ptx::ex2_approx_ftz(base - raised);
    base = raised;
    sum *= correction;
    return correction;
  }
};

}  // namespace archflash::ladder
