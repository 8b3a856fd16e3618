// The producers of latent attention over listed keys. They gather rows by cp.async, since TMA
// of 9.0 copies neighbouring rows only.
#pragma once

#include <cstdint>

#include "common/device/key_lists.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cp_async_arrive.cuh"
#include "hopper/mla_gather_config.cuh"
#include "hopper/mla_pipeline.cuh"

namespace archflash::hopper {

__device__ __forceinline__ device::KeyList list_of(const MlaGatherParams& params,
                                                   const MlaTile& tile) {
  const device::CacheRows rows{tile.first, tile.work.nk};
  return device::find_key_list(params.call.attention, params.lists, tile.work, rows, tile.visible,
                               tile.last_row);
}

// As find_mla_tile(), with blocks that are counted in places of the list.
template <class C>
__device__ __forceinline__ MlaTile find_gather_tile(const MlaGatherParams& params,
                                                    const device::Work& found) {
  const mma_sync::CacheParams& call = params.call;
  MlaTile tile;
  tile.work = found;
  const device::CacheRows rows =
      device::find_listed_rows(call.cache, found.batch_head / call.attention.heads_q);
  tile.work.nk = rows.count;
  tile.first = rows.first;
  tile.visible = {device::find_visible_keys(call.attention, tile.work), 0, 0};
  tile.last_row = found.first_row;
  const int count = list_of(params, tile).count;
  tile.blocks = device::blocks_of_share<C::BLOCK_K>(
      {0, ((count + C::BLOCK_K - 1) & -C::BLOCK_K) - C::BLOCK_K}, call.partials,
      share_of_cta<C>(call.partials.splits));
  return tile;
}

// Gathers a warp's rows of each block of the tile, a half of V after the other; the columns of K
// alone come with the left one. `warp`: of the producers.
template <class C>
__device__ __forceinline__ void gather_latent_rows(const MlaGatherParams& params,
                                                   const MlaTile& tile, unsigned char* shared,
                                                   uint32_t shared_smem, int warp) {
  using RowTile = typename C::RowTile;
  constexpr int LANES = 8;  // that copy a row of a slab, 16 bytes each
  constexpr int ROWS = 32 / LANES;
  const AttentionParams& attention = params.call.attention;
  const KvCache& cache = params.call.cache;
  const MlaBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int chunk = lane % LANES;
  const int kv_head = uniform(tile.work.batch_head % attention.heads_q / attention.heads_per_kv);
  const device::KeyList list = list_of(params, tile);
  const uint16_t* const v_gmem =
      static_cast<const uint16_t*>(attention.v_gmem) + kv_head * attention.v_head + 8 * chunk;
  const uint16_t* const k_gmem =
      static_cast<const uint16_t*>(attention.k_gmem) + kv_head * attention.k_head + 8 * chunk;
  const int first = uniform(tile.blocks.first);
  const int own_place = warp * C::WARP_KEYS + lane % C::WARP_KEYS;
  int key = uniform(tile.blocks.last);
  if (key < first) return;
  int entry = list.entry(key + own_place);
#pragma unroll 1
  for (int number = 0; key >= first; ++number, key -= C::BLOCK_K) {
    const int stage = number % C::STAGES;
    const uint32_t parity = number / C::STAGES % 2;
    const device::KeyPlace place = list.find(cache, entry);
    const uint32_t seen = __ballot_sync(device::FULL_WARP, place.position != device::NO_KEY);
    // Looked up ahead: it is not needed before the next block.
    if (key - C::BLOCK_K >= first) entry = list.entry(key - C::BLOCK_K + own_place);
    const uint32_t rows_smem = shared_smem + C::ROWS_SMEM + stage * RowTile::BYTES +
                               warp * C::WARP_KEYS * RowTile::ROW_BYTES;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Every product of the half that the stage held is done.
      ptx::mbarrier_wait_parity(barriers.empty(stage, MLA_LEFT + half), parity ^ 1);
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
