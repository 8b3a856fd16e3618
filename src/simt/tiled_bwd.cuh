// Exact fp32 attention backward on CUDA cores with the register tiles of the forward kernel, for
// GPUs with more than 64 KB of shared memory for a CTA. Every product, sum and exponential is fp32.
//
// A CTA owns rows of one side, and blocks of the other side pass by, as in attention_bwd.cuh:
//   wait block | barrier | S | dP | P through shared memory into dV | dS into dK or dQ | barrier |
//   start next block
// A warp has the scores of its own rows and all passing ones, so that P and dS, which go through
// shared memory, are private to it. Each gradient belongs to one thread: the same inputs always
// give the same bits. A block has a sum of its own, because short sums round less.
#pragma once

#include <cstdint>

#include "common/math/backward_work.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/ex2.cuh"
#include "simt/tile.cuh"
#include "simt/tiled_bwd_config.cuh"

namespace archflash::simt {

template <class C>
using TiledScores = float[C::THREAD_ROWS][C::THREAD_KEYS];
template <class C>
using TiledGradient = float[C::THREAD_ROWS][4 * C::OUT_GROUPS];

// Adds W times the passing rows to a gradient. W goes through the warp's part of shared memory.
template <class C>
__device__ __forceinline__ void add_tile_product(TiledGradient<C>& gradient_rmem,
                                                 const TiledScores<C>& w_rmem, float* shared,
                                                 const float* rows_smem /* (BLOCK, V_PITCH) */) {
  const Lane<C> lane;
  float* w_smem = shared + C::P_SMEM + (lane.warp_row + lane.row) * C::P_PITCH;
  __syncwarp();  // all lanes have read what the warp wrote before, which is overwritten below
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) {
      w_smem[i * C::LANE_ROWS * C::P_PITCH + j * C::LANE_COLS + lane.col] = w_rmem[i][j];
    }
  }
  __syncwarp();  // the warp's W is complete before any lane reads it
  TiledGradient<C> sum_rmem = {};
  multiply_pv<C>(sum_rmem, w_smem, rows_smem + 4 * lane.col);
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
    for (int c = 0; c < 4 * C::OUT_GROUPS; ++c) gradient_rmem[i][c] += sum_rmem[i][c];
  }
}

// Writes, or adds, a thread's part of a gradient times `factor`.
template <class C>
__device__ __forceinline__ void store_tile_gradient(const TiledGradient<C>& gradient_rmem,
                                                    const GradientParams& gradient,
                                                    const math::BackwardWork& cta, int columns,
                                                    float factor) {
  const Lane<C> lane;
  const int first = cta.first_row + lane.warp_row + lane.row;
  float* rows_gmem = static_cast<float*>(gradient.gmem) + cta.batch * gradient.batch +
                     cta.head * gradient.head +
                     (static_cast<int64_t>(cta.own_start) + first) * gradient.row;
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    if (first + i * C::LANE_ROWS >= cta.own_rows) continue;
#pragma unroll
    for (int n = 0; n < C::OUT_GROUPS; ++n) {
      const int column = 4 * (n * C::LANE_COLS + lane.col);
      if (column >= columns) continue;
      float* target_gmem = rows_gmem + i * C::LANE_ROWS * gradient.row + column;
      float x[4], old[4] = {};
      if (gradient.accumulate) load_4(old, target_gmem);
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = fmaf(gradient_rmem[i][4 * n + c], factor, old[c]);
      store_4<DType::F32>(target_gmem, x);
    }
  }
}

// Turns the scores into P = 2^(score - LSE), and dP into dS = P * (dP - delta), the gradient of the
// score before its scale. What belongs to a query and a key that it does not see becomes 0.
template <class C>
__device__ __forceinline__ void weigh_tile(TiledScores<C>& s_rmem, TiledScores<C>& dp_rmem,
                                           const AttentionParams& attention,
                                           const math::BackwardWork& cta, int passing_first,
                                           const math::RowTerms* terms_gmem) {
  constexpr bool OWNS_KEYS = C::OWNS == Owns::Keys;
  const Lane<C> lane;
  const bool capped = attention.transform_scores && attention.softcap != 0.0f;
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    const int row_of_tile = lane.warp_row + i * C::LANE_ROWS + lane.row;
    const int row = cta.first_row + row_of_tile;
    const int first = cta.visible.first(row), last = cta.visible.last(row);
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) {
      const int column_of_block = j * C::LANE_COLS + lane.col;
      const int column = passing_first + column_of_block;
      // An owned row behind the end has no terms, and its gradients are not stored.
      const bool seen = row < cta.own_rows && column >= first && column <= last;
      float p = 0.0f, ds = 0.0f;
      if (seen) {
        float s = s_rmem[i][j], slope = 1.0f;
        if (attention.transform_scores) {
          s *= attention.tanh_scale;
          if (capped) {
            const float tanh = tanhf(s);
            s = attention.softcap * tanh;
            slope = fmaf(-tanh, tanh, 1.0f);
          }
        }
        const math::RowTerms terms = terms_gmem[OWNS_KEYS ? column_of_block : row_of_tile];
        const float exponent = fmaf(s, attention.exp2_scale, -terms.lse_log2);
        // P is at most 1. The LSE of huge scores is rounded, which must not make P infinite. Not
        // fminf: a NaN stays one.
        p = ptx::ex2_approx_ftz(exponent > 0.0f ? 0.0f : exponent);
        ds = p * (dp_rmem[i][j] - terms.delta) * slope;
      }
      s_rmem[i][j] = p;
      dp_rmem[i][j] = ds;
    }
  }
}

