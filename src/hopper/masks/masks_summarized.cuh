// Mask tensors that a kernel before this one has read (summarize_mask.cuh): a dense attn_mask, bool
// or added in 16 or 32 bits, or key_ranges, or alibi_slopes, together with the causal mask and the
// window. Slopes need no summary, and elements of one head, or few keys, are not read twice: every
// block is said to have some (UNREAD). The summary says of each block of MASK_BLOCK rows and keys
// whether it changes anything, and which scores count, as bits in the order in which wgmma leaves
// scores. From it the producer makes the state of a block for each warpgroup.
//
//   state of the block for a warpgroup   what the warpgroup does
//   0                                    waits, and hands the block back
//   SEEN alone                           the same step as in a call without masks; scores that are
//                                        transformed (softcap) take the masked step
//   HIDDEN, RANGED, BEYOND               selects scores by bits, ranges or position, which it finds
//                                        while products run
//   ADDED                                adds elements to scores that are not scaled yet: one FMA
//   HUGE                                 adds them to scaled scores, and keeps the sums finite
//   UNREAD                               looks at the elements while the products run: whether they
//                                        are HUGE; then those of -inf hide keys
//   SLOPED                               subtracts the slope times the distance, likewise
//
// Elements come by TMA and are counted at k_full of their block. Each consumer warp hands them back
// at mask_empty of their stage when it has read them, which may be before or after its products
// have read K.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/lane_masks.cuh"
#include "common/device/masks.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/tile_walk.cuh"
#include "common/device/visible_keys.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/ld_global.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/warp_roles.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/masks/mask_elements.cuh"
#include "hopper/masks/masked_config.cuh"
#include "hopper/masks/masked_messages.cuh"
#include "hopper/masks/masked_params.h"
#include "hopper/masks/summarize_mask.cuh"

namespace archflash::hopper::summarized {

// What the producer says of a tile besides its message, so that the consumers, who have no product
// running between two tiles, need not find it.
struct Context {
  const uint32_t* bits_gmem;   // the summary's words of the tile's first row block
  const int32_t* ranges_gmem;  // of the head's first row
  int64_t q_offset;
  device::VisibleKeys visible;
  float slope;
  TileHead head;
  BlockMessage first;  // of the first block
};

// The row block of a warpgroup of a tile; a mask whose rows are repeated has one.
__device__ __forceinline__ int row_block_of(const SummarizedParams& params, int first_row,
                                            int group) {
  return min(first_row / MASK_BLOCK + group, params.row_blocks - 1);
}
// Whether all rows of a row block, of all slices, have a high element. For a whole warp.
__device__ __forceinline__ bool has_high_rows(const SummarizedParams& params, int row_block) {
  const auto* gmem = reinterpret_cast<const uint32_t*>(params.high_rows_gmem) +
                     static_cast<int64_t>(row_block) * params.key_blocks * 2;
  uint32_t high = 0;  // of 32 rows, in every other block
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) % 32; i < params.key_blocks * 2; i += 32)
    high |= gmem[i];
#pragma unroll
  for (int lanes = 2; lanes < 32; lanes *= 2)
    high |= __shfl_xor_sync(device::FULL_WARP, high, lanes);
  return __all_sync(device::FULL_WARP, high == ~0u);
}

// The producer's view of 32 blocks of a tile, one in each lane. For a whole warp.
template <class C>
struct Look {
  const SummarizedParams& params;
  const MaskParams& masks;
  device::VisibleKeys visible;
  int first_row, end_row;            // of the tile
  int mask_batch, mask_head, slice;  // of the mask; 0 where it is broadcast
  const uint8_t* states_gmem;        // of the head's first row block
  float slope = 0.0f;
  int first = 0;
  int top = -1;
  uint32_t seen = 0;      // a bit for each lane
  uint32_t states = 0;    // of the lane's block
  uint32_t all_high = 0;  // find_high_rows()

  __device__ __forceinline__ Look(const SummarizedParams& params, const SeekingTile& tile,
                                  TileHead head, const device::VisibleKeys& visible)
      : params(params),
        masks(params.masks),
        visible(visible),
        first_row(tile.first_row),
        end_row(tile.end_row),
        mask_batch(params.mask_batches == 1 ? 0 : head.batch),
        mask_head(params.mask_heads == 1 ? 0 : head.head),
        slice(mask_batch * params.mask_heads + mask_head),
        states_gmem(params.states_gmem +
                    static_cast<int64_t>(slice) * params.row_blocks * params.key_blocks) {
    if (masks.slopes_gmem != nullptr)
      slope = masks.slopes_gmem[head.batch * masks.slopes_batch + head.head * masks.slopes_head];
    if (params.high_rows_gmem != nullptr) all_high = find_high_rows();
  }

