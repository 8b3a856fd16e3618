// Attention forward on mma.sync with masks as data: attn_mask (bool or added), key_ranges,
// alibi_slopes and block_mask, together with the causal mask and the window; and with dropout.
//
// The kernel is that of mma_sync/attention_fwd.cuh for few query rows, with another main loop: it
// goes from each block of keys to the next one of which any row of the tile may see a key, so that
// blocks that ranges or the table of blocks hide are neither copied nor multiplied. In a block each
// lane finds which of its own scores count, as bits, before the product Q K^T, and loads its
// elements of attn_mask, whose latency the product hides:
//
//   wait K, V | barrier | find and start next K, V | bits, mask | S = Q K^T | softmax | P V
//
// Scores are logarithms to base 2 here: params.tanh_scale and softcap include log2(e), and
// exp2_scale is 1.
#pragma once

#include <cstdint>

#include "common/math/attention_work.cuh"
#include "common/math/dropout.cuh"
#include "common/math/few_rows.cuh"
#include "common/math/masks.cuh"
#include "common/math/online_softmax.cuh"
#include "common/math/tile_walk.cuh"
#include "common/mma_sync/attention_fwd.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/main_loop.cuh"
#include "common/mma_sync/masked_config.cuh"
#include "common/mma_sync/masked_params.h"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// What the CTA of a masked kernel knows besides: the position of query 0 of its sequence.
struct MaskedContext : FewRowsContext {
  int64_t q_offset;
};

// Warps that share the rows of each of them; see ampere/pair.cuh.
template <class C>
consteval int warps_of_row() {
  if constexpr (requires { C::WARPS_OF_ROW; }) return C::WARPS_OF_ROW;
  return 1;
}

// The row of the tile that is the first of a thread's warp.
template <class C>
__device__ __forceinline__ int first_row_of_warp(int thread) {
  return thread / (32 * warps_of_row<C>()) * C::WARP_ROWS;
}

// Counts the keys of a lane that are among the first `keys` of a block, counted from the lane's
// first key. The lane has the keys 8n and 8n + 1 from there on.
__device__ __forceinline__ int lane_keys_below(int keys) {
  const int x = max(keys, 0);
  return 2 * (x >> 3) + min(x & 7, 2);
}

// Which of a lane's keys lie in [begin, end), counted from its first one: bit 2n + i is key 8n + i.
template <class C>
__device__ __forceinline__ uint32_t lane_bits(int begin, int end) {
  static_assert(C::STEP_KEYS < 128, "the bits fit a register");
  const auto below = [](int keys) { return (1u << lane_keys_below(min(keys, C::STEP_KEYS))) - 1; };
  return below(end) & ~below(begin);
}

// What the masks say of a lane's scores in a block of keys.
template <class C>
struct LaneMasks {
  uint32_t seen[2];      // lane_bits of row lane/4 + 8r
  float slope[2];        // of ALiBi, times log2(e); 0 without
  float distance[2];     // of the row's position from the lane's first key
  math::Scores<C> bias;  // added to the scores, in natural logarithms
  // Whether any row of the warp sees any key, and whether some score changes: one answer a warp.
  bool any, changes;
};

// Loads the elements of attn_mask for a lane's keys as `Element` each, or as `Pair` for the keys 8n
// and 8n + 1 together. use(r, n, i, x) is called with each element that is seen.
template <class C, class Element, class Pair, class Use>
__device__ __forceinline__ void load_mask(const Element* const (&row_gmem)[2], int64_t key_step,
                                          bool pairs, const uint32_t (&seen)[2], const Use& use) {
  constexpr int GROUPS = C::STEP_KEYS / 8;
  if (pairs) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
        if ((seen[r] >> (2 * n) & 3) == 0) continue;
        const Pair pair = *reinterpret_cast<const Pair*>(row_gmem[r] + 8 * n);
        use(r, n, 0, pair.x);
        use(r, n, 1, pair.y);
      }
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Element* x = row_gmem[r];
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
        if (seen[r] >> (2 * n) & 1) use(r, n, 0, x[0]);
        if (seen[r] >> (2 * n + 1) & 1) use(r, n, 1, x[key_step]);
        x += 8 * key_step;
      }
    }
  }
}

