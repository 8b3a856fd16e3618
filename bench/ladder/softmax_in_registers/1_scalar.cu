// Rung 1: FlashAttention in fp32 on CUDA cores. Two threads share a query row: each computes half
// of its scores and half of its output columns.
#include "tile.cuh"

using namespace archflash;
using namespace archflash::ladder;

struct Shared {
  float q[BLOCK][HEAD_DIM], k[BLOCK][HEAD_DIM], v[BLOCK][HEAD_DIM], s[BLOCK][BLOCK];
};

__device__ __forceinline__ void copy_floats(float (*tile_smem)[HEAD_DIM],
                                            const uint16_t* rows_gmem) {
  for (int i = threadIdx.x; i < BLOCK * HEAD_DIM; i += THREADS)
    tile_smem[i / HEAD_DIM][i % HEAD_DIM] = ptx::cvt_f32_f16(rows_gmem[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const int64_t head = head_start(params);
  const int first = first_row();
  copy_floats(shared.q, params.q_gmem + head + first * HEAD_DIM);
  RowOfTwoThreads state;
  const int row = state.row;
  float o[HEAD_DIM / 2] = {};
  for (int block = 0; block <= first; block += BLOCK) {
    __syncthreads();  // all threads have read the previous K and V, overwritten next
    copy_floats(shared.k, params.k_gmem + head + block * HEAD_DIM);
    copy_floats(shared.v, params.v_gmem + head + block * HEAD_DIM);
    __syncthreads();  // Q, K and V are complete, before any thread reads them
    for (int key = state.half; key < state.half + BLOCK / 2; ++key) {
      float score = 0.0f;
      for (int d = 0; d < HEAD_DIM; ++d) score += shared.q[row][d] * shared.k[key][d];
      shared.s[row][key] = score;
    }
    const float correction =
        state.exponentiate(shared.s[row], first + row + 1 - block, params.exp2_scale,
                           [&](int key, float p) { shared.s[row][key] = p; });
#pragma unroll
    for (float& x : o) x *= correction;
    __syncwarp();  // both threads have written their P, before either reads the whole row
    for (int key = 0; key < BLOCK; ++key) {
      const float p = shared.s[row][key];
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 2; ++d) o[d] += p * shared.v[key][state.half + d];
    }
  }
  const float factor = 1.0f / state.row_sum();
  uint16_t* row_gmem = params.out_gmem + head + (first + row) * HEAD_DIM + state.half;
#pragma unroll
  for (int d = 0; d < HEAD_DIM / 2; ++d) row_gmem[d] = ptx::cvt_rn_f16_f32(o[d] * factor);
}
