// The producers of latent attention over listed keys. They gather rows by cp.async, since TMA
// of 9.0 copies neighbouring rows only.
#pragma once

#include <cstdint>

#include "common/device/key_lists.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cp_async_arrive.cuh"
#include "hopper/latent/mla_gather_config.cuh"
#include "hopper/latent/mla_pipeline.cuh"

namespace archflash::hopper {

// The CTA's tile, without which keys it sees. The shares of a tile follow one another; with PAIRS
// those of two tiles take turns.
template <class C>
__device__ __forceinline__ MlaListTile find_list_tile(const MlaGatherParams& params) {
  const KeyLists& lists = params.lists;
  const MlaListGrid& grid = params.grid;
  MlaListTile tile;
  int index = static_cast<int>(C::PAIRS ? blockIdx.x / 2 : blockIdx.x);
  tile.share = grid.shares.split(index);
  if constexpr (C::PAIRS) index = 2 * index + static_cast<int>(blockIdx.x % 2);
  tile.head_tile = grid.head_tiles.split(index);
  const int row_of_list = grid.list_rows.split(index);
  const int number = grid.lists.split(index);
  tile.kv_head = grid.heads_kv.split(index);
  tile.head_tile += tile.kv_head * grid.head_tiles.count;
  tile.row = number * grid.list_rows.count + row_of_list;

  device::KeyList& list = tile.list;
  list.sequence = index;
  list.physical = lists.physical != 0;
  list.entries_gmem = lists.indices_gmem + list.sequence * lists.batch + tile.kv_head * lists.head +
                      number * lists.row;
  list.count = lists.topk;
  if (lists.lengths_gmem != nullptr) {
    const int length =
        lists.lengths_gmem[list.sequence * lists.lengths_batch + tile.kv_head * lists.lengths_head +
                           number * lists.lengths_row];
    list.count = min(max(length, 0), lists.topk);
  }
  tile.blocks = {0, ((list.count + C::BLOCK_K - 1) & -C::BLOCK_K) - C::BLOCK_K};
  if (grid.shares.count > 1) {
    tile.blocks =
        device::blocks_of_share<C::BLOCK_K>(tile.blocks, params.call.partials, tile.share);
  }
  return tile;
}
// Which keys its query sees.
__device__ __forceinline__ void find_seen_keys(const MlaGatherParams& params, MlaListTile& tile) {
  const AttentionParams& attention = params.call.attention;
  device::KeyList& list = tile.list;
  list.rows = device::find_listed_rows(params.call.cache, list.sequence);
  const device::Work work{list.sequence * attention.heads_q, tile.row, attention.nq,
                          list.rows.count};
  const device::VisibleKeys visible = device::find_visible_keys(attention, work);
  list.first = visible.first(tile.row);
  list.last = visible.last(tile.row);
}

// The place in a block that a lane of the producers looks up. With PAIRS every other lane looks up
// rows that this warp of the other CTA sends.
template <class C>
__device__ __forceinline__ int place_of_lane() {
  const int thread = static_cast<int>(threadIdx.x) - C::CONSUMER_THREADS;
  const int place = thread / 32 * C::WARP_KEYS + thread % C::WARP_KEYS;
  if constexpr (!C::PAIRS) return place;
  const int of_other = thread % 32 / C::WARP_KEYS % 2 ^ static_cast<int>(blockIdx.x) % 2;
  return place + of_other * (C::BLOCK_K / 2);
}
// That of a tile's first block, which is loaded before the roles begin.
template <class C>
__device__ __forceinline__ int first_entry(const MlaListTile& tile) {
  return tile.blocks.last < tile.blocks.first
             ? device::NO_KEY
             : tile.list.entry(tile.blocks.last + place_of_lane<C>());
}
// As list.find(), with a product in place of the division.
__device__ __forceinline__ device::KeyPlace find_place(const MlaGatherParams& params,
                                                       const device::KeyList& list, int entry) {
  if (entry < list.first || entry > list.last) return {0, 0, device::NO_KEY};
  const KvCache& cache = params.call.cache;
  int row = entry + list.rows.first, block = row;
  row = params.grid.block_rows.split(block);
  if (list.physical) return {block, row, entry};
  if (cache.page_table_gmem != nullptr) {
    block = cache.page_table_gmem[list.sequence * cache.page_table_row + block];
  } else {
    block = cache.batch_idx_gmem == nullptr ? list.sequence : cache.batch_idx_gmem[list.sequence];
  }
  return {min(max(block, 0), cache.blocks - 1), row, entry};
}

// Gathers a warp's rows of each block of the tile, a half of V after the other; the columns of K
// alone come with the left one. `warp`: of the producers. `entry`: first_entry().
template <class C>
__device__ __forceinline__ void gather_latent_rows(const MlaGatherParams& params,
                                                   const MlaListTile& tile, unsigned char* shared,
                                                   uint32_t shared_smem, int warp, int entry) {
  using RowTile = typename C::RowTile;
  constexpr int LANES = 8;  // that copy a row of a slab, 16 bytes each
  constexpr int ROWS = 32 / LANES;
  const AttentionParams& attention = params.call.attention;
  const MlaBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int chunk = lane % LANES;
  const int kv_head = uniform(tile.kv_head);
  const device::KeyList list = tile.list;
  const uint16_t* const v_gmem =
      static_cast<const uint16_t*>(attention.v_gmem) + kv_head * attention.v_head + 8 * chunk;
  const uint16_t* const k_gmem =
      static_cast<const uint16_t*>(attention.k_gmem) + kv_head * attention.k_head + 8 * chunk;
  const int first = uniform(tile.blocks.first);
  const int own_place = place_of_lane<C>();
  int key = uniform(tile.blocks.last);
  if (key < first) wait_for_start<C>();
#pragma unroll 1
  for (int number = 0; key >= first; ++number, key -= C::BLOCK_K) {
    const int stage = number % C::STAGES;
    const uint32_t parity = number / C::STAGES % 2;
    const device::KeyPlace place = find_place(params, list, entry);
    const uint32_t seen = __ballot_sync(device::FULL_WARP, place.position != device::NO_KEY);
    // Looked up ahead: it is not needed before the next block.
    if (key - C::BLOCK_K >= first) entry = list.entry(key - C::BLOCK_K + own_place);
    const uint32_t rows_smem = shared_smem + C::ROWS_SMEM + stage * RowTile::BYTES +
                               warp * C::WARP_KEYS * RowTile::ROW_BYTES;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Every product of the half that the stage held is done. The first block comes before the
      // barriers are there.
      if (number > 0) ptx::mbarrier_wait_parity(barriers.empty(stage, MLA_LEFT + half), parity ^ 1);
      if (half == 0 && lane == 0) {
        *reinterpret_cast<uint16_t*>(shared + C::SEEN_SMEM + 8 * stage + 2 * warp) =
            static_cast<uint16_t>(seen);
      }
#pragma unroll
      for (int i = 0; i < C::WARP_KEYS / ROWS; ++i) {
        const int row_of_warp = ROWS * i + lane / LANES;
        const int64_t block = __shfl_sync(device::FULL_WARP, place.block, row_of_warp);
        const int64_t row = __shfl_sync(device::FULL_WARP, place.row, row_of_warp);
        // Zeros where the query sees no key: what lies there could be NaN, which 0 in P does not
        // silence.
        const uint32_t bytes = seen >> row_of_warp & 1 ? 16 : 0;
        const uint32_t row_smem = rows_smem + RowTile::offset(row_of_warp, chunk);
        const uint16_t* const v_row = v_gmem + block * attention.v_batch + row * attention.v_row;
        if (half == 0) {
          ptx::cp_async_cg_16(row_smem + C::V_SLABS * RowTile::SLAB_BYTES,
                              k_gmem + block * attention.k_batch + row * attention.k_row, bytes);
        }
#pragma unroll
        for (int slab = half * C::HALF_SLABS; slab < (half + 1) * C::HALF_SLABS; ++slab) {
          ptx::cp_async_cg_16(row_smem + slab * RowTile::SLAB_BYTES, v_row + slab * RowTile::SLAB,
                              bytes);
        }
      }
      if (number == 0 && half == 0) wait_for_start<C>();
      const uint32_t full = barriers.full(stage, MLA_LEFT + half);
      ptx::cp_async_mbarrier_arrive_noinc(full);
      // The arrivals above release the copies alone. This one releases the bits of this warp, and
      // what it knows from the empty barrier: the other warpgroup has read the last P.
      release(full);
    }
  }
  ptx::cp_async_wait_all();  // a thread may not end before its copies
}

}  // namespace archflash::hopper
