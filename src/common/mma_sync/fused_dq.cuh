// What the CTAs of fused_bwd.cuh do for dQ: dS K of a block of queries is added to sums in fp32, or
// is dQ at once where the keys of a head are one tile.
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
#include "common/ptx/bulk_order.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/global_order.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_shared.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

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

// Writes the fragments dq_rmem of dQ, from row `row` of a block and column `column` on. Pairs of
// fragments are PAIR_STEP pairs apart.
template <class C, int ROW_TILES, int COLUMN_TILES>
__device__ __forceinline__ void store_dq(const BackwardParams& params, const BackwardWork& cta,
                                         const Passing& block, int row, int column,
                                         const float (&dq_rmem)[ROW_TILES][COLUMN_TILES][4]) {
  const int lane = ptx::mov_tid_x_volatile() % 32;
  const int head = cta.head * params.attention.heads_per_kv + block.head;
  const int first = block.row + row + lane / 4;
  const int64_t start = cta.batch * params.dq.batch + head * params.dq.head +
                        (static_cast<int64_t>(cta.passing_start) + first) * params.dq.row;
  const auto for_each = [&](auto&& put) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (first + 16 * m + 8 * r >= cta.passing_rows) continue;
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n) {
          const int at = column + 8 * (n / 2 * 2 * C::DQ_PAIR_STEP + n % 2) + lane % 4 * 2;
          const float* x = &dq_rmem[m][n][2 * r];
          if (at < params.attention.d) {
            put(start + (16 * m + 8 * r) * params.dq.row + at,
                float2{x[0] * params.scale, x[1] * params.scale});
          }
        }
      }
    }
  };
  if (params.dq.dtype == DType::F32 || params.dq.accumulate) {
    for_each(
        [&](int64_t at, float2 x) { device::store_gradient_pair<C::DTYPE>(params.dq, at, x); });
  } else {
    uint16_t* dq_gmem = static_cast<uint16_t*>(params.dq.gmem);
    for_each([&](int64_t at, float2 x) {
      *reinterpret_cast<uint32_t*>(dq_gmem + at) = ptx::cvt_rn_x2_f32<C::DTYPE>(x.x, x.y);
    });
  }
}

// Clears dQ of the rows that see no key, for which no block comes by. By whole CTAs.
template <class C>
__device__ __forceinline__ void clear_unseeing(const BackwardParams& params,
                                               const FusedWork& work) {
  const int blocks = work.walk.template blocks<C::BLOCK>();
  const int begin = blocks > 0 ? work.walk.begin : 0;
  const int end = blocks > 0 ? work.walk.last + C::BLOCK : 0;
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < work.passing_rows; row += C::WARPS) {
    if (row >= begin && row < end) {
      row += (end - 1 - row) / C::WARPS * C::WARPS;
      continue;
    }
    for (int head = 0; head < work.heads; ++head) {
      device::clear_gradient_row(params.dq, work.batch, work.head * work.heads + head,
                                 static_cast<int64_t>(work.passing_start) + row, params.attention.d,
                                 lane, 32);
    }
  }
}

// Clears dQ of rows of a packed tensor that belong to no sequence. By whole CTAs; those of a head
// of K share out its rows.
template <class C>
__device__ __forceinline__ void clear_queries_of_no_sequence(const BackwardParams& params) {
  const AttentionParams& attention = params.attention;
  const int* cu_q = attention.cu_seqlens_q_gmem;
  const int begin = device::sequence_start(cu_q, 0, attention.nq);
  const int end = device::sequence_start(cu_q, attention.batch, attention.nq);
  if (begin == 0 && end == attention.nq) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int place = (blockIdx.z * gridDim.y + blockIdx.y) * C::WARPS + warp;
  for (int row = place; row < attention.nq; row += gridDim.y * gridDim.z * C::WARPS) {
    if (row >= begin && row < end) continue;
    for (int head = 0; head < attention.heads_per_kv; ++head) {
      device::clear_gradient_row(params.dq, 0, blockIdx.x * attention.heads_per_kv + head, row,
                                 attention.d, lane, 32);
    }
  }
}

// Adds dS K of a block of queries, in fp32, to the sums. Where CTAs take turns, `waits` says
// whether the CTA of the keys before adds to this block, too, and therefore first. The first CTA of
// a block writes the sums.
template <class C>
__device__ __forceinline__ void add_dq(const BackwardParams& params, const BackwardWork& cta,
                                       const Passing& block, uint32_t ds_smem, uint32_t k_smem,
                                       [[maybe_unused]] uint32_t sums_smem, bool waits) {
  using Scores = typename C::ScoreTile;
  using Tile = typename C::FirstTile;
  const int thread = ptx::mov_tid_x_volatile();
  const int lane = thread % 32, warp = thread / 32;
  const int row = warp / C::DQ_COLUMN_WARPS * C::DQ_ROWS;
  const int column = warp % C::DQ_COLUMN_WARPS * (C::DQ_ALTERNATES ? 16 : C::DQ_COLUMNS);
  const int64_t number = dq_block_number<C>(params, cta, block);
  const int turn = cta.first_row / C::ROWS;
  const bool writes = !C::IN_BULK && params.dq_sums.turns_gmem != nullptr && !waits;
  // Read before the products, which hide how long this takes.
  int turns_taken = turn;
  if (!C::IN_BULK && waits) turns_taken = ptx::ld_relaxed_s32(params.dq_sums.turns_gmem + number);
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
    while (!C::IN_BULK && turns_taken < turn) {
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
    // Neighbouring fragments of a warp lie side by side in the sums, too.
    constexpr int NEIGHBOURS = C::DQ_ALTERNATES ? 2 : C::DQ_STEP / 8;
    const auto place = [&](int m, int n) {
      const int tile = (step / 8 + n / 2 * 2) * C::DQ_PAIR_STEP + n % 2;
      return sums_gmem + device::dq_fragment<C::HEAD_DIM>(m, tile);
    };
    if constexpr (C::WRITES_DQ) {
      store_dq<C>(params, cta, block, row, column + step * C::DQ_PAIR_STEP, dq_rmem);
    } else if constexpr (C::IN_BULK) {
      constexpr int WARP_FRAGMENTS = C::DQ_ROWS / 16 * (C::DQ_STEP / 8);
      const uint32_t warp_smem = sums_smem + warp * (512 * WARP_FRAGMENTS);
      ptx::cp_async_bulk_wait_group_read_0();  // of the block before
      __syncwarp();
      for_each([&](int m, int n, int i, float x) {
        ptx::st_shared_b32(warp_smem + 512 * (m * (C::DQ_STEP / 8) + n) + 4 * (i + lane),
                           __float_as_uint(x));
      });
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (ptx::elect_sync()) {
#pragma unroll
        for (int n = 0; n < WARP_FRAGMENTS; n += NEIGHBOURS) {
          float* const to_gmem = place(n / (C::DQ_STEP / 8), n % (C::DQ_STEP / 8)) - lane;
          ptx::cp_reduce_async_bulk_add_f32(to_gmem, warp_smem + 512 * n, 512 * NEIGHBOURS);
        }
        ptx::cp_async_bulk_commit_group();
      }
    } else if (writes) {
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
  if (C::IN_BULK || C::WRITES_DQ || params.dq_sums.turns_gmem == nullptr) return;
  if (block.head < 0 || threadIdx.x != 0) return;
  device::pass_turn(params.dq_sums, dq_block_number<C>(params, cta, block),
                    cta.first_row / C::ROWS);
}

}  // namespace archflash::mma_sync