// Finds the masks of this lane's scores for the STEP_KEYS keys from key_first on.
template <class C>
__device__ __forceinline__ void find_lane_masks(LaneMasks<C>& found, const MaskParams& params,
                                                const AttentionParams& attention,
                                                const MaskedContext& cta, int key_first) {
  constexpr int GROUPS = C::STEP_KEYS / 8;
  const math::TileMasks masks(params, attention, cta.work, cta.packed_heads);
  const int thread = ptx::mov_tid_x_volatile();
  const int lane = thread % 32;
  const int lane_key = key_first + lane % 4 * 2;
  int heads[2], rows[2];
  bool reads = false, hidden = false;  // some element of attn_mask, or some key
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row_of_tile = first_row_of_warp<C>(thread) + lane / 4 + 8 * r;
    const int head = cta.packed_heads.head(row_of_tile);
    const int row = cta.work.first_row + cta.packed_heads.row(row_of_tile);
    const bool wanted = head < cta.packed_heads.count && row < cta.work.nq;
    uint32_t seen = 0;
    if (wanted) {
      seen = lane_bits<C>(cta.visible.first(row) - lane_key, cta.visible.last(row) + 1 - lane_key);
      if (params.ranges_gmem != nullptr) {
        uint32_t in_ranges = 0;
#pragma unroll 1
        for (int number = 0; number < params.ranges; ++number) {
          const math::KeyRange keys = masks.range(head, row, number);
          in_ranges |= lane_bits<C>(keys.begin - lane_key, keys.end - lane_key);
        }
        seen &= in_ranges;
      }
      uint8_t state = 1;
      if (params.blocks_gmem != nullptr) {
        state = masks.block(head, row, key_first);
        if (state == BLOCK_UNSEEN) seen = 0;
      }
      reads |= state != BLOCK_FULL && seen != 0;
      if (params.slopes_gmem != nullptr) {
        found.slope[r] = masks.slope(head) * math::LOG2_E;
        found.distance[r] = static_cast<float>(cta.q_offset + row - lane_key);
      }
    }
    hidden |= seen != (1u << 2 * GROUPS) - 1;
    found.seen[r] = seen;
    heads[r] = wanted ? head : 0;
    rows[r] = wanted ? row : cta.work.first_row;
  }
  found.any = __any_sync(0xFFFFFFFFu, (found.seen[0] | found.seen[1]) != 0);
  const bool loads = params.mask_element != MaskElement::None && __any_sync(0xFFFFFFFFu, reads);
  found.changes = loads || params.slopes_gmem != nullptr || __any_sync(0xFFFFFFFFu, hidden);
#pragma unroll
  for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) found.bias[0][n][i] = 0.0f;
  }
  if (!loads) return;

  const int64_t elements[2] = {masks.element(heads[0], rows[0], lane_key),
                               masks.element(heads[1], rows[1], lane_key)};
  const bool pairs = params.mask_pairs != 0;
  switch (params.mask_element) {
    case MaskElement::Bool: {
      const auto* start = static_cast<const uint8_t*>(params.mask_gmem);
      const uint8_t* const row_gmem[2] = {start + elements[0], start + elements[1]};
      uint32_t kept[2] = {0, 0};
      load_mask<C, uint8_t, uchar2>(row_gmem, params.mask_key, pairs, found.seen,
                                    [&](int r, int n, int i, uint8_t x) {
                                      if (x != 0) kept[r] |= 1u << (2 * n + i);
                                    });
      found.seen[0] &= kept[0];
      found.seen[1] &= kept[1];
      break;
    }
    case MaskElement::F32: {
      const auto* start = static_cast<const float*>(params.mask_gmem);
      const float* const row_gmem[2] = {start + elements[0], start + elements[1]};
      load_mask<C, float, float2>(
          row_gmem, params.mask_key, pairs, found.seen,
          [&](int r, int n, int i, float x) { found.bias[0][n][2 * r + i] = x; });
      break;
    }
    default: {
      const auto* start = static_cast<const uint16_t*>(params.mask_gmem);
      const uint16_t* const row_gmem[2] = {start + elements[0], start + elements[1]};
      load_mask<C, uint16_t, ushort2>(
          row_gmem, params.mask_key, pairs, found.seen, [&](int r, int n, int i, uint16_t x) {
            found.bias[0][n][2 * r + i] = math::added_of_16_bits<C::DTYPE>(x);
          });
    }
  }
}

