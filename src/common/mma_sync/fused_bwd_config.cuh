// The tile sizes of a backward kernel on mma.sync that computes all gradients. Compile-time numbers
// only, in plain C++: kernels and plans both include them.
#pragma once

#include "common/backward_params.h"
#include "common/device/swizzled_tile.cuh"
#include "common/dtype.h"
#include "common/mma_sync/params.h"

namespace archflash::mma_sync {

// A CTA owns KEY_WARPS * 16 * M_TILES keys; BLOCK queries pass by at a time, in two buffers. SPLIT
// warps share the same keys: for the scores each has a share of the queries, for dK and dV a share
// of the columns. For dQ the warps are DQ_ROW_WARPS rows of warps. d may be at most HEAD_DIM, dv
// HEAD_DIM_V.
//
// The columns that a warp takes lie in one swizzle group of its tile or are whole groups. Where
// neighbouring ones would not (48, 80 or 96 columns), a share is every SPLIT-th 16 columns.
template <DType DTYPE_, int HEAD_DIM_, int HEAD_DIM_V_, int KEY_WARPS_, int SPLIT_, int M_TILES_,
          int BLOCK_, int DQ_ROW_WARPS_, int CTAS_PER_SM_>
struct FusedBackwardConfig {
  using Params = BackwardParams;
  static constexpr bool MASKED = false;
  static constexpr bool DROPS = false;        // see DropoutBackwardConfig
  static constexpr bool P_BEFORE_DS = false;  // see SharedScoresConfig
  static constexpr DType DTYPE = DTYPE_;
  static constexpr Owns OWNS = Owns::Keys;
  static constexpr int GRADIENTS = DQ | DK | DV;
  static constexpr bool NEEDS_DP = true;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_V_;
  static constexpr int SPLIT = SPLIT_;
  static constexpr int KEY_WARPS = KEY_WARPS_;
  static constexpr int WARPS = KEY_WARPS * SPLIT;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int M_TILES = M_TILES_;
  static constexpr int WARP_ROWS = 16 * M_TILES;
  static constexpr int ROWS = KEY_WARPS * WARP_ROWS;
  static constexpr int BLOCK = BLOCK_;
  static constexpr int PART = BLOCK / SPLIT;  // queries of which a warp has the scores
  static constexpr int STAGES = 2;
  static constexpr int CTAS_PER_SM = CTAS_PER_SM_;  // ptxas limits the registers to allow as many

  static constexpr int DQ_COLUMN_WARPS = WARPS / DQ_ROW_WARPS_;
  static constexpr int DQ_ROWS = BLOCK / DQ_ROW_WARPS_;  // of a warp
  static constexpr int DQ_COLUMNS = HEAD_DIM / DQ_COLUMN_WARPS;
  // "first" is Q or K, "second" dO or V, as in BackwardConfig.
  using FirstTile = device::SwizzledTile<HEAD_DIM>;
  using SecondTile = device::SwizzledTile<HEAD_DIM_V>;
  using ScoreTile = device::SwizzledTile<BLOCK>;  // rows are keys, columns are queries

  // Whether a share of a tile's columns is every SHARES-th 16 columns.
  template <class Tile, int SHARES>
  static constexpr bool ALTERNATE =
      Tile::CHUNKS / SHARES % Tile::GROUP != 0 && Tile::GROUP % (Tile::CHUNKS / SHARES) != 0;
  // From one pair of column tiles (16 columns) of a warp to its next, in pairs: of a gradient of
  // keys, whose columns are those of Tile, and of dQ.
  template <class Tile>
  static constexpr int PAIR_STEP = ALTERNATE<Tile, SPLIT> ? SPLIT : 1;
  static constexpr bool DQ_ALTERNATES = ALTERNATE<FirstTile, DQ_COLUMN_WARPS>;
  static constexpr int DQ_PAIR_STEP = DQ_ALTERNATES ? DQ_COLUMN_WARPS : 1;
  static constexpr int DQ_STEP = DQ_COLUMNS % 32 == 0 ? 32 : DQ_COLUMNS;  // columns at a time

  // Shared memory: K, V | Q, dO of each stage | dS of two blocks | P, where warps share keys |
  // terms of the queries of each stage | FusedWork. Offsets and sizes in bytes.
  static constexpr int SCORE_BYTES = ROWS * ScoreTile::ROW_BYTES;
  static constexpr int OWN_FIRST_SMEM = 0;
  static constexpr int OWN_SECOND_SMEM = ROWS * FirstTile::ROW_BYTES;
  static constexpr int STAGES_SMEM = OWN_SECOND_SMEM + ROWS * SecondTile::ROW_BYTES;
  static constexpr int SECOND_OF_STAGE = BLOCK * FirstTile::ROW_BYTES;
  static constexpr int STAGE_BYTES = SECOND_OF_STAGE + BLOCK * SecondTile::ROW_BYTES;
  static constexpr int DS_SMEM = STAGES_SMEM + STAGES * STAGE_BYTES;
  static constexpr int P_SMEM = DS_SMEM + 2 * SCORE_BYTES;
  static constexpr int TERMS_SMEM = P_SMEM + (SPLIT > 1 ? SCORE_BYTES : 0);
  static constexpr int TERMS_BYTES = 8 * BLOCK;
  static constexpr int CONTEXT_SMEM = TERMS_SMEM + STAGES * TERMS_BYTES;
  static constexpr int CONTEXT_BYTES = 96;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + CONTEXT_BYTES;

  static_assert(PART % 16 == 0 && DQ_ROWS % 16 == 0 && DQ_COLUMNS % DQ_STEP == 0 &&
                    DQ_STEP % 16 == 0,
                "mma.sync: 16 rows of a product, two tiles of 8 columns at a time");
  static_assert(FirstTile::GROUP % (2 * PAIR_STEP<FirstTile>) == 0 &&
                    SecondTile::GROUP % (2 * PAIR_STEP<SecondTile>) == 0 &&
                    FirstTile::GROUP % (2 * DQ_PAIR_STEP) == 0,
                "16 columns of each are a whole part of a swizzle group");
  static_assert(BLOCK <= THREADS, "a thread copies the terms of a row");
};

// A FusedBackwardConfig whose P lies where dS of the same block comes behind it: less shared
// memory, and two barriers more of the warps that share keys.
template <class Backward>
struct SharedScoresConfig : Backward {
  static constexpr bool P_BEFORE_DS = true;
  static constexpr int TERMS_SMEM = Backward::P_SMEM;
  static constexpr int CONTEXT_SMEM = TERMS_SMEM + Backward::STAGES * Backward::TERMS_BYTES;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + Backward::CONTEXT_BYTES;
  static_assert(Backward::SPLIT > 1, "else P goes to no other warp");
};

// A FusedBackwardConfig whose kernel drops some of P and knows no masks as data.
template <class Backward>
struct DropoutBackwardConfig : Backward {
  using Params = DroppingBackwardParams;
  static constexpr bool DROPS = true;
  static_assert(Backward::M_TILES == 2 && Backward::PART % 16 == 0,
                "a lane has all elements that share their random bits: 32 keys by 16 queries");
};

}  // namespace archflash::mma_sync
