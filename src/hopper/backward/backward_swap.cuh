// The loader and the warp of the terms of kernels with SWAPS_KEYS: CTAs stay, and there is room for
// K and V of one tile, so that each tile has its K where the one before has its V.
//
// The warp of the terms finds the next tile, because the loader has no registers left for that. It
// does so from the tile before: the same rows see all tiles of keys, there are no cu_seqlens, and
// where a tile is shared out a CTA has no next one.
#pragma once

#include <cstdint>

#include "common/device/backward_rounds.cuh"
#include "common/device/slab_load.cuh"
#include "common/ptx/global_order.cuh"
#include "common/ptx/special_registers.cuh"
#include "hopper/backward/backward_order.cuh"
#include "hopper/backward/backward_pipeline.cuh"

namespace archflash::hopper {

// --- loader, one warp: K, V, Q and dO -> shared memory ---

// Brings K and V of a tile, and Q and dO of each block, as device::load_rounds() does. tile_stage:
// also the parity of what the tile before hands back is other than it.
template <class C>
__device__ __forceinline__ void load_swapping(const BackwardKernelParams& params,
                                              const CtaWork& work, uint32_t shared_smem,
                                              int tile_stage, device::LoaderPosition<C>& position) {
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const AttentionParams& attention = params.backward.attention;
  const bool leader = ptx::elect_sync();  // one lane starts copies; all lanes wait and count
  auto& q_ring = position.q_ring;
  auto& dout_ring = position.dout_ring;
  const auto load_keys = [&]<class Tile>(uint32_t empty, int offset, const TensorMap& map,
                                         int64_t head_stride, int64_t batch_stride, uint32_t full) {
    ptx::mbarrier_wait_parity(empty, tile_stage ^ 1);
    if (leader) {
      device::start_load<Tile>(shared_smem + offset, map, work.first_row,
                               head_stride == 0 ? 0 : work.head, batch_stride == 0 ? 0 : work.batch,
                               full);
    }
  };
  const auto load_queries = [&]<class Tile>(uint32_t empty, uint32_t parity, int offset,
                                            const TensorMap& map, int64_t head_stride,
                                            int64_t batch_stride, BlockPosition<C> block,
                                            uint32_t full) {
    ptx::mbarrier_wait_parity(empty, parity ^ 1);
    if (leader) {
      device::start_load<Tile>(
          shared_smem + offset, map, block.row,
          head_stride == 0 ? 0 : work.head * attention.heads_per_kv + block.head,
          batch_stride == 0 ? 0 : work.batch, full);
    }
  };
  load_keys.template operator()<typename C::KTile>(barriers.values_empty(), k_offset<C>(tile_stage),
                                                   params.k_map, attention.k_head,
                                                   attention.k_batch, barriers.k_full(tile_stage));
  BlockPosition<C> block = device::first_block<C>(params, work);
#pragma unroll 1
  for (int left = work.blocks; left > 0; left -= C::BLOCKS_OF_ROUND) {
    static_assert(C::BLOCKS_OF_ROUND == 1);
    load_queries.template operator()<typename C::QTile>(
        barriers.q_empty(q_ring.stage), q_ring.parity, C::Q_SMEM + q_ring.stage * C::QTile::BYTES,
        params.q_map, attention.q_head, attention.q_batch, block, barriers.q_full(q_ring.stage));
    q_ring.advance();
    // V comes behind the first Q, because S comes before dP.
    if (left == work.blocks) {
      load_keys.template operator()<typename C::VTile>(
          barriers.keys_empty(), v_offset<C>(tile_stage), params.v_map, attention.v_head,
          attention.v_batch, barriers.v_full(tile_stage));
    }
    load_queries.template operator()<typename C::DoutTile>(
        barriers.dout_empty(dout_ring.stage), dout_ring.parity,
        C::DOUT_SMEM + dout_ring.stage * C::DoutTile::BYTES, params.dout_map,
        params.backward.dout_head, params.backward.dout_batch, block,
        barriers.dout_full(dout_ring.stage));
    dout_ring.advance();
    block.next_round(work);
  }
}

// --- one more warp: the terms of a block's rows, and the next tile ---

// The number of the next tile of a CTA whose first one is that with the CTA's index. In turns a
// tile waits for tiles with smaller numbers, so no CTA takes one before all have started; then it
// ends, and makes room for one that has not.
template <class C>
__device__ __forceinline__ int take_number_when_all_run(const BackwardKernelParams& params) {
  constexpr int TRIES = 16;  // of about a microsecond
  const int ctas = ptx::mov_nctaid_x_volatile();
  int number = params.tiles;
  if (ptx::mov_tid_x_volatile() % 32 == 0) {
    bool all_run = C::WRITES_DQ || (!C::ENDS_DQ && params.turns_gmem == nullptr);
#pragma unroll 1
    for (int i = 0; i < TRIES && !all_run; ++i)
      all_run = ptx::ld_relaxed_s32(params.taken_gmem + 1) >= ctas;
    if (all_run) number = ctas + atomicAdd(params.taken_gmem, 1);
  }
  return uniform(number);
}

// What find_work() finds of tile `number`, from what it has found of another one. Called by one
// thread.
template <class C>
__device__ __forceinline__ void find_work_after(const BackwardKernelParams& params, int number,
                                                const CtaWork& before, CtaWork& work) {
  const AttentionParams& attention = params.backward.attention;
  const int heads_kv = attention.heads_q / attention.heads_per_kv;
  const int tiles = (attention.nk + C::ROWS - 1) / C::ROWS;
  const TileInGroups found(number, attention.batch * heads_kv, tiles, params.group_heads, 1);
  const int batch = found.head / heads_kv, head = found.head - batch * heads_kv;
  work.batch = batch, work.head = work.gradient_head = head;
  work.dq_first = (batch * attention.heads_q + head * attention.heads_per_kv) * params.rounds;
  work.first_row = found.tile * C::ROWS;
  work.heads = before.heads, work.begin = before.begin, work.last = before.last;
  work.upwards = false, work.chain = 0;
  work.start_head = 0;
  if (!C::ENDS_DQ && params.turn_tiles > 0) {
    device::start_apart<C>(params, work, found.tile, 0, 1);
  } else if (C::ENDS_DQ || params.turns_gmem != nullptr) {
    work.start = work.last;
    const int chains = C::ENDS_DQ ? 1 : device::count_chains(params);
    work.turn = found.tile / chains;
    work.chain = found.tile - work.turn * chains;
  } else {
    constexpr int STEPS_APART = 4;  // as in device::find_queries()
    const int apart = found.tile * STEPS_APART / max(work.heads, STEPS_APART);
    work.start = work.last - apart % ((work.last - work.begin) / C::ROUND + 1) * C::ROUND;
  }
  work.own_rows = before.own_rows, work.own_start = 0;
  work.passing_rows = before.passing_rows, work.passing_start = 0;
  work.visible = before.visible;
  work.blocks = before.blocks;
  work.dq_next_head = before.dq_next_head, work.dq_next_round = before.dq_next_round;
}

template <class C>
__device__ __forceinline__ void load_terms_and_take(const BackwardKernelParams& params,
                                                    unsigned char* shared, uint32_t shared_smem) {
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  release(barriers.tile_full(0));  // the first tile is there already
  if constexpr (!C::WRITES_DQ) {
    ptx::griddepcontrol_wait();  // the counter is zero
    if (takes_more<C>(params) && threadIdx.x % 32 == 0) atomicAdd(params.taken_gmem + 1, 1);
  }
  uint32_t blocks = 0;  // of all tiles so far: two registers say where the rings are
#pragma unroll 1
  for (uint32_t number = 0;; ++number) {
    const CtaWork& work = work_of<C>(shared, number % 2);
    RingPosition<C::Q_STAGES> q_ring{static_cast<int>(blocks % C::Q_STAGES),
                                     blocks / C::Q_STAGES % 2};
    device::load_terms_of_rounds<C>(params, work, shared, barriers, q_ring);
    blocks += work.blocks;
    if (params.tiles <= ptx::mov_nctaid_x_volatile()) break;
    // The next tile is written when the CTA is done with the one that it had there.
    const RingPosition<2> next{static_cast<int>(number % 2 ^ 1), (number + 1) / 2 % 2};
    const int taken = take_number_when_all_run<C>(params);
    ptx::mbarrier_wait_parity(barriers.tile_empty(next.stage), next.parity ^ 1);
    const bool any = taken < params.tiles;
    if (ptx::mov_tid_x_volatile() % 32 == 0) {
      CtaWork& next_work = work_of<C>(shared, next.stage);
      if (any) {
        find_work_after<C>(params, taken, work, next_work);
      } else {
        next_work.first_row = -1;
      }
    }
    release(barriers.tile_full(next.stage));
    if (!any) break;
  }
}

}  // namespace archflash::hopper
