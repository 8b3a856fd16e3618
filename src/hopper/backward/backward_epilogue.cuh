// The end of a tile of keys: dK and dV are rounded and written.
#pragma once

#include <cstdint>

#include "common/device/quad.cuh"
#include "hopper/backward/backward_params.h"
#include "hopper/backward/backward_products.cuh"

namespace archflash::hopper {

// Writes, or adds, a warp's rows of a gradient times `factor`.
template <class C, class Tile>
__device__ __forceinline__ void store_gradient(const KeyGradient<Tile>& x_rmem,
                                               const GradientParams& gradient, const CtaWork& work,
                                               int columns, float factor) {
  // A CTA that stays has no register to keep this in from tile to tile.
  const unsigned thread =
      C::HANDS_KEYS_BACK || C::HANDS_VALUES_BACK ? ptx::mov_tid_x_volatile() : threadIdx.x;
  const int lane = thread % 32;
  const int warp = static_cast<int>(thread) / 32 % C::KEY_WARPS;
  const int first = work.first_row + warp * C::WARP_ROWS + lane / 4;
  const int64_t start = work.batch * gradient.batch + work.gradient_head * gradient.head +
                        (static_cast<int64_t>(work.own_start) + first) * gradient.row;
  if (gradient.dtype != DType::F32 && !gradient.accumulate) {
    // A lane has two neighbouring columns of eight. The lanes of a quad exchange them, so that each
    // writes all eight: the next CTA cannot begin before the stores are issued.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint16_t* const row_gmem =
          static_cast<uint16_t*>(gradient.gmem) + start + 8 * r * gradient.row;
      uint32_t end = columns;  // compared anew for each row: no register is left for the answers
      if constexpr (C::COUNTS_BLOCKS) ptx::registers_change<1>(&end);
#pragma unroll
      for (int n = 0; n < Tile::COLUMNS / 8; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          words[i] = ptx::cvt_rn_x2_f32<C::DTYPE>(x_rmem[n + i][2 * r] * factor,
                                                  x_rmem[n + i][2 * r + 1] * factor);
        }
        device::transpose_in_quad(words);
        const int column = 8 * (n + lane % 4);
        if (first + 8 * r < work.own_rows && column < static_cast<int>(end))
          ptx::st_global_v4_b32(row_gmem + column, words[0], words[1], words[2], words[3]);
      }
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (first + 8 * r >= work.own_rows) continue;
    const int64_t row = start + 8 * r * gradient.row;
#pragma unroll
    for (int n = 0; n < Tile::COLUMNS / 8; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      if (column >= columns) continue;
      const float2 x = {x_rmem[n][2 * r] * factor, x_rmem[n][2 * r + 1] * factor};
      device::store_gradient_pair<C::DTYPE>(gradient, row + column, x);
    }
  }
}

// What keys that no query sees get: 0. Called by the first `warps` warps of a CTA.
template <class C>
__device__ __forceinline__ void clear_gradients(const BackwardKernelParams& params,
                                                const CtaWork& work, int warps) {
  const int lane = threadIdx.x % 32;
  const int end = min(work.first_row + C::ROWS, work.own_rows);
  for (int row = work.first_row + static_cast<int>(threadIdx.x) / 32; row < end; row += warps) {
    const AttentionParams& attention = params.backward.attention;
    const int64_t row_of_tensor = static_cast<int64_t>(work.own_start) + row;
    device::clear_gradient_row(params.backward.dk, work.batch, work.gradient_head, row_of_tensor,
                               attention.d, lane, 32);
    device::clear_gradient_row(params.backward.dv, work.batch, work.gradient_head, row_of_tensor,
                               attention.dv, lane, 32);
  }
}

}  // namespace archflash::hopper
