// Attention forward on mma.sync tensor cores, for every GPU from compute capability 8.0 on. Inputs
// are fp16 or bf16; scores, sums and output accumulators are fp32.
//
// One CTA computes BLOCK_Q query rows of one head with an online softmax. It visits the key blocks
// that its rows see, from the last one (which may be shorter) back to the first. There are no
// roles: each warp loads, multiplies and owns WARP_ROWS rows, whose scores, P and outputs never
// leave its registers. Shared memory holds Q, K, V and the CtaContext. With C::DROPS some of P is
// dropped before P V.
//
// main_loop.cuh has the blocks, copies and barriers, tile.cuh the loads, lane maps and products,
// device/online_softmax.cuh the softmax. The folders that instantiate the kernel (ampere, ada) have
// its tiles, the choice among them and the measurements.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/f32_out.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/kept_weights.cuh"
#include "common/device/key_groups.cuh"
#include "common/device/online_softmax.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/main_loop.cuh"
#include "common/mma_sync/params.h"
#include "common/mma_sync/tile.cuh"
#include "common/partials.h"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// Finds the tile of this CTA, and writes the rows of no sequence, unless the combining kernel does.
template <class C, class Params>
__device__ __forceinline__ device::Work find_work(const Params& params) {
  const AttentionParams& attention = attention_of(params);
  if constexpr (C::CAN_SPLIT) {
    const device::PackedHeads& packed = params.packed_heads;
    const int splits = params.partials.splits, index = blockIdx.x;
    for (int head = 0; !params.partials.wanted() && head < packed.count; ++head) {
      if (writes_f32(params)) {
        device::write_rows_of_no_sequence<4>(attention, index, threadIdx.x, C::THREADS,
                                             packed.rows(), packed.count, head);
      } else {
        device::write_rows_of_no_sequence(attention, index, threadIdx.x, C::THREADS, packed.rows(),
                                          packed.count, head);
      }
    }
    return device::find_work(attention, index / splits, packed.rows(), packed.count);
  } else {
    if (writes_f32(params)) {
      device::write_rows_of_no_sequence<C::BLOCK_Q, 4>(attention, blockIdx.x, threadIdx.x,
                                                       C::THREADS);
    } else {
      device::write_rows_of_no_sequence<C::BLOCK_Q>(attention, blockIdx.x, threadIdx.x, C::THREADS);
    }
    return device::find_work<C::BLOCK_Q>(attention, blockIdx.x);
  }
}

// Writes the rows of a CTA: with C::CAN_SPLIT to the workspace if the keys are split, else to the
// output. `params` is the FewRowsParams or CacheParams then.
template <class C, class Params>
__device__ __forceinline__ void store_tile(const device::Outputs<C>& o_rmem,
                                           const device::RowState<C>& state, const Params& params,
                                           const device::Work& work, unsigned char* shared) {
  const AttentionParams& attention = attention_of(params);
  const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
  if constexpr (C::CAN_SPLIT) {
    const Partials& partials = params.partials;
    const device::PackedHeads& packed = params.packed_heads;
    if (partials.wanted()) {
      device::store_partials<C>(o_rmem, state, attention, partials, packed, work,
                                blockIdx.x % partials.splits, warp_row);
      return;
    }
    if (packed.count > 1) {
      device::store_packed_out<C>(o_rmem, state, attention, packed, work, warp_row);
      return;
    }
  }
  if (writes_f32(params)) {
    device::store_f32_out<C>(o_rmem, state, attention, work, warp_row);
    return;
  }
  // A warp stages its output rows in its own rows of Q, which no other warp reads.
  static_assert(C::VTile::ROW_BYTES <= C::QKTile::ROW_BYTES);
  device::store_out<C, typename C::VTile>(o_rmem, state, attention, work, warp_row,
                                          shared + C::Q_SMEM + warp_row * C::QKTile::ROW_BYTES);
}

// Sets the dropped weights of a warp's P to 0, of the 32 keys from key_first on. fragment_of(m, i)
// is that of row tile m and of the first (i = 0) or the other 16 of these keys.
//
// All row tiles are drawn together: most of the first two rounds of Philox is the same for all keys
// of a row or for all rows of a key. The lane finds its row anew for each 32 keys, because there
// are no registers to keep what depends on the row alone.
template <class C, class FragmentOf>
__device__ __forceinline__ void drop_of_keys(const device::Dropout& dropout, const CtaContext& cta,
                                             int key_first, const FragmentOf& fragment_of) {
  const unsigned thread = ptx::mov_tid_x_volatile();
  const int query = cta.work.first_row + device::warp_first_row<C>(thread) + thread % 32 / 4;
  const int key = key_first + thread % 4 * 2;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
    uint32_t kept_rmem[2][4];
    device::draw_kept(kept_rmem[0], kept_rmem[1], dropout, query + 16 * m, key);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) fragment_of(m, half)[i] &= kept_rmem[half][i];
    }
  }
}

// Scales what dropout has left of the sums of P V; the sums of rows have all of P.
template <class C>
__device__ __forceinline__ void scale_kept(device::Outputs<C>& o_rmem, float scale) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_rmem[m][n][i] *= scale;
    }
  }
}

