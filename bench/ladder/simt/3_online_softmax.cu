// Rung 3: one pass. The base of a row rises with the largest score so far, and each rise rescales
// the row's sum and outputs.
#include "tile.cuh"

using namespace archflash;
using namespace archflash::ladder;

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  __shared__ alignas(16) float k_smem[BLOCK][HEAD_DIM], v_smem[BLOCK][HEAD_DIM];
  const Row row(params);
  float q[HEAD_DIM], o[HEAD_DIM] = {};
  OnlineSoftmax softmax;
  load_row(q, params.q_gmem + row.start(), row.visible > 0);
  for (int first = 0; first < row.cta_visible; first += BLOCK) {
    __syncthreads();  // all threads have read the previous K and V, overwritten next
    copy_elements(k_smem, params.k_gmem + row.head, first, params.n);
    copy_elements(v_smem, params.v_gmem + row.head, first, params.n);
    __syncthreads();  // K and V are complete, before any thread reads them
    for (int key = 0; key < min(BLOCK, row.visible - first); ++key) {
      const float score = dot(q, k_smem[key]) * params.exp2_scale;
      if (score > softmax.base) {
        const float correction = softmax.raise(score);
#pragma unroll
        for (float& x : o) x *= correction;
      }
      const float p = ptx::ex2_approx_ftz(score - softmax.base);
      softmax.sum += p;
#pragma unroll
      for (int d = 0; d < HEAD_DIM; ++d) o[d] += p * element(v_smem[key], d);
    }
  }
  if (row.visible > 0) store_row(o, softmax.sum, params.out_gmem + row.start());
}
