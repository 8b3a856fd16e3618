// Copies of blocks by cp.async without masks and packed sequences (dense_fwd.cuh, bounded_fwd.cuh).
#pragma once

#include <cstdint>

#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"

namespace archflash::mma_sync {

// Where the keys and values of the CTA's head lie. It is read from shared memory when a block is
// copied, because outputs and scores leave few registers.
struct DenseContext {
  const uint16_t* k_gmem;
  const uint16_t* v_gmem;
};

// Starts the copy of ROWS rows of a tensor, of which the first `rows` exist; the others become
// zeros. Every address is one of an existing row.
template <class C, class Tile, int ROWS>
__device__ __forceinline__ void start_last_rows(uint32_t tile_smem, const uint16_t* rows_gmem,
                                                int64_t row_stride, int rows, int columns) {
  using Lane = CopyLane<C, Tile>;
  static_assert(ROWS % Lane::ROWS_PER_STEP == 0, "threads must tile the rows");
  const Lane lane;
  const uint32_t target = tile_smem + lane.offset;
  const auto stride = static_cast<uint32_t>(row_stride);  // plan.cpp: below 2^32
#pragma unroll
  for (int row = 0; row < ROWS; row += Lane::ROWS_PER_STEP) {
    const bool valid = lane.row + row < rows;
    const uint64_t source_row = valid ? lane.row + row : 0;
    const uint16_t* source = rows_gmem + source_row * stride + lane.column;
#pragma unroll
    for (int group = 0; group < Lane::GROUPS; ++group) {
      if (lane.column + group * Lane::GROUP_COLUMNS < columns) {
        ptx::cp_async_cg_16(target + row * Tile::ROW_BYTES + group * Tile::GROUP * 16,
                            source + group * Lane::GROUP_COLUMNS, valid ? 16 : 0);
      }
    }
  }
}

// What a thread copies of each block of keys, found once: for kernels that have registers to keep
// it.
template <class C, class Tile>
struct KeptLoad {
  const char* source;  // in the first block
  uint32_t target;
  int column;

  __device__ __forceinline__ KeptLoad(uint32_t tile_smem, const uint16_t* rows_gmem,
                                      uint64_t row_bytes) {
    const CopyLane<C, Tile> lane;
    source = reinterpret_cast<const char*>(rows_gmem + lane.column) + lane.row * row_bytes;
    target = tile_smem + lane.offset;
    column = lane.column;
  }

  // Starts the copy of the block from first_row on.
  __device__ __forceinline__ void start(uint32_t first_row, uint64_t row_bytes, int columns) const {
    using Lane = CopyLane<C, Tile>;
    const char* row_gmem = source + first_row * row_bytes;
#pragma unroll
    for (int row = 0; row < C::BLOCK_K; row += Lane::ROWS_PER_STEP) {
#pragma unroll
      for (int group = 0; group < Lane::GROUPS; ++group) {
        if (column + group * Lane::GROUP_COLUMNS < columns) {
          ptx::cp_async_cg_16(target + row * Tile::ROW_BYTES + group * Tile::GROUP * 16,
                              row_gmem + group * Lane::GROUP_COLUMNS * 2);
        }
      }
      row_gmem += Lane::ROWS_PER_STEP * row_bytes;
    }
  }
};

}  // namespace archflash::mma_sync
