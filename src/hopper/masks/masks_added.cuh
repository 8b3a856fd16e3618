// An attn_mask of 16 bits that is added. One of each head has no summary: each of its elements is
// read for one head only, so that looking at it twice would cost more than a summary saves. Causal
// mask and window may come with it.
//
// Elements are added to the scores as if all were numbers of an ordinary size. Where the maxima of
// the sums say that this was wrong, the warp mends them: some element may be huge, so that a sum is
// infinite where it should be the lowest score (device/masks.cuh), or hide a NaN. Keys that -inf
// hides need no mending, as long as a row's maximum says so: their sums are -inf. Behind a block
// that was mended elements are added as that needs it at once, until none is huge.
//
// A mask that heads share may have a summary (summarize_mask.cuh): then blocks that no row sees, or
// that change nothing, are told by it, and its bits are used where nothing is added.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/lane_masks.cuh"
#include "common/device/masks.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/tile_walk.cuh"
#include "common/device/visible_keys.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cp_async_4.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/ld_global.cuh"
#include "common/ptx/min.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/warp_roles.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/masks/mask_elements.cuh"
#include "hopper/masks/masked_config.cuh"
#include "hopper/masks/masked_messages.cuh"
#include "hopper/masks/masked_params.h"
#include "hopper/masks/masks_summarized.cuh"
#include "hopper/masks/summarize_mask.cuh"

namespace archflash::hopper::added {

// What the producer says of a tile besides its message.
struct Context {
  const uint32_t* bits_gmem;  // the summary's words of the tile's first row block
  device::VisibleKeys visible;
  TileHead head;
  BlockMessage first;  // of the first block
};

// The producer's view of 32 blocks of a tile, one in each lane. For a whole warp.
template <class C>
struct Look {
  const SummarizedParams& params;
  device::VisibleKeys visible;
  int first_row, end_row;     // of the tile
  int mask_batch, mask_head;  // 0 where the mask is broadcast
  int first = 0;
  int top = -1;
  uint32_t seen = 0;    // a bit for each lane
  uint32_t states = 0;  // of the lane's block

  __device__ __forceinline__ Look(const SummarizedParams& params, const SeekingTile& tile,
                                  TileHead head, const device::VisibleKeys& visible)
      : params(params),
        visible(visible),
        first_row(tile.first_row),
        end_row(tile.end_row),
        mask_batch(params.mask_batches == 1 ? 0 : head.batch),
        mask_head(params.mask_heads == 1 ? 0 : head.head) {}

  // The number of the tile that is taken at position `index`.
  __device__ __forceinline__ static int tile_at(const SummarizedParams&, int index) {
    ptx::griddepcontrol_wait();  // what comes before this call is done
    return index;
  }
  __device__ __forceinline__ device::Blocks in_ranges(const device::Blocks& blocks) const {
    return blocks;
  }
  __device__ __forceinline__ Context context(const SeekingTile&, TileHead head,
                                             const BlockMessage& first_block) const {
    const int64_t row_block = static_cast<int64_t>(slice()) * params.row_blocks +
                              summarized::row_block_of(params, first_row, 0);
    return {.bits_gmem = params.bits_gmem + row_block * params.key_blocks * SUMMARY_WORDS,
            .visible = visible,
            .head = head,
            .first = first_block};
  }
  __device__ __forceinline__ uint32_t states_of(int lane) const {
    return __shfl_sync(device::FULL_WARP, states, lane);
  }

  // Looks at 32 blocks, from the one at `key` backwards. Returns `key`.
  __device__ __forceinline__ int look_at(int key) {
    top = key;
    const int of_lane = key - static_cast<int>(threadIdx.x % 32) * C::BLOCK_K;
    const int last_key = of_lane + C::BLOCK_K - 1;
    states = 0;
#pragma unroll(C::SHARED ? 1 : C::WARPGROUPS)
    for (int group = 0; group < C::WARPGROUPS; ++group) {
      const int row = first_row + group * C::GROUP_ROWS;
      const int last_row = min(row + C::GROUP_ROWS, end_row) - 1;
      const int row_block =
          slice() * params.row_blocks + summarized::row_block_of(params, first_row, group);
      uint32_t state = of_lane >= first && last_row >= row ? state_of(row_block, of_lane) : 0;
      if (C::SHARED && __any_sync(device::FULL_WARP, (state & SUMMARY_LOWEST) != 0)) {
        const bool counts_not = summarized::has_high_rows(params, row_block);
        state = counts_not && (state & SUMMARY_LOWEST) != 0 ? 0 : state & ~SUMMARY_LOWEST;
      }
      if (state == 0 || visible.hides(row, last_row, of_lane, last_key)) continue;
      const bool beyond = visible.masks(row, last_row, of_lane, last_key);
      states |= (beyond ? state | STATE_BEYOND : state) << (8 * group);
    }
    seen = __ballot_sync(device::FULL_WARP, states != 0);
    return key;
  }

