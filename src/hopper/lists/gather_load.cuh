// The producers of a kernel for listed rows: four warps, which gather Q and the rows of K and V by
// cp.async, since TMA of 9.0 copies neighbouring rows only.
#pragma once

#include <cstdint>

#include "common/device/few_rows.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cp_async_arrive.cuh"
#include "hopper/lists/gather_pipeline.cuh"

namespace archflash::hopper {

template <class C>
__device__ __forceinline__ void gather_rows(const GatherParams& params, unsigned char* shared,
                                            uint32_t shared_smem) {
  using QTile = typename C::QTile;
  using KTile = typename C::KTile;
  using VTile = typename C::VTile;
  constexpr int LANES = 8;  // that copy a row of a slab, 16 bytes each
  constexpr int ROWS = 32 / LANES;
  const AttentionParams& attention = params.call.attention;
  const KvCache& cache = params.call.cache;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int warp = uniform(static_cast<int>(threadIdx.x - C::CONSUMER_THREADS) / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int lane_row = lane / LANES, chunk = lane % LANES;
  const int own_key = warp * C::WARP_KEYS + lane % C::WARP_KEYS;
  RingPosition<C::STAGES> ring;
  uint32_t q_parity = 0;

  // Copies a row of this lane's, slab by slab, where it has columns: zeros elsewhere, and if it is
  // not wanted. What lies there could be NaN, which 0 in P or in Q does not silence.
  const auto copy_row = [&]<class Tile>(uint32_t row_smem, const uint16_t* row_gmem, int columns,
                                        bool wanted) {
#pragma unroll
    for (int slab = 0; slab < Tile::SLABS; ++slab) {
      const bool exists = wanted && slab * Tile::SLAB + 8 * chunk < columns;
      ptx::cp_async_cg_16(row_smem + slab * Tile::SLAB_BYTES,
                          exists ? row_gmem + slab * Tile::SLAB : row_gmem, exists ? 16 : 0);
    }
  };
  const auto load_q = [&](const device::Work& work) {
    // The products of every consumer warp have read the last tile's Q.
    ptx::mbarrier_wait_parity(barriers.q_empty(0), q_parity ^ 1);
#pragma unroll 1
    for (int i = 0; i < C::WARP_ROWS_OF_Q / ROWS; ++i) {
      const int row_of_tile = warp * C::WARP_ROWS_OF_Q + ROWS * i + lane_row;
      const device::FewRow row(attention, params.call.packed_heads, work, row_of_tile);
      const uint16_t* const row_gmem = static_cast<const uint16_t*>(attention.q_gmem) +
                                       row.batch * attention.q_batch + row.head * attention.q_head +
                                       row.packed * attention.q_row + 8 * chunk;
      copy_row.template operator()<QTile>(
          shared_smem + C::Q_SMEM + QTile::offset(row_of_tile, chunk), row_gmem, attention.d,
          row.wanted);
    }
    ptx::cp_async_mbarrier_arrive_noinc(barriers.q_full(0));
    q_parity ^= 1;
  };

#pragma unroll 1
  for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const GatherTile tile = find_gather_tile<C>(params, index);
    if (!tile.any_block()) continue;
    const int kv_head = uniform(tile.work.batch_head % attention.heads_q / attention.heads_per_kv);
    const uint16_t* const k_gmem =
        static_cast<const uint16_t*>(attention.k_gmem) + kv_head * attention.k_head + 8 * chunk;
    const uint16_t* const v_gmem =
        static_cast<const uint16_t*>(attention.v_gmem) + kv_head * attention.v_head + 8 * chunk;
    const int last = uniform(tile.blocks.last);
    int entry = tile.list.entry(tile.blocks.first + own_key);
#pragma unroll 1
    for (int block = uniform(tile.blocks.first); block <= last; block += C::BLOCK_K) {
      ring = {uniform(ring.stage), uniform(ring.parity)};  // else lanes arrive one by one
      const device::KeyPlace place = tile.list.find(cache, entry);
      const uint32_t seen = __ballot_sync(device::FULL_WARP, place.position != device::NO_KEY);
      const bool bare = __all_sync(device::FULL_WARP, tile.all_see(place.position)) &&
                        !attention.transform_scores;
      const int64_t k_place = place.block * attention.k_batch + place.row * attention.k_row;
      const int64_t v_place = place.block * attention.v_batch + place.row * attention.v_row;
      // Looked up ahead: it is not needed before the next block.
      if (block < last) entry = tile.list.entry(block + C::BLOCK_K + own_key);
      const auto copy_rows = [&]<class Tile>(int tile_smem, const uint16_t* gmem, int64_t place,
                                             int columns) {
#pragma unroll
        for (int i = 0; i < C::WARP_KEYS / ROWS; ++i) {
          const int row_of_warp = ROWS * i + lane_row;
          const int64_t start = __shfl_sync(device::FULL_WARP, place, row_of_warp);
          copy_row.template operator()<Tile>(
              shared_smem + tile_smem + Tile::offset(warp * C::WARP_KEYS + row_of_warp, chunk),
              gmem + start, columns, seen >> row_of_warp & 1);
        }
      };
      // The products of every consumer warp have read the K that the stage held, and the warps its
      // positions.
      ptx::mbarrier_wait_parity(barriers.k_empty(ring.stage), ring.parity ^ 1);
      GatheredKeys<C>& keys = gathered_keys<C>(shared, ring.stage);
      if (lane < C::WARP_KEYS) keys.positions[own_key] = place.position;
      if (lane == 0) keys.bare[warp] = bare;
      copy_rows.template operator()<KTile>(C::K_SMEM + ring.stage * KTile::BYTES, k_gmem, k_place,
                                           attention.d);
      ptx::cp_async_mbarrier_arrive_noinc(barriers.k_full(ring.stage));
      // The arrivals above release the copies alone, this one the positions.
      release(barriers.k_full(ring.stage));
      // The products of every consumer warp have read the V that the stage held.
      ptx::mbarrier_wait_parity(barriers.v_empty(ring.stage), ring.parity ^ 1);
      copy_rows.template operator()<VTile>(C::V_SMEM + ring.stage * VTile::BYTES, v_gmem, v_place,
                                           attention.dv);
      ptx::cp_async_mbarrier_arrive_noinc(barriers.v_full(ring.stage));
      // Behind the first block, for which there is room while the last tile's Q is still read.
      if (block == tile.blocks.first) load_q(tile.work);
      ring.advance();
    }
  }
  ptx::cp_async_wait_all();  // a thread may not end before its copies
}

}  // namespace archflash::hopper
