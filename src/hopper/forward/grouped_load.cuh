// What the producer's warpgroup does for tiles with PACKS: Q comes for each warpgroup, and the
// warps beside the producer clear rows of V.
#pragma once

#include <cstdint>

#include "common/device/slab_load.cuh"
#include "hopper/forward/pipeline.cuh"
#include "hopper/params.h"

namespace archflash::hopper {

// With PACKS: starts the copies of a tile's Q, for each warpgroup that has rows. Called by one
// thread.
template <class C>
__device__ __forceinline__ void load_grouped_q(const Params& params, const Tile& tile, int row,
                                               int head, int batch, uint32_t q_smem,
                                               uint32_t full) {
  using QTile = typename C::QTile;
  const GroupHeads& groups = params.groups;
  const int rows = tile.end_row - tile.first_row;
  const int box_bytes = groups.filled() * QTile::ROW_BYTES;
  int bytes = 0;
#pragma unroll
  for (int group = 0; group < C::WARPGROUPS; ++group)
    bytes += group * groups.rows < rows ? QTile::SLABS * box_bytes : 0;
  ptx::mbarrier_arrive_expect_tx(full, bytes);
#pragma unroll
  for (int group = 0; group < C::WARPGROUPS; ++group) {
    if (group * groups.rows >= rows) break;
#pragma unroll
    for (int slab = 0; slab < QTile::SLABS; ++slab) {
      ptx::cp_async_bulk_tensor_4d_load(
          q_smem + group * C::GROUP_ROWS * QTile::ROW_BYTES + slab * QTile::SLAB_BYTES,
          params.q_map, slab * QTile::SLAB, row + group * groups.rows, head, batch, full);
    }
  }
}

// With CLEARS_BESIDE, for the other warps of the producer's warpgroup: clears the rows of V that do
// not count, which the producer has copied for them, and hands the block over.
template <class C>
__device__ __forceinline__ void clear_v_beside(unsigned char* shared, uint32_t shared_smem) {
  using VTile = typename C::VTile;
  constexpr int THREADS = C::WARPGROUP - 32;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const unsigned thread = threadIdx.x - C::CONSUMER_THREADS - 32;
  for (uint32_t parity = 0;; parity ^= 1) {
    ptx::mbarrier_wait_parity(barriers.v_ragged(), parity);  // V and the message are there
    const RowsToClear rows = rows_to_clear<C>(shared);
    if (rows.stage < 0) return;
    clear_rows<VTile, VTile::SLABS, THREADS>(shared + C::V_SMEM + rows.stage * VTile::BYTES,
                                             rows.begin, rows.end, thread);
    ptx::bar_sync(C::CLEARING_BARRIER, THREADS);  // all warps' zeros are there
    if (thread == 0) {
      ptx::mbarrier_arrive(barriers.v_full(rows.stage));
      ptx::mbarrier_arrive(barriers.v_cleared());
    }
  }
}

}  // namespace archflash::hopper
