// Attention forward on mma.sync with masks as data: attn_mask (bool or added), key_ranges,
// alibi_slopes and block_mask, together with the causal mask and the window; and with dropout.
//
// The kernel is that of mma_sync/attention_fwd.cuh for few query rows, whose main loop here goes
// from each block of keys to the next one of which any row of the tile may see a key, so that
// blocks that ranges or the table of blocks hide are neither copied nor multiplied. In a block each
// lane finds which of its own scores count, as bits, before the product Q K^T, and loads its
// elements of attn_mask, whose latency the product hides:
//
//   wait K, V | barrier | find and start next K, V | bits, mask | S = Q K^T | softmax | P V
//
// K and V may be a KV cache. Its attn_mask is about the last keys of each sequence, and each lane
// looks up its few elements after it has found its other masks.
//
// Scores are logarithms to base 2 here: params.rule.tanh_scale and softcap include log2(e), and
// exp2_scale is 1.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device/attention_work.cuh"
#include "common/device/chunked_keys.cuh"
#include "common/device/dropout.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/kv_cache.cuh"
#include "common/device/lane_masks.cuh"
#include "common/device/masks.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/quad.cuh"
#include "common/mma_sync/attention_fwd.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/main_loop.cuh"
#include "common/mma_sync/params.h"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// What the CTA of a masked kernel knows besides: the position of query 0 of its sequence.
struct MaskedContext : FewRowsContext {
  int64_t q_offset;
};

// What the CTA of a masked kernel knows of a KV cache, with the masks of its sequence.
struct MaskedCacheContext : CacheContext {
  MaskParams masks;          // of the CTA's sequence, but for attn_mask
  const uint8_t* mask_gmem;  // the element of row 0 and key 0 of the tile's first head; null: none
  int mask_begin;            // the first key that attn_mask is about
};
template <class C>
using MaskedContextOf = std::conditional_t<C::CACHE, MaskedCacheContext, MaskedContext>;
template <class C>
using MaskedParamsOf = std::conditional_t<C::CACHE, MaskedCacheParams, MaskedParams>;

// One thread calls this and writes the result to shared memory for all.
__device__ __forceinline__ MaskedContext make_masked_context(const FewRowsParams& params,
                                                             const device::Work& work) {
  MaskedContext cta;
  static_cast<CtaContext&>(cta) = make_cta_context(params.attention, work);
  cta.packed_heads = params.packed_heads;
  cta.q_offset = device::find_q_offset(params.attention, work);
  return cta;
}

// make_masked_context() for a KV cache.
template <class C>
__device__ __forceinline__ MaskedCacheContext make_masked_cache_context(
    const MaskedCacheParams& params, const device::Work& work, const device::CacheRows& rows) {
  const AttentionParams& attention = params.call.attention;
  MaskedCacheContext cta;
  static_cast<CacheContext&>(cta) = make_cache_context<C>(params.call, work, rows);
  MaskParams& masks = cta.masks;
  masks = params.masks;
  const int sequence = work.batch_head / attention.heads_q;
  const int row_start = device::sequence_start(attention.cu_seqlens_q_gmem, sequence, attention.nq);
  if (masks.ranges_gmem != nullptr) masks.ranges_gmem += row_start * masks.ranges_row;
  cta.mask_gmem = static_cast<const uint8_t*>(masks.mask_gmem);
  // May be negative, and then the mask has columns for keys that the sequence does not have.
  cta.mask_begin = work.nk - static_cast<int>(params.mask_keys);
  if (cta.mask_gmem != nullptr) {
    cta.mask_gmem += sequence * masks.mask_batch +
                     work.batch_head % attention.heads_q * masks.mask_head +
                     row_start * masks.mask_row - cta.mask_begin * masks.mask_key;
  }
  masks.mask_element = MaskElement::None;
  return cta;
}

// What find_lane_masks() reads of a MaskedCacheContext.
struct MaskedCacheRows {
  const device::Work& work;
  const device::PackedHeads& packed_heads;
  device::ChunkedKeys visible;
  int64_t q_offset;
};