  // The number of the tile that is taken at position `index`.
  __device__ __forceinline__ static int tile_at(const SummarizedParams&, int index) {
    ptx::griddepcontrol_wait();  // the kernel before this one has written the summary
    return index;
  }
  // The blocks of the tile from the first to the last in which a range of one of its rows lies;
  // first > last if there is none.
  __device__ __forceinline__ device::Blocks in_ranges(const device::Blocks& blocks) const {
    if (masks.ranges_gmem == nullptr) return blocks;
    SeenKeys all{INT32_MAX, -1};
#pragma unroll
    for (int group = 0; group < C::WARPGROUPS; ++group) {
      const int row = first_row + group * C::GROUP_ROWS;
      if (row >= end_row) continue;
      const SeenKeys keys = params.seen_keys_gmem[slice * params.row_blocks + row / MASK_BLOCK];
      all = {min(all.first, keys.first), max(all.last, keys.last)};
    }
    return {max(blocks.first, device::block_start<C::BLOCK_K>(all.first)),
            min(blocks.last, device::block_start<C::BLOCK_K>(all.last))};
  }
  // The keys between the first and the last one in a range of any row of the slice.
  __device__ __forceinline__ device::KeyRange all_ranges() const {
    SeenKeys all{INT32_MAX, -1};
#pragma unroll 1
    for (int block = static_cast<int>(threadIdx.x) % 32; block < params.row_blocks; block += 32) {
      const SeenKeys keys = params.seen_keys_gmem[slice * params.row_blocks + block];
      all = {min(all.first, keys.first), max(all.last, keys.last)};
    }
    return {__reduce_min_sync(device::FULL_WARP, all.first),
            __reduce_max_sync(device::FULL_WARP, all.last) + 1};
  }
  __device__ __forceinline__ Context context(const SeekingTile& tile, TileHead head,
                                             const BlockMessage& first_block) const {
    const int64_t row_block = static_cast<int64_t>(slice) * params.row_blocks + row_block_of(0);
    return {.bits_gmem = params.bits_gmem + row_block * params.key_blocks * SUMMARY_WORDS,
            .ranges_gmem =
                masks.ranges_gmem + mask_batch * masks.ranges_batch + mask_head * masks.ranges_head,
            .q_offset = device::find_q_offset(params.call.attention, tile),
            .visible = visible,
            .slope = slope,
            .head = head,
            .first = first_block};
  }
  __device__ __forceinline__ uint32_t states_of(int lane) const {
    return __shfl_sync(device::FULL_WARP, states, lane);
  }

