// Attention forward with head dimensions above 256 and masks as data or dropout: the kernel of
// wide_fwd.cuh with the main loop of mma_sync/masked_fwd.cuh, which goes from each block of keys to
// the next one of which any row of the tile may see a key. Each warp of a pair finds the masks of
// half of the keys before Q K^T and leaves them in shared memory, because no registers are left for
// them; both read them behind the exchange of the scores, whose barrier serves both.
//
//   wait K | barrier | start V | masks | scores | exchange | softmax | wait V | barrier | find and
//   start next K | P V
//
// Scores are logarithms to base 2 here, as in mma_sync/masked_fwd.cuh.
#pragma once

#include <cstdint>

#include "ampere/pair.cuh"
#include "ampere/wide_config.cuh"
#include "ampere/wide_fwd.cuh"
#include "common/attention_params.h"
#include "common/math/lane_masks.cuh"
#include "common/math/masks.cuh"
#include "common/math/online_softmax.cuh"
#include "common/math/tile_walk.cuh"
#include "common/mma_sync/attention_fwd.cuh"
#include "common/mma_sync/masked_fwd.cuh"
#include "common/mma_sync/params.h"
#include "common/ptx/cp_async.cuh"

namespace archflash::ampere {

// What is in shared memory of the masks of a pair's scores: what is added to each score, in
// logarithms to base 2 and -inf where the key is not seen, for each key tile as fragments d; and of
// either warp, which has found those of every second half of the keys, whether its half has any key
// that is seen, and whether it changes any score.
template <class C>
struct PairMasks {
  float4 added[C::BLOCK_K / 8][32];
  uint8_t any[2], changes[2];
};

template <class C>
__device__ __forceinline__ PairMasks<C>& masks_of_pair(unsigned char* shared) {
  return reinterpret_cast<PairMasks<C>*>(shared + C::MASK_SMEM)[ptx::mov_tid_x_volatile() / 64];
}

// Finds the masks of a warp's half of the keys from `block` on.
template <class C>
__device__ __forceinline__ void find_half_masks(const mma_sync::MaskedParams& params,
                                                const mma_sync::MaskedContext& cta, int block,
                                                unsigned char* shared) {
  using Half = typename C::MaskedHalf;
  const unsigned thread = ptx::mov_tid_x_volatile(), lane = thread % 32, share = thread / 32 % 2;
  PairMasks<C>& pair = masks_of_pair<C>(shared);
  math::LaneMasks<Half> found;
  math::find_lane_masks<Half>(found, params.masks, params.call.attention, cta,
                              mma_sync::first_row_of_warp<Half>(thread),
                              block + share * Half::STEP_KEYS);
  if (lane == 0) pair.any[share] = found.any, pair.changes[share] = found.changes;
  if (!found.changes) return;
  math::Scores<Half> added = {};  // what the masks make of scores of 0
  math::apply_lane_masks<Half>(added, found, params.masks, 1.0f);
#pragma unroll
  for (int n = 0; n < Half::STEP_KEYS / 8; ++n) {
    const float (&x)[4] = added[0][n];
    pair.added[share * (Half::STEP_KEYS / 8) + n][lane] = {x[0], x[1], x[2], x[3]};
  }
}

// Masks a warp's scores. Returns whether any of its rows sees any key: the same for both warps.
template <class C>
__device__ __forceinline__ bool apply_pair_masks(math::Scores<typename C::Warp>& s_rmem,
                                                 unsigned char* shared) {
  constexpr int TILES = C::MaskedHalf::STEP_KEYS / 8;
  const PairMasks<C>& pair = masks_of_pair<C>(shared);
  const unsigned lane = ptx::mov_tid_x_volatile() % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!pair.changes[half]) continue;
#pragma unroll
    for (int n = half * TILES; n < (half + 1) * TILES; ++n) {
      const float4 x = pair.added[n][lane];
      const float added[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = s_rmem[0][n][i];
        s += added[i];
        if (s < math::LOWEST_LOG2) s = math::LOWEST_LOG2;
        // Selecting makes the old value irrelevant, even if it was NaN.
        if (added[i] == math::MINUS_INFINITY) s = math::MINUS_INFINITY;
      }
    }
  }
  return pair.any[0] || pair.any[1];
}

