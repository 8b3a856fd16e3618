// The products of a warp of fused_bwd.cuh into its dK and dV, and how P and dS go to the warps that
// need them, too.
#pragma once

#include <cstdint>

#include "common/mma_sync/attention_bwd.cuh"
#include "common/mma_sync/fused_bwd_config.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/st_shared.cuh"

namespace archflash::mma_sync {

// The scores of a warp, as the functions of attention_bwd.cuh take them.
template <class C>
struct ScoresOfWarp {
  static constexpr DType DTYPE = C::DTYPE;
  static constexpr Owns OWNS = C::OWNS;
  static constexpr int GRADIENTS = C::GRADIENTS;
  static constexpr int M_TILES = C::M_TILES;
  static constexpr int BLOCK = C::PART;
  static constexpr bool NEEDS_DP = true;
};

// A tile of which every STEP-th pair of chunks (16 columns) counts, from one of the first STEP on.
template <class Tile, int STEP>
struct PairsOfTile : Tile {
  template <typename Address>
  static __device__ __forceinline__ constexpr Address advance(Address offset, int chunks) {
    return Tile::advance(offset, chunks * STEP);
  }
};

template <class C, class Tile, int OUT_COLUMNS>
struct FusedProduct : BackwardProduct<C, Tile, C::PART, OUT_COLUMNS> {
  using VTile = PairsOfTile<Tile, C::template PAIR_STEP<Tile>>;
};

// The first chunk of the columns of share `part` of a gradient of keys.
template <class C, class Tile>
__device__ __forceinline__ int first_chunk(int part) {
  return part * (C::template PAIR_STEP<Tile> > 1 ? 2 : Tile::CHUNKS / C::SPLIT);
}

// Writes a warp's P or dS into the tile of the CTA, whose rows are keys.
template <class C>
__device__ __forceinline__ void store_scores(uint32_t tile_smem,
                                             const BlockFragments<ScoresOfWarp<C>>& scores_rmem,
                                             int warp_row, int part, int lane) {
  using Tile = typename C::ScoreTile;
  const uint32_t lane_smem =
      Tile::advance(tile_smem + warp_row * Tile::ROW_BYTES + Tile::offset(lane / 4, 0),
                    part * (C::PART / 8)) +
      lane % 4 * 4;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::PART / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        ptx::st_shared_b32(Tile::advance(lane_smem, n) + (16 * m + 8 * r) * Tile::ROW_BYTES,
                           scores_rmem[m][n / 2][n % 2 * 2 + r]);
      }
    }
  }
}

// Adds to a warp's dV or dK the product of its own P or dS, of share `part` of the queries, with
// dO or Q.
template <class C, class Tile, int COLUMNS>
__device__ __forceinline__ void multiply_own(float (&x_rmem)[C::M_TILES][COLUMNS / 8][4],
                                             const BlockFragments<ScoresOfWarp<C>>& scores_rmem,
                                             uint32_t passing_smem, int part, int lane) {
  const uint32_t first_smem =
      Tile::advance(passing_smem + rows_first_offset<Tile>(lane), first_chunk<C, Tile>(part)) +
      part * C::PART * Tile::ROW_BYTES;
  multiply_pv<FusedProduct<C, Tile, COLUMNS>>(x_rmem, scores_rmem, first_smem);
}

// Adds to a warp's dV or dK the products of P or dS of the queries that other warps have, which
// share its keys, with dO or Q. scores_smem: P or dS of the warp's first key.
template <class C, class Tile, int COLUMNS>
__device__ __forceinline__ void multiply_others(float (&x_rmem)[C::M_TILES][COLUMNS / 8][4],
                                                uint32_t scores_smem, uint32_t passing_smem,
                                                int part, int lane) {
  using Scores = typename C::ScoreTile;
  const uint32_t first_smem =
      Tile::advance(passing_smem + rows_first_offset<Tile>(lane), first_chunk<C, Tile>(part));
  // Where P lies in the place of dS there are no registers to read far ahead.
  constexpr int AT_ONCE = C::P_BEFORE_DS && C::PART > 32 ? 1 : C::PART / 16;
#pragma unroll
  for (int step = 1; step < C::SPLIT; ++step) {
    const int other = (part + step) % C::SPLIT;
    const uint32_t lane_smem =
        Scores::advance(scores_smem + rows_first_offset<Scores>(lane), other * (C::PART / 8));
#pragma unroll AT_ONCE
    for (int query = 0; query < C::PART; query += 16) {
      uint32_t a_rmem[C::M_TILES][4];
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
        ptx::ldmatrix_x4(a_rmem[m],
                         Scores::advance(lane_smem, query / 8) + m * 16 * Scores::ROW_BYTES);
      }
      multiply_pv_group<FusedProduct<C, Tile, COLUMNS>>(
          x_rmem, [&](int m) -> const uint32_t (&)[4] { return a_rmem[m]; },
          first_smem + other * C::PART * Tile::ROW_BYTES, query, [](uint32_t (&)[4]) {});
    }
  }
}

}  // namespace archflash::mma_sync
