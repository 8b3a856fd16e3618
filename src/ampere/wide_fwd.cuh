// Attention forward with head dimensions above 256, on mma.sync, for every GPU from compute
// capability 8.0 on: with a KV cache or without one, for many query rows and for few; and with
// C::MASKED with masks as data or dropout.
//
// One CTA computes 64 rows, 16 in each pair of warps (pair.cuh): of one head, or of heads that
// share a head of K, packed. Two warps have registers for the outputs of 16 rows with 512 columns,
// and for the query. The main loop is that of mma_sync/main_loop.cuh with one stage, of which a
// pair of warps makes P in these steps:
//
//   masks (wide_masks.cuh) | half of the scores | exchange | softmax
//
// The barrier at the top of a block also keeps the next scores from being written before the other
// warp of the pair has read the last ones.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ampere/pair.cuh"
#include "ampere/wide_config.cuh"
#include "ampere/wide_masks.cuh"
#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/masks.cuh"
#include "common/device/online_softmax.cuh"
#include "common/mma_sync/attention_fwd.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/main_loop.cuh"
#include "common/mma_sync/masked_fwd.cuh"
#include "common/mma_sync/params.h"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::ampere {

// Reads a warp's part of the query from global memory; zeros for rows and columns that do not
// exist.
template <class C>
__device__ __forceinline__ void load_wide_query(PairQuery<C>& q_rmem, const AttentionParams& params,
                                                const mma_sync::FewRowsContext& cta) {
  const PairWarp<C> at(cta);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const device::FewRow row(params, cta.packed_heads, cta.work, at.warp_row + at.lane / 4 + 8 * r);
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
__device__ __forceinline__ void load_state(device::RowState<typename C::Warp>& state,
                                           const unsigned char* shared) {
  const unsigned thread = ptx::mov_tid_x_volatile();
  const float2 sums = reinterpret_cast<const float2*>(shared + C::SUM_SMEM)[thread];
  const float* bases = reinterpret_cast<const float*>(shared + C::BASE_SMEM) +
                       thread / 32 * C::WARP_ROWS + thread % 32 / 4;
  state.sum[0][0] = sums.x, state.sum[0][1] = sums.y;
  state.base[0][0] = bases[0], state.base[0][1] = bases[8];
}
template <class C>
__device__ __forceinline__ void store_state(const device::RowState<typename C::Warp>& state,
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
__device__ __forceinline__ void exponentiate_wide_scores(
    device::Probabilities<typename C::Warp>& p_rmem, device::Scores<typename C::Warp>& s_rmem,
    device::RowState<typename C::Warp>& state, device::Outputs<typename C::Warp>& o_rmem,
    float exp2_scale, unsigned char* shared) {
  using Warp = typename C::Warp;
  if constexpr (C::STATE_IN_SHARED) load_state<C>(state, shared);
  exponentiate_pair_scores<Warp>(p_rmem, s_rmem, state, o_rmem, exp2_scale);
  if constexpr (C::STATE_IN_SHARED) store_state<C>(state, shared);
}

template <class C>
using WideParams = std::conditional_t<C::MASKED, mma_sync::MaskedParams, mma_sync::CacheParams>;

// The part of the parameter that both kernels have.
template <class C>
__device__ __forceinline__ const auto& wide_call(const WideParams<C>& params) {
  if constexpr (C::MASKED) {
    return params.call;
  } else {
    return params;
  }
}

template <class C>
__device__ __forceinline__ void wide_fwd(const WideParams<C>& all_params) {
  using Warp = typename C::Warp;
  using Context = std::conditional_t<C::MASKED, mma_sync::MaskedContext, mma_sync::CacheContext>;
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const auto& call = wide_call<C>(all_params);
  const AttentionParams& attention = call.attention;
  static_assert(sizeof(Context) <= C::CONTEXT_BYTES);
  Context& cta = *reinterpret_cast<Context*>(shared + C::CONTEXT_SMEM);
  {
    device::Work work = mma_sync::find_work<C>(call);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) {
      if constexpr (C::MASKED) {
        cta = mma_sync::make_masked_context(call, work);
      } else {
        const device::CacheRows rows = mma_sync::find_rows(call, work);
        work.nk = rows.count;
        cta = mma_sync::make_cache_context<C>(call, work, rows);
      }
    }
  }
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it

  mma_sync::KeyBlocks<C> blocks(attention, cta, shared_smem);
  blocks.take_share(call.partials, blockIdx.x % call.partials.splits);
  const auto walk = [&] {
    if constexpr (C::MASKED) {
      // Found anew for each block, because there are no registers to keep them.
      const auto find_masks = [&] {
        return device::TileMasks(all_params.masks, attention, cta.work, cta.packed_heads);
      };
      return device::SeenKeyBlocks<C, decltype(find_masks)>{find_masks, blocks.begin};
    } else {
      return mma_sync::EveryBlock<C>{blocks.begin};
    }
  }();
  if constexpr (C::MASKED) blocks.last = walk.look_behind(blocks.last + C::BLOCK_K);
  clear_wide_columns<C>(shared, attention);
  if (walk.has(blocks.last)) blocks.start_k(blocks.last, shared_smem);
  PairQuery<C> q_rmem;
  load_wide_query<C>(q_rmem, attention, cta);
  device::Outputs<Warp> o_rmem = {};
  device::RowState<Warp> state;
  device::clear(state);
  if constexpr (C::STATE_IN_SHARED) store_state<C>(state, shared);
  struct Block {
    device::Probabilities<Warp> p_rmem;
    int key;        // the first of the block
    bool any;       // with masks: whether any row of the pair sees any key
    uint32_t seen;  // with masks: the keys that any row sees
  };
  // Whether a pair of warps computes a block, which is the same for both. With masks each does,
  // because that is known behind the exchange only.
  const auto sees = [&](int key) {
    if constexpr (!C::MASKED) return pair_sees<C>(cta, key);
    return true;
  };
  // Where registers are few that is asked anew before P V.
  constexpr bool ASKS_TWICE = C::STATE_IN_SHARED;
  blocks.template visit<Block>(
      walk, [&](const Block&, int key) { return ASKS_TWICE || sees(key); },
      [&](Block& block, const mma_sync::QFragments<C>&, uint32_t, uint32_t, int key) {
        block.key = key;
        if (ASKS_TWICE && !sees(key)) return;
        if constexpr (C::MASKED) find_half_masks<C>(all_params, cta, key, shared);
        device::Scores<Warp> s_rmem;
        multiply_half_scores<C>(s_rmem, q_rmem, shared_smem);
        add_scores_of_pair<C>(s_rmem, shared + C::SCORES_SMEM);
        if (C::MASKED || attention.transform_scores)
          device::transform_scores<Warp>(s_rmem, attention.rule);
        if constexpr (C::MASKED) {
          block.any = apply_pair_masks<C>(s_rmem, shared);
          block.seen = mma_sync::keys_of_warp<Warp>(s_rmem);
          if (!block.any) return;
        } else {
          mask_pair_scores<C>(s_rmem, cta, key);
        }
        exponentiate_wide_scores<C>(block.p_rmem, s_rmem, state, o_rmem, attention.exp2_scale,
                                    shared);
        if constexpr (C::MASKED) {
          if (all_params.dropout.state_gmem != nullptr)
            mma_sync::drop_of_warp<Warp>(block.p_rmem, all_params.dropout, cta, key);
        }
      },
      [&](const Block& block, uint32_t) {
        if (ASKS_TWICE && !sees(block.key)) return;
        if constexpr (C::MASKED) {
          if (block.any) {
            mma_sync::multiply_seen_pv<Warp>(o_rmem, block.p_rmem,
                                             half_v_smem<C>(shared_smem + C::V_SMEM), block.seen);
          }
        } else {
          mma_sync::multiply_pv<Warp>(o_rmem, block.p_rmem,
                                      half_v_smem<C>(shared_smem + C::V_SMEM));
        }
      });
  if constexpr (C::MASKED) {
    if (all_params.dropout.state_gmem != nullptr)
      mma_sync::scale_kept<Warp>(o_rmem, all_params.dropout.scale);
  }
  if constexpr (C::STATE_IN_SHARED) load_state<C>(state, shared);
  store_half_rows<C>(o_rmem, state, attention, call.partials, cta, attention.dv);
}

}  // namespace archflash::ampere
