// How the roles of a kernel for listed rows hand tiles and blocks over to one another: the
// barriers, what the producers tell of the keys of a stage, and the tile that all find.
#pragma once

#include <cstdint>

#include "common/device/key_lists.cuh"
#include "common/device/tile_walk.cuh"
#include "hopper/forward/pipeline.cuh"
#include "hopper/lists/gather_config.cuh"

namespace archflash::hopper {

// Called by one thread. No fence follows: only threads use the barriers, and no copy of TMA.
//
// clang-format off
//   barrier                 arrives                        waits      so that
//   q_full                  each producer lane, when its   consumers  Q has landed before wgmma reads it
//                           copies have landed
//   q_empty                 each consumer warp             producers  the products have read Q before the next one comes
//   k_full of each stage    each producer lane, as above,  consumers  K has landed, and its positions are there
//                           and each producer warp
//   v_full of each stage    each producer lane, as above   consumers  V has landed before wgmma reads it
//   k_empty, v_empty        each consumer warp             producers  every warp's products have read the block, and the
//     of each stage                                                   warps its positions, before the next one comes
// clang-format on
template <class C>
__device__ __forceinline__ void initialise_gather_barriers(const Barriers<C>& barriers) {
  constexpr int PRODUCER_LANES = 32 * C::PRODUCER_WARPS;
  ptx::mbarrier_init(barriers.q_full(0), PRODUCER_LANES);
  ptx::mbarrier_init_for_warps(barriers.q_empty(0), C::WARPS);
  for (int stage = 0; stage < C::STAGES; ++stage) {
    ptx::mbarrier_init_for_warps(barriers.k_full(stage), C::PRODUCER_WARPS, PRODUCER_LANES);
    ptx::mbarrier_init_for_warps(barriers.k_empty(stage), C::WARPS);
    ptx::mbarrier_init(barriers.v_full(stage), PRODUCER_LANES);
    ptx::mbarrier_init_for_warps(barriers.v_empty(stage), C::WARPS);
  }
}

// The keys of a stage.
template <class C>
struct GatheredKeys {
  int positions[C::BLOCK_K];    // device::KeyPlace
  int bare[C::PRODUCER_WARPS];  // whether the scores of this warp's keys need nothing but a softmax

  __device__ __forceinline__ bool all_bare() const {
    int all = bare[0];
#pragma unroll
    for (int warp = 1; warp < C::PRODUCER_WARPS; ++warp) all &= bare[warp];
    return all != 0;
  }
};
template <class C>
__device__ __forceinline__ GatheredKeys<C>& gathered_keys(unsigned char* shared, int stage) {
  static_assert(sizeof(GatheredKeys<C>) == C::POSITIONS_BYTES);
  return *reinterpret_cast<GatheredKeys<C>*>(shared + C::POSITIONS_SMEM +
                                             stage * C::POSITIONS_BYTES);
}

// The rows of a CTA's tile, and their keys.
struct GatherTile {
  device::Work work;
  device::VisibleKeys visible;
  device::KeyList list;
  int open_first, open_last;  // every row sees the positions from the one to the other
  device::Blocks blocks;      // first places of the first and the last block of the CTA's share

  __device__ __forceinline__ bool exists() const { return work.first_row >= 0; }
  __device__ __forceinline__ bool any_block() const {
    return exists() && blocks.first <= blocks.last;
  }
  __device__ __forceinline__ bool all_see(int position) const {
    return position >= open_first && position <= open_last;
  }
};

template <class C>
__device__ __forceinline__ GatherTile find_gather_tile(const GatherParams& params, int index) {
  const mma_sync::CacheParams& call = params.call;
  const AttentionParams& attention = call.attention;
  const int splits = call.partials.splits;
  GatherTile tile;
  tile.work = device::find_list_work(attention, params.lists, call.packed_heads, index / splits);
  if (tile.work.first_row < 0) return tile;
  const device::CacheRows rows =
      device::find_listed_rows(call.cache, tile.work.batch_head / attention.heads_q);
  tile.work.nk = rows.count;
  tile.visible = device::find_visible_keys(attention, tile.work);
  const int last_row = min(tile.work.first_row + call.packed_heads.rows(), tile.work.nq) - 1;
  tile.list =
      device::find_key_list(attention, params.lists, tile.work, rows, tile.visible, last_row);
  tile.open_first = max(tile.visible.first(last_row), 0);  // NO_KEY is negative
  tile.open_last = tile.visible.last(tile.work.first_row);
  const device::Blocks all{0, device::block_start<C::BLOCK_K>(tile.list.count - 1)};
  tile.blocks = device::split_blocks<C::BLOCK_K>(all, index % splits, splits);
  return tile;
}

}  // namespace archflash::hopper
