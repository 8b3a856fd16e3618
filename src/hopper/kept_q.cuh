// Q in registers: the other operand of Q K^T then takes less of what shared memory can give.
#pragma once

#include <cstdint>

#include "common/math/online_softmax.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/wgmma.cuh"
#include "hopper/tile.cuh"

namespace archflash::hopper {

// Q as fragments of A, where it is kept.
template <class C>
using QFragments = uint32_t[C::KEEPS_Q ? C::HEAD_DIM / 16 : 1][4];

template <class C>
__device__ __forceinline__ void load_q(QFragments<C>& q_rmem, uint32_t shared_smem,
                                       int stage, int warp_row) {
  using QTile = typename C::QTile;
  const int lane = threadIdx.x % 32;
  const uint32_t row_smem = shared_smem + C::Q_SMEM + stage * QTile::BYTES +
                            warp_row * QTile::ROW_BYTES + QTile::offset(lane % 16, lane / 16);
#pragma unroll
  for (int i = 0; i < C::HEAD_DIM / 16; ++i)
    ptx::ldmatrix_x4(q_rmem[i], QTile::advance(row_smem, 2 * i));
}

// Does what start_qk() does with Q in registers.
template <class C>
__device__ __forceinline__ void start_kept_qk(math::Scores<C>& s_rmem, const QFragments<C>& q_rmem,
                                              uint32_t shared_smem, int stage) {
  using Product = ptx::Wgmma<C::DTYPE, C::BLOCK_K>;
  float* const s = &s_rmem[0][0][0];
  ptx::registers_change<C::BLOCK_K / 2>(s);
  ptx::wgmma_fence();  // the last uses of the scores come before the product
  const ptx::WgmmaDescriptor k =
      describe_tile<typename C::KTile>(shared_smem + C::K_SMEM + stage * C::KTile::BYTES, 16);
#pragma unroll
  for (int i = 0; i < C::HEAD_DIM / 16; ++i) {
    Product::template rs<false>(s, q_rmem[i], advance(k, column_step<typename C::KTile>(i)),
                                i != 0);
  }
  ptx::wgmma_commit_group();
}

// Sets the outputs of a tile to 0.
template <class C>
__device__ __forceinline__ void clear_outputs(math::Outputs<C>& o_rmem) {
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o_rmem[0][n][i] = 0.0f;
  }
}

}  // namespace archflash::hopper
