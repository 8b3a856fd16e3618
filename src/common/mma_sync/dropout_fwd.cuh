// Attention forward on mma.sync with dropout, for many query rows: the kernel of attention_fwd.cuh
// whose weights are dropped before P V. It knows no softcap, no masks as data and no split keys:
// calls with those are left to masked_fwd.cuh.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/math/attention_work.cuh"
#include "common/math/kept_weights.cuh"
#include "common/math/online_softmax.cuh"
#include "common/math/tile_walk.cuh"
#include "common/mma_sync/attention_fwd.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/dropout_params.h"
#include "common/mma_sync/main_loop.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// Sets the dropped weights of a warp's P to 0, of the 32 keys from key_first on. fragment_of(m, i)
// is that of row tile m and of the first (i = 0) or the other 16 of these keys.
//
// All row tiles are drawn together: most of the first two rounds of Philox is the same for all keys
// of a row or for all rows of a key. The lane finds its row anew for each 32 keys, because there
// are no registers to keep what depends on the row alone.
template <class C, class FragmentOf>
__device__ __forceinline__ void drop_of_keys(const math::Dropout& dropout, const CtaContext& cta,
                                             int key_first, const FragmentOf& fragment_of) {
  const unsigned thread = ptx::mov_tid_x_volatile();
  const int query = cta.work.first_row + math::warp_first_row<C>(thread) + thread % 32 / 4;
  const int key = key_first + thread % 4 * 2;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
    uint32_t kept_rmem[2][4];
    math::draw_kept(kept_rmem[0], kept_rmem[1], dropout, query + 16 * m, key);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) fragment_of(m, half)[i] &= kept_rmem[half][i];
    }
  }
}

template <class C>
__device__ __forceinline__ void dropout_fwd(const DroppingParams& all_params) {
  static_assert(!C::CAN_SPLIT && !C::CACHE && C::KEY_GROUPS == 1 && C::QK_PACK == 1 &&
                    C::V_PACK == 1 && C::STEP_KEYS % 32 == 0,
                "many query rows in 16 bits, and the random bits of 32 keys at a time");
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const AttentionParams& params = all_params.attention;
  static_assert(sizeof(CtaContext) <= C::CONTEXT_BYTES);
  CtaContext& cta = *reinterpret_cast<CtaContext*>(shared + C::CONTEXT_SMEM);
  const math::Work work = find_work<C>(params);
  if (work.first_row < 0) return;
  // The threads read `cta` behind the first barrier of visit().
  const CtaContext own = make_cta_context(params, work);
  if (threadIdx.x == 0) cta = own;

  KeyBlocks<C> blocks(params, cta, own, shared_smem);
  blocks.start(shared, own);
  if (blocks.begin > blocks.last) __syncthreads();  // visit() has no barrier then
  const math::Dropout dropout =
      math::find_dropout(all_params.dropout, math::uniform(work.batch_head));
  math::Outputs<C> o_rmem = {};
  math::RowState<C> state;
  state.large = false;
  math::clear(state);
  const auto score = [&](math::Scores<C>& s_rmem, const QFragments<C>& q_rmem, uint32_t q_smem,
                         uint32_t k_smem, int key_first) {
    const math::RaiseLimits<C> limits(state);
    multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
    mask_edges<C>(s_rmem, cta, key_first);
    return math::follow_maxima<C>(s_rmem, state, o_rmem, params.exp2_scale, &limits);
  };
  if constexpr (C::WEIGHS_LATE) {
    struct Scored {
      math::Scores<C> s_rmem;
      float exp2_scale;
      int key_first;
    };
    blocks.template visit<Scored>(
        [&](Scored& scored, const QFragments<C>& q_rmem, uint32_t q_smem, uint32_t k_smem,
            int key_first) {
          scored.exp2_scale = score(scored.s_rmem, q_rmem, q_smem, k_smem, key_first);
          scored.key_first = key_first;
        },
        [&](const Scored& scored, uint32_t v_smem) {
#pragma unroll
          for (int key = 0; key < C::STEP_KEYS; key += 32) {
            uint32_t p_rmem[C::M_TILES][2][4];
#pragma unroll
            for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
              for (int n = 0; n < 4; ++n) {
                math::weigh_key_tile<C>(scored.s_rmem, p_rmem[m][n / 2], state, m, key / 8 + n,
                                        scored.exp2_scale);
              }
            }
            drop_of_keys<C>(dropout, cta, scored.key_first + key,
                            [&](int m, int half) -> uint32_t (&)[4] { return p_rmem[m][half]; });
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              multiply_pv_group<C>(
                  o_rmem, [&](int m) -> const uint32_t (&)[4] { return p_rmem[m][half]; }, v_smem,
                  key + 16 * half, [](uint32_t (&)[4]) {});
            }
          }
        });
  } else {
    blocks.visit(
        [&](Probabilities<C>& p_rmem, const QFragments<C>& q_rmem, uint32_t q_smem, uint32_t k_smem,
            int key_first) {
          math::Scores<C> s_rmem;
          const float exp2_scale = score(s_rmem, q_rmem, q_smem, k_smem, key_first);
          math::weigh_all_scores<C>(s_rmem, p_rmem, state, exp2_scale);
#pragma unroll
          for (int key = 0; key < C::STEP_KEYS; key += 32) {
            drop_of_keys<C>(dropout, cta, key_first + key, [&](int m, int half) -> uint32_t (&)[4] {
              return p_rmem[m][key / 16 + half];
            });
          }
        },
        [&](const Probabilities<C>& p_rmem, uint32_t v_smem) {
          multiply_pv<C>(o_rmem, p_rmem, v_smem);
        });
  }

  // The sums have all weights: those that are left of a row whose others were dropped weigh more.
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_rmem[m][n][i] *= all_params.dropout.scale;
    }
  }
  // A warp stages its output rows in its own rows of Q, which no other warp reads.
  static_assert(C::VTile::ROW_BYTES <= C::QKTile::ROW_BYTES);
  const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
  math::store_out<C, typename C::VTile>(o_rmem, state, params, cta.work, warp_row,
                                        shared + C::Q_SMEM + warp_row * C::QKTile::ROW_BYTES);
}

}  // namespace archflash::mma_sync

// Defines an entry point. plan.cpp launches it by NAME.
#define ARCHFLASH_DROPOUT_KERNEL(NAME, CONFIG)                                       \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::mma_sync::DroppingParams params) {     \
    archflash::mma_sync::dropout_fwd<CONFIG>(params);                                \
  }
