// The products of a consumer warpgroup: S = Q K^T and O += P V.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device/fp8_softmax.cuh"
#include "common/device/online_softmax.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/ptx/wgmma_few.cuh"
#include "common/swizzle.h"

namespace archflash::hopper {

// Bytes from 8 rows of a slab to the next 8.
template <class Tile>
__device__ __forceinline__ constexpr int group_step() {
  if constexpr (requires { Tile::GROUP_BYTES; }) {
    return Tile::GROUP_BYTES;
  } else {
    return 8 * Tile::ROW_BYTES;
  }
}

// The shared-memory descriptor of wgmma (PTX ISA, "Matrix Descriptor Format"): bits 0 to 13 are
// address >> 4, 16 to 29 the leading offset >> 4, 32 to 45 the stride offset >> 4, 62 and 63 the
// swizzle. The stride offset is the step to the next 8 rows of a slab. The leading offset of an
// MN-major tile is the step to its next slab; that of a K-major tile is ignored.
template <class Tile>
__device__ __forceinline__ ptx::WgmmaDescriptor describe_tile(uint32_t tile_smem,
                                                              int leading_bytes) {
  constexpr uint32_t ADDRESS_MASK = 0x3FFFF;
  constexpr uint32_t SWIZZLE = Tile::SWIZZLE == Swizzle::B128 ? 1u : 2u;
  return {(tile_smem & ADDRESS_MASK) >> 4 | static_cast<uint32_t>(leading_bytes >> 4) << 16,
          static_cast<uint32_t>(group_step<Tile>() >> 4) | SWIZZLE << 30};
}
__device__ __forceinline__ ptx::WgmmaDescriptor advance(ptx::WgmmaDescriptor descriptor,
                                                        int bytes) {
  return {descriptor.low + static_cast<uint32_t>(bytes >> 4), descriptor.high};
}

// The bytes from a row's start to the columns of product k, in a K-major tile, whose columns are
// summed over. A product sums over 32 bytes of columns.
template <class Tile>
__device__ __forceinline__ constexpr int column_step(int k) {
  const int column = 16 * k;
  return column / Tile::SLAB * Tile::SLAB_BYTES + column % Tile::SLAB * 2;
}

// The 64 rows of Q of a warpgroup, in a stage of Q.
template <class C>
__device__ __forceinline__ ptx::WgmmaDescriptor describe_q(uint32_t shared_smem, int stage,
                                                           int group) {
  using QTile = typename C::QTile;
  return describe_tile<QTile>(
      shared_smem + C::Q_SMEM + stage * QTile::BYTES + group * C::GROUP_ROWS * QTile::ROW_BYTES,
      16);
}

// Starts S = Q K^T for the 64 rows of a warpgroup and the first KEYS keys of the K of a stage.
// q: the descriptor of the rows, or their fragments of A in registers.
template <class C, int KEYS = C::BLOCK_K, class Q>
__device__ __forceinline__ void start_qk(device::Scores<C>& s_rmem, const Q& q,
                                         uint32_t shared_smem, int stage) {
  using Product = ptx::Wgmma<C::DTYPE, KEYS>;
  float* const s = &s_rmem[0][0][0];
  ptx::registers_change<KEYS / 2>(s);
  ptx::wgmma_fence();  // the last uses of the scores come before the product
  const ptx::WgmmaDescriptor k =
      describe_tile<typename C::KTile>(shared_smem + C::K_SMEM + stage * C::KTile::BYTES, 16);
#pragma unroll
  for (int i = 0; i < C::HEAD_DIM / C::PACK / 16; ++i) {
    const ptx::WgmmaDescriptor k_of_product = advance(k, column_step<typename C::KTile>(i));
    if constexpr (KEYS < 48) {
      ptx::wgmma_ss_few<C::DTYPE, KEYS>(s, advance(q, column_step<typename C::QTile>(i)),
                                        k_of_product, i != 0);
    } else if constexpr (std::is_same_v<Q, ptx::WgmmaDescriptor>) {
      Product::ss(s, advance(q, column_step<typename C::QTile>(i)), k_of_product, i != 0);
    } else {
      Product::template rs<false>(s, q[i], k_of_product, i != 0);
    }
  }
  ptx::wgmma_commit_group();
}

// P, as fragments of A.
template <class C>
using Probabilities =
    std::conditional_t<C::FP8, device::Fp8Probabilities<C>, device::Probabilities<C>>;

// The outputs of a product: of PASS_COLUMNS columns of V.
template <class C>
using PassOutputs = float[1][C::PASS_COLUMNS / 8][4];

// Where products add up: the part, or the outputs themselves.
template <class C>
__device__ __forceinline__ PassOutputs<C>& products_of(device::Outputs<C>& o_rmem,
                                                       PassOutputs<C>& part_rmem) {
  if constexpr (C::SUMS_IN_PARTS) {
    return part_rmem;
  } else {
    return o_rmem;
  }
}

// Starts O += P V, or O = P V if not `add`, with the V of a stage; if it is of 8 bits, with its
// columns from `first_column` on. KEYS: the first ones of the block.
template <class C, int KEYS = C::BLOCK_K>
__device__ __forceinline__ void start_pv(PassOutputs<C>& o_rmem, const Probabilities<C>& p_rmem,
                                         uint32_t shared_smem, int stage, int add,
                                         int first_column = 0) {
  using VTile = typename C::VTile;
  using Product = ptx::Wgmma<C::DTYPE, C::PASS_COLUMNS>;
  float* const o = &o_rmem[0][0][0];
  ptx::registers_change<C::PASS_COLUMNS / 2>(o);
  ptx::wgmma_fence();  // the last uses of P and the outputs come before the product
  const int leading_bytes = C::FP8 ? 16 : VTile::SLABS > 1 ? VTile::SLAB_BYTES : 0;
  const ptx::WgmmaDescriptor v = describe_tile<VTile>(
      shared_smem + C::V_SMEM + stage * VTile::BYTES + first_column * VTile::ROW_BYTES,
      leading_bytes);
#pragma unroll
  for (int i = 0; i < KEYS / (16 * C::PACK); ++i) {
    const int step = C::FP8 ? column_step<VTile>(i) : 2 * i * group_step<VTile>();
    Product::rs(o, p_rmem[0][i], advance(v, step), add || i > 0);
  }
  ptx::wgmma_commit_group();
}

// Adds a part of the sums to the outputs. `pass`: which PASS_COLUMNS columns of V it is of.
template <class C>
__device__ __forceinline__ void add_pass(device::Outputs<C>& o_rmem, const PassOutputs<C>& part,
                                         int pass) {
  constexpr int TILES = C::PASS_COLUMNS / 8;
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o_rmem[0][pass * TILES + n][i] += part[0][n][i];
  }
}

}  // namespace archflash::hopper
