// Rung 4: 16 bytes at a time, from global and from shared memory: a load for four products.
#include "tile.cuh"

using namespace archflash;
using namespace archflash::ladder;

// The four elements from 4 * i on of a row of shared memory.
__device__ __forceinline__ float4 chunk(const float* row_smem, int i) {
  return reinterpret_cast<const float4*>(row_smem)[i];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  __shared__ alignas(16) float k_smem[BLOCK][HEAD_DIM], v_smem[BLOCK][HEAD_DIM];
  const Row row(params);
  float q[HEAD_DIM], o[HEAD_DIM] = {};
  OnlineSoftmax softmax;
  load_row(q, params.q_gmem + row.start(), row.visible > 0);
  for (int first = 0; first < row.cta_visible; first += BLOCK) {
    __syncthreads();  // all threads have read the previous K and V, overwritten next
    copy_chunks(k_smem, params.k_gmem + row.head, first, params.n);
    copy_chunks(v_smem, params.v_gmem + row.head, first, params.n);
    __syncthreads();  // K and V are complete, before any thread reads them
    for (int key = 0; key < min(BLOCK, row.visible - first); ++key) {
      float parts[4] = {};  // four sums side by side, so that products do not wait for one another
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 4; ++i) {
        const float4 k = chunk(k_smem[key], i);
        parts[0] += q[4 * i] * k.x, parts[1] += q[4 * i + 1] * k.y;
        parts[2] += q[4 * i + 2] * k.z, parts[3] += q[4 * i + 3] * k.w;
      }
      const float score = (parts[0] + parts[1] + (parts[2] + parts[3])) * params.exp2_scale;
      if (score > softmax.base) {
        const float correction = softmax.raise(score);
#pragma unroll
        for (float& x : o) x *= correction;
      }
      const float p = ptx::ex2_approx_ftz(score - softmax.base);
      softmax.sum += p;
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 4; ++i) {
        const float4 v = chunk(v_smem[key], i);
        o[4 * i] += p * v.x, o[4 * i + 1] += p * v.y;
        o[4 * i + 2] += p * v.z, o[4 * i + 3] += p * v.w;
      }
    }
  }
  if (row.visible > 0) store_row(o, softmax.sum, params.out_gmem + row.start());
}
