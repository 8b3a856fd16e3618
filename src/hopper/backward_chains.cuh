// dQ where the tiles of a head make many chains, each with a sum of its own: few rows of queries
// beside many keys, so that one CTA for a round would be too few to read the sums.
#pragma once

#include <cstdint>

#include "hopper/backward_dq.cuh"
#include "hopper/chains_config.cuh"

namespace archflash::hopper {

// Writes some pieces of dQ: the sums of all chains, times the scale. Each warp adds up every eighth
// sum, and then its threads add up what the warps have, always in the same order.
template <class C>
__device__ __forceinline__ void write_dq_of_chains(const BackwardKernelParams& params) {
  constexpr int WARPS = BACKWARD_DQ_THREADS / 32, PART_CHUNKS = C::PART_COLUMNS / 8;
  constexpr int CTAS = DQ_CTAS_OF_ROUND<C>, MOST = 32;  // CTAs and sums of a round
  static_assert(DQ_PIECES <= WARPS && C::ROUND_SUMS % (DQ_PIECES * 8 * C::WARP_ROWS) == 0);
  __shared__ float4 of_warps[WARPS][DQ_PIECES][32];
  const AttentionParams& attention = params.backward.attention;
  const GradientParams& gradient = params.backward.dq;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int index = static_cast<int>(blockIdx.x) / CTAS;
  const device::SummedRound round = device::find_summed_round<C>(params, index);
  // A piece by its number in the CTA: its first column, its first row in the round, and where it
  // lies in a sum, in chunks of 16 bytes; chunk < 0: dQ does not have it.
  struct Piece {
    int column, row, chunk;
  };
  const auto find_piece = [&](int i) {
    const int number = static_cast<int>(blockIdx.x) % CTAS * DQ_PIECES + i;
    const int rows_16 = number / PART_CHUNKS, n = number % PART_CHUNKS;
    const int number_of_part = rows_16 / 4, row = rows_16 % 4 * C::WARP_ROWS;
    const SumsPart<C> part(params, number_of_part);
    const int column = (C::SHARES_ROWS ? 0 : number_of_part * C::PART_COLUMNS) + 8 * n;
    const int row_of_round = (C::SHARES_ROWS ? number_of_part * C::PART_ROWS : 0) + row;
    const bool has =
        column < attention.d && row < part.rows && round.first_row + row_of_round < round.rows;
    const int chunk = (part.start + row * part.columns) / 4 + n * 32;
    return Piece{column, row_of_round, has ? chunk : -1};
  };
  int chunks[DQ_PIECES];
#pragma unroll
  for (int i = 0; i < DQ_PIECES; ++i) chunks[i] = find_piece(i).chunk;
  ptx::griddepcontrol_wait();  // all CTAs have added to the sums
  const device::SumsOfRound<C> sums(params, index);
  float4 read[MOST / WARPS][DQ_PIECES] = {};
  const auto load = [&](uint32_t wanted) {
#pragma unroll
    for (int j = 0; j < MOST / WARPS; ++j) {
      const int number = j * WARPS + warp;
      if (number >= params.sums_of_round || (wanted >> number & 1) == 0) continue;
      const float4* const sum_gmem =
          sums.sums_gmem + static_cast<int64_t>(number) * sums.to_next + lane;
#pragma unroll
      for (int i = 0; i < DQ_PIECES; ++i) {
        if (chunks[i] >= 0) read[j][i] = sum_gmem[chunks[i]];
      }
    }
  };
  // Where tiles start apart, some sums are never written. Elsewhere all loads are in flight before
  // it is known which were.
  if (params.turn_tiles > 0) {
    load(sums.written);
  } else {
    load(~0u);
  }
  float4 own[DQ_PIECES] = {};
#pragma unroll
  for (int j = 0; j < MOST / WARPS; ++j) {
    if ((sums.written >> (j * WARPS + warp) & 1) == 0) continue;
#pragma unroll
    for (int i = 0; i < DQ_PIECES; ++i) {
      const float4& x = read[j][i];
      own[i] = {own[i].x + x.x, own[i].y + x.y, own[i].z + x.z, own[i].w + x.w};
    }
  }
#pragma unroll
  for (int i = 0; i < DQ_PIECES; ++i) of_warps[warp][i][lane] = own[i];
  __syncthreads();  // all warps have written what they have added up
  // A thread takes 8 columns of a row: two of each lane of a quad.
  if (threadIdx.x >= DQ_PIECES * C::WARP_ROWS) return;
  const int of_piece = static_cast<int>(threadIdx.x) % C::WARP_ROWS;
  const int number = static_cast<int>(threadIdx.x) / C::WARP_ROWS;
  const Piece piece = find_piece(number);
  const int row = round.first_row + piece.row + of_piece;
  if (piece.chunk < 0 || row >= round.rows) return;
  float x[8] = {};
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float4& four = of_warps[i][number][of_piece % 8 * 4 + t];
      x[2 * t] += of_piece < 8 ? four.x : four.z;
      x[2 * t + 1] += of_piece < 8 ? four.y : four.w;
    }
  }
#pragma unroll
  for (float& sum : x) sum *= params.backward.scale;
  device::store_gradient_chunk<C::DTYPE>(
      gradient, device::gradient_of_sequence(params, round) + row * gradient.row + piece.column, x);
}

}  // namespace archflash::hopper
