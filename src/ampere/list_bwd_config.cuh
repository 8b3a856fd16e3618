// The tile sizes of the backward kernels for lists of keys (list_bwd.cuh). Compile-time numbers
// only, in plain C++: the kernels and plan_backward.cpp include them.
#pragma once

#include "common/device/swizzled_tile.cuh"
#include "common/image_dtype.h"

namespace archflash::ampere {

// A CTA owns up to BLOCK_Q rows of one list and visits its keys in blocks of BLOCK_K. Its warps
// share out each product in their own way:
//   S, dP    ROW_WARPS share the rows, the others of the WARPS the block's keys
//   dQ       ROW_WARPS share the rows, the others the columns
//   dK, dV   KEY_WARPS share the block's keys, the others the columns
// Who shares columns takes every second, fourth or eighth 16 of them.
template <DType DTYPE_, int HEAD_DIM_, int HEAD_DIM_V_, int BLOCK_Q_, int BLOCK_K_, int WARPS_,
          int ROW_WARPS_, int KEY_WARPS_, int STAGES_, int CTAS_PER_SM_>
struct ListBackwardConfig {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_V_;
  static constexpr int BLOCK_Q = BLOCK_Q_;
  static constexpr int BLOCK_K = BLOCK_K_;
  static constexpr int WARPS = WARPS_;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int ROW_WARPS = ROW_WARPS_;
  static constexpr int COLUMN_WARPS = WARPS / ROW_WARPS;  // of S, dP and dQ
  static constexpr int KEY_WARPS = KEY_WARPS_;
  static constexpr int SUM_WARPS = WARPS / KEY_WARPS;  // those that share columns of dK and dV
  static constexpr int STAGES = STAGES_;
  static constexpr int CTAS_PER_SM = CTAS_PER_SM_;

  static constexpr int WARP_ROWS = BLOCK_Q / ROW_WARPS;
  static constexpr int M_TILES = WARP_ROWS / 16;
  static constexpr int BLOCK = BLOCK_K / COLUMN_WARPS;      // keys of a warp's scores
  static constexpr int SUM_KEYS = BLOCK_K / KEY_WARPS;      // keys of a warp's part of dK and dV
  static constexpr int SUM_PAIRS = HEAD_DIM > 192 ? 1 : 2;  // 16 columns of them at a time
  static constexpr bool NEEDS_DP = true;

  using FirstTile = device::SwizzledTile<HEAD_DIM>;     // of Q and K
  using SecondTile = device::SwizzledTile<HEAD_DIM_V>;  // of dO and V
  using ScoreTile = device::SwizzledTile<BLOCK_K>;      // of P and dS, whose rows are queries

  // Shared memory: Q, dO | K, V of each stage | P, dS | positions of keys | context. In bytes.
  static constexpr int DOUT_SMEM = BLOCK_Q * FirstTile::ROW_BYTES;
  static constexpr int STAGES_SMEM = DOUT_SMEM + BLOCK_Q * SecondTile::ROW_BYTES;
  static constexpr int V_OF_STAGE = BLOCK_K * FirstTile::ROW_BYTES;
  static constexpr int STAGE_BYTES = V_OF_STAGE + BLOCK_K * SecondTile::ROW_BYTES;
  static constexpr int P_SMEM = STAGES_SMEM + STAGES * STAGE_BYTES;
  static constexpr int DS_SMEM = P_SMEM + BLOCK_Q * ScoreTile::ROW_BYTES;
  static constexpr int POSITIONS_SMEM = DS_SMEM + BLOCK_Q * ScoreTile::ROW_BYTES;
  static constexpr int POSITION_BLOCKS = 3;  // multiplied, copied, looked up
  static constexpr int CONTEXT_SMEM = POSITIONS_SMEM + POSITION_BLOCKS * BLOCK_K * 4;
  static constexpr int CONTEXT_BYTES = 160;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + CONTEXT_BYTES;

  static_assert(ROW_WARPS * COLUMN_WARPS == WARPS && KEY_WARPS * SUM_WARPS == WARPS);
  static_assert(WARP_ROWS % 16 == 0 && BLOCK % 16 == 0 && SUM_KEYS % 16 == 0,
                "mma.sync: 16 rows of a product, and of ldmatrix");
  static_assert(HEAD_DIM % (16 * COLUMN_WARPS) == 0 && HEAD_DIM % (16 * SUM_WARPS) == 0 &&
                    HEAD_DIM_V % (16 * SUM_WARPS) == 0,
                "warps share out columns 16 at a time");
  static_assert(BLOCK_K <= THREADS, "a thread looks a key up");
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0, 10.x)");
};

// clang-format off
//                                                         head_dim            warps         CTAs
//                                                        q,k   v  rows keys  all rows keys stages per SM
using D64Lists       = ListBackwardConfig<DTYPE,  64,  64,  64,  64,  4,  2,   2,   1,     3>;
using D64FewLists    = ListBackwardConfig<DTYPE,  64,  64,  16,  64,  4,  1,   2,   1,     4>;
using D128LargeLists = ListBackwardConfig<DTYPE, 128, 128, 128,  64,  8,  4,   2,   2,     1>;
using D128Lists      = ListBackwardConfig<DTYPE, 128, 128,  64,  64,  8,  4,   2,   1,     2>;
using D128FewLists   = ListBackwardConfig<DTYPE, 128, 128,  16,  64,  4,  1,   2,   1,     4>;
using D192LargeLists = ListBackwardConfig<DTYPE, 192, 128, 128,  64,  8,  4,   2,   1,     1>;
using D192Lists      = ListBackwardConfig<DTYPE, 192, 128,  64,  64,  4,  2,   2,   1,     2>;
using D192FewLists   = ListBackwardConfig<DTYPE, 192, 128,  16,  64,  4,  1,   2,   1,     4>;
using D256Lists      = ListBackwardConfig<DTYPE, 256, 256,  64,  32,  4,  2,   1,   1,     2>;
using D256FewLists   = ListBackwardConfig<DTYPE, 256, 256,  16,  64,  4,  1,   2,   1,     2>;
// clang-format on

}  // namespace archflash::ampere
