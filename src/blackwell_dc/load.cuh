// The roles that bring the inputs into shared memory: load, one warp, starts the copies of Q, K and
// V; clean, one warp, clears rows of V that no row of the sequence sees. The table in
// pipeline.cuh says what they wait for and hand over.
#pragma once

#include <cstdint>

#include "blackwell_dc/config.cuh"
#include "blackwell_dc/next_tile.cuh"
#include "blackwell_dc/pair_pipeline.cuh"
#include "blackwell_dc/params.h"
#include "blackwell_dc/pipeline.cuh"
#include "blackwell_dc/walk.cuh"
#include "common/device/attention_work.cuh"
#include "common/device/ring.cuh"
#include "common/device/slab_load.cuh"
#include "common/device/tile_walk.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_dc {

// --- load, one warp: Q, K, V -> shared memory ---

// How many blocks of a tile are still to be loaded when load asks for the next tile. They take
// longer than the response does.
constexpr int ASKING_BLOCKS = 2;

template <class C>
__device__ __forceinline__ void load(const Params& params, uint32_t shared_smem) {
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{uniform(shared_smem + C::BARRIER_SMEM)};
  const Barriers<C> mma_barriers = barriers_of_mma<C>(barriers);
  const uint32_t ring_smem = uniform(shared_smem + C::RING_SMEM);
  // Keeps the address of a map in a uniform register.
  const auto hold = [](const TensorMap& map) {
    return reinterpret_cast<const TensorMap*>(uniform(reinterpret_cast<uint64_t>(&map)));
  };
  const TensorMap &k_map = *hold(params.k_map), &v_map = *hold(params.v_map);
  const int rank = rank_in_pair<C>();
  // Other tiles read K and V again, and each Q has one reader.
  uint64_t keep = 0, once = 0;
  if constexpr (C::SWITCHES.l2_hints) {
    keep = uniform(ptx::createpolicy_evict_last());
    once = uniform(ptx::createpolicy_evict_first());
  }
  const bool leader = ptx::elect_sync();  // one lane starts copies; all lanes wait and count
  Ring<C> ring = Ring<C>::of_writer();
  uint32_t q_parity = 1;  // the first wait ends at once: nothing is in Q's part yet
  for (TileWalk<C> walk(params, shared_smem); walk.more(); walk.next()) {
    const Tile work = find_tile<C>(params, walk.tile());
    if (work.first_row < 0) {
      walk.ask(leader);
      continue;
    }
    const device::VisibleKeys visible = device::find_visible_keys(attention, work);
    const device::Blocks blocks = find_blocks<C>(params, work, visible);
    const CountedKeys counted(attention, work, visible);
    const int count = count_blocks<C>(blocks);
    // The next tile is asked for shortly before it is needed: a CTA should not hold a tile that
    // another one could begin with.
    if (count <= ASKING_BLOCKS) walk.ask(leader);
    if (count == 0) {
      // A tile without keys needs no Q and has no products. O_OVER_Q: store arrives at q_empty for
      // this tile's output rows all the same, so load makes the arrival that mma does not make.
      for (int t = 0; t < C::TILES && C::O_OVER_Q; ++t) {
        ptx::mbarrier_wait_parity(barriers.q_empty(t), q_parity);
        // mutants: arrives-for-itself (tests/sim/tags.py)
        arrive_as_warp(barriers.q_empty(t));
      }
      if (C::O_OVER_Q) q_parity ^= 1;
      continue;
    }
    const int batch = work.batch_head / attention.heads_q;
    const int head = work.batch_head % attention.heads_q;
    const int kv_head = head / attention.heads_per_kv;
    // Opaque to the compiler, which would otherwise compute the coordinates anew for every block.
    const int keys_start = device::sequence_start(attention.cu_seqlens_k_gmem, batch, attention.nk);
    const int k_head = ptx::mov_b32_volatile(attention.k_head == 0 ? 0 : kv_head);
    const int k_batch = ptx::mov_b32_volatile(attention.k_batch == 0 ? 0 : batch);
    const int v_head = ptx::mov_b32_volatile(attention.v_head == 0 ? 0 : kv_head);
    const int v_batch = ptx::mov_b32_volatile(attention.v_batch == 0 ? 0 : batch);
    const auto load_k = [&](int row) {
      const Slot slot = ring.next_k();
      ptx::mbarrier_wait_parity(barriers.kv_empty(slot.index), slot.parity);  // the slot is free
      if (leader) {
        start_part<C, typename C::KTile>(
            ring_smem + ring.offset(slot.index), k_map, 0, row + rank * C::KTile::ROWS, k_head,
            k_batch, barriers.kv_full(slot.index), mma_barriers.kv_full(slot.index), keep);
      }
    };
    const auto load_v = [&](int row) {
      const bool ragged = counted.lack_some(row - keys_start, C::BLOCK_K);
      const Slot slot = ring.next_v();
      // mutants: v-free-with-q
      ptx::mbarrier_wait_parity(barriers.kv_empty(slot.index), slot.parity);  // the slot is free
      const uint32_t v_smem = ring_smem + ring.offset(slot.index);
      const int column = rank * C::VTile::COLUMNS;
      if (leader && ragged) {  // the bytes go to clean; mma waits for v_clean besides kv_full
        if (rank == 0) ptx::mbarrier_arrive(barriers.kv_full(slot.index));
        device::start_load<typename C::VTile, C::PACK, C::SWITCHES.l2_hints>(
            v_smem, v_map, row, v_head, v_batch, barriers.v_ragged(slot.index), column, keep);
      } else if (leader) {
        start_part<C, typename C::VTile>(v_smem, v_map, column, row, v_head, v_batch,
                                         barriers.kv_full(slot.index),
                                         mma_barriers.kv_full(slot.index), keep);
      }
    };
    // mma needs the last block's K and Q first.
    const int last_row = keys_start + blocks.last;
    load_k(last_row);
    const int q_start = device::sequence_start(attention.cu_seqlens_q_gmem, batch, attention.nq);
    for (int t = 0; t < C::TILES; ++t) {
      // mutants: q-free-for-both-tiles
      ptx::mbarrier_wait_parity(barriers.q_empty(t), q_parity);
      if (leader) {
        start_part<C, typename C::QTile>(
            shared_smem + C::Q_SMEM + t * C::QTile::BYTES, params.q_map, 0,
            q_start + work.first_row + t * C::TILE_ROWS, attention.q_head == 0 ? 0 : head,
            attention.q_batch == 0 ? 0 : batch, barriers.q_full(t), mma_barriers.q_full(t), once);
      }
    }
    load_v(last_row);
#pragma unroll 1
    for (int row = last_row - C::BLOCK_K; row >= keys_start + blocks.first; row -= C::BLOCK_K) {
      if (row == keys_start + blocks.first + (ASKING_BLOCKS - 1) * C::BLOCK_K) walk.ask(leader);
      load_k(row);
      load_v(row);
    }
    q_parity ^= 1;
  }
  // mma's last commits arrive at barriers in shared memory: load stays, and the CTA's shared memory
  // with it, until all of them have.
  for (int t = 0; t < C::TILES; ++t) ptx::mbarrier_wait_parity(barriers.q_empty(t), q_parity);
#pragma unroll 1
  for (int i = 0; i < C::SLOTS; ++i) {
    const Slot slot = C::SHARED_RING || i < C::K_STAGES ? ring.next_k() : ring.next_v();
    ptx::mbarrier_wait_parity(barriers.kv_empty(slot.index), slot.parity);  // the last commit
  }
}