 private:
  __device__ __forceinline__ int slice() const {
    return mask_batch * params.mask_heads + mask_head;
  }
  // What the summary says of a block of the mask; without one all is added. row_block: of all
  // slices.
  __device__ __forceinline__ uint32_t state_of(int row_block, int key) const {
    if (!C::SHARED || params.states_gmem == nullptr) return STATE_SEEN | STATE_ADDED;
    return params.states_gmem[row_block * params.key_blocks + key / MASK_BLOCK];
  }
};

template <class C>
struct ScoreMasks {
  using Seen = uint32_t[1];  // which scores count by their position, or by a summary's bits
  using Kept = summarized::Elements<C>;

  const SummarizedParams& params;
  uint32_t shared_smem;
  bool adds_late;  // whether elements are added to scaled scores, for now or always
  RingPosition<C::MASK_STAGES> ring;
  const SeekingTile* tile = nullptr;
  const Context* cta = nullptr;
  __device__ __forceinline__ ScoreMasks(const SummarizedParams& params, uint32_t shared_smem, int,
                                        int)
      : params(params), shared_smem(shared_smem), adds_late(always_adds_late()) {}
  __device__ __forceinline__ void begin_tile(const SeekingTile& of_cta, const Context& context) {
    tile = &of_cta;
    cta = &context;
    adds_late = always_adds_late();  // a tile's bits do not depend on which one came before
  }
  // What an element is multiplied by where it is added to a score that is not scaled yet.
  __device__ __forceinline__ float factor() const { return params.factor; }
  // Whether elements times the factor may be infinite though none is huge.
  __device__ __forceinline__ bool always_adds_late() const { return !(factor() <= LARGEST_FACTOR); }

  // Called while the products run. Returns the state of the block for this warp.
  template <bool>
  __device__ __forceinline__ uint32_t find(Seen& seen, Kept&, uint32_t state,
                                           const BlockMessage& block) {
    seen[0] = 0xFFFFFFFFu;
    if (C::SHARED && (state & STATE_HUGE) != 0) adds_late = true;
    if (selects_by_bits(state)) {
      const int thread = ptx::mov_tid_x_volatile();
      const int row_block = params.row_blocks == 1 ? 0 : thread / C::WARPGROUP;
      const int number = row_block * params.key_blocks + block.key / MASK_BLOCK;
      // The context came behind the producer's wait for the kernel that has written the bits.
      seen[0] = ptx::ld_global_b32(cta->bits_gmem + number * SUMMARY_WORDS + thread % C::WARPGROUP);
    }
    if ((state & STATE_BEYOND) == 0) return state;
    const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
    const unsigned lane = thread % 32;
    const device::VisibleKeys visible = cta->visible;
    const int lane_key = block.key + static_cast<int>(lane % 4 * 2);
    const int lane_row = tile->first_row + static_cast<int>(thread / 32 * 16 + lane / 4);
    uint32_t of_rows = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane_row + 8 * r;
      of_rows |= device::lane_bits<SummaryConfig<C::DTYPE>>(visible.first(row) - lane_key,
                                                            visible.last(row) + 1 - lane_key)
                 << (16 * r);
    }
    seen[0] &= of_rows;
    return state;
  }