// Takes from a lane's bits the keys from key_first on that attn_mask hides. Called by whole warps.
template <class C>
__device__ __forceinline__ void hide_by_mask(device::LaneMasks<C>& found,
                                             const MaskedCacheContext& cta, int warp_row,
                                             int key_first) {
  if (cta.mask_gmem == nullptr || key_first + C::STEP_KEYS <= cta.mask_begin) return;
  const int lane = ptx::mov_tid_x_volatile() % 32;
  const int lane_key = key_first + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row_of_tile = warp_row + lane / 4 + 8 * r;
    const uint8_t* row_gmem =
        cta.mask_gmem + cta.packed_heads.head(row_of_tile) * cta.masks.mask_head +
        (cta.work.first_row + cta.packed_heads.row(row_of_tile)) * cta.masks.mask_row;
    uint32_t asked = found.seen[r] & device::lane_bits<C>(cta.mask_begin - lane_key, C::STEP_KEYS);
#pragma unroll 1
    for (; asked != 0; asked &= asked - 1) {
      const int bit = __ffs(static_cast<int>(asked)) - 1;
      const int64_t key = lane_key + 8 * (bit / 2) + bit % 2;
      if (row_gmem[key * cta.masks.mask_key] == 0) found.seen[r] &= ~(1u << bit);
    }
  }
  found.any = __any_sync(device::FULL_WARP, (found.seen[0] | found.seen[1]) != 0);
  found.changes = true;
}

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
  device::drop_weights<C::STEP_KEYS>(p_rmem[0], dropout, queries, batch_heads,
                                     key_first + thread % 4 * 2);
}

// Which keys of a block some row of the warp sees, from scores that have been masked: bit 2n + i is
// the key 8n + i from this lane's first one on, as in device::lane_bits(). Called by whole warps.
template <class C>
__device__ __forceinline__ uint32_t keys_of_warp(const device::Scores<C>& s_rmem) {
  uint32_t seen = 0;
#pragma unroll
  for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float (&s)[4] = s_rmem[0][n];
      if (s[i] != device::MINUS_INFINITY || s[2 + i] != device::MINUS_INFINITY)
        seen |= 1u << (2 * n + i);
    }
  }
#pragma unroll
  for (int rows = 4; rows < 32; rows *= 2) seen |= __shfl_xor_sync(device::FULL_WARP, seen, rows);
  return seen;
}
template <class C>
constexpr uint32_t ALL_KEYS = (1u << C::STEP_KEYS / 4) - 1;

// O += P V for STEP_KEYS keys, of which no row of the warp sees those that `seen` lacks: their P is
// 0, but 0 * NaN would be NaN, so that they count as 0 in V too. Called by whole warps.
template <class C>
__device__ __forceinline__ void multiply_seen_pv(device::Outputs<C>& o_rmem,
                                                 const Probabilities<C>& p_rmem,
                                                 uint32_t v_smem /* this lane's row */,
                                                 uint32_t seen) {
  static_assert(C::V_PACK == 1 && C::M_TILES == 1 && C::STEP_KEYS <= 64);
  if (__all_sync(device::FULL_WARP, seen == ALL_KEYS<C>)) {
    multiply_pv<C>(o_rmem, p_rmem, v_smem);
    return;
  }
#pragma unroll
  for (int key = 0; key < C::STEP_KEYS; key += 16) {
    uint32_t kept[2];  // of the two key tiles
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const uint32_t bits = seen >> (2 * (key / 8 + tile));
      kept[tile] = (bits & 1 ? 0x0000FFFFu : 0) | (bits & 2 ? 0xFFFF0000u : 0);
    }
    multiply_pv_group<C>(
        o_rmem, [&](int) -> const uint32_t (&)[4] { return p_rmem[0][key / 16]; }, v_smem, key,
        [&](uint32_t (&v_rmem)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) v_rmem[i] &= kept[i % 2];
        });
  }
}

// What a warp knows of a block of keys between its two products.
template <class C>
struct MaskedBlock {
  device::LaneMasks<C> of_lane;
  Probabilities<C> p_rmem;
  uint32_t seen;  // the keys that some row of the warp sees
};