template <class C>
__device__ __forceinline__ void tiled_bwd(const BackwardParams& params) {
  constexpr bool OWNS_KEYS = C::OWNS == Owns::Keys;
  extern __shared__ float4 shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);
  const AttentionParams& attention = params.attention;
  if constexpr (OWNS_KEYS)
    math::clear_keys_of_no_sequence<C::ROWS, C::GRADIENTS>(params, blockIdx.x, C::WARPS);
  const math::BackwardWork cta = math::find_backward_work<C::OWNS, C::ROWS>(attention, blockIdx.x);
  if (cta.first_row < 0) return;

  // Passing rows that any owned row has to do with; begin > last if there is none.
  const int begin = cta.visible.first(cta.first_row) & -C::BLOCK;
  const int last = cta.visible.last(min(cta.first_row + C::ROWS, cta.own_rows) - 1) & -C::BLOCK;
  const auto rows_of = [&](bool keys, int head, int64_t row) {
    return keys ? math::key_rows<float>(params, cta.batch, head, row)
                : math::query_rows<float>(params, cta.batch, head, row);
  };
  const auto start_passing = [&](const math::Passing& block) {
    const int head = math::passing_head<C::OWNS>(attention, cta, block);
    const auto rows =
        rows_of(!OWNS_KEYS, head, static_cast<int64_t>(cta.passing_start) + block.row);
    const int valid = cta.passing_rows - block.row;
    start_load<C, C::BLOCK, C::QK_PITCH>(shared + C::FIRST_SMEM, rows.first_gmem, rows.first_row,
                                         valid, attention.d);
    start_load<C, C::BLOCK, C::QK_PITCH>(shared + C::SECOND_SMEM, rows.second_gmem, rows.second_row,
                                         valid, attention.dv);
  };
  if (begin <= last) {
    const auto own =
        rows_of(OWNS_KEYS, cta.head, static_cast<int64_t>(cta.own_start) + cta.first_row);
    const int valid = cta.own_rows - cta.first_row;
    start_load<C, C::ROWS, C::QK_PITCH>(shared + C::OWN_FIRST_SMEM, own.first_gmem, own.first_row,
                                        valid, attention.d);
    start_load<C, C::ROWS, C::QK_PITCH>(shared + C::OWN_SECOND_SMEM, own.second_gmem,
                                        own.second_row, valid, attention.dv);
    start_passing({0, begin});
  }

  TiledGradient<C> first_rmem = {};   // dQ or dK
  TiledGradient<C> second_rmem = {};  // dV; unused where the CTA owns queries
#pragma unroll 1
  for (math::Passing block{0, begin}; block.head < cta.heads && begin <= last;) {
    const int warp_first = cta.first_row + Lane<C>().warp_row;
    const int warp_last = min(warp_first + C::WARP_ROWS, cta.own_rows) - 1;  // none: < warp_first
    ptx::copies_wait_all();
    __syncthreads();  // the copies of all threads have arrived
    // A warp whose rows have nothing to do with the block skips the work, but not the barriers.
    if (warp_last >= warp_first &&
        !cta.visible.hides(warp_first, warp_last, block.row, block.row + C::BLOCK - 1)) {
      const int head = OWNS_KEYS ? math::passing_head<C::OWNS>(attention, cta, block) : cta.head;
      const int64_t row = OWNS_KEYS ? static_cast<int64_t>(cta.passing_start) + block.row
                                    : static_cast<int64_t>(cta.own_start) + cta.first_row;
      TiledScores<C> s_rmem, dp_rmem;
      {
        const Lane<C> lane;
        const int own = (lane.warp_row + lane.row) * C::QK_PITCH;
        const int passing = lane.col * C::QK_PITCH;
        multiply_qk<C>(s_rmem, shared + C::OWN_FIRST_SMEM + own, shared + C::FIRST_SMEM + passing,
                       attention.d);
        multiply_qk<C>(dp_rmem, shared + C::OWN_SECOND_SMEM + own,
                       shared + C::SECOND_SMEM + passing, attention.dv);
      }
      weigh_tile<C>(s_rmem, dp_rmem, attention, cta, block.row,
                    math::terms_of(params, cta.batch, head, row));
      if constexpr (OWNS_KEYS)
        add_tile_product<C>(second_rmem, s_rmem, shared, shared + C::SECOND_SMEM);
      add_tile_product<C>(first_rmem, dp_rmem, shared, shared + C::FIRST_SMEM);
    }
    block.row += C::BLOCK;
    if (block.row > last) block = {block.head + 1, begin};
    __syncthreads();  // no warp still reads the block, which is overwritten next
    if (block.head < cta.heads) start_passing(block);
  }

  store_tile_gradient<C>(first_rmem, OWNS_KEYS ? params.dk : params.dq, cta, attention.d,
                         params.scale);
  if constexpr (OWNS_KEYS) store_tile_gradient<C>(second_rmem, params.dv, cta, attention.dv, 1.0f);
}

}  // namespace archflash::simt

// Defines an entry point. plan_backward.cpp launches it by NAME.
#define ARCHFLASH_SIMT_TILED_BACKWARD_KERNEL(NAME, CONFIG)                           \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::BackwardParams params) {               \
    archflash::simt::tiled_bwd<CONFIG>(params);                                      \
  }
