// dQ: the sums in the workspace, to which the CTAs of a head add their parts, and the kernel that
// scales and rounds them.
#pragma once

#include <cstdint>

#include "common/device/backward_round_sums.cuh"
#include "common/ptx/bulk_load.cuh"
#include "common/ptx/bulk_order.cuh"
#include "common/ptx/bulk_store.cuh"
#include "common/ptx/global_order.cuh"
#include "hopper/backward/backward_params.h"
#include "hopper/backward/backward_pipeline.cuh"

namespace archflash::hopper {

// --- two warps: dQ of each round -> the sums in the workspace ---

// A part of the sums of a round, which have no more rows and columns than dQ needs. Parts come one
// after another, in a part the rows of each warp, and of these eight columns after eight others.
template <class C>
struct SumsPart {
  int rows, columns;
  int start;  // in floats from those of the round
  __device__ __forceinline__ SumsPart(const BackwardKernelParams& params, int number) {
    const int all_rows = device::sums_rows<C>(params);
    const int all = device::sums_columns<C>(params.backward.attention.d);
    if constexpr (C::SHARES_ROWS) {
      rows = min(all_rows - number * C::PART_ROWS, C::PART_ROWS);
      columns = all;
      start = number * C::PART_ROWS * all;
    } else {
      const int before = min(number * C::PART_COLUMNS, all);
      rows = all_rows;
      columns = min(all - before, C::PART_COLUMNS);
      start = all_rows * before;
    }
  }
};

// TMA adds a part at once, which is faster than additions of 16 bytes. Warp `number` adds the parts
// of a consumer warpgroup. In turns it adds both parts of every second round, because to wait for a
// turn, to add and to hand it on takes longer than a round.
template <class C>
__device__ __forceinline__ void add_dq(const BackwardKernelParams& params, unsigned char* shared,
                                       uint32_t shared_smem, uint32_t number) {
  constexpr int PART_BYTES = 4 * C::PART_ROWS * C::PART_COLUMNS;
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const bool leader = ptx::elect_sync();
  const bool in_turns = params.turns_gmem != nullptr;
  const bool all_groups = in_turns || C::WARPGROUPS == 1;
  const int first_group = all_groups ? 0 : static_cast<int>(number);
  const int end_group = all_groups ? C::WARPGROUPS : first_group + 1;
  // The sums of a round lie in memory as in shared memory.
  const bool whole_sums = C::SUMS_STEP == C::HEAD_DIM ||
                          (C::MERGES_PARTS && device::round_sums<C>(params) == C::ROUND_SUMS);
  uint32_t count = 0;          // of rounds
  ptx::griddepcontrol_wait();  // the sums and the turns are zero
  for_each_tile<C>(params, shared, shared_smem, [&](const CtaWork& work, const auto&) {
    BlockPosition<C> block = device::first_block<C>(params, work);
    const uint32_t end = count + work.blocks / C::BLOCKS_OF_ROUND;
#pragma unroll 1
    for (; count < end; ++count, block.next_round(work)) {
      if (all_groups && count % 2 != number) continue;
      const device::DqTurn turn = device::dq_turn<C>(params, work, block);
      // It looks for its turn while dQ is computed, because that takes a while even if it has come.
      if (leader && turn.waits) {
        while (ptx::ld_acquire_s32(params.turns_gmem + turn.sum) < turn.come) {
        }
      }
      __syncwarp();
#pragma unroll 1
      for (int group = first_group; group < end_group; ++group)
        ptx::mbarrier_wait_parity(barriers.dq_full(group, count), count / 2 % 2);
      if (leader) {
        if (turn.waits) ptx::fence_proxy_async_global();  // the turn has come before TMA adds
        float* const round_gmem = device::sums_of_round<C>(params, turn.sum);
        const bool adds = !device::lists_rounds<C>() || turn.come != device::ListedRound::NO_TURN;
        const auto add = [&](int start, uint32_t offset, uint32_t bytes) {
          if (!adds) return;
          const uint32_t from_smem = shared_smem + C::DQ_SMEM + offset;
          if (in_turns && !turn.waits) {
            ptx::cp_async_bulk_store(round_gmem + start, from_smem, bytes);
          } else {
            ptx::cp_reduce_async_bulk_add_f32(round_gmem + start, from_smem, bytes);
          }
        };
        if (whole_sums) {
          add(first_group * (PART_BYTES / 4), first_group * PART_BYTES,
              (end_group - first_group) * PART_BYTES);
        } else {  // what dQ has of each warp's rows
#pragma unroll 1
          for (int group = first_group; group < end_group; ++group) {
            const SumsPart<C> part(params, group);
#pragma unroll 1
            for (int warp = 0; warp * C::WARP_ROWS < part.rows && part.columns > 0; ++warp) {
              add(part.start + warp * C::WARP_ROWS * part.columns,
                  group * PART_BYTES + warp * 4 * C::WARP_SUMS, 4 * C::WARP_ROWS * part.columns);
            }
          }
        }
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group_read_0();
#pragma unroll 1
        for (int group = first_group; group < end_group; ++group)
          ptx::mbarrier_arrive(barriers.dq_empty(group));
        if (in_turns) {  // the CTA of the next turn may add when this one has
          // Whether a CTA has the turn behind this one, in the rounds that it goes over, too.
          const int behind = work.first_row + device::count_chains(params) * C::ROWS;
          if (C::SWAPS_KEYS || (work.upwards ? work.first_row > 0 : behind < work.own_rows))
            ptx::cp_async_bulk_wait_group_0();
          if (adds) ptx::st_release_s32(params.turns_gmem + turn.sum, work.turn + 1);
        }
      }
      __syncwarp();
    }
  });
}

// With ENDS_DQ: brings the sums of the CTA before of each round to where its dQ comes to lie, and
// writes what comes of them: new sums, or where this CTA is the last one to add dQ itself. With
// WRITES_DQ there are no sums, and a round is complete at once. Warp `number` has every second
// round, as above.
template <class C>
__device__ __forceinline__ void end_dq(const BackwardParamsOf<C>& all_params, unsigned char* shared,
                                       uint32_t shared_smem, uint32_t number) {
  using DqTile = typename C::DqTile;
  static_assert(C::SUMS_STEP == C::HEAD_DIM, "sums lie in memory as in shared memory");
  constexpr int PART_BYTES = 4 * C::PART_ROWS * C::PART_COLUMNS;
  const BackwardKernelParams& params = call_of<C>(all_params);
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const bool leader = ptx::elect_sync();
  DqNote& note = *reinterpret_cast<DqNote*>(shared + C::DQ_NOTE_SMEM);
  uint32_t count = 0;          // of rounds
  ptx::griddepcontrol_wait();  // the turns are zero, and what comes before is done with dQ
  for_each_tile<C>(params, shared, shared_smem, [&](const CtaWork& work, const auto&) {
    // The first row of the first round that the tile behind goes over, too, and ends.
    const int next_key = work.first_row + C::ROWS;
    int goes_on = INT32_MAX;
    if (!C::WRITES_DQ && next_key < work.own_rows)
      goes_on = C::SWAPS_KEYS ? 0 : work.visible.first(next_key) & -C::ROUND;
    BlockPosition<C> block = device::first_block<C>(params, work);
    const uint32_t end = count + work.blocks / C::BLOCKS_OF_ROUND;
#pragma unroll 1
    for (; count < end; ++count, block.next_round(work)) {
      if (count % 2 != number) continue;
      const device::DqTurn turn =
          C::WRITES_DQ ? device::DqTurn{} : device::dq_turn<C>(params, work, block);
      const bool ends = block.row < goes_on;
      if (leader) {
        float* const sums_gmem = device::sums_of_round<C>(params, turn.sum);
        int32_t* const turn_gmem = params.turns_gmem + turn.sum;
        if (!C::WRITES_DQ && turn.waits) {
          const int own_turn = work.turn;
          while (ptx::ld_acquire_s32(turn_gmem) < own_turn) {
          }
          ptx::fence_proxy_async_global();  // the turn has come before TMA reads
        }
        ptx::mbarrier_wait_parity(barriers.dq_read(), count % 2 ^ 1);
        if constexpr (!C::WRITES_DQ) note = {turn.waits, ends};
#pragma unroll 1
        for (int group = 0; group < C::WARPGROUPS; ++group) {
          if (!C::WRITES_DQ && turn.waits) {
            ptx::mbarrier_arrive_expect_tx(barriers.dq_empty(group), PART_BYTES);
            ptx::cp_async_bulk_load(shared_smem + C::DQ_SMEM + group * PART_BYTES,
                                    sums_gmem + group * (PART_BYTES / 4), PART_BYTES,
                                    barriers.dq_empty(group));
          } else {
            ptx::mbarrier_arrive(barriers.dq_empty(group));
          }
        }
#pragma unroll 1
        for (int group = 0; group < C::WARPGROUPS; ++group) {
          const uint32_t from_smem = shared_smem + C::DQ_SMEM + group * PART_BYTES;
          ptx::mbarrier_wait_parity(barriers.dq_full(group, count), count / 2 % 2);
          if (C::WRITES_DQ || ends) {
            const int row = block.row + (C::SHARES_ROWS ? group * C::PART_ROWS : 0);
            const int column = C::SHARES_ROWS ? 0 : group * C::PART_COLUMNS;
            const int head = work.head * params.backward.attention.heads_per_kv + block.head;
#pragma unroll 1
            for (int warp = 0; warp < 4; ++warp) {
#pragma unroll
              for (int slab = 0; slab < DqTile::SLABS; ++slab) {
                ptx::cp_async_bulk_tensor_4d_store(
                    all_params.dq_map, column + slab * DqTile::SLAB, row + warp * C::WARP_ROWS,
                    head, work.batch,
                    from_smem + warp * (4 * C::WARP_SUMS) + slab * DqTile::SLAB_BYTES);
              }
            }
          } else {
            ptx::cp_async_bulk_store(sums_gmem + group * (PART_BYTES / 4), from_smem, PART_BYTES);
          }
        }
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group_read_0();
        ptx::mbarrier_arrive(barriers.dq_read());
        // The CTA of the next turn may go on when this one has written.
        if (!C::WRITES_DQ && !ends) {
          ptx::cp_async_bulk_wait_group_0();
          ptx::st_release_s32(turn_gmem, work.turn + 1);
        }
      }
      __syncwarp();
    }
  });
}

// --- what comes behind: dQ, when all CTAs have added to its sums ---

// Writes dQ of a round of queries: the sums, times the scale. Where rounds are few, several CTAs
// share one out.
template <class C>
__device__ __forceinline__ void write_dq(const BackwardKernelParams& params) {
  const AttentionParams& attention = params.backward.attention;
  const GradientParams& gradient = params.backward.dq;
  const int index = static_cast<int>(blockIdx.x);
  ptx::griddepcontrol_wait();  // all CTAs have added to the sums
  const device::SummedRound round = device::find_summed_round<C>(params, index);
  if (round.rows < 0) return;
  const device::SumsOfRound<C> sums_of_round(params, index);
  const int64_t start = device::gradient_of_sequence(params, round);
  // A thread takes what four lanes have of eight columns: of two rows, 8 apart.
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.y); i * BACKWARD_DQ_THREADS < C::ROUND_SUMS / 16;
       i += static_cast<int>(gridDim.y)) {
    const int number = i * BACKWARD_DQ_THREADS + static_cast<int>(threadIdx.x);
    if (C::ROUND_SUMS / 16 < BACKWARD_DQ_THREADS && number >= C::ROUND_SUMS / 16) return;
    constexpr int CHUNKS = C::PART_COLUMNS / 8;
    const int n = number % CHUNKS, lane_row = number / CHUNKS % 8, warp = number / (8 * CHUNKS);
    const int part = warp / 4;
    const int column = (C::SHARES_ROWS ? 0 : part * C::PART_COLUMNS) + 8 * n;
    const int first_row =
        round.first_row + (C::SHARES_ROWS ? part * C::PART_ROWS : 0) + warp % 4 * C::WARP_ROWS;
    if (first_row >= round.rows) continue;
    const SumsPart<C> of_part(params, part);
    if (C::SUMS_STEP < C::HEAD_DIM &&
        (column >= attention.d || warp % 4 * C::WARP_ROWS >= of_part.rows))
      continue;
    const int of_warp = (of_part.start + warp % 4 * C::WARP_ROWS * of_part.columns) / 4;
    float4 sums[4];
    sums_of_round.template read<4, 1>(sums, of_warp + n * 32 + lane_row * 4);
    float x[2][8];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float scale = params.backward.scale;
      x[0][2 * t] = sums[t].x * scale, x[0][2 * t + 1] = sums[t].y * scale;
      x[1][2 * t] = sums[t].z * scale, x[1][2 * t + 1] = sums[t].w * scale;
    }
    const int row = first_row + lane_row;
    if (column >= attention.d) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= round.rows) continue;
      device::store_gradient_chunk<C::DTYPE>(gradient,
                                             start + (row + 8 * r) * gradient.row + column, x[r]);
    }
  }
}

}  // namespace archflash::hopper
