// dQ where rounds have several sums, one or two for each chain of tiles.
#pragma once

#include <cstdint>

#include "common/device/quad.cuh"
#include "hopper/backward/backward_dq.cuh"

namespace archflash::hopper {

// As write_dq(), but loads of four sums are in flight together, and a warp reads 512 bytes at a
// time. That takes 104 registers in place of 44, with which one sum would be read more slowly.
template <class C>
__device__ __forceinline__ void write_dq_of_chains(const BackwardKernelParams& params) {
  const AttentionParams& attention = params.backward.attention;
  const GradientParams& gradient = params.backward.dq;
  const int index = static_cast<int>(blockIdx.x);
  ptx::griddepcontrol_wait();  // all CTAs have added to the sums
  const device::SummedRound round = device::find_summed_round<C>(params, index);
  if (round.rows < 0) return;
  const device::SumsOfRound<C> sums_of_round(params, index);
  const int64_t start = device::gradient_of_sequence(params, round);
  // A thread reads what one lane had of eight columns, four times, and exchanges that with the
  // other lanes of its quad: it writes eight columns of two rows, 8 apart.
  constexpr int CHUNKS = C::PART_COLUMNS / 8, TOGETHER = 4, SUMS_AT_A_TIME = 4;
  static_assert(CHUNKS % TOGETHER == 0);
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.y); i * BACKWARD_DQ_THREADS < C::ROUND_SUMS / 16;
       i += static_cast<int>(gridDim.y)) {
    const int number = i * BACKWARD_DQ_THREADS + static_cast<int>(threadIdx.x);
    if (C::ROUND_SUMS / 16 < BACKWARD_DQ_THREADS && number >= C::ROUND_SUMS / 16) return;
    const int lane = number % 32, of_warps = number / 32;
    const int n = of_warps % (CHUNKS / TOGETHER) * TOGETHER, warp = of_warps / (CHUNKS / TOGETHER);
    const int part = warp / 4;
    const int first_row =
        round.first_row + (C::SHARES_ROWS ? part * C::PART_ROWS : 0) + warp % 4 * C::WARP_ROWS;
    if (first_row >= round.rows) continue;
    const SumsPart<C> of_part(params, part);
    int has = TOGETHER;
    if constexpr (C::SUMS_STEP < C::HEAD_DIM) {
      has = min(of_part.columns / 8 - n, TOGETHER);
      if (has <= 0 || warp % 4 * C::WARP_ROWS >= of_part.rows) continue;
    }
    const int of_warp = (of_part.start + warp % 4 * C::WARP_ROWS * of_part.columns) / 4;
    float4 sums[TOGETHER];
    sums_of_round.template read_many<SUMS_AT_A_TIME, TOGETHER, 32>(sums, of_warp + n * 32 + lane,
                                                                   has);
    const int column = (C::SHARES_ROWS ? 0 : part * C::PART_COLUMNS) + 8 * (n + lane % 4);
    const int row = first_row + lane / 4;
    const float scale = params.backward.scale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t words[2][TOGETHER];  // the first and the second one of two neighbouring columns
#pragma unroll
      for (int t = 0; t < TOGETHER; ++t) {
        words[0][t] = __float_as_uint((r == 0 ? sums[t].x : sums[t].z) * scale);
        words[1][t] = __float_as_uint((r == 0 ? sums[t].y : sums[t].w) * scale);
      }
      device::transpose_in_quad(words[0]);
      device::transpose_in_quad(words[1]);
      float x[8];
#pragma unroll
      for (int t = 0; t < TOGETHER; ++t) {
        x[2 * t] = __uint_as_float(words[0][t]);
        x[2 * t + 1] = __uint_as_float(words[1][t]);
      }
      if (row + 8 * r < round.rows && column < attention.d) {
        device::store_gradient_chunk<C::DTYPE>(gradient,
                                               start + (row + 8 * r) * gradient.row + column, x);
      }
    }
  }
}

}  // namespace archflash::hopper