  // Looks at 32 blocks, from the one at `key` backwards. Returns `key`.
  __device__ __forceinline__ int look_at(int key) {
    top = key;
    const uint32_t of_unseen = params.bits_gmem != nullptr ? STATE_HIDDEN : STATE_RANGED;
    const bool sloped = masks.slopes_gmem != nullptr;
    const int of_lane = key - static_cast<int>(threadIdx.x % 32) * C::BLOCK_K;
    uint32_t of_mask[C::WARPGROUPS][C::SUMMARY_BLOCKS];
    load_states(of_mask, of_lane,
                STATE_SEEN | (sloped ? STATE_SLOPED : STATE_ADDED | STATE_UNREAD));
    states = 0;
#pragma unroll
    for (int group = 0; group < C::WARPGROUPS; ++group) {
      const int row = first_row + group * C::GROUP_ROWS;
      const int last_row = min(row + C::GROUP_ROWS, end_row) - 1, end = of_lane + C::BLOCK_K;
      if (of_lane < first || last_row < row || visible.hides(row, last_row, of_lane, end - 1))
        continue;
      uint32_t state = 0;
      bool lowest = true;  // or hidden
#pragma unroll
      for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
        const int part_key = of_lane + part * MASK_BLOCK, part_last = part_key + MASK_BLOCK - 1;
        if (visible.hides(row, last_row, part_key, part_last)) {
          state |= STATE_BEYOND;
          continue;
        }
        state |= of_mask[group][part] == 0 ? of_unseen : of_mask[group][part];
        lowest &= of_mask[group][part] == 0 || (of_mask[group][part] & SUMMARY_LOWEST) != 0;
        if (visible.masks(row, last_row, part_key, part_last)) state |= STATE_BEYOND;
      }
      if (params.high_rows_gmem != nullptr) {
        if (lowest && (all_high >> group & 1) != 0) continue;
        state &= ~SUMMARY_LOWEST;
      }
      if ((state & STATE_SEEN) != 0) states |= state << (8 * group);
    }
    seen = __ballot_sync(device::FULL_WARP, states != 0);
    return key;
  }

 private:
  __device__ __forceinline__ int row_block_of(int group) const {
    return summarized::row_block_of(params, first_row, group);
  }
  // A bit for each warpgroup: whether all rows of its row block have a high element.
  __device__ __forceinline__ uint32_t find_high_rows() const {
    uint32_t found = 0;
#pragma unroll 1
    for (int group = 0; group < C::WARPGROUPS; ++group) {
      const bool high = has_high_rows(params, slice * params.row_blocks + row_block_of(group));
      found |= (high ? 1u : 0) << group;
    }
    return found;
  }
  // What the summary says of the lane's block, `otherwise` without one. All is loaded before any of
  // it is looked at: one load waits as long as all. Blocks that are not there get what others have,
  // which is not looked at. The offsets fit 32 bits: plan.cpp limits the summary's size.
  __device__ __forceinline__ void load_states(uint32_t (&of_mask)[C::WARPGROUPS][C::SUMMARY_BLOCKS],
                                              int of_lane, uint32_t otherwise) const {
    const bool summarized = params.states_gmem != nullptr;
#pragma unroll
    for (int group = 0; group < C::WARPGROUPS; ++group) {
      const int row_block = row_block_of(group);
#pragma unroll
      for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
        const int block = min(max(of_lane / MASK_BLOCK + part, 0), params.key_blocks - 1);
        of_mask[group][part] = otherwise;
        if (summarized) of_mask[group][part] = states_gmem[row_block * params.key_blocks + block];
      }
    }
  }
};

template <class C>
struct ScoreMasks {
  // What a warp finds out about a block while its products run: which scores count, a word for each
  // block of the summary, and the elements that are kept. As one struct they spill registers.
  using Seen = uint32_t[C::SUMMARY_BLOCKS];
  using Kept = Elements<C>;

  const SummarizedParams& params;
  const MaskParams& masks;
  const AttentionParams& attention;
  uint32_t shared_smem;
  int group;
  // What is added to scores before they are scaled has this factor.
  float factor;
  bool adds_late;  // whether all is added to scaled scores
  RingPosition<C::MASK_STAGES> ring;
  const SeekingTile* tile = nullptr;
  const Context* cta = nullptr;

  __device__ __forceinline__ ScoreMasks(const SummarizedParams& params, uint32_t shared_smem,
                                        int group, int)
      : params(params),
        masks(params.masks),
        attention(params.call.attention),
        shared_smem(shared_smem),
        group(group),
        factor(device::LOG2_E / attention.exp2_scale),
        adds_late(!(factor <= LARGEST_FACTOR)) {}
  __device__ __forceinline__ void begin_tile(const SeekingTile& of_cta, const Context& context) {
    tile = &of_cta;
    cta = &context;
  }

  // Called while the products run. Returns the state of the block for this warp.
  template <bool MAY_ADD>
  __device__ __forceinline__ uint32_t find(Seen& seen, Kept& kept, uint32_t state,
                                           const BlockMessage& block) {
    find_bits(seen, state, block.key);
    if constexpr (!MAY_ADD) return state;
    const bool unread = (state & STATE_UNREAD) != 0;
    if ((state & STATE_ADDED) != 0 && (C::KEEPS_ELEMENTS || unread)) {
      const uint32_t row_smem = find_elements();
      if constexpr (C::KEEPS_ELEMENTS) {
#pragma unroll
        for (int n = 0; n < C::BLOCK_K / 16; ++n) load_elements<C>(kept[n], row_smem, n);
      }
      if (unread && (C::WIDE || any_huge<C>(kept, row_smem))) state |= STATE_HUGE;
      if constexpr (C::KEEPS_ELEMENTS) ptx::fence_proxy_async_shared();
    }
    if constexpr (C::KEEPS_ELEMENTS) hand_back_elements(state, block.states);
    return state;
  }

