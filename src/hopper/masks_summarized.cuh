// Mask tensors that a kernel before this one has read (summarize_mask.cuh): a dense attn_mask, bool
// or added in 16 bits, or key_ranges, or alibi_slopes, together with the causal mask and the
// window. Slopes need no summary, and elements that only one head uses are not read twice: every
// block is said to have some (UNREAD). The summary says of each block of MASK_BLOCK rows and keys
// whether it changes anything, and which scores count, as bits in the order in which wgmma leaves
// scores. From it the producer makes the state of a block for each warpgroup; what the warpgroup
// does about it stands in summarized_scores.cuh.
#pragma once

#include <cstdint>

#include "common/math/attention_work.cuh"
#include "common/math/masks.cuh"
#include "common/math/tile_walk.cuh"
#include "common/math/visible_keys.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/masked_config.cuh"
#include "hopper/masked_messages.cuh"
#include "hopper/masked_params.h"

namespace archflash::hopper::summarized {

// What the producer says of a tile besides its message, so that the consumers, who have no product
// running between two tiles, need not find it.
struct Context {
  const uint32_t* bits_gmem;   // the summary's words of the tile's first row block
  const int32_t* ranges_gmem;  // of the head's first row
  int64_t q_offset;
  math::VisibleKeys visible;
  float slope;
  TileHead head;
  BlockMessage first;  // of the first block
};

// The producer's view of 32 blocks of a tile, one in each lane. For a whole warp.
template <class C>
struct Look {
  const SummarizedParams& params;
  const MaskParams& masks;
  math::VisibleKeys visible;
  int first_row, end_row;            // of the tile
  int mask_batch, mask_head, slice;  // of the mask; 0 where it is broadcast
  const uint8_t* states_gmem;        // of the head's first row block
  float slope = 0.0f;
  int first = 0;
  int top = -1;
  uint32_t seen = 0;    // a bit for each lane
  uint32_t states = 0;  // of the lane's block

  __device__ __forceinline__ Look(const SummarizedParams& params, const SeekingTile& tile,
                                  TileHead head, const math::VisibleKeys& visible)
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
  }

  // The number of the tile that is taken at position `index`.
  __device__ __forceinline__ static int tile_at(const SummarizedParams&, int index) {
    ptx::griddepcontrol_wait();  // the kernel before this one has written the summary
    return index;
  }
  // Those of the tile's blocks that lie between the first and the last one in which a range of a
  // row of the tile lies; first > last if there is none.
  __device__ __forceinline__ math::Blocks in_ranges(const math::Blocks& blocks) const {
    if (masks.ranges_gmem == nullptr) return blocks;
    SeenKeys all{INT32_MAX, -1};
#pragma unroll
    for (int group = 0; group < C::WARPGROUPS; ++group) {
      const int row = first_row + group * C::GROUP_ROWS;
      if (row >= end_row) continue;
      const SeenKeys keys = params.seen_keys_gmem[slice * params.row_blocks + row / MASK_BLOCK];
      all = {min(all.first, keys.first), max(all.last, keys.last)};
    }
    return {max(blocks.first, math::block_start<C::BLOCK_K>(all.first)),
            min(blocks.last, math::block_start<C::BLOCK_K>(all.last))};
  }
  // The keys between the first and the last one in a range of any row of the slice.
  __device__ __forceinline__ math::KeyRange all_ranges() const {
    SeenKeys all{INT32_MAX, -1};
#pragma unroll 1
    for (int block = static_cast<int>(threadIdx.x) % 32; block < params.row_blocks; block += 32) {
      const SeenKeys keys = params.seen_keys_gmem[slice * params.row_blocks + block];
      all = {min(all.first, keys.first), max(all.last, keys.last)};
    }
    return {__reduce_min_sync(math::FULL_WARP, all.first),
            __reduce_max_sync(math::FULL_WARP, all.last) + 1};
  }
  __device__ __forceinline__ Context context(const SeekingTile& tile, TileHead head,
                                             const BlockMessage& first_block) const {
    const int64_t row_block =
        static_cast<int64_t>(slice) * params.row_blocks + first_row / MASK_BLOCK;
    return {.bits_gmem = params.bits_gmem + row_block * params.key_blocks * SUMMARY_WORDS,
            .ranges_gmem =
                masks.ranges_gmem + mask_batch * masks.ranges_batch + mask_head * masks.ranges_head,
            .q_offset = math::find_q_offset(params.call.attention, tile),
            .visible = visible,
            .slope = slope,
            .head = head,
            .first = first_block};
  }
  __device__ __forceinline__ uint32_t states_of(int lane) const {
    return __shfl_sync(math::FULL_WARP, states, lane);
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
#pragma unroll
      for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
        const int part_key = of_lane + part * MASK_BLOCK, part_last = part_key + MASK_BLOCK - 1;
        if (visible.hides(row, last_row, part_key, part_last)) {
          state |= STATE_BEYOND;
          continue;
        }
        state |= of_mask[group][part] == 0 ? of_unseen : of_mask[group][part];
        if (visible.masks(row, last_row, part_key, part_last)) state |= STATE_BEYOND;
      }
      if ((state & STATE_SEEN) != 0) states |= state << (8 * group);
    }
    seen = __ballot_sync(math::FULL_WARP, states != 0);
    return key;
  }

 private:
  // What the summary says of the lane's block, `otherwise` without one. All is loaded before any of
  // it is looked at: one load waits as long as all. Blocks that are not there get what others have,
  // which is not looked at. The offsets fit 32 bits: plan.cpp limits the summary's size.
  __device__ __forceinline__ void load_states(uint32_t (&of_mask)[C::WARPGROUPS][C::SUMMARY_BLOCKS],
                                              int of_lane, uint32_t otherwise) const {
    const bool summarized = params.states_gmem != nullptr;
#pragma unroll
    for (int group = 0; group < C::WARPGROUPS; ++group) {
      const int row_block = min(first_row / MASK_BLOCK + group, params.row_blocks - 1);
#pragma unroll
      for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
        const int block = min(max(of_lane / MASK_BLOCK + part, 0), params.key_blocks - 1);
        of_mask[group][part] = otherwise;
        if (summarized) of_mask[group][part] = states_gmem[row_block * params.key_blocks + block];
      }
    }
  }
};

}  // namespace archflash::hopper::summarized