// P = 2^(S * exp2_scale - base) and O += P V for STEP_KEYS keys, a few at a time and without a
// branch, so that the assembler can place exponentials between products. drop(key, fragment_of)
// drops some of P of the 32 keys from `key` on, if C::DROPS.
template <class C, class Drop>
__device__ __forceinline__ void exponentiate_and_multiply_pv(
    device::Outputs<C>& o_rmem, const device::Scores<C>& s_rmem, device::RowState<C>& state,
    float exp2_scale, uint32_t v_smem /* this lane's row */, const Drop& drop) {
  constexpr int KEYS = C::DROPS ? 32 : 16;
#pragma unroll
  for (int key = 0; key < C::STEP_KEYS; key += KEYS) {
    uint32_t p_rmem[C::M_TILES][KEYS / 16][4];
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
        device::exponentiate_key_tile<C>(s_rmem, p_rmem[m][n / 2], state, m, key / 8 + n,
                                         exp2_scale);
    }
    drop(key, [&](int m, int half) -> uint32_t (&)[4] { return p_rmem[m][half]; });
#pragma unroll
    for (int half = 0; half < KEYS / 16; ++half) {
      multiply_pv_group<C>(
          o_rmem, [&](int m) -> const uint32_t (&)[4] { return p_rmem[m][half]; }, v_smem,
          key + 16 * half, [](uint32_t (&)[4]) {});
    }
  }
}

template <class C>
__device__ __forceinline__ void attention_fwd(const ParamsOf<C>& all_params) {
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const AttentionParams& params = attention_of(all_params);
  using Context = ContextOf<C>;
  static_assert(sizeof(Context) <= C::CONTEXT_BYTES);
  Context& cta = *reinterpret_cast<Context*>(shared + C::CONTEXT_SMEM);
  device::Work work = find_work<C>(all_params);
  if (work.first_row < 0) return;
  Context own;
  if constexpr (C::CACHE) {
    if (work.nq <= all_params.few_rows) return;  // another launch serves the sequence
    if (threadIdx.x == 0) {
      const device::CacheRows rows =
          device::find_cache_rows(all_params.cache, work.batch_head / params.heads_q);
      work.nk = rows.count;
      cta = make_cache_context<C>(all_params, work, rows);
    }
    __syncthreads();  // thread 0 has written `cta`, before the other threads read it
  } else {
    // Every thread finds the context, so that copies start at once. The threads read `cta` behind
    // the first barrier of visit().
    static_cast<CtaContext&>(own) = make_cta_context(params, work);
    if constexpr (C::CAN_SPLIT) own.packed_heads = all_params.packed_heads;
    if (threadIdx.x == 0) cta = own;
  }
  const Context& known = C::CACHE ? cta : own;

  KeyBlocks<C> blocks(params, cta, known, shared_smem);
  if constexpr (C::CAN_SPLIT)
    blocks.take_share(all_params.partials, blockIdx.x % all_params.partials.splits);
  blocks.start(shared, known);
  if (!C::CACHE && blocks.begin > blocks.last) __syncthreads();  // visit() has no barrier then
  const auto dropout = [&] {
    if constexpr (C::DROPS)
      return device::find_dropout(all_params.dropout, device::uniform(work.batch_head));
    else
      return nullptr;
  }();
  const auto drop_32_keys = [&](int key_first, const auto& fragment_of) {
    if constexpr (C::DROPS) drop_of_keys<C>(dropout, cta, key_first, fragment_of);
  };
  device::Outputs<C> o_rmem = {};
  device::RowState<C> state;
  state.large = false;
  device::clear(state);
  // S of STEP_KEYS keys, masked, with the bases raised as they require.
  const auto score = [&](device::Scores<C>& s_rmem, const QFragments<C>& q_rmem, uint32_t q_smem,
                         uint32_t k_smem, int key_first) {
    const device::RaiseLimits<C> limits(state);
    multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
    if (!C::DROPS && params.transform_scores) device::transform_scores<C>(s_rmem, params.rule);
    mask_edges<C>(s_rmem, cta, key_first);
    return device::update_row_max<C>(s_rmem, state, o_rmem, params.exp2_scale, &limits);
  };
  if constexpr (C::LATE_EXPONENTIALS) {
    struct Scored {
      device::Scores<C> s_rmem;
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
          exponentiate_and_multiply_pv<C>(o_rmem, scored.s_rmem, state, scored.exp2_scale, v_smem,
                                          [&](int key, const auto& fragment_of) {
                                            drop_32_keys(scored.key_first + key, fragment_of);
                                          });
        });
  } else {
    blocks.visit(
        [&](Probabilities<C>& p_rmem, const QFragments<C>& q_rmem, uint32_t q_smem, uint32_t k_smem,
            int key_first) {
          device::Scores<C> s_rmem;
          const float exp2_scale = score(s_rmem, q_rmem, q_smem, k_smem, key_first);
          device::exponentiate_all_scores<C>(s_rmem, p_rmem, state, exp2_scale);
#pragma unroll
          for (int key = 0; C::DROPS && key < C::STEP_KEYS; key += 32) {
            drop_32_keys(key_first + key, [&](int m, int half) -> uint32_t (&)[4] {
              return p_rmem[m][key / 16 + half];
            });
          }
        },
        [&](const Probabilities<C>& p_rmem, uint32_t v_smem) {
          multiply_pv<C>(o_rmem, p_rmem, v_smem);
        });
  }
  if constexpr (C::KEY_GROUPS > 1) {
    static_assert(device::MERGE_BYTES<C> <= C::STAGES * C::STAGE_BYTES);
    __syncthreads();  // every warp has read K and V, before outputs overwrite them
    device::merge_key_groups<C>(o_rmem, state, shared + C::K_SMEM, [] { __syncthreads(); });
    if (device::key_group<C>(threadIdx.x) > 0) return;
  }

  if constexpr (C::DROPS) scale_kept<C>(o_rmem, all_params.dropout.scale);
  store_tile<C>(o_rmem, state, all_params, cta.work, shared);
}

}  // namespace archflash::mma_sync
