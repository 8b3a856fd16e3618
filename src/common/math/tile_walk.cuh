// The row tiles of a CTA that stays for several, and the key blocks of each.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/math/attention_work.cuh"
#include "common/math/visible_keys.cuh"

namespace archflash::math {

// One of each round of tiles, as many as there are workers, which are CTAS CTAs each; every second
// round goes backwards, so that who had the longest of one round has the shortest of the next.
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

// The row tile of an index; first_row negative: nothing to do. Called by whole warps. tiles:
// indices in all, `splits` of them, one after another, for each row tile.
template <int BLOCK_Q, int CTAS>
__device__ __forceinline__ Work find_tile(const AttentionParams& params, int tiles,
                                          const SharedTileIndex<CTAS>& index, int splits = 1) {
  Work none{};
  none.first_row = -1;
  const unsigned value = index.value();
  if (value >= static_cast<unsigned>(tiles)) return none;  // the last round may be short
  return find_work<BLOCK_Q>(params, static_cast<int>(value) / splits);
}

// First keys of the first and of the last block with a visible key. None: last before first.
struct Blocks {
  int first, last;
};
template <int BLOCK_Q, int BLOCK_K>
__device__ __forceinline__ Blocks find_blocks(const Work& work, const VisibleKeys& visible) {
  const int last_row = min(work.first_row + BLOCK_Q, work.nq) - 1;
  return {visible.first(work.first_row) & -BLOCK_K, visible.last(last_row) & -BLOCK_K};
}

// Those of them that one of `splits` takes: as many as the others or one more, maybe none.
template <int BLOCK_K>
__device__ __forceinline__ Blocks split_blocks(const Blocks& blocks, int split, int splits) {
  const int count = max((blocks.last - blocks.first) / BLOCK_K + 1, 0);
  const int each = count / splits, more = count % splits;
  const int first = blocks.first + (split * each + min(split, more)) * BLOCK_K;
  return {first, first + (each - (split < more ? 0 : 1)) * BLOCK_K};
}

}  // namespace archflash::math
