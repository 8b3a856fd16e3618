// The row tiles that a persistent CTA computes one after another, and the key blocks of each tile.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/math/attention_work.cuh"
#include "common/math/visible_keys.cuh"

namespace archflash::math {

// The tile indices of a worker, which is a CTA or a group of CTAS CTAs. In each round every worker
// takes one tile. Every second round is handed out in reverse order, so that the worker with the
// longest tile of one round gets the shortest of the next.
template <int CTAS>
struct SharedTileIndex {
  unsigned round = 0;

  __device__ __forceinline__ static unsigned workers() { return gridDim.x / CTAS; }
  __device__ __forceinline__ bool more(int tiles) const {
    return round * workers() < static_cast<unsigned>(tiles);
  }
  __device__ __forceinline__ unsigned value() const {
    const unsigned worker = blockIdx.x / CTAS;
    // mutants: tiles-in-other-order
    return round * workers() + (round % 2 == 0 ? worker : workers() - 1 - worker);
  }
};
using TileIndex = SharedTileIndex<1>;

// The row tile of a tile index; its first_row is negative if there is nothing to compute. Called by
// whole warps. There are `tiles` indices; each row tile has `splits` consecutive ones, one for each
// share of its keys.
template <int BLOCK_Q, int CTAS>
__device__ __forceinline__ Work find_tile(const AttentionParams& params, int tiles,
                                          const SharedTileIndex<CTAS>& index, int splits = 1) {
  Work none{};
  none.first_row = -1;
  const unsigned value = index.value();
  if (value >= static_cast<unsigned>(tiles)) return none;  // the last round may be short
  return find_work<BLOCK_Q>(params, static_cast<int>(value) / splits);
}

// First key of the first and of the last block that any row of a tile sees; first > last if there
// is none.
struct Blocks {
  int first, last;
};
template <int BLOCK_Q, int BLOCK_K>
__device__ __forceinline__ Blocks find_blocks(const Work& work, const VisibleKeys& visible) {
  const int last_row = min(work.first_row + BLOCK_Q, work.nq) - 1;
  return {visible.first(work.first_row) & -BLOCK_K, visible.last(last_row) & -BLOCK_K};
}

// The key blocks of share `split` out of `splits`. Shares differ by at most one block and may be
// empty.
template <int BLOCK_K>
__device__ __forceinline__ Blocks split_blocks(const Blocks& blocks, int split, int splits) {
  const int count = max((blocks.last - blocks.first) / BLOCK_K + 1, 0);
  const int each = count / splits, more = count % splits;
  const int first = blocks.first + (split * each + min(split, more)) * BLOCK_K;
  return {first, first + (each - (split < more ? 0 : 1)) * BLOCK_K};
}

}  // namespace archflash::math