// Adds what the masks add, and sets the scores of keys that a row does not see to -inf. Selecting
// makes the old value irrelevant, even if it was NaN.
template <class C>
__device__ __forceinline__ void apply_lane_masks(math::Scores<C>& s_rmem, const LaneMasks<C>& masks,
                                                 bool sloped) {
#pragma unroll
  for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i / 2, key = 8 * n + i % 2;
      float& s = s_rmem[0][n][i];
      const float bias = masks.bias[0][n][i];
      s = fmaf(bias, math::LOG2_E, s);
      if (sloped) s = fmaf(-masks.slope[r], fabsf(masks.distance[r] - key), s);
      if (s < math::LOWEST_LOG2) s = math::LOWEST_LOG2;  // not fmaxf: a NaN stays one
      const bool seen = masks.seen[r] >> (2 * n + i % 2) & 1;
      if (!seen || bias == math::MINUS_INFINITY) s = math::MINUS_INFINITY;
    }
  }
}

// Sets the dropped weights of a warp to 0, of the keys from key_first on.
template <class C>
__device__ __forceinline__ void drop_of_warp(Probabilities<C>& p_rmem, const DropoutParams& dropout,
                                             const MaskedContext& cta, int key_first) {
  const int thread = ptx::mov_tid_x_volatile();
  int queries[2], batch_heads[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row_of_tile = first_row_of_warp<C>(thread) + thread % 32 / 4 + 8 * r;
    queries[r] = cta.work.first_row + cta.packed_heads.row(row_of_tile);
    batch_heads[r] = cta.work.batch_head + cta.packed_heads.head(row_of_tile);
  }
  math::drop_weights<C::STEP_KEYS>(p_rmem[0], dropout, queries, batch_heads,
                                   key_first + thread % 4 * 2);
}

template <class C>
__device__ __forceinline__ void masked_fwd(const MaskedParams& all_params) {
  using QKTile = typename C::QKTile;
  using VTile = typename C::VTile;
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const FewRowsParams& call = all_params.call;
  const AttentionParams& params = call.attention;
  const Partials& partials = call.partials;
  static_assert(sizeof(MaskedContext) <= C::CONTEXT_BYTES);
  MaskedContext& cta = *reinterpret_cast<MaskedContext*>(shared + C::CONTEXT_SMEM);
  {
    const math::Work work = find_work<C>(call);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) {
      static_cast<CtaContext&>(cta) = make_cta_context(params, work);
      cta.packed_heads = call.packed_heads;
      cta.q_offset = math::find_q_offset(params, work);
    }
  }
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it

  const math::TileMasks masks(all_params.masks, params, cta.work, cta.packed_heads);
  KeyBlocks<C> blocks(params, cta, shared_smem);
  blocks.take_share(partials, blockIdx.x % partials.splits);
  const int begin = blocks.begin;
  const auto block_before = [&](int key) {
    return masks.last_block<C::BLOCK_Q, C::BLOCK_K>(key - 1, begin);
  };
  int block = block_before(blocks.last + C::BLOCK_K);
  if (block >= 0) {
    // start() begins with the block at `last`.
    blocks.last = block;
    blocks.start(shared);
  }

  math::Outputs<C> o_rmem = {};
  math::RowState<C> state;
  state.large = false;
  math::clear(state);
  QFragments<C> q_rmem;
  bool first = true;
  // The current stage's K is at stage_smem + K_SMEM, its V at stage_smem + V_SMEM.
  uint32_t stage_smem = shared_smem;
