// The products of the backward pass: S and dP by keys and queries, dV, dK and dQ; and dS on its way
// to shared memory.
#pragma once

#include <cstdint>

#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/wgmma_n32.cuh"
#include "hopper/backward/backward_pipeline.cuh"
#include "hopper/forward/products.cuh"

namespace archflash::hopper {

// 64 keys by the queries of a block, in the registers of a warpgroup: keys lane/4 + 8r of a warp's
// 16, queries 8n + 2*(lane%4) + i at [n][2r + i].
template <class C>
using KeysByQueries = float[C::BLOCK / 8][4];
template <class C>
using KeysByQueries16 = uint32_t[C::BLOCK / 16][4];  // in 16 bits, as fragments of A
template <class Tile>
using KeyGradient = float[Tile::COLUMNS / 8][4];  // dK for a tile of K, dV for one of V

// Starts K Q^T or V dO^T for the 64 keys of a warpgroup, which `a` describes. Tile, Passing: of K
// and Q, or of V and dO.
template <class C, class Tile, class Passing>
__device__ __forceinline__ void start_keys_by_queries(KeysByQueries<C>& x_rmem,
                                                      ptx::WgmmaDescriptor a, uint32_t b_smem) {
  using Product = ptx::Wgmma<C::DTYPE, C::BLOCK>;
  const ptx::WgmmaDescriptor b = describe_tile<Passing>(b_smem, 16);
#pragma unroll
  for (int i = 0; i < Tile::COLUMNS / 16; ++i) {
    Product::ss(&x_rmem[0][0], advance(a, column_step<Tile>(i)),
                advance(b, column_step<Passing>(i)), i != 0);
  }
  ptx::wgmma_commit_group();
}

// Starts the addition of P^T dO to dV, or of dS^T Q to dK (Tile: of dO or Q), at most 192 columns
// at a time: ptxas refuses a product that takes more registers than a thread has when the kernel
// starts.
template <class C, class Tile>
__device__ __forceinline__ void start_gradient(KeyGradient<Tile>& sum_rmem,
                                               const KeysByQueries16<C>& a_rmem, uint32_t b_smem) {
  constexpr int COLUMNS = Tile::COLUMNS <= 192 ? Tile::COLUMNS : Tile::COLUMNS / 2;
  using Product = ptx::Wgmma<C::DTYPE, COLUMNS>;
  const ptx::WgmmaDescriptor b =
      describe_tile<Tile>(b_smem, Tile::SLABS > 1 ? Tile::SLAB_BYTES : 0);
#pragma unroll
  for (int i = 0; i < C::BLOCK / 16; ++i) {
#pragma unroll
    for (int column = 0; column < Tile::COLUMNS; column += COLUMNS) {
      Product::rs(&sum_rmem[column / 8][0], a_rmem[i],
                  advance(b, column / Tile::SLAB * Tile::SLAB_BYTES + 16 * i * Tile::ROW_BYTES), 1);
    }
  }
  ptx::wgmma_commit_group();
}

// Starts a warpgroup's part of dQ = dS K of a round, or dQ += dS K if `adds`.
template <class C>
__device__ __forceinline__ void start_dq(float* dq, uint32_t ds_smem, uint32_t k_smem, int group,
                                         bool adds = false) {
  using DsTile = typename C::DsTile;
  using KTile = typename C::KTile;
  using Product = ptx::Wgmma<C::DTYPE, C::PART_COLUMNS>;
  static_assert(C::PART_COLUMNS % KTile::SLAB == 0, "a part has the columns of whole slabs");
  constexpr int SLABS = C::PART_COLUMNS / KTile::SLAB;
  if constexpr (C::SHARES_ROWS) {
    ds_smem += group * C::PART_ROWS * DsTile::ROW_BYTES;
  } else {
    k_smem += group * SLABS * KTile::SLAB_BYTES;
  }
  const ptx::WgmmaDescriptor ds = describe_tile<DsTile>(ds_smem, 16);
  const ptx::WgmmaDescriptor k = describe_tile<KTile>(k_smem, SLABS > 1 ? KTile::SLAB_BYTES : 0);
#pragma unroll
  for (int i = 0; i < C::ROWS / 16; ++i) {
    Product::template ss<true>(dq, advance(ds, column_step<DsTile>(i)),
                               advance(k, 16 * i * KTile::ROW_BYTES), i != 0 || adds);
  }
  ptx::wgmma_commit_group();
}

// Writes dS of a block to its rows of a tile, in which a query has a row.
template <class C>
__device__ __forceinline__ void store_ds(uint32_t rows_smem, const KeysByQueries16<C>& ds_rmem) {
  using DsTile = typename C::DsTile;
  // With a softcap or a mask no register is left for the address, which is then computed anew.
  const int thread =
      C::SOFTCAP || C::READS_MASK ? ptx::mov_tid_x_volatile() : static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  // Lanes 8j to 8j + 7 name the rows of matrix j of a fragment: queries 8 * (j / 2) to + 7 of 16,
  // keys 8 * (j % 2) to + 7 of the warp's 16.
  const int row = lane / 16 * 8 + lane % 8;
  const int chunk = thread / 32 % C::KEY_WARPS * 2 + lane / 8 % 2;
  const uint32_t first_smem = rows_smem + DsTile::offset(row, chunk);
#pragma unroll
  for (int i = 0; i < C::BLOCK / 16; ++i)
    ptx::stmatrix_x4_trans(first_smem + 16 * i * DsTile::ROW_BYTES, ds_rmem[i]);
}

// Clears what store_ds() writes.
template <class C>
__device__ __forceinline__ void clear_ds(uint32_t rows_smem) {
  const KeysByQueries16<C> zeros_rmem = {};
  store_ds<C>(rows_smem, zeros_rmem);
}

// Writes a warp's rows of a part of dQ, times `scale`, to a tile of 16 bits.
template <class C>
__device__ __forceinline__ void store_dq_rows(uint32_t tile_smem, const float* dq, float scale) {
  using DqTile = typename C::DqTile;
  const int lane = ptx::mov_tid_x_volatile() % 32;
  const uint32_t first_smem = tile_smem + DqTile::offset(lane % 16, lane / 16);
  __syncwarp();  // the sums that lay there are read
#pragma unroll
  for (int n = 0; n < C::PART_COLUMNS / 8; n += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const x = dq + 4 * (n + i / 2) + 2 * (i % 2);
      words[i] = ptx::cvt_rn_x2_f32<C::DTYPE>(x[0] * scale, x[1] * scale);
    }
    ptx::stmatrix_x4(DqTile::advance(first_smem, n), words);
  }
}

}  // namespace archflash::hopper
