// Rungs 2 and 3: tensor cores by WMMA. A fragment is loaded from shared memory and stored there as
// a whole, and nothing is known of which lane holds which element. So scores, P and outputs all lie
// in shared memory.
#pragma once

#include <cuda_fp16.h>
#include <mma.h>

#include "tile.cuh"

namespace archflash::ladder {

namespace wmma = nvcuda::wmma;

using Left = wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major>;
using Right = wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major>;
using RightByColumns = wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major>;
using Sums = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;

template <class Fragment>
__device__ __forceinline__ void load(Fragment& fragment, const uint16_t* tile, int stride) {
  wmma::load_matrix_sync(fragment, reinterpret_cast<const half*>(tile), stride);
}

template <class Rows>
struct Shared {
  uint16_t q[BLOCK * Rows::STRIDE], k[BLOCK * Rows::STRIDE], v[BLOCK * Rows::STRIDE];
  uint16_t p[BLOCK * Rows::STRIDE];
  float s[BLOCK * Rows::FLOAT_STRIDE], o[BLOCK * Rows::FLOAT_STRIDE];
};

// The kernel of rungs 2 and 3. copy(tile_smem, rows_gmem) copies 64 rows. All of S, P and O that a
// warp touches are its own 16 rows.
template <class Rows, class Copy>
__device__ __forceinline__ void attend_by_fragments(const Params& params, const Copy& copy) {
  constexpr int STRIDE = Rows::STRIDE, FLOAT_STRIDE = Rows::FLOAT_STRIDE;
  extern __shared__ __align__(128) unsigned char dynamic[];
  Shared<Rows>& shared = *reinterpret_cast<Shared<Rows>*>(dynamic);
  const int64_t head = head_start(params);
  const int first = first_row(), warp_row = threadIdx.x / 32 * 16;
  RowOfTwoThreads state;
  float* s_row = shared.s + state.row * FLOAT_STRIDE;
  float* o_row = shared.o + state.row * FLOAT_STRIDE;
  for (int d = state.half; d < state.half + HEAD_DIM / 2; ++d) o_row[d] = 0.0f;
  copy(shared.q, params.q_gmem + head + first * HEAD_DIM);
  for (int block = 0; block <= first; block += BLOCK) {
    __syncthreads();  // all warps have read the previous K and V, overwritten next
    copy(shared.k, params.k_gmem + head + block * HEAD_DIM);
    copy(shared.v, params.v_gmem + head + block * HEAD_DIM);
    __syncthreads();  // Q, K and V are complete, before any warp reads them
#pragma unroll 1
    for (int n = 0; n < BLOCK; n += 16) {
      Sums s;
      wmma::fill_fragment(s, 0.0f);
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += 16) {
        Left q;
        RightByColumns k;
        load(q, shared.q + warp_row * STRIDE + d, STRIDE);
        load(k, shared.k + n * STRIDE + d, STRIDE);
        wmma::mma_sync(s, q, k, s);
      }
      wmma::store_matrix_sync(shared.s + warp_row * FLOAT_STRIDE + n, s, FLOAT_STRIDE,
                              wmma::mem_row_major);
    }
    __syncwarp();  // the warp's scores are complete, before its threads read them
    uint16_t* p_row = shared.p + state.row * STRIDE;
    const float correction =
        state.exponentiate(s_row, first + state.row + 1 - block, params.exp2_scale,
                           [&](int key, float p) { p_row[key] = ptx::cvt_rn_f16_f32(p); });
    for (int d = state.half; d < state.half + HEAD_DIM / 2; ++d) o_row[d] *= correction;
    __syncwarp();  // the warp's P and rescaled outputs are complete, before fragments of them load
#pragma unroll 1
    for (int n = 0; n < HEAD_DIM; n += 16) {
      float* o_tile = shared.o + warp_row * FLOAT_STRIDE + n;
      Sums o;
      wmma::load_matrix_sync(o, o_tile, FLOAT_STRIDE, wmma::mem_row_major);
#pragma unroll
      for (int key = 0; key < BLOCK; key += 16) {
        Left p;
        Right v;
        load(p, shared.p + warp_row * STRIDE + key, STRIDE);
        load(v, shared.v + key * STRIDE + n, STRIDE);
        wmma::mma_sync(o, p, v, o);
      }
      __syncwarp();  // all lanes have loaded the sums, before the store overwrites them
      wmma::store_matrix_sync(o_tile, o, FLOAT_STRIDE, wmma::mem_row_major);
    }
    __syncwarp();  // the warp's outputs are complete, before its threads rescale or write them
  }
  const float factor = 1.0f / state.row_sum();
  uint16_t* row_gmem = params.out_gmem + head + (first + state.row) * HEAD_DIM;
  for (int d = state.half; d < state.half + HEAD_DIM / 2; ++d)
    row_gmem[d] = ptx::cvt_rn_f16_f32(o_row[d] * factor);
}

}  // namespace archflash::ladder
