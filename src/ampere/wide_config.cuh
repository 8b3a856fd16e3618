// The tile sizes of the kernels for head dimensions above 256 (wide_fwd.cuh). Compile-time numbers
// only, in plain C++: the kernels and plan.cpp both include them.
#pragma once

#include "common/dtype.h"
#include "common/math/swizzled_tile.cuh"

namespace archflash::ampere {

// d and dv may be at most HEAD_DIM.
template <DType DTYPE_, int HEAD_DIM_, int BLOCK_K_, int STAGES_>
struct WideConfig {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM;
  static constexpr int ROW_COLUMNS = HEAD_DIM;
  static constexpr int WARPS = 8;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int WARP_ROWS = 16;  // of a pair of warps
  static constexpr int BLOCK_Q = WARPS / 2 * WARP_ROWS;
  static constexpr int BLOCK_K = BLOCK_K_;
  // Buffers for K and V. With 2, the next K and V are copied during the whole of the current block.
  // With 1, V is copied during Q K^T, and the next K during P V.
  static constexpr int STAGES = STAGES_;
  static constexpr int CTAS_PER_SM = 1;  // 8 warps with up to 255 registers fill an SM
  // What the parts of mma_sync and math/few_rows.cuh ask.
  static constexpr bool CAN_SPLIT = true;
  static constexpr bool CACHE = true;
  static constexpr bool FP8_CACHE = false;

  using Tile = math::SwizzledTile<HEAD_DIM>;  // of K and of V

  // What one warp multiplies and weighs (pair.cuh).
  struct Warp {
    static constexpr DType DTYPE = DTYPE_;
    static constexpr int M_TILES = 1;
    static constexpr int WARP_ROWS = 16;
    static constexpr int STEP_KEYS = BLOCK_K;
    static constexpr int HEAD_DIM_V = WideConfig::HEAD_DIM_V / 2;
    static constexpr int V_PACK = 1;
    static constexpr bool ROWS_ALONE = true;
    using VTile = Tile;
  };

  // Shared memory: K, V of each stage | scores of each warp | CacheContext. Offsets and sizes in
  // bytes.
  static constexpr int V_SMEM = BLOCK_K * Tile::ROW_BYTES;
  static constexpr int STAGE_BYTES = 2 * V_SMEM;
  static constexpr int SCORES_SMEM = STAGES * STAGE_BYTES;
  static constexpr int SCORES_BYTES = WARP_ROWS * BLOCK_K * 4;  // of a warp
  static constexpr int CONTEXT_SMEM = SCORES_SMEM + WARPS * SCORES_BYTES;
  static constexpr int CONTEXT_BYTES = 96;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + CONTEXT_BYTES;

  static_assert(HEAD_DIM % 128 == 0, "each warp of a pair has whole swizzle groups of V");
  static_assert(STAGES == 1 || STAGES == 2, "the main loop knows one or two buffers");
  static_assert(SHARED_BYTES <= (STAGES == 1 ? 99 : 163) * 1024,
                "CUDA: shared memory of a CTA (8.6, 8.9, 12.x; 8.0)");
};

// clang-format off
//                           head block
//                           _dim _k  stages
template <DType T>
using D384Large = WideConfig<T, 384, 32, 2>;
template <DType T>
using D384      = WideConfig<T, 384, 32, 1>;
template <DType T>
using D512Large = WideConfig<T, 512, 32, 2>;
template <DType T>
using D512      = WideConfig<T, 512, 32, 1>;
// clang-format on

}  // namespace archflash::ampere
