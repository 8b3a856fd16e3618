// A round of query rows in the list of a CTA of the backward pass, which owns keys.
#pragma once

#include <cstdint>

#include "common/device/host_device.h"

namespace archflash::device {

// In one word: the head, of those that share a head of K; the first row, as a number of blocks of
// queries; and which of the tile's two blocks of keys see the round's first block, a bit for each,
// and its second one, the same again.
struct ListedRound {
  static constexpr int HEAD_SHIFT = 4, ROW_SHIFT = 12;
  static constexpr int MOST_HEADS = 1 << (ROW_SHIFT - HEAD_SHIFT);
  static constexpr int64_t MOST_BLOCKS = int64_t{1} << (32 - ROW_SHIFT);
  // That adds no dQ, in turns.
  static constexpr int32_t NO_TURN = -1;
  static constexpr int SUM_SHIFT = 25;
  uint32_t word;
  // In turns: what the counter of its sum says when the tile's turn has come, and from bit
  // SUM_SHIFT on which of the round's sums that is.
  int32_t turn;

  ARCHFLASH_HOST_DEVICE static ListedRound of(int head, int row_block, uint32_t seen,
                                              int32_t turn) {
    return {static_cast<uint32_t>(row_block) << ROW_SHIFT |
                static_cast<uint32_t>(head) << HEAD_SHIFT | seen,
            turn};
  }
  ARCHFLASH_HOST_DEVICE int head() const {
    return static_cast<int>(word >> HEAD_SHIFT & (MOST_HEADS - 1));
  }
  ARCHFLASH_HOST_DEVICE int row_block() const { return static_cast<int>(word >> ROW_SHIFT); }
  ARCHFLASH_HOST_DEVICE int32_t come() const {
    return turn == NO_TURN ? NO_TURN : turn & ((1 << SUM_SHIFT) - 1);
  }
  ARCHFLASH_HOST_DEVICE int32_t sum() const { return turn == NO_TURN ? 0 : turn >> SUM_SHIFT; }
  ARCHFLASH_HOST_DEVICE uint32_t seen(int block) const { return word >> (2 * block) & 3; }
};

}  // namespace archflash::device
