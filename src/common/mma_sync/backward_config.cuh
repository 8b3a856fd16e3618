// The tile sizes of a backward kernel on mma.sync. Compile-time numbers only, in plain C++: kernels
// and plans both include them.
#pragma once

#include "common/backward_params.h"
#include "common/device/swizzled_tile.cuh"
#include "common/dtype.h"

namespace archflash::mma_sync {

// A CTA owns WARPS * 16 * M_TILES rows; BLOCK rows of the other side pass by at a time, in two
// buffers. d may be at most HEAD_DIM, dv HEAD_DIM_V.
template <DType DTYPE_, Owns OWNS_, int GRADIENTS_, int HEAD_DIM_, int HEAD_DIM_V_, int WARPS_,
          int M_TILES_, int BLOCK_, int CTAS_PER_SM_>
struct BackwardConfig {
  using Params = BackwardParams;
  static constexpr bool MASKED = false;
  static constexpr DType DTYPE = DTYPE_;
  static constexpr Owns OWNS = OWNS_;
  static constexpr int GRADIENTS = GRADIENTS_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_V_;
  static constexpr int WARPS = WARPS_;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int M_TILES = M_TILES_;
  static constexpr int WARP_ROWS = 16 * M_TILES;
  static constexpr int ROWS = WARPS * WARP_ROWS;
  static constexpr int BLOCK = BLOCK_;
  static constexpr int STAGES = 2;
  static constexpr int CTAS_PER_SM = CTAS_PER_SM_;  // ptxas limits the registers to allow as many

  // dV alone needs P, but not dP and therefore neither V nor delta.
  static constexpr bool NEEDS_DP = (GRADIENTS & (DQ | DK)) != 0;

  // Q and K are tiles of HEAD_DIM columns, dO and V of HEAD_DIM_V. "first" is Q or K, "second" dO
  // or V.
  using FirstTile = device::SwizzledTile<HEAD_DIM>;
  using SecondTile = device::SwizzledTile<HEAD_DIM_V>;

  // Shared memory: owned first, owned second | passing first, passing second of each stage | terms
  // of the passing queries of each stage | BackwardContext. Offsets and sizes in bytes.
  static constexpr int OWN_FIRST_SMEM = 0;
  static constexpr int OWN_SECOND_SMEM = ROWS * FirstTile::ROW_BYTES;
  static constexpr int STAGES_SMEM =
      OWN_SECOND_SMEM + (NEEDS_DP ? ROWS * SecondTile::ROW_BYTES : 0);
  static constexpr int SECOND_OF_STAGE = BLOCK * FirstTile::ROW_BYTES;
  static constexpr int STAGE_BYTES = SECOND_OF_STAGE + BLOCK * SecondTile::ROW_BYTES;
  static constexpr int TERMS_SMEM = STAGES_SMEM + STAGES * STAGE_BYTES;
  static constexpr int TERMS_BYTES = OWNS == Owns::Keys ? 8 * BLOCK : 0;
  static constexpr int CONTEXT_SMEM = TERMS_SMEM + STAGES * TERMS_BYTES;
  static constexpr int CONTEXT_BYTES = 64;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + CONTEXT_BYTES;

  static_assert((OWNS == Owns::Queries) == (GRADIENTS == DQ),
                "rows own their own gradients: queries dQ, keys dK and dV");
  static_assert(BLOCK % 16 == 0 && BLOCK <= THREADS,
                "mma.sync: 16 rows of a product; a thread copies the terms of a row");
  static_assert(SHARED_BYTES <= 99 * 1024, "every GPU from 8.0 on gives a CTA 99 KB");
};

}  // namespace archflash::mma_sync
