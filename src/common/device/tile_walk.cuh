// The row tiles that a persistent CTA computes one after another, and the key blocks of each tile.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/visible_keys.cuh"
#include "common/partials.h"

namespace archflash::device {

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
    // mutants: tiles-in-other-order (tests/sim/tags.py)
    return round * workers() + (round % 2 == 0 ? worker : workers() - 1 - worker);
  }
};
using TileIndex = SharedTileIndex<1>;

// The row tile of a tile index; its first_row is negative if there is nothing to compute. Called by
// whole warps. There are `tiles` indices; each row tile has `splits` consecutive ones, one for each
// share of its keys. A tile has block_q rows of each of `packed_heads` heads.
template <int CTAS>
__device__ __forceinline__ Work find_tile(const AttentionParams& params, int tiles,
                                          const SharedTileIndex<CTAS>& index, int splits,
                                          int block_q, int packed_heads) {
  Work none{};
  none.first_row = -1;
  const unsigned value = index.value();
  if (value >= static_cast<unsigned>(tiles)) return none;  // the last round may be short
  return find_work(params, static_cast<int>(value) / splits, block_q, packed_heads);
}
template <int BLOCK_Q, int CTAS>
__device__ __forceinline__ Work find_tile(const AttentionParams& params, int tiles,
                                          const SharedTileIndex<CTAS>& index) {
  return find_tile(params, tiles, index, 1, BLOCK_Q, 1);
}

// First key of the block of a key. -1 stands for no key and gives a block before the first one.
template <int BLOCK_K>
__device__ __forceinline__ int block_start(int key) {
  if constexpr ((BLOCK_K & (BLOCK_K - 1)) == 0) return key & -BLOCK_K;
  return key < 0 ? -BLOCK_K : key / BLOCK_K * BLOCK_K;
}

// First key of the first and of the last block that any row of a tile sees; first > last if there
// is none. block_q: rows of a head in the tile.
struct Blocks {
  int first, last;
};
template <int BLOCK_K>
__device__ __forceinline__ Blocks find_blocks(const Work& work, const VisibleKeys& visible,
                                              int block_q) {
  const int last_row = min(work.first_row + block_q, work.nq) - 1;
  return {block_start<BLOCK_K>(visible.first(work.first_row)),
          block_start<BLOCK_K>(visible.last(last_row))};
}
template <int BLOCK_Q, int BLOCK_K>
__device__ __forceinline__ Blocks find_blocks(const Work& work, const VisibleKeys& visible) {
  return find_blocks<BLOCK_K>(work, visible, BLOCK_Q);
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

// The key blocks of share `split`: an equal part of what the tile sees, or what it sees of the keys
// at the share's place. The last place reaches to the end of the keys.
template <int BLOCK_K>
__device__ __forceinline__ Blocks blocks_of_share(const Blocks& blocks, const Partials& partials,
                                                  int split) {
  if (partials.share_keys == 0) return split_blocks<BLOCK_K>(blocks, split, partials.splits);
  const int first = split * partials.share_keys;
  const int last = split + 1 < partials.splits ? first + partials.share_keys - BLOCK_K : INT32_MAX;
  return {max(blocks.first, first), min(blocks.last, last)};
}

}  // namespace archflash::device
