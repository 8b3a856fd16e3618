// The row tiles of packed sequences, which the device finds from cu_seqlens.
#pragma once

#include <cstdint>

namespace archflash::device {

// The first tile of a sequence. Sequence b owns the tiles [start(b), start(b + 1)) with
// start(b) = floor(cu_seqlens[b] / block_rows) + b. For any lengths these are at least the
// ceil(length / block_rows) tiles that the sequence needs, and all sequences together own at most
// ceil(total / block_rows) + batch.
__device__ __forceinline__ int varlen_tile_start(const int* cu_seqlens_gmem, int sequence,
                                                 int block_rows) {
  return max(cu_seqlens_gmem[sequence], 0) / block_rows + sequence;
}

// The sequence that owns `tile`: the last b of [0, batch) with start(b) <= tile, or -1 if there is
// none. A whole warp calls it with the same arguments; each step tests 32 sequences at once.
__device__ __forceinline__ int find_varlen_sequence(const int* cu_seqlens_gmem, int batch,
                                                    int block_rows, int tile) {
  constexpr unsigned FULL_WARP = 0xFFFFFFFFu;
  const int lane = threadIdx.x % 32;
  int first = 0;  // the answer lies in [first, first + count)
  int count = batch;
  while (true) {
    // mutants: never-negative, longer-steps (tests/sim/tags.py)
    const int step = (count + 31) / 32;
    const int asked = first + lane * step;
    const bool before =
        lane * step < count && varlen_tile_start(cu_seqlens_gmem, asked, block_rows) <= tile;
    const int hits = __popc(__ballot_sync(FULL_WARP, before));
    if (hits == 0) return -1;
    first += (hits - 1) * step;
    count -= (hits - 1) * step;
    if (step == 1) return first;
    if (count > step) count = step;
  }
}

}  // namespace archflash::device
