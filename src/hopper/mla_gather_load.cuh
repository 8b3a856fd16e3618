// The producers of latent attention over chosen keys. They gather rows by cp.async, since TMA of
// 9.0 copies neighbouring rows only.
#pragma once

#include <cstdint>

#include "common/ptx/cp_async.cuh"
#include "common/ptx/cp_async_arrive.cuh"
#include "hopper/mla_gather_pipeline.cuh"

namespace archflash::hopper {

__device__ __forceinline__ device::KeyList list_of(const MlaGatherParams& params,
                                                   const MlaTile& tile) {
  const device::CacheRows rows{tile.first, tile.work.nk};
  return device::find_key_list(params.call.attention, params.lists, tile.work, rows, tile.visible,
                               tile.last_row);
}

template <class C>
__device__ __forceinline__ MlaGatherTile find_gather_tile(const MlaGatherParams& params,
                                                          int index) {
  const mma_sync::CacheParams& call = params.call;
  MlaGatherTile tile;
  tile.split = index % call.partials.splits;
  tile.work = device::find_list_work(call.attention, params.lists, call.packed_heads,
                                     index / call.partials.splits);
  const device::CacheRows rows =
      device::find_listed_rows(call.cache, tile.work.batch_head / call.attention.heads_q);
  tile.work.nk = rows.count;
  tile.first = rows.first;
  tile.visible = {device::find_visible_keys(call.attention, tile.work), 0, 0};
  tile.last_row = tile.work.first_row;
  const int count = list_of(params, tile).count;
  tile.blocks = device::blocks_of_share<C::BLOCK_K>(
      {0, ((count + C::BLOCK_K - 1) & -C::BLOCK_K) - C::BLOCK_K}, call.partials, tile.split);
  return tile;
}

// A producer warp: it copies a quarter of the rows of Q, and of each block.
template <class C>
struct MlaGatherProducer {
  using RowTile = typename C::RowTile;
  using QTile = typename C::QTile;
  static constexpr int LANES = 8;  // that copy 128 bytes of a row, 16 bytes each
  static constexpr int ROWS = 32 / LANES;

  const MlaGatherParams& params;
  unsigned char* shared;
  uint32_t shared_smem;
  MlaGatherBarriers<C> barriers;
  int warp;         // of the producers
  uint32_t phases;  // bit s: parity of the phase in which stage s is filled next

  // Arrives for this warp's copies so far when they have landed (each lane), and at once for what
  // else the warp has written and knows: an arrival for copies releases nothing but them.
  __device__ __forceinline__ void hand_over(uint32_t barrier) {
    ptx::cp_async_mbarrier_arrive_noinc(barrier);
    release(barrier);
  }

  // The columns of Q that wgmma reads from shared memory. Rows that belong to no head are zeros.
  __device__ __forceinline__ void copy_q(const MlaTile& tile) {
    constexpr int WARP_ROWS = C::BLOCK_Q / C::PRODUCER_WARPS;
    const AttentionParams& attention = params.call.attention;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = warp * WARP_ROWS + lane / LANES, chunk = lane % LANES;
    const int batch = tile.work.batch_head / attention.heads_q;
    const int head = tile.work.batch_head % attention.heads_q;
    const uint16_t* const q_gmem = static_cast<const uint16_t*>(params.qv_gmem) +
                                   batch * params.qv_batch + head * params.qv_head +
                                   tile.work.first_row * params.qv_row + 8 * chunk;
#pragma unroll 1
    for (int i = 0; i < WARP_ROWS; i += ROWS) {
      const bool wanted = row + i < params.call.packed_heads.count;
      const uint16_t* const row_gmem = q_gmem + (wanted ? row + i : 0) * params.qv_head;
      const uint32_t row_smem = shared_smem + C::Q_SMEM + QTile::offset(row + i, chunk);
#pragma unroll
      for (int slab = 0; slab < QTile::SLABS; ++slab) {
        ptx::cp_async_cg_16(row_smem + slab * QTile::SLAB_BYTES, row_gmem + slab * QTile::SLAB,
                            wanted ? 16 : 0);
      }
    }
    hand_over(barriers.q_full());
  }

  __device__ __forceinline__ void gather(const MlaTile& tile) {
    const AttentionParams& attention = params.call.attention;
    const KvCache& cache = params.call.cache;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int chunk = lane % LANES;
    const int kv_head = uniform(tile.work.batch_head % attention.heads_q / attention.heads_per_kv);
    const device::KeyList list = list_of(params, tile);
    const uint16_t* const v_gmem =
        static_cast<const uint16_t*>(attention.v_gmem) + kv_head * attention.v_head + 8 * chunk;
    const uint16_t* const k_gmem =
        static_cast<const uint16_t*>(attention.k_gmem) + kv_head * attention.k_head + 8 * chunk;
    const int own_place = warp * C::WARP_KEYS + lane % C::WARP_KEYS;
    const int first = uniform(tile.blocks.first);
    int key = uniform(tile.blocks.last);
    if (key < first) return;
    int entry = list.entry(key + own_place);
    int stage = 0;
#pragma unroll 1
    for (; key >= first; key -= C::BLOCK_K) {
      const uint32_t parity = phases >> stage & 1;
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
          // Zeros where the query sees no key: what lies there could be NaN, which 0 in P does
          // not silence.
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
        hand_over(barriers.full(stage, MLA_LEFT + half));
      }
      phases ^= 1u << stage;
      stage ^= 1;
    }
  }

  __device__ __forceinline__ void run() {
    int number = 0;
#pragma unroll 1
    for (int index = static_cast<int>(blockIdx.x); index < params.tiles;
         index += static_cast<int>(gridDim.x)) {
      const MlaGatherTile tile = find_gather_tile<C>(params, index);
      if (tile.work.first_row < 0) continue;
      send(tile, number);
      ptx::mbarrier_wait_parity(barriers.q_empty(), number % 2 ^ 1);
      copy_q(tile);
      gather(tile);
      ++number;
    }
    MlaGatherTile none{};
    none.work.first_row = -1;
    send(none, number);
    ptx::cp_async_wait_all();  // a thread may not end before its copies
  }

  // The first warp tells the consumers of a tile.
  __device__ __forceinline__ void send(const MlaGatherTile& tile, int number) {
    if (warp != 0) return;
    ptx::mbarrier_wait_parity(barriers.tile_empty(number % 2), number / 2 % 2 ^ 1);
    if (threadIdx.x % 32 == 0) tile_message_of<C>(shared, number) = tile;
    release(barriers.tile_full(number % 2));
  }
};

}  // namespace archflash::hopper