template <class C>
__device__ __forceinline__ void wide_masked_fwd(const mma_sync::MaskedParams& params) {
  using Warp = typename C::Warp;
  using Tile = typename C::Tile;
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const mma_sync::FewRowsParams& call = params.call;
  const AttentionParams& attention = call.attention;
  static_assert(sizeof(mma_sync::MaskedContext) <= C::CONTEXT_BYTES);
  mma_sync::MaskedContext& cta =
      *reinterpret_cast<mma_sync::MaskedContext*>(shared + C::CONTEXT_SMEM);
  {
    const math::Work work = mma_sync::find_work<C>(call);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) {
      static_cast<mma_sync::CtaContext&>(cta) = mma_sync::make_cta_context(attention, work);
      cta.packed_heads = call.packed_heads;
      cta.q_offset = math::find_q_offset(attention, work);
    }
  }
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it

  const math::Blocks blocks = math::blocks_of_share<C::BLOCK_K>(
      math::find_blocks<C::BLOCK_K>(cta.work, cta.visible, cta.packed_heads.rows()), call.partials,
      blockIdx.x % call.partials.splits);
  const auto block_before = [&](int key) {
    const math::TileMasks masks(params.masks, attention, cta.work, cta.packed_heads);
    return masks.last_block<C::BLOCK_Q, C::BLOCK_K>(key - 1, blocks.first);
  };
  const auto start_k = [&](int key) {
    mma_sync::start_keys<C, Tile>(shared_smem, cta.k_gmem, attention.k_row, attention.d, key,
                                  mma_sync::NO_BEGIN, cta.visible.nk);
  };
  clear_wide_columns<C>(shared, attention);
  int block = block_before(blocks.last + C::BLOCK_K);
  if (block >= 0) start_k(block);
  PairQuery<C> q_rmem;
  load_wide_query<C>(q_rmem, attention, cta);
  math::Outputs<Warp> o_rmem = {};
  math::RowState<Warp> state;
  math::clear(state);
  if constexpr (C::STATE_IN_SHARED) store_state<C>(state, shared);
#pragma unroll 1
  while (block >= 0) {
    // Each thread waits for its own copies of K; the barrier makes those of all threads visible.
    // After it no warp still reads V of the previous block or its scores, which are overwritten
    // next.
    ptx::copies_wait_all();
    __syncthreads();
    mma_sync::start_keys<C, Tile>(shared_smem + C::V_SMEM, cta.v_gmem, attention.v_row,
                                  attention.dv, block, cta.visible.first_shift, cta.visible.nk);
    math::Probabilities<Warp> p_rmem;
    // Every warp multiplies, because whether its rows see any of these keys is known behind the
    // exchange only.
    find_half_masks<C>(params, cta, block, shared);
    math::Scores<Warp> s_rmem;
    multiply_half_scores<C>(s_rmem, q_rmem, shared_smem);
    add_scores_of_pair<C>(s_rmem, shared + C::SCORES_SMEM);
    math::transform_scores<Warp>(s_rmem, attention.tanh_scale, attention.softcap);
    const bool any = apply_pair_masks<C>(s_rmem, shared);
    const uint32_t seen = mma_sync::keys_of_warp<Warp>(s_rmem);
    if (any) {  // both warps of a pair, or neither
      weigh_wide_scores<C>(p_rmem, s_rmem, state, o_rmem, attention.exp2_scale, shared);
      if (params.dropout.state_gmem != nullptr)
        mma_sync::drop_of_warp<Warp>(p_rmem, params.dropout, cta, block);
    }
    // After the barrier V has arrived from all threads, and no warp still reads K, which the next
    // block's K overwrites.
    ptx::copies_wait_all();
    __syncthreads();
    const int next = block_before(block);
    if (next >= 0) start_k(next);
    if (any) {
      const uint32_t v_smem = half_v_smem<C>(shared_smem + C::V_SMEM);
      mma_sync::multiply_seen_pv<Warp>(o_rmem, p_rmem, v_smem, seen);
    }
    block = next;
  }
  // The weights that are left of a row whose others were dropped weigh more.
  if (params.dropout.state_gmem != nullptr) {
#pragma unroll
    for (int n = 0; n < Warp::HEAD_DIM_V / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_rmem[0][n][i] *= params.dropout.scale;
    }
  }
  if constexpr (C::STATE_IN_SHARED) load_state<C>(state, shared);
  store_half_rows<C>(o_rmem, state, attention, call.partials, cta, attention.dv);
}

}  // namespace archflash::ampere

// Defines an entry point. plan.cpp launches it by NAME.
#define ARCHFLASH_WIDE_MASKED_KERNEL(NAME, CONFIG)                                   \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::mma_sync::MaskedParams params) {       \
    archflash::ampere::wide_masked_fwd<CONFIG>(params);                              \
  }