// --- clean, one warp: zeros in the rows of V that do not count ---

// These rows have P = 0, but 0 * NaN would be NaN.
template <class C>
__device__ __forceinline__ void clean(const Params& params, unsigned char* shared,
                                      uint32_t shared_smem) {
  using VTile = typename C::VTile;
  if (!any_ragged(params.attention)) return;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const Barriers<C> mma_barriers = barriers_of_mma<C>(barriers);
  Ring<C> ring;
  uint32_t parities = 0;  // bit i: the parity of v_ragged for slot i's next ragged block
  for (TileWalk<C> walk(params, shared_smem); walk.more(); walk.next()) {
    const Tile work = find_tile<C>(params, walk.tile());
    if (work.first_row < 0) continue;
    const device::VisibleKeys visible = device::find_visible_keys(params.attention, work);
    const device::Blocks blocks = find_blocks<C>(params, work, visible);
    const CountedKeys counted(params.attention, work, visible);
    for (int block = blocks.last; block >= blocks.first; block -= C::BLOCK_K) {
      ring.next_k();
      const Slot slot = ring.next_v();
      if (!counted.lack_some(block, C::BLOCK_K)) continue;
      ptx::mbarrier_wait_parity(barriers.v_ragged(slot.index), parities >> slot.index & 1);
      device::clear_rows<VTile>(shared + C::RING_SMEM + ring.offset(slot.index),
                                counted.begin - block, counted.end - block);
      arrive_at_mma_with_stores_as_warp<C>(mma_barriers.v_clean(slot.index));
      parities ^= 1u << slot.index;
    }
  }
}

}  // namespace archflash::blackwell_dc
