// Rungs 4 and 5: two warpgroups take turns to issue products.
#pragma once

#include "common/ptx/named_barrier.cuh"
#include "ring.cuh"

namespace archflash::ladder {

using Rung = Shape<2, 128>;

// Named barriers 1 and 2, one for each warpgroup: a warpgroup waits at its own, and hands the turn
// over by arriving at the other's.
struct Turns {
  int group;

  // Warpgroup 0 begins.
  __device__ __forceinline__ void begin() const {
    if (group == 1) hand_over();
  }
  __device__ __forceinline__ void wait() const { ptx::bar_sync(1 + group, Rung::CONSUMERS); }
  __device__ __forceinline__ void hand_over() const {
    ptx::bar_arrive(1 + (group ^ 1), Rung::CONSUMERS);
  }
  // Takes the last turn that was handed over: a barrier must not end with arrivals.
  __device__ __forceinline__ void end() const {
    if (group == 0) wait();
  }
};

}  // namespace archflash::ladder
