// What the CTAs of fused_bwd.cuh do for dQ: dS K of a block of queries is added to sums in fp32.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/backward_rows.cuh"
#include "common/device/backward_sums.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/dq_turns.cuh"
#include "common/mma_sync/fused_bwd_config.cuh"
#include "common/mma_sync/key_tiles.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/global_order.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

using device::BackwardWork;
using device::Passing;

struct FusedWork : BackwardWork {
  // The sequence's first row of Q, dO and the terms of the first query head.
  const uint16_t* q_gmem;
  const uint16_t* dout_gmem;
  const device::RowTerms* terms_gmem;
  device::DqWalk walk;
};

// Adds dS K of a block of queries, in fp32, to the sums. Where CTAs take turns, it may wait for the
// CTA of the keys before, and the first CTA of a block writes the sums.
template <class C>
__device__ __forceinline__ void add_dq(const BackwardParams& params, const FusedWork& cta,
                                       const Passing& block, uint32_t ds_smem, uint32_t k_smem,
                                       bool waits) {
  using Scores = typename C::ScoreTile;
  using Tile = typename C::FirstTile;
  const int thread = ptx::mov_tid_x_volatile();
  const int lane = thread % 32, warp = thread / 32;
  const int row = warp / C::DQ_COLUMN_WARPS * C::DQ_ROWS;
  const int column = warp % C::DQ_COLUMN_WARPS * (C::DQ_ALTERNATES ? 16 : C::DQ_COLUMNS);
  const int64_t number = device::dq_block_number(params, cta, block, C::BLOCK);
  const int turn = cta.first_row / C::ROWS;
  const bool writes = params.dq_sums.turns_gmem != nullptr && !waits;
  // Read before the products, which hide how long this takes.
  int turns_taken = turn;
  if (waits) turns_taken = ptx::ld_relaxed_s32(params.dq_sums.turns_gmem + number);
  const uint32_t a_smem = Scores::advance(ds_smem + columns_first_offset<Scores>(lane), row / 8);
  const uint32_t b_smem = Tile::advance(k_smem + rows_first_offset<Tile>(lane), column / 8);
  float* sums_gmem = params.dq_sums.gmem + number * (C::BLOCK * C::HEAD_DIM) +
                     device::dq_fragment<C::HEAD_DIM>(row / 16, column / 8) + lane;
#pragma unroll 1
  for (int step = 0; step < C::DQ_COLUMNS; step += C::DQ_STEP) {
    float dq_rmem[C::DQ_ROWS / 16][C::DQ_STEP / 8][4] = {};
#pragma unroll
    for (int key = 0; key < C::ROWS; key += 16) {
      uint32_t a_rmem[C::DQ_ROWS / 16][4];
#pragma unroll
      for (int m = 0; m < C::DQ_ROWS / 16; ++m) {
        ptx::ldmatrix_x4_trans(a_rmem[m], Scores::advance(a_smem, m * 2) + key * Scores::ROW_BYTES);
      }
#pragma unroll
      for (int n = 0; n < C::DQ_STEP / 8; n += 2) {
        uint32_t b_rmem[4];
        ptx::ldmatrix_x4_trans(b_rmem, Tile::advance(b_smem, (step / 8 + n) * C::DQ_PAIR_STEP) +
                                           key * Tile::ROW_BYTES);
#pragma unroll
        for (int m = 0; m < C::DQ_ROWS / 16; ++m) {
          ptx::mma_m16n8k16<C::DTYPE>(dq_rmem[m][n], a_rmem[m], b_rmem[0], b_rmem[1]);
          ptx::mma_m16n8k16<C::DTYPE>(dq_rmem[m][n + 1], a_rmem[m], b_rmem[2], b_rmem[3]);
        }
      }
    }
    // What is added below depends on the value that was read, so it is added after it was read.
    while (turns_taken < turn) {
      turns_taken = ptx::ld_acquire_s32(params.dq_sums.turns_gmem + number);
    }
    const auto for_each = [&](auto&& put) {
#pragma unroll
      for (int m = 0; m < C::DQ_ROWS / 16; ++m) {
#pragma unroll
        for (int n = 0; n < C::DQ_STEP / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) put(m, n, 32 * i, dq_rmem[m][n][i]);
        }
      }
    };
    const auto place = [&](int m, int n) {
      const int tile = (step / 8 + n / 2 * 2) * C::DQ_PAIR_STEP + n % 2;
      return sums_gmem + device::dq_fragment<C::HEAD_DIM>(m, tile);
    };
    if (writes) {
      for_each([&](int m, int n, int i, float x) { place(m, n)[i] = x; });
    } else {
      for_each([&](int m, int n, int i, float x) { ptx::red_add_f32(place(m, n) + i, x); });
    }
  }
}

// Passes the turn at a block to which all warps of this CTA have added before a barrier that came
// since.
template <class C>
__device__ __forceinline__ void pass_turn(const BackwardParams& params, const BackwardWork& cta,
                                          const Passing& block) {
  if (params.dq_sums.turns_gmem == nullptr) return;
  if (block.head < 0 || threadIdx.x != 0) return;
  device::pass_turn(params.dq_sums, device::dq_block_number(params, cta, block, C::BLOCK),
                    cta.first_row / C::ROWS);
}

}  // namespace archflash::mma_sync