  // Returns the scale of the sums.
  template <bool>
  __device__ __forceinline__ float finish(device::Scores<C>& s_rmem, const Seen& seen, const Kept&,
                                          uint32_t state, int) const {
    float scale = params.call.attention.exp2_scale;
    if constexpr (C::COPIES_OWN) {
      ptx::cp_async_wait_all();
      __syncwarp();  // the copies of all lanes are there before any lane reads them
    }
    if (!C::SHARED || (state & STATE_ADDED) != 0) {
      if (adds_late) {
        add<true>(s_rmem, [&](float& x, float element) {
          x = at_least_lowest(fmaf(element, device::LOG2_E, __fmul_rn(x, scale)), element);
        });
        scale = 1.0f;
      } else {
        add(s_rmem, [&](float& x, float element) { x = fmaf(element, factor(), x); });
      }
    }
    if ((state & STATE_BEYOND) != 0 || selects_by_bits(state))
      summarized::select_scores<C>(s_rmem, seen);
    return scale;
  }
  // Hands back the stage of a block, which it has even if no elements come with it. state: 0 if the
  // warp has read none.
  template <bool>
  __device__ __forceinline__ void hand_back(uint32_t state, const BlockMessage&) {
    if (C::COPIES_OWN) return;
    if (state != 0) ptx::fence_proxy_async_shared();  // the reads come before TMA's next write
    release(mask_empty<C>(shared_smem, ring.stage));
    ring.advance();
  }

  // hopper::update_row_max(), which first has the sums mended where they are wrong.
  template <class Raised>
  __device__ __forceinline__ float update_row_max(device::Scores<C>& s_rmem,
                                                  device::RowState<C>& row_state, float scale,
                                                  const Seen& seen, uint32_t state,
                                                  const Raised& raised) {
    float max[2];
    find_maxima(s_rmem, max);
    // Whether a maximum is that of huge or NaN sums, or of keys that are all hidden.
    const bool added = !C::SHARED || (state & STATE_ADDED) != 0;
    const bool odd = added && (!(fabsf(max[0]) < LARGEST_SUM) || !(fabsf(max[1]) < LARGEST_SUM));
    if (added && adds_late) {
      adds_late = always_adds_late() || __any_sync(device::FULL_WARP, odd);
    } else {
      // Without short cuts, so that there is no branch: as in hopper::update_row_max().
      const int rare = static_cast<int>(max[0] * scale > row_state.base[0][0]) |
                       static_cast<int>(max[1] * scale > row_state.base[0][1]) |
                       static_cast<int>(row_state.large) | static_cast<int>(odd);
      if (!__any_sync(device::FULL_WARP, rare)) return scale;
      if (__any_sync(device::FULL_WARP, odd) && is_wrong(max)) {
        mend(s_rmem, seen, state);
        adds_late = true;
        scale = 1.0f;
      }
    }
    return hopper::update_row_max<C>(s_rmem, row_state, scale, raised);
  }

  // Starts the copies of a block's elements for the warp's own rows, two in each lane at a time.
  // All lanes have read those of the block before.
  __device__ __forceinline__ void copy_elements(const BlockMessage& block) const {
    using Tile = typename C::MaskTile;
    if (block.key < 0) return;
    __syncwarp();
    const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
    const auto lane = static_cast<int>(thread % 32), warp_row = static_cast<int>(thread / 32 * 16);
    const MaskParams& masks = params.masks;
    const int key = block.key + 2 * lane, nk = params.call.attention.nk;
    const auto bytes = static_cast<uint32_t>(2 * min(max(nk - key, 0), 2));
    // volatile: the compiler would keep what is the same for all blocks in registers.
    const volatile TileHead& head = cta->head;
    const volatile SeekingTile& of_cta = *tile;
    const int row = of_cta.first_row + warp_row, rows = params.call.attention.nq - row;
    const auto* gmem = static_cast<const uint16_t*>(masks.mask_gmem) +
                       head.batch * masks.mask_batch + head.head * masks.mask_head +
                       (rows > 0 ? row : 0) * masks.mask_row + (bytes == 0 ? 0 : key);
    const uint32_t row_smem = mask_smem<C>(shared_smem, 0) + lane % 4 * 4;
#pragma unroll
    for (int r = 0; r < C::WARP_ROWS; ++r) {
      ptx::cp_async_ca_4(row_smem + Tile::offset(warp_row + r, lane / 4), gmem, bytes);
      if (r + 1 < rows) gmem += masks.mask_row;  // behind the last row comes that again
    }
  }

