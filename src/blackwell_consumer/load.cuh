// The producer of attention_fwd.cuh, one warp: K, V and Q -> shared memory; and where the tiles of
// its CTA lie.
#pragma once

#include <cstdint>

#include "blackwell_consumer/config.cuh"
#include "blackwell_consumer/params.h"
#include "blackwell_consumer/tile.cuh"
#include "common/device/attention_work.cuh"
#include "common/device/equal_tiles.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/ring.cuh"
#include "common/device/slab_load.cuh"
#include "common/device/tile_walk.cuh"
#include "common/device/visible_keys.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_consumer {

// The row tile of an index, or in kernels that can split a tile's share of the keys.
template <class C>
__device__ __forceinline__ device::Work find_tile(const Params& params,
                                                  const device::TileIndex& index) {
  if constexpr (C::CAN_SPLIT) {
    return device::find_tile(params.attention, params.tiles, index, params.partials.splits,
                             params.packed_heads.rows(), params.packed_heads.count);
  } else {
    if (params.attention.cu_seqlens_q_gmem != nullptr)
      return device::find_tile<C::BLOCK_Q>(params.attention, params.tiles, index);
    device::Work none{};
    none.first_row = -1;
    if (index.value() >= static_cast<unsigned>(params.tiles)) return none;  // as in find_tile()
    return device::find_equal_work(params.attention, params.divisors,
                                   static_cast<int>(index.value()), C::BLOCK_Q);
  }
}
template <class C>
__device__ __forceinline__ device::Blocks find_blocks(const Params& params,
                                                      const device::TileIndex& index,
                                                      const device::Work& work,
                                                      const device::VisibleKeys& visible) {
  if constexpr (C::CAN_SPLIT) {
    const device::Blocks blocks =
        device::find_blocks<C::BLOCK_K>(work, visible, params.packed_heads.rows());
    return device::blocks_of_share<C::BLOCK_K>(
        blocks, params.partials, static_cast<int>(index.value()) % params.partials.splits);
  } else {
    return device::find_blocks<C::BLOCK_Q, C::BLOCK_K>(work, visible);
  }
}

template <class C>
__device__ __forceinline__ void produce(const Params& params, uint32_t shared_smem) {
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  RingPosition<C> ring;  // only the elected lane's advances
  uint32_t q_parity = 0;
  for (device::TileIndex index; index.more(params.tiles); ++index.round) {
    const device::Work work = find_tile<C>(params, index);
    if (work.first_row < 0) continue;
    const device::Blocks blocks =
        find_blocks<C>(params, index, work, device::find_visible_keys(attention, work));
    if (ptx::elect_sync()) {
      const int batch = params.divisors.heads_of_sequence.quotient(work.batch_head);
      const int head = work.batch_head - batch * attention.heads_q;
      const int kv_head = params.divisors.heads_of_kv.quotient(head);
      const int keys_start =
          device::sequence_start(attention.cu_seqlens_k_gmem, batch, attention.nk);
      const auto load_k = [&](int block) {
        // Every consumer warp has read the K that the stage held, before TMA overwrites it.
        ptx::mbarrier_wait_parity(barriers.k_empty(ring.stage()), ring.parity() ^ 1);
        device::start_load<typename C::KTile, C::QK_PACK>(
            shared_smem + C::K_SMEM + ring.stage() * C::KTile::BYTES, params.k_map,
            keys_start + block, attention.k_head == 0 ? 0 : kv_head,
            attention.k_batch == 0 ? 0 : batch, barriers.k_full(ring.stage()));
      };
      const auto load_v = [&](int block) {
        // Every consumer warp has read the V that the stage held, before TMA overwrites it.
        ptx::mbarrier_wait_parity(barriers.v_empty(ring.stage()), ring.parity() ^ 1);
        device::start_load<typename C::VTile, C::V_PACK>(
            shared_smem + C::V_SMEM + ring.stage() * C::VTile::BYTES, params.v_map,
            keys_start + block, attention.v_head == 0 ? 0 : kv_head,
            attention.v_batch == 0 ? 0 : batch, barriers.v_full(ring.stage()));
        ++ring.count;
      };
      // The first K comes before Q: the rings are free while the previous tile's output still
      // passes through Q's part. The first V, which is needed last, comes after Q.
      if (blocks.first <= blocks.last) load_k(blocks.last);
      // Every consumer warp's output rows have left Q's part, before TMA overwrites it.
      ptx::mbarrier_wait_parity(barriers.q_empty(), q_parity ^ 1);
      if (blocks.first <= blocks.last) {
        const int q_start =
            device::sequence_start(attention.cu_seqlens_q_gmem, batch, attention.nq);
        device::start_load<typename C::QTile, C::QK_PACK>(
            shared_smem + C::Q_SMEM, params.q_map, q_start + work.first_row,
            attention.q_head == 0 ? 0 : head, attention.q_batch == 0 ? 0 : batch,
            barriers.q_full());
        // mutants: v-came-back-before-q (tests/sim/tags.py)
        load_v(blocks.last);
      } else {
        // A tile without keys needs no Q. The consumers wait for q_full in every tile.
        ptx::mbarrier_arrive(barriers.q_full());
      }
      for (int block = blocks.last - C::BLOCK_K; block >= blocks.first; block -= C::BLOCK_K) {
        load_k(block);
        load_v(block);
      }
    }
    // mutants: search-waits-for-warp
    __syncwarp();  // the elected lane is here before the whole warp searches the next tile
    q_parity ^= 1;
  }
}

}  // namespace archflash::blackwell_consumer
