// The tile sizes of the kernel for latent caches (mla_fwd.cuh), and its parameter. Compile-time
// numbers only, in plain C++: the kernel and plan.cpp both include them.
#pragma once

#include <cstdint>

#include "common/device/swizzled_tile.cuh"
#include "common/dtype.h"
#include "common/mma_sync/params.h"

namespace archflash::ampere {

struct MlaParams {
  mma_sync::CacheParams call;
  const void* qv_gmem;  // as attention.q_gmem, with dv columns; strides in elements
  int64_t qv_batch, qv_head, qv_row;
};

template <DType DTYPE_>
struct MlaConfig {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int HEAD_DIM = 64;     // of q and K
  static constexpr int HEAD_DIM_V = 512;  // of qv and V
  static constexpr int ROW_COLUMNS = HEAD_DIM_V + HEAD_DIM;
  static constexpr int WARPS = 8;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int WARP_ROWS = 16;  // of a pair of warps
  static constexpr int BLOCK_Q = WARPS / 2 * WARP_ROWS;
  static constexpr int BLOCK_K = 32;
  static constexpr int STAGES = 2;
  static constexpr int CTAS_PER_SM = 1;  // 8 warps with up to 255 registers fill an SM
  // What the parts of mma_sync and device/few_rows.cuh ask.
  static constexpr bool CAN_SPLIT = true;
  static constexpr bool CACHE = true;
  static constexpr bool FP8_CACHE = true;  // or of 16 bits: strides of the cache are in bytes

  // What one warp multiplies and exponentiates: all scores of its rows, half of the columns of V.
  struct Warp {
    static constexpr DType DTYPE = DTYPE_;
    static constexpr int M_TILES = 1;
    static constexpr int WARP_ROWS = 16;
    static constexpr int STEP_KEYS = BLOCK_K;
    static constexpr int HEAD_DIM_V = MlaConfig::HEAD_DIM_V / 2;
    static constexpr int V_PACK = 1;
    static constexpr bool ROWS_ALONE = true;
    using VTile = device::SwizzledTile<ROW_COLUMNS>;
  };

  // Shared memory: latent rows of each stage | scores of each warp | CacheContext. In bytes.
  using Tile = device::SwizzledTile<ROW_COLUMNS>;
  static constexpr int STAGE_BYTES = BLOCK_K * Tile::ROW_BYTES;
  // Rows of 8 bits are converted to those of the first stage. Until then they are in the place of
  // the second one, where each thread has FP8_COPIES times 16 bytes of its own.
  static constexpr int FP8_SMEM = STAGE_BYTES;
  static constexpr int FP8_CHUNKS = ROW_COLUMNS / 16;  // of a row
  static constexpr int FP8_COPIES = (FP8_CHUNKS + Tile::GROUP - 1) / Tile::GROUP;
  static_assert(FP8_COPIES * THREADS * 16 <= STAGE_BYTES);
  static constexpr int SCORES_SMEM = STAGES * STAGE_BYTES;
  static constexpr int SCORES_BYTES = WARP_ROWS * BLOCK_K * 4;  // of a warp
  static constexpr int CONTEXT_SMEM = SCORES_SMEM + WARPS * SCORES_BYTES;
  static constexpr int CONTEXT_BYTES = 96;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + CONTEXT_BYTES;

  static_assert(THREADS / Tile::GROUP == BLOCK_K, "eight threads copy each row of a block");
  static_assert(SHARED_BYTES <= 99 * 1024,
                "CUDA: at most 99 KiB of shared memory in a CTA (8.6, 8.9, 12.x)");
};

}  // namespace archflash::ampere
