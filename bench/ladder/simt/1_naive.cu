// Rung 1: the formula. A thread finds the maximum of its row's scores, then computes the scores
// again for their weights. It reads Q, K and V from global memory at every use.
#include "row.cuh"

using namespace archflash;
using namespace archflash::ladder;

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  const Row row(params);
  const float* q = params.q_gmem + row.start();
  const auto score = [&](int key) {
    const float* k = params.k_gmem + row.head + int64_t{key} * HEAD_DIM;
    float sum = 0.0f;
    for (int d = 0; d < HEAD_DIM; ++d) sum += q[d] * k[d];
    return sum * params.exp2_scale;
  };
  float max = -INFINITY;
  for (int key = 0; key < row.visible; ++key) max = fmaxf(max, score(key));
  float o[HEAD_DIM] = {}, sum = 0.0f;
  for (int key = 0; key < row.visible; ++key) {
    const float* v = params.v_gmem + row.head + int64_t{key} * HEAD_DIM;
    const float p = ptx::ex2_approx_ftz(score(key) - max);
    sum += p;
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) o[d] += p * v[d];
  }
  if (row.visible == 0) return;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) params.out_gmem[row.start() + d] = o[d] / sum;
}
