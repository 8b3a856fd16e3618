// Writes a warp's rows of the output and their LSE (dense_fwd.cuh, bounded_fwd.cuh).
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/online_softmax.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::mma_sync {

// Divides a warp's outputs by the row sums and writes the first `rows` rows from out_gmem on, and
// the LSE where lse_gmem is not null. Outputs go through the warp's own rows of Q, rows_smem, so
// that each lane writes 16 bytes.
template <class C>
__device__ __forceinline__ void store_rows(const device::Outputs<C>& o_rmem,
                                           const device::RowState<C>& state,
                                           unsigned char* rows_smem, uint16_t* out_gmem,
                                           int64_t out_row, int columns, float* lse_gmem,
                                           int rows) {
  using VTile = typename C::VTile;
  static_assert(VTile::ROW_BYTES <= C::QKTile::ROW_BYTES);
  const int lane = ptx::mov_tid_x_volatile() % 32;
  __syncwarp();  // every lane has read its fragments of Q, before any lane overwrites them
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const device::RowEnd end =
          device::finish_lane_row<C>(state, m, r, device::MINUS_INFINITY /* no sink */);
      const int row = 16 * m + 8 * r + lane / 4;
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
        const float* o = &o_rmem[m][n][2 * r];
        *reinterpret_cast<uint32_t*>(rows_smem + VTile::offset(row, n) + lane % 4 * 4) =
            ptx::cvt_rn_x2_f32<C::DTYPE>(o[0] * end.factor, o[1] * end.factor);
      }
      if (lse_gmem != nullptr && lane % 4 == 0 && row < rows) lse_gmem[row] = end.lse;
    }
  }
  __syncwarp();  // the warp's rows are complete before any lane reads them
  constexpr int CHUNKS = C::HEAD_DIM_V / 8;
#pragma unroll
  for (int index = lane; index < C::WARP_ROWS * CHUNKS; index += 32) {
    const int row = index / CHUNKS, chunk = index % CHUNKS;
    const uint4 x = *reinterpret_cast<const uint4*>(rows_smem + VTile::offset(row, chunk));
    if (row < rows && chunk * 8 < columns)
      ptx::st_global_v4_b32(out_gmem + row * out_row + chunk * 8, x.x, x.y, x.z, x.w);
  }
}

// Writes the outputs of a warp to the rows of a head from `row` on, as the call's strides say.
// warp_row: the warp's first row in the tile.
template <class C>
__device__ __forceinline__ void store_head_rows(const device::Outputs<C>& o_rmem,
                                                const device::RowState<C>& state,
                                                unsigned char* shared,
                                                const AttentionParams& params, uint32_t batch,
                                                uint32_t head, auto row, int warp_row, int rows) {
  float* lse_gmem = params.lse_gmem;
  if (lse_gmem != nullptr) lse_gmem += batch * params.lse_batch + head * params.lse_head + row;
  uint16_t* out_gmem = static_cast<uint16_t*>(params.out_gmem) + batch * params.out_batch +
                       head * params.out_head + row * params.out_row;
  store_rows<C>(o_rmem, state, shared + C::Q_SMEM + warp_row * C::QKTile::ROW_BYTES, out_gmem,
                params.out_row, params.dv, lse_gmem, rows);
}

}  // namespace archflash::mma_sync
