// In which order a CTA of keys goes over blocks of queries, and when it may add to their sums of dQ
// (backward_sums.cuh).
//
// All CTAs go from the last block to the first one, and over the heads that share a head of K
// inside of a block. Where they take turns, those of a head add to a block in the order of their
// keys, so that the same inputs always give the same bits; the first one writes. A CTA then waits
// only for CTAs with smaller indices, which have started before it, and none of them comes late to
// a block whose turn others wait for.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/backward_work.cuh"
#include "common/ptx/global_order.cuh"

namespace archflash::device {

// First rows of blocks of queries: of the first and the last one that see any of the CTA's keys
// (none does if begin > last), and of those that see any of the CTA before, where it has its turn
// before this one.
struct DqWalk {
  int begin, last;
  int before_begin, before_last;

  template <int BLOCK>
  __device__ __forceinline__ int blocks() const {
    return begin <= last ? (last - begin) / BLOCK + 1 : 0;
  }
  // Whether the CTA of the keys before adds to a block, and therefore first.
  __device__ __forceinline__ bool waits(const Passing& block) const {
    return block.row >= before_begin && block.row <= before_last;
  }
};

template <int ROWS, int BLOCK>
__device__ __forceinline__ DqWalk find_dq_walk(const DqSums& sums, const BackwardWork& work) {
  const int end = min(work.first_row + ROWS, work.own_rows);
  DqWalk walk{work.visible.first(work.first_row) & -BLOCK, work.visible.last(end - 1) & -BLOCK, 1,
              0};
  if (sums.turns_gmem != nullptr && work.first_row > 0) {
    walk.before_begin = work.visible.first(work.first_row - ROWS) & -BLOCK;
    walk.before_last = work.visible.last(work.first_row - 1) & -BLOCK;
  }
  return walk;
}

// Lets the CTA of the next keys add to a block. By one thread, behind a barrier that came after the
// CTA's additions.
__device__ __forceinline__ void pass_turn(const DqSums& sums, int64_t block, int turn) {
  ptx::st_release_s32(sums.turns_gmem + block, turn + 1);
}

}  // namespace archflash::device
