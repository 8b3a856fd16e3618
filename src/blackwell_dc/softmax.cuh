// The role softmax, four warps for each tile: S -> P, one thread for each row. The table in
// pipeline.cuh says what it waits for and hands over.
#pragma once

#include <cstdint>
#include <type_traits>

#include "blackwell_dc/config.cuh"
#include "blackwell_dc/next_tile.cuh"
#include "blackwell_dc/pair_pipeline.cuh"
#include "blackwell_dc/params.h"
#include "blackwell_dc/pipeline.cuh"
#include "blackwell_dc/row_softmax.cuh"
#include "blackwell_dc/row_softmax_e4m3.cuh"
#include "blackwell_dc/walk.cuh"
#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/tile_walk.cuh"
#include "common/device/visible_keys.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tcgen05.cuh"

namespace archflash::blackwell_dc {

template <class C>
using RowSoftmax = std::conditional_t<C::FP8, RowSoftmaxE4m3<C>, RowSoftmax16<C>>;

template <class C>
__device__ __forceinline__ void softmax(const Params& params, unsigned char* shared,
                                        uint32_t shared_smem, int t) {
  constexpr int KEYS = C::BLOCK_K / 4;  // in a quarter of a block
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const Barriers<C> mma_barriers = barriers_of_mma<C>(barriers);
  const int row_of_tile = threadIdx.x % C::TILE_ROWS;
  const uint32_t lanes_tmem = uniform(ptx::tmem_lanes_of_warp(threadIdx.x / 32));
  float* stats = reinterpret_cast<float*>(shared + C::STATS_SMEM + t * C::STATS_BYTES);
  // Counted from the CTA's start: the blocks of this tile, and the messages to correction.
  uint32_t step = 0, message = 0;
  // A message is one float for each row (the factor for O), or two (sum and base, at a tile's end).
  const auto tell = [&](float first, float second, bool both) {
    // Correction has read the message before.
    // mutants: message-was-read (tests/sim/tags.py)
    ptx::mbarrier_wait_parity(barriers.stats_empty(t), (message & 1) ^ 1);
    stats[row_of_tile] = first;
    if (both) stats[C::TILE_ROWS + row_of_tile] = second;
    arrive_as_warp(barriers.stats_full(t));
    ++message;
  };

  for (TileWalk<C> walk(params, shared_smem); walk.more(); walk.next()) {
    const Tile work = find_tile<C>(params, walk.tile());
    if (work.first_row < 0) continue;
    const device::VisibleKeys visible = device::find_visible_keys(attention, work);
    const device::Blocks blocks = find_blocks<C>(params, work, visible);
    const device::PackedHeads packed_heads = find_packed_heads<C>(params);
    const int row = work.first_row + packed_heads.row(t * C::TILE_ROWS + row_of_tile);
    const int first_seen = visible.first(row), last_seen = visible.last(row);
    // From clear_first to clear_last every row of this warp sees every key of a block: no mask.
    const int rows_of_warp = min(packed_heads.rows(), 32);  // of each head
    const int warp_row = row - static_cast<int>(threadIdx.x) % rows_of_warp;
    const int clear_first = visible.first(warp_row + rows_of_warp - 1);
    const int clear_last = visible.last(warp_row) - (C::BLOCK_K - 1);
    RowSoftmax<C> row_softmax(params, work, warp_row);
#pragma unroll 1
    for (int block = blocks.last; block >= blocks.first; block -= C::BLOCK_K, ++step) {
      const uint32_t buffer = C::TILES == 2 ? t : step % 2;
      const uint32_t parity = C::TILES == 2 ? step % 2 : step / 2 % 2;
      const uint32_t s_tmem = lanes_tmem + buffer * C::S_COLUMNS;
      Scores<C> s_rmem;
      row_softmax.start_block(block);
      ptx::mbarrier_wait_parity(barriers.s_ready(buffer), parity);  // S is complete
      ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter)
        ptx::tcgen05_ld(s_rmem[quarter], s_tmem + quarter * KEYS);
      ptx::tcgen05_wait_ld(s_rmem);
      row_softmax.transform(s_rmem);
      if (block < clear_first || block > clear_last)
        mask_scores<C>(s_rmem, first_seen - block, last_seen - block);
      const float factor = row_softmax.follow_maximum(s_rmem);
      // The tile's first block has no O to rescale.
      if (block != blocks.last) tell(factor, 0.0f, false);
      row_softmax.round_large(s_rmem);
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        uint32_t p_rmem[KEYS / C::P_PER_COLUMN];
        row_softmax.exponentiate(s_rmem[quarter], p_rmem, quarter);
        ptx::tcgen05_st(s_tmem + C::P_COLUMN + quarter * (KEYS / C::P_PER_COLUMN), p_rmem);
        if (quarter == (C::SWITCHES.split_p ? 2 : 3)) {
          ptx::tcgen05_wait_st();
          ptx::tcgen05_fence_before_thread_sync();
          // mutants: whole-warp-on-tensor-memory
          arrive_at_mma_as_warp<C>(mma_barriers.p_ready(buffer));
        }
      }
      if constexpr (C::SWITCHES.split_p) {
        ptx::tcgen05_wait_st();
        ptx::tcgen05_fence_before_thread_sync();
        // mutants: whole-warp-on-tensor-memory
        arrive_at_mma_as_warp<C>(mma_barriers.p_last(buffer));
      }
      row_softmax.add(s_rmem);  // here, so that mma need not wait for the sum
    }
    tell(row_softmax.sum, row_softmax.base(), true);
  }
}

}  // namespace archflash::blackwell_dc
