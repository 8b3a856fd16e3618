// Rung 4: mma.sync and ldmatrix, whose fragments have a known layout. Q and the outputs stay in
// registers; scores and P still pass through shared memory, where two threads own a row, and so do
// the factors by which they rescale the outputs.
#include "registers.cuh"

using namespace archflash;
using namespace archflash::ladder;

struct SharedWithScores : Shared {
  uint16_t p[BLOCK * Rows::STRIDE];
  float s[BLOCK * Rows::FLOAT_STRIDE], factor[BLOCK];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  SharedWithScores& shared = *reinterpret_cast<SharedWithScores*>(dynamic);
  const int64_t head = head_start(params);
  const int first = first_row(), lane = threadIdx.x % 32;
  const int lane_row = threadIdx.x / 32 * 16 + lane / 4;
  copy_chunks<Rows>(shared.q, params.q_gmem + head + first * HEAD_DIM);
  __syncthreads();  // Q is complete, before any warp reads it
  Fragments q;
  load_rows(q, shared.q);
  RowOfTwoThreads state;
  uint16_t* p_row = shared.p + state.row * Rows::STRIDE;
  Sums o = {};
#pragma unroll 1
  for (int block = 0; block <= first; block += BLOCK) {
    __syncthreads();  // all warps have read the previous K and V, overwritten next
    copy_chunks<Rows>(shared.k, params.k_gmem + head + block * HEAD_DIM);
    copy_chunks<Rows>(shared.v, params.v_gmem + head + block * HEAD_DIM);
    __syncthreads();  // K and V are complete, before any warp reads them
    Sums s = {};
    multiply_q_k(s, q, shared.k);
#pragma unroll
    for (int n = 0; n < BLOCK / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* pair = shared.s + (lane_row + 8 * r) * Rows::FLOAT_STRIDE + 8 * n + lane % 4 * 2;
        *reinterpret_cast<float2*>(pair) = make_float2(s[n][2 * r], s[n][2 * r + 1]);
      }
    }
    __syncwarp();  // the warp's scores are complete, before its threads read them
    const float correction = state.exponentiate(
        shared.s + state.row * Rows::FLOAT_STRIDE, first + state.row + 1 - block, params.exp2_scale,
        [&](int key, float p) { p_row[key] = ptx::cvt_rn_f16_f32(p); });
    if (state.half == 0) shared.factor[state.row] = correction;
    __syncwarp();  // the warp's P and factors are complete, before its lanes read them
    Fragments p;
    load_rows(p, shared.p);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = shared.factor[lane_row + 8 * r];
#pragma unroll
      for (auto& tile : o) tile[2 * r] *= factor, tile[2 * r + 1] *= factor;
    }
    multiply_p_v(o, p, shared.v);
    __syncwarp();  // the warp has read P and factors, before the next block overwrites them
  }
  const float inverse = 1.0f / state.row_sum();
  if (state.half == 0) shared.factor[state.row] = inverse;
  __syncwarp();  // the warp's factors are complete, before its lanes read them
  const float factor[2] = {shared.factor[lane_row], shared.factor[lane_row + 8]};
  store_rows(o, factor, params.out_gmem + head + first * HEAD_DIM);
}
