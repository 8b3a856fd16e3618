// Mask tensors that the lanes of a warp read themselves: attn_mask, key_ranges, alibi_slopes and
// block_mask, in any combination, together with the causal mask and the window. The producer looks
// at ranges and blocks only; attn_mask is read where scores are. In a block that any mask changes
// each lane finds the masks of its scores while both products run, which hides the loads of a bool
// mask, and applies them when both are done, because they need the registers of P
// (device/lane_masks.cuh). The other CTA of the SM multiplies meanwhile.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/lane_masks.cuh"
#include "common/device/masks.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/visible_keys.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/masks/masked_config.cuh"
#include "hopper/masks/masked_messages.cuh"
#include "hopper/masks/masked_params.h"

namespace archflash::hopper::in_place {

// What the producer says of a tile besides its message: what find_lane_masks() is told, where the
// tile's rows lie, and its first block.
struct Context {
  device::Work work;
  device::PackedHeads packed_heads;
  device::VisibleKeys visible;
  int64_t q_offset;
  TileHead head;
  BlockMessage first;
};

// The producer's view of 32 blocks of a tile, one in each lane. For a whole warp.
template <class C>
struct Look {
  const MaskedParams& params;
  const MaskParams& masks;
  device::TileMasks tile_masks;
  device::VisibleKeys visible;
  int rows;  // of each head in the tile
  int first = 0;
  int top = -1;
  uint32_t seen = 0, masked = 0;  // a bit for each lane: some row sees a key; some score changes

  __device__ __forceinline__ Look(const MaskedParams& params, const SeekingTile& tile, TileHead,
                                  const device::VisibleKeys& visible)
      : params(params),
        masks(params.masks),
        tile_masks(masks, params.call.attention, tile, params.call.packed_heads),
        visible(visible),
        rows(rows_of_tile<C>(params.call)) {}

  // The number of the tile that is taken at position `index`.
  __device__ __forceinline__ static int tile_at(const MaskedParams& params, int index) {
    const int place = index - (params.call.tiles - params.ordered);
    if (place < 0) return index;
    ptx::griddepcontrol_wait();  // the kernel before this one has written the order
    return params.order_gmem[place];
  }
  __device__ __forceinline__ device::Blocks in_ranges(const device::Blocks& blocks) const {
    return blocks;  // look_at() passes over the others
  }
  __device__ __forceinline__ device::KeyRange all_ranges() const {
    return tile_masks.template all_ranges<C::BLOCK_Q>();
  }
  __device__ __forceinline__ Context context(const SeekingTile& tile, TileHead head,
                                             const BlockMessage& first_block) const {
    return {.work = tile,
            .packed_heads = params.call.packed_heads,
            .visible = visible,
            .q_offset = device::find_q_offset(params.call.attention, tile),
            .head = head,
            .first = first_block};
  }
  __device__ __forceinline__ uint32_t states_of(int lane) const {
    return STATE_SEEN | (masked >> lane & 1) * STATE_HIDDEN;
  }

  // Looks at 32 blocks, from the one at `key` or the last one before it that is in a range.
  // Returns the first key of the first one looked at; it is below `first` if there is none.
  __device__ __forceinline__ int look_at(int key) {
    if (masks.ranges_gmem != nullptr) {
      const int last = tile_masks.template last_in_ranges<C::BLOCK_Q>(key + C::BLOCK_K - 1);
      if (last < first) return -1;
      key = last & -C::BLOCK_K;
    }
    top = key;
    const int of_lane = key - static_cast<int>(threadIdx.x % 32) * C::BLOCK_K;
    bool any = false, all = true;
    if (of_lane >= first) {
      look_at_rows(of_lane, any, all);
      if (any && masks.blocks_gmem != nullptr) {
        bool any_head = false;
#pragma unroll 1
        for (int head = 0; head < tile_masks.packed_heads.count; ++head) {
          const uint8_t state = tile_masks.block(head, tile_masks.first_row, of_lane);
          any_head |= state != BLOCK_UNSEEN;
          const bool whole = state == BLOCK_FULL ||
                             (state != BLOCK_UNSEEN && masks.mask_element == MaskElement::None);
          all &= whole;
        }
        any = any_head;
      } else if (masks.mask_element != MaskElement::None) {
        all = false;
      }
      if (masks.slopes_gmem != nullptr) all = false;
    }
    seen = __ballot_sync(device::FULL_WARP, any);
    masked = __ballot_sync(device::FULL_WARP, !all);
    return key;
  }

 private:
  // Whether any row sees any of the keys from `key` on by position and ranges, and whether all see
  // them all. A row whose ranges only together have all of them counts as not seeing them all.
  __device__ __forceinline__ void look_at_rows(int key, bool& any, bool& all) const {
    const int end = key + C::BLOCK_K;
    const int first_row = tile_masks.first_row;
    const int last_row = min(first_row + rows, tile_masks.nq) - 1;
    any = !visible.hides(first_row, last_row, key, end - 1);
    all = !visible.masks(first_row, last_row, key, end - 1);
    if (masks.ranges_gmem == nullptr || !any) return;
    any = false;
    const int heads = masks.ranges_head == 0 ? 1 : tile_masks.packed_heads.count;
#pragma unroll 1
    for (int head = 0; head < heads; ++head) {
#pragma unroll 1
      for (int row = first_row; row <= last_row; ++row) {
        const int row_first = visible.first(row), row_end = visible.last(row) + 1;
        bool whole = false;
#pragma unroll 1
        for (int number = 0; number < masks.ranges; ++number) {
          const device::KeyRange keys = tile_masks.range(head, row, number);
          const int from = max(keys.begin, row_first), to = min(keys.end, row_end);
          any |= max(from, key) < min(to, end);
          whole |= from <= key && to >= end;
        }
        all &= whole;
      }
    }
  }
};

// The masks of a consumer warp's scores.
template <class C>
struct ScoreMasks {
  using Seen = device::LaneMasks<C>;
  struct Kept {};  // elements are loaded when they are added

  const MaskedParams& params;
  int warp_row;
  const Context* cta = nullptr;

  __device__ __forceinline__ ScoreMasks(const MaskedParams& params, uint32_t, int, int warp_row)
      : params(params), warp_row(warp_row) {}
  __device__ __forceinline__ void begin_tile(const SeekingTile&, const Context& context) {
    cta = &context;
  }
  template <bool>
  __device__ __forceinline__ uint32_t find(Seen& seen, Kept&, uint32_t state,
                                           const BlockMessage& block) {
    device::find_lane_masks<C>(seen, params.masks, params.call.attention, *cta, warp_row,
                               block.key);
    return state;
  }
  template <bool>
  __device__ __forceinline__ float finish(device::Scores<C>& s_rmem, Seen& seen, const Kept&,
                                          uint32_t, int) {
    const AttentionParams& attention = params.call.attention;
    if (attention.transform_scores) device::transform_scores<C>(s_rmem, attention.rule);
    device::apply_lane_masks<C>(s_rmem, seen, params.masks, attention.exp2_scale);
    return 1.0f;
  }
  template <bool>
  __device__ __forceinline__ void hand_back(uint32_t, const BlockMessage&) {}
};

}  // namespace archflash::hopper::in_place

namespace archflash::hopper {

template <class C>
struct InPlace {
  using Params = MaskedParams;
  using Context = in_place::Context;
  using Look = in_place::Look<C>;
  using ScoreMasks = in_place::ScoreMasks<C>;
};

}  // namespace archflash::hopper
