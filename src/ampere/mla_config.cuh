// The tile sizes of the kernel for latent caches (mla_fwd.cuh), and its parameter. Compile-time
// numbers only, in plain C++: the kernel and plan.cpp both include them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "common/math/swizzled_tile.cuh"
#include "common/mma_sync/params.h"

namespace archflash::ampere {

struct MlaParams {
  mma_sync::CacheParams call;
  const void* qv_gmem;  // as attention.q_gmem, with dv columns; strides in elements
  int64_t qv_batch, qv_head, qv_row;
};
static_assert(std::is_trivially_copyable_v<MlaParams>);
static_assert(offsetof(MlaParams, call) == 0, "core::pointers() counts from the block's start");

// FP8_CACHE_: the cache has numbers of 8 bits, which the kernel converts to DTYPE_.
template <DType DTYPE_, bool FP8_CACHE_ = false>
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
  static constexpr int STAGES = FP8_CACHE_ ? 1 : 2;  // of 16-bit rows
  static constexpr int CTAS_PER_SM = 1;              // 8 warps with up to 255 registers fill an SM
  // What the parts of mma_sync and math/few_rows.cuh ask.
  static constexpr bool CAN_SPLIT = true;
  static constexpr bool CACHE = true;
  static constexpr bool FP8_CACHE = FP8_CACHE_;
  static constexpr int ELEMENT_BYTES = FP8_CACHE ? 1 : 2;  // of the cache

  // What one warp multiplies and weighs: all scores of its rows, half of the columns of V.
  struct Warp {
    static constexpr DType DTYPE = DTYPE_;
    static constexpr int M_TILES = 1;
    static constexpr int WARP_ROWS = 16;
    static constexpr int STEP_KEYS = BLOCK_K;
    static constexpr int HEAD_DIM_V = MlaConfig::HEAD_DIM_V / 2;
    static constexpr int V_PACK = 1;
    static constexpr bool ROWS_ALONE = true;
    using VTile = math::SwizzledTile<ROW_COLUMNS>;
  };

  // Shared memory: latent rows of each stage | 8-bit rows of a block | scores of each warp |
  // CacheContext. In bytes.
  using Tile = math::SwizzledTile<ROW_COLUMNS>;
  static constexpr int STAGE_BYTES = BLOCK_K * Tile::ROW_BYTES;
  // Tile::GROUP threads copy a row of the cache, CHUNK columns at a time.
  static constexpr int CHUNK = 16 / ELEMENT_BYTES;
  static constexpr int COPIES = (ROW_COLUMNS / CHUNK + Tile::GROUP - 1) / Tile::GROUP;
  static constexpr int FP8_SMEM = STAGES * STAGE_BYTES;
  static constexpr int FP8_BYTES = FP8_CACHE ? COPIES * THREADS * 16 : 0;
  static constexpr int SCORES_SMEM = FP8_SMEM + FP8_BYTES;
  static constexpr int SCORES_BYTES = WARP_ROWS * BLOCK_K * 4;  // of a warp
  static constexpr int CONTEXT_SMEM = SCORES_SMEM + WARPS * SCORES_BYTES;
  static constexpr int CONTEXT_BYTES = 96;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + CONTEXT_BYTES;

  static_assert(THREADS / Tile::GROUP == BLOCK_K, "eight threads copy each row of a block");
  static_assert(SHARED_BYTES <= 99 * 1024,
                "CUDA: at most 99 KiB of shared memory in a CTA (8.6, 8.9, 12.x)");
};

template <DType DTYPE>
using MlaFp8Config = MlaConfig<DTYPE, true>;

}  // namespace archflash::ampere
