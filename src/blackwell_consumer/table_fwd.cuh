// Attention forward with block_mask alone, a table of blocks of 64 rows and 64 keys: the kernel of
// attention_fwd.cuh with another walk. The producer looks at the table, 32 blocks of keys at a
// time, one in each lane, and copies those that any row of blocks of the tile sees. With each K
// comes a message about which rows of blocks it is for (device::TableBlock); warps of others pass
// over it. Whether any block comes stands beside Q.
//
// The barriers are those of attention_fwd.cuh: messages are written before the producer arrives at
// k_full or q_full, and read before a consumer warp arrives at k_empty or q_empty.
#pragma once

#include <cstdint>

#include "blackwell_consumer/attention_fwd.cuh"
#include "blackwell_consumer/table_config.cuh"
#include "blackwell_consumer/table_params.h"
#include "common/device/table_blocks.cuh"

namespace archflash::blackwell_consumer {

template <class C>
__device__ __forceinline__ device::TableBlock& table_block(unsigned char* shared, uint32_t stage) {
  static_assert(sizeof(device::TableBlock) <= C::BLOCK_BYTES);
  return *reinterpret_cast<device::TableBlock*>(shared + C::BLOCK_SMEM + stage * C::BLOCK_BYTES);
}
template <class C>
__device__ __forceinline__ uint32_t& any_block(unsigned char* shared) {
  return *reinterpret_cast<uint32_t*>(shared + C::ANY_SMEM);
}

template <class C>
__device__ __forceinline__ void produce_table(const TableParams& all_params, unsigned char* shared,
                                              uint32_t shared_smem) {
  const Params& params = all_params.call;
  const AttentionParams& attention = params.attention;
  const MaskParams& masks = all_params.masks;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const bool leader = ptx::elect_sync();  // one lane starts copies; all lanes look at the table
  RingPosition<C> ring;
  uint32_t q_parity = 0;
  for (device::TileIndex index; index.more(params.tiles); ++index.round) {
    const device::Work work = find_tile<C>(params, index);
    if (work.first_row < 0) continue;
    const int batch = params.divisors.heads_of_sequence.quotient(work.batch_head);
    const int head = work.batch_head - batch * attention.heads_q;
    const int kv_head = params.divisors.heads_of_kv.quotient(head);
    device::TableBlocks<C::ROW_BLOCKS> blocks(
        masks.blocks_gmem + batch * masks.blocks_batch + head * masks.blocks_head +
            work.first_row / MASK_BLOCK * masks.blocks_row,
        masks.blocks_row, device::find_visible_keys(attention, work), work.first_row,
        min(work.first_row + C::BLOCK_Q, work.nq));
    const auto load_k = [&](const device::TableBlock& block) {
      // Every consumer warp has read the K that the stage held, before TMA overwrites it.
      ptx::mbarrier_wait_parity(barriers.k_empty(ring.stage()), ring.parity() ^ 1);
      if (!leader) return;
      table_block<C>(shared, ring.stage()) = block;
      device::start_load<typename C::KTile>(
          shared_smem + C::K_SMEM + ring.stage() * C::KTile::BYTES, params.k_map, block.key,
          attention.k_head == 0 ? 0 : kv_head, attention.k_batch == 0 ? 0 : batch,
          barriers.k_full(ring.stage()));
    };
    const auto load_v = [&](int key) {
      // Every consumer warp has read the V that the stage held, before TMA overwrites it.
      ptx::mbarrier_wait_parity(barriers.v_empty(ring.stage()), ring.parity() ^ 1);
      if (leader) {
        device::start_load<typename C::VTile>(
            shared_smem + C::V_SMEM + ring.stage() * C::VTile::BYTES, params.v_map, key,
            attention.v_head == 0 ? 0 : kv_head, attention.v_batch == 0 ? 0 : batch,
            barriers.v_full(ring.stage()));
      }
      ++ring.count;
    };
    device::TableBlock block = blocks.next();
    device::TableBlock next = block;
    const bool any = block.key >= 0;
    // The first K comes before Q, and the first V behind it, as in attention_fwd.cuh.
    if (any) {
      next = blocks.next();
      block.last = next.key < 0;
      load_k(block);
    }
    // Every consumer warp's output rows have left Q's part, before TMA overwrites it.
    ptx::mbarrier_wait_parity(barriers.q_empty(), q_parity ^ 1);
    if (leader) {
      any_block<C>(shared) = any;
      if (any) {
        device::start_load<typename C::QTile>(
            shared_smem + C::Q_SMEM, params.q_map, work.first_row, attention.q_head == 0 ? 0 : head,
            attention.q_batch == 0 ? 0 : batch, barriers.q_full());
      } else {
        ptx::mbarrier_arrive(barriers.q_full());  // a tile without keys needs no Q
      }
    }
    if (any) load_v(block.key);
#pragma unroll 1
    while (next.key >= 0) {
      block = next;
      next = blocks.next();
      block.last = next.key < 0;
      load_k(block);
      load_v(block.key);
    }
    q_parity ^= 1;
  }
}

template <class C>
__device__ __forceinline__ void consume_table(const Params& params, unsigned char* shared,
                                              uint32_t shared_smem) {
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  // Outputs and scores leave few registers, so what a warp knows of its tile lies in shared memory.
  static_assert(sizeof(WarpContext) <= C::CONTEXT_BYTES);
  WarpContext& context = *reinterpret_cast<WarpContext*>(shared + C::CONTEXT_SMEM +
                                                         threadIdx.x / 32 * C::CONTEXT_BYTES);
  RingPosition<C> ring;
  uint32_t q_parity = 0;

  for (device::TileIndex index; index.more(params.tiles); ++index.round) {
    const device::Work work = find_tile<C>(params, index);
    if (work.first_row < 0) continue;
    // One lane writes the context for its warp. All lanes have read that of the tile before:
    // release(), at the end of that tile, has synchronised them.
    if (threadIdx.x % 32 == 0) {
      context = make_warp_context<C>(params, index, work,
                                     device::find_visible_keys(attention, work), threadIdx.x / 32);
      context.round = index.round;
      context.q_parity = q_parity;
      context.large_bases = 0;
    }
    __syncwarp();  // the context is written before any lane reads it
    mma_sync::QFragments<C> q_rmem;
    ScalesOf<C> scales;  // none
    device::Outputs<C> o_rmem = {};
    device::RowState<C, WarpFlag> state;
    state.large.flag_smem = &context.large_bases;
    device::clear(state);
    ptx::mbarrier_wait_parity(barriers.q_full(), q_parity);  // Q has landed
    bool more = any_block<C>(shared) != 0;
    if (C::Q_IN_REGISTERS && more) mma_sync::load_all_q<C>(q_rmem, lane_q_smem<C>(shared_smem));
#pragma unroll 1
    while (more) {
      wait_for_k<C>(barriers, ring);
      const device::TableBlock& block = table_block<C>(shared, ring.stage());
      const int row_block = static_cast<int>(threadIdx.x) / 32 * C::WARP_ROWS / MASK_BLOCK;
      const int key = block.key;
      more = block.last == 0;
      if (block.state(row_block) == 0) {
        skip_block<C>(barriers, ring);
      } else {
        visit_block<C>(params, barriers, ring, context, state, o_rmem, q_rmem, scales, key,
                       shared_smem);
      }
    }

    const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
    if (params.out_dtype == DType::F32) {
      device::store_f32_out<C>(o_rmem, state, attention, context.work, warp_row);
    } else {
      device::store_out<C, typename C::QTile>(o_rmem, state, attention, context.work, warp_row,
                                              shared + C::Q_SMEM + warp_row * C::QTile::ROW_BYTES);
    }
    // This thread's reads and writes of output rows in Q's part come before TMA's next write there.
    ptx::fence_proxy_async_shared();
    // Both come from the context, so that no register holds them during the loop above.
    index.round = context.round;
    q_parity = context.q_parity ^ 1;
    release(barriers.q_empty());
  }
}

template <class C>
__device__ __forceinline__ void table_fwd(const TableParams& params) {
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  run_roles<C>(
      shared, [&](uint32_t shared_smem) { consume_table<C>(params.call, shared, shared_smem); },
      [&](uint32_t shared_smem) { produce_table<C>(params, shared, shared_smem); });
}

}  // namespace archflash::blackwell_consumer
