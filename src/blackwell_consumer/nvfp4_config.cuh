// The tiles of the kernels for approximate="nvfp4", and how K and V lie in the workspace: numbers
// that the kernels and plan.cpp (plain C++) read.
#pragma once

#include <cstdint>

#include "common/block_scales.h"
#include "common/device/host_device.h"

namespace archflash::blackwell_consumer {

constexpr int NVFP4_BLOCK_K = 128;
constexpr int NVFP4_PREPARE_THREADS = 256;
// The largest magnitude that e2m1 (6) times a scale of ue4m3 (448) can say.
constexpr float NVFP4_LARGEST = 6 * 448;

// Rows of COLUMNS numbers of four bits in shared memory, which ldmatrix reads without bank
// conflicts: eight rows of a 16-byte chunk lie in different banks.
template <int COLUMNS>
struct NibbleTile {
  static constexpr int ROW_BYTES = COLUMNS / 2;
  static_assert(ROW_BYTES == 64 || ROW_BYTES == 32);

  ARCHFLASH_HOST_DEVICE static constexpr int offset(int row, int chunk) {
    const int swizzle = ROW_BYTES == 64 ? row / 2 % 4 : row / 4 % 2;
    return row * ROW_BYTES + (chunk ^ swizzle) * 16;
  }
};

// Consumer warps own 16 rows each. A block of K is a chunk of bytes, as is one of V: a tile, and
// behind it the scales of its rows. Rows of K are keys, in the order of key_at(). V is transposed:
// its rows are columns of V, in the order that v_row() says. STORED: q, k and v have four bits as
// they come.
template <int HEAD_DIM_, bool STORED_ = false>
struct Nvfp4Config {
  static constexpr bool STORED = STORED_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM;
  static constexpr int WARPS = 8;
  static constexpr int M_TILES = 1;
  static constexpr int WARP_ROWS = 16;
  static constexpr int BLOCK_Q = WARPS * WARP_ROWS;
  static constexpr int BLOCK_K = NVFP4_BLOCK_K;
  static constexpr int STEP_KEYS = BLOCK_K;
  static constexpr int STAGES = 2;
  static constexpr bool ROWS_ALONE = false;
  static constexpr int CONSUMER_THREADS = 32 * WARPS;
  static constexpr int THREADS = CONSUMER_THREADS + 128;  // one warp of the last warpgroup copies
  static constexpr int CTAS_PER_SM = 1;
  // setmaxnreg: all threads start with 168 registers, and the last warpgroup hands on most of its.
  static constexpr int PRODUCER_REGISTERS = 24;
  static constexpr int CONSUMER_REGISTERS = 240;
  static_assert(CONSUMER_REGISTERS * CONSUMER_THREADS + PRODUCER_REGISTERS * 128 <= 65536);

  using KTile = NibbleTile<HEAD_DIM>;
  using VTile = NibbleTile<BLOCK_K>;
  static constexpr int K_SCALES = BLOCK_K * KTile::ROW_BYTES;  // where they begin in a chunk
  static constexpr int V_SCALES = HEAD_DIM_V * VTile::ROW_BYTES;
  static constexpr int K_SCALE_BYTES = HEAD_DIM / NVFP4_GROUP;  // of a row
  static constexpr int V_SCALE_BYTES = BLOCK_K / NVFP4_GROUP;
  static constexpr int K_BYTES = K_SCALES + BLOCK_K * K_SCALE_BYTES;
  static constexpr int V_BYTES = V_SCALES + HEAD_DIM_V * V_SCALE_BYTES;

  static constexpr int K_SMEM = 0;
  static constexpr int V_SMEM = K_SMEM + STAGES * K_BYTES;
  static constexpr int BARRIER_SMEM = V_SMEM + STAGES * V_BYTES;
  static constexpr int SHARED_BYTES = BARRIER_SMEM + 8 * 4 * STAGES;

  // The row of V's tile that has column `column`: a lane's fragments of two neighbouring column
  // tiles are then columns that follow one another.
  ARCHFLASH_HOST_DEVICE static constexpr int v_row(int column) {
    return column / 16 * 16 + column % 2 * 8 + column % 16 / 2;
  }
  // The key in a row of K's tile: each lane then holds the scores of eight keys that follow one
  // another, which is what the product with V wants of it.
  ARCHFLASH_HOST_DEVICE static constexpr int key_at(int row) {
    return row / 32 * 32 + row % 8 / 2 * 8 + row % 32 / 8 * 2 + row % 2;
  }
};

using Nvfp4D64 = Nvfp4Config<64>;
using Nvfp4D128 = Nvfp4Config<128>;
using Nvfp4StoredD64 = Nvfp4Config<64, true>;
using Nvfp4StoredD128 = Nvfp4Config<128, true>;

}  // namespace archflash::blackwell_consumer