#pragma unroll 1
  while (block >= 0) {
    // Each thread waits for its own copies: K, V, and Q in the first round. The barrier makes the
    // copies of all threads visible. After it no warp still reads the previous block, whose buffers
    // are overwritten next.
    ptx::copies_wait_all();
    __syncthreads();
    const uint32_t other_stage = 2 * shared_smem + C::STAGE_BYTES - stage_smem;
    const int next = block_before(block);
    if (next >= 0) {
      blocks.start_k(next, other_stage);
      blocks.start_v(next, other_stage);
    }
    const int thread = ptx::mov_tid_x_volatile();
    const int warp_row = thread / 32 * C::WARP_ROWS;
    const uint32_t q_smem = shared_smem + C::Q_SMEM + warp_row * QKTile::ROW_BYTES +
                            rows_first_offset<QKTile>(thread % 32);
    if constexpr (C::Q_IN_REGISTERS) {
      if (first) {
#pragma unroll
        for (int column = 0; column < QKTile::COLUMNS; column += 16)
          load_q<C>(q_rmem[column / 16], q_smem, column);
      }
    }
    first = false;
    LaneMasks<C> of_lane;
    find_lane_masks<C>(of_lane, all_params.masks, params, cta, block);
    // A warp that sees none of these keys skips the work, but not the barriers.
    if (of_lane.any) {
      const uint32_t k_smem = stage_smem + C::K_SMEM + columns_first_offset<QKTile>(thread % 32);
      const uint32_t v_smem = stage_smem + C::V_SMEM + v_first_offset<C>(thread % 32);
      const math::RaiseLimits<C> limits(state);
      math::Scores<C> s_rmem;
      multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
      math::transform_scores<C>(s_rmem, params.tanh_scale, params.softcap);
      if (of_lane.changes)
        apply_lane_masks<C>(s_rmem, of_lane, all_params.masks.slopes_gmem != nullptr);
      const float exp2_scale =
          math::follow_maxima<C>(s_rmem, state, o_rmem, params.exp2_scale, &limits);
      Probabilities<C> p_rmem;
      math::weigh_all_scores<C>(s_rmem, p_rmem, state, exp2_scale);
      if (all_params.dropout.state_gmem != nullptr)
        drop_of_warp<C>(p_rmem, all_params.dropout, cta, block);
      multiply_pv<C>(o_rmem, p_rmem, v_smem);
    }
    stage_smem = other_stage;
    block = next;
  }

  // The weights that are left of a row whose others were dropped weigh more.
  if (all_params.dropout.state_gmem != nullptr) {
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_rmem[0][n][i] *= all_params.dropout.scale;
    }
  }
  const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
  const math::PackedHeads& packed = call.packed_heads;
  if (partials.wanted()) {
    math::store_partials<C>(o_rmem, state, params, partials, packed, cta.work,
                            blockIdx.x % partials.splits, warp_row);
  } else if (packed.count > 1) {
    math::store_packed_out<C>(o_rmem, state, params, packed, cta.work, warp_row);
  } else {
    // A warp stages its output rows in its own rows of Q, which no other warp reads.
    static_assert(VTile::ROW_BYTES <= QKTile::ROW_BYTES);
    math::store_out<C, VTile>(o_rmem, state, params, cta.work, warp_row,
                              shared + C::Q_SMEM + warp_row * QKTile::ROW_BYTES);
  }
}

}  // namespace archflash::mma_sync

// Defines an entry point. plan.cpp launches it by NAME.
#define ARCHFLASH_MASKED_KERNEL(NAME, CONFIG)                                        \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::mma_sync::MaskedParams params) {       \
    archflash::mma_sync::masked_fwd<CONFIG>(params);                                 \
  }
