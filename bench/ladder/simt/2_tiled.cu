// Rung 2: the 64 rows of a CTA share blocks of 32 keys in shared memory; Q is in registers. There
// are still two passes over K, one for the maxima and one for the weights.
#include "tile.cuh"

using namespace archflash;
using namespace archflash::ladder;

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  __shared__ alignas(16) float k_smem[BLOCK][HEAD_DIM], v_smem[BLOCK][HEAD_DIM];
  const Row row(params);
  float q[HEAD_DIM], o[HEAD_DIM] = {}, max = -INFINITY, sum = 0.0f;
  load_row(q, params.q_gmem + row.start(), row.visible > 0);
  for (int first = 0; first < row.cta_visible; first += BLOCK) {
    __syncthreads();  // all threads have read the previous K, overwritten next
    copy_elements(k_smem, params.k_gmem + row.head, first, params.n);
    __syncthreads();  // K is complete, before any thread reads it
    for (int key = 0; key < min(BLOCK, row.visible - first); ++key)
      max = fmaxf(max, dot(q, k_smem[key]) * params.exp2_scale);
  }
  for (int first = 0; first < row.cta_visible; first += BLOCK) {
    __syncthreads();  // all threads have read the previous K and V, overwritten next
    copy_elements(k_smem, params.k_gmem + row.head, first, params.n);
    copy_elements(v_smem, params.v_gmem + row.head, first, params.n);
    __syncthreads();  // K and V are complete, before any thread reads them
    for (int key = 0; key < min(BLOCK, row.visible - first); ++key) {
      const float p = ptx::ex2_approx_ftz(dot(q, k_smem[key]) * params.exp2_scale - max);
      sum += p;
#pragma unroll
      for (int d = 0; d < HEAD_DIM; ++d) o[d] += p * element(v_smem[key], d);
    }
  }
  if (row.visible > 0) store_row(o, sum, params.out_gmem + row.start());
}
