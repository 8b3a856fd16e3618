// Copies of whole tiles from tensors to shared memory by TMA, one slab at a time.
#pragma once

#include <cstdint>

#include "common/device/slab_tile.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/tensor_map.h"

namespace archflash::device {

// Starts the copy of one head's rows from `row` on and columns from `column` on. Called by one
// thread, after the barrier was made to expect the bytes of the tile. A broadcast dimension (stride
// 0) has size 1 in the map, and its coordinate must be 0. `column` and the map count elements, of
// which PACK make one 16-bit column of the tile. With HINT, `policy` says what L2 does with the
// tile.
template <class Tile, int PACK = 1, bool HINT = false>
__device__ __forceinline__ void start_copy(uint32_t tile_smem, const TensorMap& map, int row,
                                           int head, int batch, uint32_t barrier_smem,
                                           int column = 0, uint64_t policy = 0) {
#pragma unroll
  for (int slab = 0; slab < Tile::SLABS; ++slab) {
#pragma unroll
    for (int first = 0; first < Tile::ROWS; first += Tile::BOX_ROWS) {
      const uint32_t box_smem = tile_smem + slab * Tile::SLAB_BYTES + first * Tile::ROW_BYTES;
      const int box_column = column + slab * Tile::SLAB * PACK;
      if constexpr (HINT) {
        ptx::cp_async_bulk_tensor_4d_load(box_smem, map, box_column, row + first, head, batch,
                                          barrier_smem, policy);
      } else {
        ptx::cp_async_bulk_tensor_4d_load(box_smem, map, box_column, row + first, head, batch,
                                          barrier_smem);
      }
    }
  }
}

// start_copy() of a tile that is all that its barrier waits for.
template <class Tile, int PACK = 1, bool HINT = false>
__device__ __forceinline__ void start_load(uint32_t tile_smem, const TensorMap& map, int row,
                                           int head, int batch, uint32_t barrier_smem,
                                           int column = 0, uint64_t policy = 0) {
  ptx::mbarrier_arrive_expect_tx(barrier_smem, Tile::BYTES);
  start_copy<Tile, PACK, HINT>(tile_smem, map, row, head, batch, barrier_smem, column, policy);
}

}  // namespace archflash::device
