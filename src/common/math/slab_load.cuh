// Copies of whole tiles between tensors and shared memory by TMA, slab by slab.
#pragma once

#include <cstdint>

#include "common/math/slab_tile.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/tensor_map.h"

namespace archflash::math {

// Starts the copy of a tile's rows from `row` on of one head; all its bytes go to the barrier. A
// broadcast dimension (stride 0) has size 1 in the map: its coordinate is 0. The map's columns are
// elements, PACK of them in the 16 bits that a tile calls one; the tile starts at one of them.
template <class Tile, int PACK = 1>
__device__ __forceinline__ void start_load(uint32_t tile_smem, const TensorMap& map, int row,
                                           int head, int batch, uint32_t barrier_smem,
                                           int column = 0) {
  ptx::mbarrier_arrive_expect_tx(barrier_smem, Tile::BYTES);
#pragma unroll
  for (int slab = 0; slab < Tile::SLABS; ++slab) {
#pragma unroll
    for (int first = 0; first < Tile::ROWS; first += Tile::BOX_ROWS) {
      ptx::cp_async_bulk_tensor_4d_load(
          tile_smem + slab * Tile::SLAB_BYTES + first * Tile::ROW_BYTES, map,
          column + slab * Tile::SLAB * PACK, row + first, head, batch, barrier_smem);
    }
  }
}

}  // namespace archflash::math