  // What a block needs that is not clear. Returns the scale of scores that are finished.
  template <bool MAY_ADD>
  __device__ __forceinline__ float finish(device::Scores<C>& s_rmem, const Seen& seen,
                                          const Kept& kept, uint32_t state, int key) const {
    float scale = attention.exp2_scale;
    const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
    const unsigned lane = thread % 32;
    if (MAY_ADD && attention.transform_scores) device::transform_scores<C>(s_rmem, attention.rule);
    // x * scale + a * b, which stays finite.
    const auto add_scaled = [&](float& x, float a, float b) {
      x = fmaf(a, b, __fmul_rn(x, scale));
      if (x < device::LOWEST_LOG2) x = device::LOWEST_LOG2;  // not fmaxf: a NaN stays one
    };
    if (MAY_ADD && (state & STATE_ADDED) != 0) {
      const uint32_t row_smem = C::KEEPS_ELEMENTS ? 0 : find_elements();
      const auto add_late = [&](float& x, float element) {
        add_scaled(x, element, device::LOG2_E);
      };
      if constexpr (C::WIDE) {
        add_wide(s_rmem, [&](float& x, float element) {
          add_late(x, element);
          if (element == device::MINUS_INFINITY) x = element;  // also where it is NaN
        });
        scale = 1.0f;
      } else if ((state & (STATE_HUGE | STATE_UNREAD)) == (STATE_HUGE | STATE_UNREAD)) {
        add_elements<C>(s_rmem, kept, row_smem, [&](float& x, float element) {
          add_late(x, element);
          if (element == device::MINUS_INFINITY) x = element;  // also where it is NaN
        });
        scale = 1.0f;
      } else if ((state & STATE_HUGE) != 0 || adds_late) {
        add_elements<C>(s_rmem, kept, row_smem, add_late);
        scale = 1.0f;
      } else {
        add_elements<C>(s_rmem, kept, row_smem,
                        [&](float& x, float element) { x = fmaf(element, factor, x); });
      }
    }
    if (MAY_ADD && (state & STATE_SLOPED) != 0) {
      const int64_t q_offset = cta->q_offset;
      const float slope = cta->slope;
      const float longest = fabsf(static_cast<float>(q_offset)) + static_cast<float>(attention.nq) +
                            static_cast<float>(attention.nk);
      const bool late = adds_late || !(fabsf(slope) * longest < LARGEST_ADDED);
      // The positions of the warpgroup's first and last row, from the block's first key on.
      const int64_t first = q_offset + tile->first_row + group * C::GROUP_ROWS - key;
      const int64_t last = first + C::GROUP_ROWS - 1;
      const auto lane_row = static_cast<int>(thread % C::WARPGROUP / 32 * 16 + lane / 4);
      const auto distance = static_cast<float>(first + lane_row - static_cast<int>(lane % 4 * 2));
      if (late) {
        const float step = slope * device::LOG2_E;
        add_distances<C>(s_rmem, distance,
                         [&](float& x, float d) { add_scaled(x, -step, fabsf(d)); });
        scale = 1.0f;
      } else if (first < C::BLOCK_K - 1 && last > 0) {
        const float step = slope * factor;
        add_distances<C>(s_rmem, distance,
                         [&](float& x, float d) { x = fmaf(-step, fabsf(d), x); });
      } else {  // all keys lie on one side of all rows
        const float step = last > 0 ? slope * factor : -slope * factor;
        add_distances<C>(s_rmem, distance, [&](float& x, float d) { x = fmaf(-step, d, x); });
      }
    }
    if ((state & (STATE_HIDDEN | STATE_RANGED | STATE_BEYOND)) != 0) select_scores<C>(s_rmem, seen);
    return scale;
  }

  // Hands back the elements of a block, unless find<MAY_ADD>() has kept them and done so.
  template <bool MAY_ADD>
  __device__ __forceinline__ void hand_back(uint32_t state, const BlockMessage& block) {
    if constexpr (!C::KEEPS_ELEMENTS || !MAY_ADD) hand_back_elements(state, block.states);
  }

