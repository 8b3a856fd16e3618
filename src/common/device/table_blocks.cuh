// The blocks of keys that a tile sees by block_mask, where each of its rows of blocks may see
// others: for producers whose consumers share the blocks that come.
#pragma once

#include <cstdint>

#include "common/device/tile_walk.cuh"
#include "common/device/visible_keys.cuh"
#include "common/mask_params.h"

namespace archflash::device {

// What a block of keys is to a row of blocks: a byte of flags for each one in the tile. 0: none of
// its rows sees a key of it.
constexpr uint32_t BLOCK_SEEN = 1;
constexpr uint32_t BLOCK_MASKED = 2;  // the positions of some rows hide some of its keys
constexpr uint32_t BLOCK_KEYS = 4;    // attn_mask may hide some of its keys

// A block of keys, as consumers are told of it with its K.
struct TableBlock {
  int32_t key;      // the first one; negative: there is no block
  uint32_t states;  // of each row of blocks
  int32_t last;     // whether none follows in the tile

  // The state of one row of blocks of the tile.
  __device__ __forceinline__ uint32_t state(int row_block) const {
    return states >> (8 * row_block) & 0xFF;
  }
};

// The blocks that any of the ROW_BLOCKS rows of blocks of a tile sees, from the last one to the
// first. It looks at 32 of them at a time, one in each lane, and reads the next 32 from the table
// meanwhile. For a whole warp.
template <int ROW_BLOCKS>
class TableBlocks {
  static_assert(ROW_BLOCKS <= 4, "a word has the states of a block");
  static constexpr int KEYS = 32 * MASK_BLOCK;  // that are looked at together

 public:
  TableBlocks() = default;
  // row_gmem: the table's row of blocks with the tile's first row, which is a multiple of
  // MASK_BLOCK; row_step: from one row of blocks to the next. end_row: one behind the tile's last.
  // decides: whether attn_mask decides which keys are seen in blocks that are not BLOCK_FULL.
  __device__ __forceinline__ TableBlocks(const uint8_t* row_gmem, int64_t row_step,
                                         const VisibleKeys& visible, int first_row, int end_row,
                                         bool decides = false)
      : row_gmem_(row_gmem),
        row_step_(row_step),
        visible_(visible),
        first_row_(first_row),
        end_row_(end_row),
        decides_(decides),
        first_(block_start<MASK_BLOCK>(visible.first(first_row))),
        ahead_(block_start<MASK_BLOCK>(visible.last(end_row - 1))) {
    read();
  }

  // The next block; its `last` is left to the caller.
  __device__ __forceinline__ TableBlock next() {
    while (left_ == 0) {
      if (ahead_ < first_) return {-1, 0, 0};
      look();
    }
    const int lane = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    return {ahead_ + KEYS - lane * MASK_BLOCK, __shfl_sync(0xFFFFFFFFu, states_, lane), 0};
  }

  // Whether two blocks are left at most.
  __device__ __forceinline__ bool ends_soon() const {
    return ahead_ < first_ && __popc(left_) <= 2;
  }

 private:
  __device__ __forceinline__ int key_of_lane() const {
    return ahead_ - static_cast<int>(threadIdx.x % 32) * MASK_BLOCK;
  }

  // Reads the table for the block at ahead_ and those before it.
  __device__ __forceinline__ void read() {
    const int key = key_of_lane();
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS; ++i) {
      const bool is_there = key >= first_ && first_row_ + i * MASK_BLOCK < end_row_;
      read_[i] = is_there ? row_gmem_[i * row_step_ + key / MASK_BLOCK] : BLOCK_UNSEEN;
    }
  }

  // Looks at the blocks for which the table was read.
  __device__ __forceinline__ void look() {
    const int key = key_of_lane(), last_key = key + MASK_BLOCK - 1;
    states_ = 0;
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS; ++i) {
      const int row = first_row_ + i * MASK_BLOCK;
      const int last_row = min(row + MASK_BLOCK, end_row_) - 1;
      if (read_[i] == BLOCK_UNSEEN || visible_.hides(row, last_row, key, last_key)) continue;
      const bool masked = visible_.masks(row, last_row, key, last_key);
      const bool some = decides_ && read_[i] != BLOCK_FULL;
      states_ |= (BLOCK_SEEN | (masked ? BLOCK_MASKED : 0) | (some ? BLOCK_KEYS : 0)) << (8 * i);
    }
    left_ = __ballot_sync(0xFFFFFFFFu, states_ != 0);
    ahead_ -= KEYS;
    read();
  }

  const uint8_t* row_gmem_;
  int64_t row_step_;
  VisibleKeys visible_;
  int first_row_, end_row_;
  bool decides_;
  int first_;  // the first key of the first block
  int ahead_;  // that of the block in lane 0 for which the table was read
  uint8_t read_[ROW_BLOCKS];
  uint32_t states_ = 0;  // of this lane's block, of those that are looked at
  uint32_t left_ = 0;    // a bit for each of them that is still to come
};

}  // namespace archflash::device
