// How the roles of a CTA that computes latent attention hand blocks over to one another: the
// barriers and the hazards that they close, and the tile that all of them work on.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device/chunked_keys.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/key_lists.cuh"
#include "common/device/kv_cache.cuh"
#include "common/device/tile_walk.cuh"
#include "common/ptx/cluster.cuh"
#include "hopper/forward/pipeline.cuh"
#include "hopper/latent/mla_config.cuh"

namespace archflash::hopper {

// The parts of a stage, in the order in which they come.
enum MlaPart { MLA_KEYS = 0, MLA_LEFT = 1, MLA_RIGHT = 2 };

// The barriers, as addresses in shared memory.
//
// clang-format off
//   barrier                  arrives                  waits         so that
//   full of each part        its producer, bytes      consumers     the part has landed before wgmma reads it
//   empty of the keys' part  the 4 warps that         its producer  their product has read it before TMA
//                            compute the scores                     overwrites it
//   empty of a half of V     the 4 warps that         its producer  the same. They multiply P V of a block only when
//                            multiply it                            they have its P, so its scores are there too
//   p_full of a warpgroup    its 4 warps              the other     P and its bases are there before they are read.
//                                                     warpgroup     There is no empty barrier: a warpgroup writes its
//                                                                   next P when it has scores of rows that came after
//                                                                   the other one has handed back the half of V that
//                                                                   it multiplied with the last P
//   ragged of each part      its producer, bytes      its producer  a part has landed before its rows that no query
//                                                                   sees are cleared
//   named barrier 2          warpgroup 0: arrives     warpgroup 1   the products of S do not run side by side, which
//                                                                   would end both late. It closes no hazard
//
//   query                    thread 0, bytes          consumers     with GATHERS: qv has landed before wgmma reads it
//   named barrier 3          all                    all           with GATHERS: `tile` and the barriers are there before
//                                                                 they are used
//
//   with PAIRS
//   empty of a half of V     of both CTAs the 4       producers     a CTA sends rows only where both have read the last
//                            warps that multiply it                 ones, and so overwrites what it sends only when
//                                                                   the other one has got it
//   sent of a half           the first producer       consumers     the rows that the other CTA sends have landed
//                            warp, bytes
// clang-format on
template <class C>
struct MlaBarriers {
  uint32_t first_smem;

  __device__ __forceinline__ uint32_t full(int stage, int part) const {
    return first_smem + 8 * (C::PARTS * stage + part);
  }
  __device__ __forceinline__ uint32_t empty(int stage, int part) const {
    return full(stage, part) + 8 * C::STAGES * C::PARTS;
  }
  // Where the barriers of the keys' part lie, which comes with a half of V where rows are gathered.
  __device__ __forceinline__ uint32_t sent(int stage, int part) const {
    return part == MLA_LEFT ? full(stage, MLA_KEYS) : empty(stage, MLA_KEYS);
  }
  // Where that of the first ragged part lies: rows that are gathered are none.
  __device__ __forceinline__ uint32_t query() const { return ragged(MLA_KEYS); }
  __device__ __forceinline__ uint32_t p_full(int group) const {
    return first_smem + 8 * (2 * C::STAGES * C::PARTS + group);
  }
  __device__ __forceinline__ uint32_t ragged(int part) const {
    return p_full(C::WARPGROUPS) + 8 * part;
  }
};

// Where keys are listed: the barriers and the tile are there before they are used, with PAIRS those
// of both CTAs. All threads call it.
template <class C>
__device__ __forceinline__ void wait_for_start() {
  if constexpr (C::PAIRS) {
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  } else {
    ptx::bar_sync(C::START_BARRIER, C::THREADS);
  }
}

// Hands a half of V back; with PAIRS to the producers of both CTAs.
template <class C>
__device__ __forceinline__ void release_half(uint32_t empty) {
  release(empty);
  if constexpr (C::PAIRS) {
    if (ptx::ARRIVALS_OF_WARP > 1 || ptx::elect_sync()) {
      ptx::mbarrier_arrive_shared_cluster(ptx::mapa_shared_cluster(empty, blockIdx.x % 2 ^ 1));
    }
  }
}

// What a CTA computes; one thread writes it to shared memory for all.
struct MlaTile {
  device::Work work;
  device::ChunkedKeys visible;
  device::Blocks blocks;  // first keys of the first and the last block of the CTA's share
  int last_row;           // of any head of the tile
  int first;              // row of the sequence that is its first key
  int share;              // of the keys
};

// What a CTA computes where keys are listed: heads of one query.
struct MlaListTile {
  int head_tile;  // of the query's heads
  int row, kv_head;
  int share;  // of the places of the list
  device::KeyList list;
  device::Blocks blocks;  // first places of the first and the last block of the CTA's share
};
template <class C>
using MlaTileOf = std::conditional_t<C::GATHERS, MlaListTile, MlaTile>;

// A row of a tile.
__device__ __forceinline__ device::FewRow find_row(const mma_sync::CacheParams& params,
                                                   const MlaTile& tile, int row_of_tile) {
  return {params.attention, params.packed_heads, tile.work, row_of_tile};
}
struct HeadRow {  // as device::FewRow
  int batch, head;
  int64_t packed;
  bool wanted;

  __device__ __forceinline__ int64_t lse_index(const AttentionParams& params) const {
    return batch * params.lse_batch + head * params.lse_head + packed;
  }
};
__device__ __forceinline__ HeadRow find_row(const mma_sync::CacheParams& params,
                                            const MlaListTile& tile, int row_of_tile) {
  const int count = params.packed_heads.count;
  const bool wanted = row_of_tile < count;
  return {tile.list.sequence, tile.head_tile * count + (wanted ? row_of_tile : 0), tile.row,
          wanted};
}

template <class C>
__device__ __forceinline__ MlaTile find_mla_tile(const mma_sync::CacheParams& params,
                                                 const device::Work& found) {
  const AttentionParams& attention = params.attention;
  MlaTile tile;
  tile.work = found;
  const device::CacheRows rows =
      device::find_cache_rows(params.cache, found.batch_head / attention.heads_q);
  tile.work.nk = rows.count;
  tile.first = rows.first;
  tile.visible = {device::find_visible_keys(attention, tile.work), params.attention_chunk,
                  tile.work.nk - tile.work.nq};
  tile.last_row = min(found.first_row + params.packed_heads.rows(), found.nq) - 1;
  tile.share = static_cast<int>(blockIdx.x % params.partials.splits);
  tile.blocks =
      device::blocks_of_share<C::BLOCK_K>({tile.visible.first(found.first_row) & -C::BLOCK_K,
                                           tile.visible.last(tile.last_row) & -C::BLOCK_K},
                                          params.partials, tile.share);
  return tile;
}

}  // namespace archflash::hopper
