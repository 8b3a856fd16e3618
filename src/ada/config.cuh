// The tiles of each ada kernel: compile-time numbers only, read by the kernel and by plan.cpp
// (plain C++).
#pragma once

#include <cstdint>

#include "ada/params.h"
#include "common/math/swizzled_tile.cuh"
#include "common/mma_sync/config.cuh"
#include "common/problem.h"

namespace archflash::ada {

// --- 16-bit inputs: the kernel of common/mma_sync, tiles for the 99 KB of 8.9 ---

using mma_sync::Config;

// clang-format off
//                             head_dim       m_    block step        Q in   CTAs
//                           q,k   v   warps tiles _k   _keys stages  regs   per SM
template <DType T>
using D64        = Config<T,  64,  64, 4,   2,  128,  128,  1,     false, 2>;
template <DType T>
using D64Few     = Config<T,  64,  64, 4,   1,   64,   64,  1,     true,  3>;
template <DType T>
using D96        = Config<T,  96,  96, 4,   2,   64,   64,  1,     false, 2>;
template <DType T>
using D128Wide   = Config<T, 128, 128, 4,   2,   32,   32,  1,     false, 2>;
template <DType T>
using D128       = Config<T, 128, 128, 4,   1,   64,   64,  1,     false, 2>;
template <DType T>
using D192       = Config<T, 192, 128, 8,   1,   32,   32,  1,     false, 1>;
template <DType T>
using D256       = Config<T, 256, 256, 8,   1,   32,   32,  1,     false, 1>;
// clang-format on

// --- 8-bit inputs ---

// A CTA, a warp and a step own what they own in mma_sync::Config; here an element is a byte.
template <DType DTYPE_, int HEAD_DIM_, int HEAD_DIM_V_, int WARPS_, int M_TILES_, int BLOCK_K_,
          int STAGES_, bool Q_IN_REGISTERS_, int CTAS_PER_SM_>
struct Fp8Config {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_V_;
  static constexpr int WARPS = WARPS_;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int M_TILES = M_TILES_;
  static constexpr int WARP_ROWS = 16 * M_TILES;
  static constexpr int BLOCK_Q = WARPS * WARP_ROWS;
  static constexpr int BLOCK_K = BLOCK_K_;
  static constexpr int STEP_KEYS = BLOCK_K;
  static constexpr int STAGES = STAGES_;
  static constexpr bool Q_IN_REGISTERS = Q_IN_REGISTERS_;
  static constexpr int CTAS_PER_SM = CTAS_PER_SM_;

  // A tile's elements are pairs of bytes: what ldmatrix moves.
  using QKTile = math::SwizzledTile<HEAD_DIM / 2>;
  using VTile = math::SwizzledTile<HEAD_DIM_V / 2>;

  // Shared memory, in bytes: Q | K, V of each stage | Place.
  static constexpr int K_BYTES = BLOCK_K * QKTile::ROW_BYTES;
  static constexpr int V_BYTES = BLOCK_K * VTile::ROW_BYTES;
  static constexpr int Q_SMEM = 0;
  static constexpr int K_SMEM = Q_SMEM + BLOCK_Q * QKTile::ROW_BYTES;
  static constexpr int V_SMEM = K_SMEM + K_BYTES;
  static constexpr int STAGE_BYTES = K_BYTES + V_BYTES;
  static constexpr int PLACE_SMEM = K_SMEM + STAGES * STAGE_BYTES;
  static constexpr int PLACE_BYTES = 160;
  static constexpr int SHARED_BYTES = PLACE_SMEM + PLACE_BYTES;

  // P is 2^(score - base) with the base P_LOG2 below the row maximum, which makes the largest P
  // 256: e4m3 ends at 448. The base follows the maximum when that has risen by more than BASE_LAG,
  // before P reaches 256 * 2^0.75 = 431, which rounds to 416 or 448. Beyond LARGE_BASE the rounding
  // of the base could carry P further, so there the base is the maximum itself and follows at once.
  static constexpr float P_LOG2 = 8.0f;
  static constexpr float BASE_LAG = 0.75f;
  static constexpr float LARGE_BASE = 1 << 18;

  static_assert(DTYPE == DType::E4M3 || DTYPE == DType::E5M2, "8-bit floating point only");
  static_assert(STAGES == 1 || STAGES == 2, "the main loop knows one or two buffers");
  static_assert(STEP_KEYS % 32 == 0, "mma.sync: 32 keys of P V");
  static_assert(SCALE_ROWS % STEP_KEYS == 0, "the keys of a step share a descale");
  static_assert(SCALE_ROWS % WARP_ROWS == 0, "the rows of a warp share a descale");
  static_assert(SHARED_BYTES <= 99 * 1024, "CUDA: at most 99 KiB of shared memory in a CTA (8.9)");
};

// clang-format off
//                              head_dim       m_    block         Q in   CTAs
//                            q,k   v   warps tiles _k    stages   regs   per SM
template <DType T>
using Fp8D64     = Fp8Config<T,  64,  64, 4,   1,   64,    2,     true,  3>;
template <DType T>
using Fp8D128    = Fp8Config<T, 128, 128, 4,   1,   64,    2,     true,  2>;
template <DType T>
using Fp8D192    = Fp8Config<T, 192, 128, 4,   1,   64,    2,     false, 2>;
template <DType T>
using Fp8D256    = Fp8Config<T, 256, 256, 4,   1,   64,    1,     false, 2>;
// clang-format on

}  // namespace archflash::ada
