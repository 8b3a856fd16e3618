// Attention forward with head dimensions above 256, on mma.sync, for every GPU from compute
// capability 8.0 on: with a KV cache or without one, for many query rows and for few.
//
// One CTA computes 64 rows, 16 in each pair of warps (pair.cuh): of one head, or of heads that
// share a head of K, packed. Two warps have registers for the outputs of 16 rows with 512 columns,
// and for the query.
//
//   wait K | barrier | start V | scores | exchange | softmax | wait V | barrier | start next K | P
//   V
//
// The barrier at the top of a block also keeps the next scores from being written before the other
// warp of the pair has read the last ones.
#pragma once

#include <cstdint>

#include "ampere/pair.cuh"
#include "ampere/wide_config.cuh"
#include "common/attention_params.h"
#include "common/math/attention_work.cuh"
#include "common/math/chunked_keys.cuh"
#include "common/math/few_rows.cuh"
#include "common/math/online_softmax.cuh"
#include "common/math/tile_walk.cuh"
#include "common/mma_sync/attention_fwd.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/params.h"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::ampere {

// What a CTA knows; it is in shared memory.
struct WideContext : mma_sync::CacheContext {
  math::Blocks blocks;  // of keys, which it visits from the last to the first
};

// Reads a warp's part of the query from global memory; zeros for rows and columns that do not
// exist.
template <class C>
__device__ __forceinline__ void load_wide_query(PairQuery<C>& q_rmem, const AttentionParams& params,
                                                const mma_sync::FewRowsContext& cta) {
  const PairWarp<C> at(cta);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const math::FewRow row(params, cta.packed_heads, cta.work, at.warp_row + at.lane / 4 + 8 * r);
    const int first_column = PAIR_STEP * at.share + at.lane % 4 * 2;
    const uint16_t* q_gmem = static_cast<const uint16_t*>(params.q_gmem) +
                             row.batch * params.q_batch + row.head * params.q_head +
                             row.packed * params.q_row + first_column;
    const int columns = row.wanted ? params.d - first_column : 0;
#pragma unroll
    for (int step = 0; step < C::HEAD_DIM / (2 * PAIR_STEP); ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = 2 * PAIR_STEP * step + 8 * half;
        q_rmem[step][2 * half + r] =
            column < columns ? *reinterpret_cast<const uint32_t*>(q_gmem + column) : 0;
      }
    }
  }
}

// Writes zeros to the columns of K and V that no copy writes.
template <class C>
__device__ __forceinline__ void clear_wide_columns(unsigned char* shared,
                                                   const AttentionParams& params) {
  mma_sync::clear_columns<C, typename C::Tile>(shared, C::BLOCK_K, params.d);
  mma_sync::clear_columns<C, typename C::Tile>(shared + C::V_SMEM, C::BLOCK_K, params.dv);
}

// The RowState of a warp, from shared memory and back (WideConfig::STATE_IN_SHARED).
template <class C>
__device__ __forceinline__ void load_state(math::RowState<typename C::Warp>& state,
                                           const unsigned char* shared) {
  const unsigned thread = ptx::mov_tid_x_volatile();
  const float2 sums = reinterpret_cast<const float2*>(shared + C::SUM_SMEM)[thread];
  const float* bases = reinterpret_cast<const float*>(shared + C::BASE_SMEM) +
                       thread / 32 * C::WARP_ROWS + thread % 32 / 4;
  state.sum[0][0] = sums.x, state.sum[0][1] = sums.y;
  state.base[0][0] = bases[0], state.base[0][1] = bases[8];
}
template <class C>
__device__ __forceinline__ void store_state(const math::RowState<typename C::Warp>& state,
                                            unsigned char* shared) {
  const unsigned thread = ptx::mov_tid_x_volatile();
  float* bases = reinterpret_cast<float*>(shared + C::BASE_SMEM) + thread / 32 * C::WARP_ROWS +
                 thread % 32 / 4;
  reinterpret_cast<float2*>(shared + C::SUM_SMEM)[thread] = {state.sum[0][0], state.sum[0][1]};
  __syncwarp();  // every lane has read the old bases before they are overwritten
  if (thread % 4 == 0) bases[0] = state.base[0][0], bases[8] = state.base[0][1];
  __syncwarp();  // the new bases are there before other lanes read them
}

// P of a warp's scores, with its outputs rescaled as they require.
template <class C>
__device__ __forceinline__ void weigh_wide_scores(math::Probabilities<typename C::Warp>& p_rmem,
                                                  math::Scores<typename C::Warp>& s_rmem,
                                                  math::RowState<typename C::Warp>& state,
                                                  math::Outputs<typename C::Warp>& o_rmem,
                                                  float exp2_scale, unsigned char* shared) {
  using Warp = typename C::Warp;
  if constexpr (C::STATE_IN_SHARED) load_state<C>(state, shared);
  // Found anew each time, so that it takes no register in between.
  state.large = __any_sync(math::FULL_WARP, math::is_large<math::Weights16>(state.base[0][0]) ||
                                                math::is_large<math::Weights16>(state.base[0][1]));
  exp2_scale = math::follow_maxima<Warp>(s_rmem, state, o_rmem, exp2_scale,
                                         static_cast<const math::RaiseLimits<Warp>*>(nullptr));
  math::weigh_all_scores<Warp>(s_rmem, p_rmem, state, exp2_scale);
  if constexpr (C::STATE_IN_SHARED) store_state<C>(state, shared);
}