 private:
  template <class Add>
  __device__ __forceinline__ void add_wide(device::Scores<C>& s_rmem, const Add& add) const {
    using MaskTile = typename C::MaskTile;
    const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
    const bool once = masks.mask_row == 0;
    const auto lane = static_cast<int>(thread % 32);
    const int row = once ? 0 : static_cast<int>(thread / 32 * 16) + lane / 4;
    const auto lane_bytes =
        static_cast<uint32_t>(MaskTile::offset(row, lane % 4 / 2) + lane % 2 * 8);
    const uint32_t row_smem[2] = {mask_smem<C>(shared_smem, 0) + lane_bytes,
                                  mask_smem<C>(shared_smem, 1) + lane_bytes};
    add_wide_elements<C>(s_rmem, row_smem, once ? 0 : 8 * MaskTile::ROW_BYTES, add);
  }
  // Where this lane's row of the elements lies for ldmatrix.
  __device__ __forceinline__ uint32_t find_elements() const {
    const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
    const unsigned lane = thread % 32;
    // Where all rows of a mask are the same, TMA brings one of them.
    const auto row = masks.mask_row == 0 ? 0 : static_cast<int>(thread / 32 * 16 + lane % 16);
    return mask_smem<C>(shared_smem, ring.stage) +
           C::MaskTile::offset(row, static_cast<int>(lane / 16));
  }
  // Hands back the elements of a block, if it has some for any warpgroup. `state`: for this warp,
  // which without ADDED has read none.
  __device__ __forceinline__ void hand_back_elements(uint32_t state, uint32_t states) {
    if ((states & ADDED_FOR_ANY) == 0) return;
    // These reads come before TMA's next write there. Kept elements have a fence where they are
    // read.
    if (!C::KEEPS_ELEMENTS && (state & STATE_ADDED) != 0) ptx::fence_proxy_async_shared();
    if constexpr (C::WIDE) {
      for (int stage = 0; stage < C::MASK_STAGES; ++stage)
        release(mask_empty<C>(shared_smem, stage));
    } else {
      release(mask_empty<C>(shared_smem, ring.stage));
      ring.advance();
    }
  }
  // Which scores of this lane count by attn_mask, ranges and position.
  __device__ __forceinline__ void find_bits(Seen& seen, uint32_t state, int key) const {
    const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
    const unsigned lane = thread % 32;
    const int row_block = params.row_blocks == 1 ? 0 : group;  // from that of bits_gmem on
#pragma unroll
    for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
      seen[part] = 0xFFFFFFFFu;
      if ((state & STATE_HIDDEN) == 0) continue;
      // Keys behind the last block of the summary are hidden by their position. Behind the last
      // row block no block is seen.
      const int number = min(key / MASK_BLOCK + part, params.key_blocks - 1);
      const int64_t block = static_cast<int64_t>(row_block) * params.key_blocks + number;
      // The context came behind the producer's wait for the kernel that has written the bits.
      seen[part] =
          ptx::ld_global_b32(cta->bits_gmem + block * SUMMARY_WORDS + thread % C::WARPGROUP);
    }
    if ((state & (STATE_RANGED | STATE_BEYOND)) == 0) return;
    // The keys from `begin` to `end` of a row, as the lane's bits of one of its two rows.
    const auto bits_of = [&](int part, int r, int begin, int end) {
      const int lane_key = key + part * MASK_BLOCK + static_cast<int>(lane % 4 * 2);
      return device::lane_bits<SummaryConfig<C::DTYPE>>(begin - lane_key, end - lane_key)
             << (16 * r);
    };
    const int lane_row = tile->first_row + static_cast<int>(thread / 32 * 16 + lane / 4);
    if ((state & STATE_BEYOND) != 0) {
      const device::VisibleKeys visible = cta->visible;
#pragma unroll
      for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
        uint32_t of_rows = 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = lane_row + 8 * r;
          of_rows |= bits_of(part, r, visible.first(row), visible.last(row) + 1);
        }
        seen[part] &= of_rows;
      }
    }
    if ((state & STATE_RANGED) != 0) {
      uint32_t in_ranges[C::SUMMARY_BLOCKS] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = min(lane_row + 8 * r, attention.nq - 1);
        const int32_t* range = cta->ranges_gmem + row * masks.ranges_row;
#pragma unroll 1
        for (int number = 0; number < masks.ranges; ++number, range += 2) {
          const int begin = max(range[0], 0), end = range[1];
#pragma unroll
          for (int part = 0; part < C::SUMMARY_BLOCKS; ++part)
            in_ranges[part] |= bits_of(part, r, begin, end);
        }
      }
#pragma unroll
      for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) seen[part] &= in_ranges[part];
    }
  }
};

}  // namespace archflash::hopper::summarized

namespace archflash::hopper {

template <class C>
struct Summarized {
  using Params = SummarizedParams;
  using Context = summarized::Context;
  using Look = summarized::Look<C>;
  using ScoreMasks = summarized::ScoreMasks<C>;
};

}  // namespace archflash::hopper
