// The role dq, four warps: dQ -> the sums in the workspace; and the kernel that scales and rounds
// them.
#pragma once

#include <cstdint>

#include "blackwell_dc/backward_params.h"
#include "blackwell_dc/backward_pipeline.cuh"
#include "common/backward_params.h"
#include "common/device/backward_round_sums.cuh"
#include "common/device/backward_rounds.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/ring.cuh"
#include "common/device/uniform.cuh"
#include "common/ptx/bulk_order.cuh"
#include "common/ptx/bulk_store.cuh"
#include "common/ptx/global_order.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/named_barrier.cuh"
#include "common/ptx/tcgen05.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_dc::backward {

using device::BlockPosition;
using device::CtaWork;
using device::release;
using device::uniform;

constexpr int DQ_NAMED_BARRIER = 1;

// TMA adds 32 columns at once. A thread has a query row.
template <class C>
__device__ __forceinline__ void add_dq(const BackwardKernelParams& params, const CtaWork& work,
                                       unsigned char* shared, uint32_t shared_smem) {
  constexpr int PIECES = C::HEAD_DIM / C::DQ_COLUMNS;
  static_assert(PIECES % C::DQ_STAGES == 0);
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int row = threadIdx.x % C::BLOCK;
  const uint32_t dq_tmem = uniform(ptx::tmem_lanes_of_warp(threadIdx.x / 32)) + C::DQ_COLUMN;
  // One thread starts the additions: the elected one of the first warp. The branches are two, so
  // that ptxas sees that it is one lane.
  const bool first_warp = uniform(static_cast<int>(threadIdx.x) / 32) == C::DQ_WARP;
  const auto as_leader = [&](const auto& act) {
    if (first_warp) {
      if (ptx::elect_sync()) act();
    }
  };
  const auto sync = [] { ptx::bar_sync(DQ_NAMED_BARRIER, 32 * C::DQ_WARPS); };
  BlockPosition<C> block{0, work.start};
  uint32_t parity = 0;
#pragma unroll 1
  for (int left = work.blocks; left > 0; --left) {
    const device::DqTurn turn = device::dq_turn<C>(params, work, block);
    const bool in_turns = params.turns_gmem != nullptr;
    float* sums_gmem = params.dq_sums_gmem + static_cast<int64_t>(turn.sum) * C::ROUND_SUMS;
    ptx::mbarrier_wait_parity(barriers.dq_ready(), parity);
    ptx::tcgen05_fence_after_thread_sync();
    parity ^= 1;
    // All of dQ is taken over before any of it goes on: the tensor cores wait for its columns.
    float dq_rmem[PIECES][C::DQ_COLUMNS];
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
      ptx::tcgen05_ld(dq_rmem[piece], dq_tmem + piece * C::DQ_COLUMNS);
    ptx::tcgen05_wait_ld(dq_rmem);
    ptx::tcgen05_fence_before_thread_sync();
    release(barriers.dq_empty());
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      const int offset = C::DQ_SMEM + piece % C::DQ_STAGES * C::DQ_BYTES;
      // TMA has read the piece that lay here.
      as_leader([] { ptx::cp_async_bulk_wait_group_read_1(); });
      sync();
#pragma unroll
      for (int i = 0; i < C::DQ_COLUMNS / 4; ++i) {
        const float* const dq = &dq_rmem[piece][4 * i];
        *reinterpret_cast<float4*>(shared + offset + (i * C::BLOCK + row) * 16) =
            float4{dq[0], dq[1], dq[2], dq[3]};
      }
      ptx::fence_proxy_async_shared();  // the stores come before TMA reads them
      sync();
      as_leader([&] {
        if (piece == 0 && turn.waits) {
          const int own_turn = work.turn;
          while (ptx::ld_acquire_s32(params.turns_gmem + turn.sum) < own_turn) {
          }
          ptx::fence_proxy_async_global();  // the turn has come before TMA adds
        }
        float* const piece_gmem = sums_gmem + piece * (C::DQ_BYTES / 4);
        if (in_turns && !turn.waits) {
          ptx::cp_async_bulk_store(piece_gmem, shared_smem + offset, C::DQ_BYTES);
        } else {
          ptx::cp_reduce_async_bulk_add_f32(piece_gmem, shared_smem + offset, C::DQ_BYTES);
        }
        ptx::cp_async_bulk_commit_group();
      });
    }
    as_leader([&] {
      if (!in_turns) return;
      ptx::cp_async_bulk_wait_group_0();  // the next tile of keys may add when this one has
      ptx::st_release_s32(params.turns_gmem + turn.sum, work.turn + 1);
    });
    __syncwarp();
    block.next_round(work);
  }
  // Shared memory stays until TMA has read it.
  as_leader([] { ptx::cp_async_bulk_wait_group_read_0(); });
}

// --- what comes behind: dQ, when all CTAs have added to its sums ---

// Writes dQ of a block of queries: the sums, times the scale.
template <class C>
__device__ __forceinline__ void write_dq(const BackwardKernelParams& params) {
  const AttentionParams& attention = params.backward.attention;
  const GradientParams& gradient = params.backward.dq;
  const int index = static_cast<int>(blockIdx.x);
  const device::SummedRound round = device::find_summed_round<C>(params, index);
  if (round.rows < 0) return;
  const device::SumsOfRound<C> sums_of_round(params, index);
  const int64_t start = device::gradient_of_sequence(params, round);
  const float scale = params.backward.scale;
  // A thread takes eight columns of a row.
#pragma unroll
  for (int i = 0; i < C::ROUND_SUMS / 8 / BACKWARD_DQ_THREADS; ++i) {
    const int number = i * BACKWARD_DQ_THREADS + static_cast<int>(threadIdx.x);
    const int row = number % C::BLOCK, chunk = number / C::BLOCK;
    if (round.first_row + row >= round.rows || 8 * chunk >= attention.d) continue;
    float4 sums[2];
    sums_of_round.template read<2, C::BLOCK>(sums, 2 * chunk * C::BLOCK + row);
    float x[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      x[4 * half] = sums[half].x * scale, x[4 * half + 1] = sums[half].y * scale;
      x[4 * half + 2] = sums[half].z * scale, x[4 * half + 3] = sums[half].w * scale;
    }
    device::store_gradient_chunk<C::DTYPE>(
        gradient, start + (round.first_row + row) * gradient.row + 8 * chunk, x);
  }
}

}  // namespace archflash::blackwell_dc::backward