// The row of V that this lane names to ldmatrix for its warp's half of the columns.
template <class C>
__device__ __forceinline__ uint32_t half_v_smem(uint32_t v_smem /* V of the first key */) {
  const unsigned thread = ptx::mov_tid_x_volatile();
  return v_smem + thread / 32 % 2 * C::Warp::HEAD_DIM_V * 2 +
         mma_sync::rows_first_offset<typename C::Tile>(thread % 32);
}

template <class C>
__device__ __forceinline__ void wide_fwd(const mma_sync::CacheParams& params) {
  using Warp = typename C::Warp;
  using Tile = typename C::Tile;
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const AttentionParams& attention = params.attention;
  static_assert(sizeof(WideContext) <= C::CONTEXT_BYTES);
  WideContext& cta = *reinterpret_cast<WideContext*>(shared + C::CONTEXT_SMEM);
  {
    math::Work work = mma_sync::find_work<C>(params);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) {
      const math::CacheRows rows = mma_sync::find_rows(params, work);
      work.nk = rows.count;
      static_cast<mma_sync::CacheContext&>(cta) =
          mma_sync::make_cache_context<C>(params, work, rows);
      const math::ChunkedKeys visible = mma_sync::visible_keys<C>(cta);
      const int last_row = min(work.first_row + cta.packed_heads.rows(), work.nq) - 1;
      cta.blocks = math::blocks_of_share<C::BLOCK_K>(
          {visible.first(work.first_row) & -C::BLOCK_K, visible.last(last_row) & -C::BLOCK_K},
          params.partials, blockIdx.x % params.partials.splits);
    }
  }
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it

  const auto start_k = [&](int key) {
    mma_sync::start_cached_keys<C, Tile>(shared_smem, cta.k_gmem, attention.k_batch,
                                         attention.k_row, attention.d, key, cta);
  };
  const auto start_v = [&](int key) {
    mma_sync::start_cached_keys<C, Tile>(shared_smem + C::V_SMEM, cta.v_gmem, attention.v_batch,
                                         attention.v_row, attention.dv, key, cta);
  };
  clear_wide_columns<C>(shared, attention);
  if (cta.blocks.first <= cta.blocks.last) start_k(cta.blocks.last);
  PairQuery<C> q_rmem;
  load_wide_query<C>(q_rmem, attention, cta);
  math::Outputs<Warp> o_rmem = {};
  math::RowState<Warp> state;
  math::clear(state);
  if constexpr (C::STATE_IN_SHARED) store_state<C>(state, shared);
#pragma unroll 1
  for (int key = cta.blocks.last; key >= cta.blocks.first; key -= C::BLOCK_K) {
    // Each thread waits for its own copies of K; the barrier makes those of all threads visible.
    // After it no warp still reads V of the previous block or its scores, which are overwritten
    // next.
    ptx::copies_wait_all();
    __syncthreads();
    start_v(key);
    math::Probabilities<Warp> p_rmem;
    if (pair_sees<C>(cta, key)) {  // both warps of a pair, or neither
      math::Scores<Warp> s_rmem;
      multiply_half_scores<C>(s_rmem, q_rmem, shared_smem);
      add_scores_of_pair<C>(s_rmem, shared + C::SCORES_SMEM);
      if (attention.transform_scores)
        math::transform_scores<Warp>(s_rmem, attention.tanh_scale, attention.softcap);
      mask_pair_scores<C>(s_rmem, cta, key);
      weigh_wide_scores<C>(p_rmem, s_rmem, state, o_rmem, attention.exp2_scale, shared);
    }
    // After the barrier V has arrived from all threads, and no warp still reads K, which the next
    // block's K overwrites.
    ptx::copies_wait_all();
    __syncthreads();
    if (key > cta.blocks.first) start_k(key - C::BLOCK_K);
    // Asked anew, so that the answer takes no register in between.
    if (pair_sees<C>(cta, key))
      mma_sync::multiply_pv<Warp>(o_rmem, p_rmem, half_v_smem<C>(shared_smem + C::V_SMEM));
  }
  if constexpr (C::STATE_IN_SHARED) load_state<C>(state, shared);
  store_half_rows<C>(o_rmem, state, attention, params.partials, cta, attention.dv);
}

}  // namespace archflash::ampere

// Defines an entry point. plan.cpp launches it by NAME.
#define ARCHFLASH_WIDE_KERNEL(NAME, CONFIG)                                          \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::mma_sync::CacheParams params) {        \
    archflash::ampere::wide_fwd<CONFIG>(params);                                     \
  }