 private:
  // Whether the summary's bits say which scores count. Elements that are added say it themselves.
  __device__ __forceinline__ static bool selects_by_bits(uint32_t state) {
    return C::SHARED && (state & (STATE_HIDDEN | STATE_ADDED)) == STATE_HIDDEN;
  }
  // The largest of a lane's scores in each of its two rows; NaN if one is.
  __device__ __forceinline__ static void find_maxima(const device::Scores<C>& s_rmem,
                                                     float (&max)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = ptx::max_nan(s_rmem[0][0][2 * r], s_rmem[0][0][2 * r + 1]);
#pragma unroll
      for (int n = 1; n < C::BLOCK_K / 8; ++n)
        max[r] = ptx::max_nan(max[r], ptx::max_nan(s_rmem[0][n][2 * r], s_rmem[0][n][2 * r + 1]));
    }
  }
  // Whether sums with such maxima are wrong, for a whole warp: not where they are -inf because
  // their keys are hidden.
  __device__ __forceinline__ bool is_wrong(const float (&max)[2]) const {
    const uint32_t hidden = hides_all();
    bool wrong = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool all_hidden = max[r] == device::MINUS_INFINITY && (hidden >> r & 1) != 0;
      wrong |= !all_hidden && !(fabsf(max[r]) < LARGEST_SUM);
    }
    return __any_sync(device::FULL_WARP, wrong);
  }
  // Makes the sums that are not scaled what they should be, scaled.
  __device__ __forceinline__ void mend(device::Scores<C>& s_rmem, const Seen& seen,
                                       uint32_t state) const {
    add<true>(s_rmem, [&](float& x, float element) {
      float y = __fmul_rn(x, params.call.attention.exp2_scale);
      // Beside a huge element no score counts but a NaN. The sum may be infinite, and equal
      // elements have equal sums in the blocks to which they are added late, too.
      if (fabsf(element) >= LARGEST_SUM / LARGEST_FACTOR && x == x) y = element * device::LOG2_E;
      x = at_least_lowest(y, element);
    });
    if ((state & STATE_BEYOND) != 0) summarized::select_scores<C>(s_rmem, seen);
  }
  // Whether all elements of a lane hide their keys: a bit for each of its two rows.
  __device__ __forceinline__ uint32_t hides_all() const {
    const uint32_t row_smem = find_elements();
    uint32_t hidden = 3;
#pragma unroll
    for (int n = 0; n < C::BLOCK_K / 16; ++n) {
      __syncwarp();  // as in add()
      uint32_t words[4];
      summarized::load_elements<C>(words, row_smem, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (device::added_of_half<C::DTYPE>(words[i], half) != device::MINUS_INFINITY)
            hidden &= ~(1u << (i % 2));
        }
      }
    }
    return hidden;
  }
  // A scaled sum that stays finite; -inf where the element is, even if the sum is NaN.
  __device__ __forceinline__ static float at_least_lowest(float x, float element) {
    if (x < device::LOWEST_LOG2) x = device::LOWEST_LOG2;  // not fmaxf: a NaN stays one
    return element == device::MINUS_INFINITY ? element : x;
  }
  // Calls each(s, x) with each score of the lane and the element that is added to it. IN_TURN: with
  // the elements of 16 keys at a time in registers.
  template <bool IN_TURN = false, class Each>
  __device__ __forceinline__ void add(device::Scores<C>& s_rmem, const Each& each) const {
    const uint32_t row_smem = find_elements();
#pragma unroll
    for (int n = 0; n < C::BLOCK_K / 16; ++n) {
      if (IN_TURN) __syncwarp();  // ptxas would start all loads at once
      uint32_t words[4];
      summarized::load_elements<C>(words, row_smem, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* s = &s_rmem[0][2 * n + i / 2][2 * (i % 2)];
        each(s[0], device::added_of_half<C::DTYPE>(words[i], 0));
        each(s[1], device::added_of_half<C::DTYPE>(words[i], 1));
      }
    }
  }
  // Where this lane's row of the elements lies for ldmatrix.
  __device__ __forceinline__ uint32_t find_elements() const {
    const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
    const unsigned lane = thread % 32;
    // Where all rows of a mask are the same, TMA brings one of them.
    const auto row =
        params.masks.mask_row == 0 ? 0 : static_cast<int>(thread / 32 * 16 + lane % 16);
    return mask_smem<C>(shared_smem, ring.stage) +
           C::MaskTile::offset(row, static_cast<int>(lane / 16));
  }
};

}  // namespace archflash::hopper::added

namespace archflash::hopper {

template <class C>
struct Added {
  using Params = SummarizedParams;
  using Context = added::Context;
  using Look = added::Look<C>;
  using ScoreMasks = added::ScoreMasks<C>;
};

}  // namespace archflash::hopper