// P of a block's scores, masked, with the outputs rescaled as they require. block.of_lane is known.
template <class C>
__device__ __forceinline__ void exponentiate_masked_scores(
    MaskedBlock<C>& block, device::Scores<C>& s_rmem, device::RowState<C>& state,
    device::Outputs<C>& o_rmem, const MaskParams& masks, const AttentionParams& params,
    const device::RaiseLimits<C>* limits) {
  device::transform_scores<C>(s_rmem, params.rule);
  block.seen = ALL_KEYS<C>;
  if (block.of_lane.changes) {
    device::apply_lane_masks<C>(s_rmem, block.of_lane, masks, 1.0f);
    block.seen = keys_of_warp<C>(s_rmem);
  }
  const float exp2_scale =
      device::update_row_max<C>(s_rmem, state, o_rmem, params.exp2_scale, limits);
  device::exponentiate_all_scores<C>(s_rmem, block.p_rmem, state, exp2_scale);
}

template <class C>
__device__ __forceinline__ void masked_fwd(const MaskedParamsOf<C>& all_params) {
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const auto& call = all_params.call;
  const AttentionParams& params = call.attention;
  using Context = MaskedContextOf<C>;
  static_assert(sizeof(Context) <= C::CONTEXT_BYTES);
  Context& cta = *reinterpret_cast<Context*>(shared + C::CONTEXT_SMEM);
  {
    device::Work work = find_work<C>(call);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) {
      if constexpr (C::CACHE) {
        const device::CacheRows rows =
            device::find_cache_rows(call.cache, work.batch_head / params.heads_q);
        work.nk = rows.count;
        cta = make_masked_cache_context<C>(all_params, work, rows);
      } else {
        cta = make_masked_context(call, work);
      }
    }
  }
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it

  KeyBlocks<C> blocks(params, cta, shared_smem);
  blocks.take_share(call.partials, blockIdx.x % call.partials.splits);
  const MaskParams& mask_params = [&]() -> const MaskParams& {
    if constexpr (C::CACHE)
      return cta.masks;
    else
      return all_params.masks;
  }();
  const device::TileMasks masks(mask_params, params, cta.work, cta.packed_heads);
  const auto find_masks = [&] { return masks; };
  const device::SeenKeyBlocks<C, decltype(find_masks)> walk{find_masks, blocks.begin};
  blocks.last = walk.look_behind(blocks.last + C::BLOCK_K);
  if (walk.has(blocks.last)) blocks.start(shared);

  device::Outputs<C> o_rmem = {};
  device::RowState<C> state;
  state.large = false;
  device::clear(state);
  blocks.template visit<MaskedBlock<C>>(
      walk,
      [&](MaskedBlock<C>& block, int key_first) {
        const int warp_row = first_row_of_warp<C>(ptx::mov_tid_x_volatile());
        if constexpr (C::CACHE) {
          const MaskedCacheRows rows{cta.work, cta.packed_heads, visible_keys<C>(cta),
                                     cta.work.nk - cta.work.nq};
          device::find_lane_masks<C>(block.of_lane, mask_params, params, rows, warp_row, key_first);
          hide_by_mask<C>(block.of_lane, cta, warp_row, key_first);
        } else {
          device::find_lane_masks<C>(block.of_lane, mask_params, params, cta, warp_row, key_first);
        }
        return block.of_lane.any;
      },
      [&](MaskedBlock<C>& block, const QFragments<C>& q_rmem, uint32_t q_smem, uint32_t k_smem,
          int key_first) {
        const device::RaiseLimits<C> limits(state);
        device::Scores<C> s_rmem;
        multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
        exponentiate_masked_scores<C>(block, s_rmem, state, o_rmem, mask_params, params, &limits);
        if constexpr (!C::CACHE) {
          if (all_params.dropout.state_gmem != nullptr)
            drop_of_warp<C>(block.p_rmem, all_params.dropout, cta, key_first);
        }
      },
      [&](const MaskedBlock<C>& block, uint32_t v_smem) {
        multiply_seen_pv<C>(o_rmem, block.p_rmem, v_smem, block.seen);
      });

  if constexpr (!C::CACHE) {
    if (all_params.dropout.state_gmem != nullptr) scale_kept<C>(o_rmem, all_params.dropout.scale);
  }
  store_tile<C>(o_rmem, state, call, cta.work, shared);
  if constexpr (!C::CACHE) {
    if (!call.partials.wanted())
      device::store_lowest<C>(state, attention_of(call), call.packed_heads, cta.work,
                              static_cast<int>(threadIdx.x) / 32 * C::WARP_ROWS);
  }
}

}  // namespace archflash::mma_sync
