// A ring of stages in shared memory, which TMA fills and warps hand back: the position in it, and
// what a warp does at its barriers.
#pragma once

#include <cstdint>

#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::device {

// A position in a ring of STAGES stages.
template <int STAGES>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;  // of the phase of the full barrier in which the stage is filled

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The arrival of a warp at a barrier, such as one that hands a stage back to the producer. The
// barrier was made by mbarrier_init_for_warps().
__device__ __forceinline__ void release(uint32_t barrier_smem) {
  // mutants: elect-waits-for-warp (tests/sim/tags.py)
  __syncwarp();  // all lanes of the warp have read what the barrier guards
  if (ptx::ARRIVALS_OF_WARP > 1 || ptx::elect_sync()) ptx::mbarrier_arrive(barrier_smem);
}

// Called where the leader, one lane of the warp, arrives for all lanes with the bytes of a copy:
// the arrivals of the others, in a build where every lane arrives.
__device__ __forceinline__ void arrive_beside(bool leader, uint32_t barrier_smem) {
  if (ptx::ARRIVALS_OF_WARP > 1 && !leader) ptx::mbarrier_arrive(barrier_smem);
}

// Clears the rows of a tile before `begin` and from `end` on, which no row of the sequence has to
// do with: what they are multiplied with is 0, but 0 * NaN would be NaN. Called by a whole warp, or
// by all warps of THREADS threads, when the tile has landed, by the thread with this number.
template <class Tile, int SLABS = Tile::SLABS, int THREADS = 32>
__device__ __forceinline__ void clear_rows(unsigned char* tile, int begin, int end,
                                           unsigned thread = threadIdx.x) {
  begin = min(max(begin, 0), static_cast<int>(Tile::ROWS));
  const int kept = max(min(end, static_cast<int>(Tile::ROWS)) - begin, 0);  // rows
#pragma unroll 1
  for (int slab = 0; slab < SLABS; ++slab) {
#pragma unroll 1
    for (int byte = static_cast<int>(thread % THREADS * 16);
         byte < static_cast<int>(Tile::ROWS - kept) * Tile::ROW_BYTES; byte += THREADS * 16) {
      const int behind = byte < begin * Tile::ROW_BYTES ? 0 : kept * Tile::ROW_BYTES;
      *reinterpret_cast<uint4*>(tile + slab * Tile::SLAB_BYTES + byte + behind) = uint4{};
    }
  }
  ptx::fence_proxy_async_shared();  // the stores come before the tensor cores read
  __syncwarp();                     // all lanes' stores come before the arrival of one
}

}  // namespace archflash::device
