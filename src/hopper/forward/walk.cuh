// The walk of a CTA: over row tiles, and for each tile over the blocks of keys that its rows see.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device/chunked_keys.cuh"
#include "common/device/tile_walk.cuh"
#include "hopper/cache/cache_params.h"
#include "hopper/cache/mixed_params.h"
#include "hopper/config.cuh"
#include "hopper/forward/drop_weights.cuh"
#include "hopper/forward/pipeline.cuh"
#include "hopper/params.h"

namespace archflash::hopper {

// What a kernel is given: with CACHE it is told of the cache, with MIXED of the tiles, with DROPS
// of dropout, and with STORES_BY_TMA of the outputs, too.
template <class C>
using ParamsOf = std::conditional_t<
    C::CACHE, std::conditional_t<C::MIXED, MixedParams, CacheParams>,
    std::conditional_t<C::DROPS, DroppingParams,
                       std::conditional_t<C::STORES_BY_TMA, StoringParams, Params>>>;

template <class C>
__device__ __forceinline__ const Params& call_of(const ParamsOf<C>& params) {
  if constexpr (C::CACHE || C::DROPS || C::STORES_BY_TMA) {
    return params.call;
  } else {
    return params;
  }
}

// Query rows of each head that a tile has.
template <class C>
__device__ __forceinline__ int rows_of_tile(const Params& params) {
  if constexpr (C::PACKS) return params.groups.rows * C::WARPGROUPS;
  return C::CAN_PACK ? params.packed_heads.rows() : C::BLOCK_Q;
}

// The shares of a tile: of its keys, or of the columns of V.
template <class C>
__device__ __forceinline__ int shares_of_tile(const Params& params) {
  return C::CAN_SPLIT ? params.partials.splits : C::SLICES_V ? params.v_slices : 1;
}

// The first column of V that a share of a tile multiplies, if it is of 8 bits.
template <class C>
__device__ __forceinline__ int first_v_column(const Tile& tile) {
  return C::SLICES_V ? tile.split * C::HEAD_DIM_V : 0;
}

// What the rows of a tile see: with CACHE positions may be cut into chunks.
template <class C>
using VisibleKeysOf = std::conditional_t<C::CACHE, device::ChunkedKeys, device::VisibleKeys>;

template <class C>
__device__ __forceinline__ VisibleKeysOf<C> find_visible_keys(const ParamsOf<C>& params,
                                                              const device::Work& work) {
  const device::VisibleKeys visible = device::find_visible_keys(call_of<C>(params).attention, work);
  if constexpr (C::CACHE) {
    return {visible, params.attention_chunk, work.nk - work.nq};
  } else {
    return visible;
  }
}

// The blocks of a tile's share of the keys.
template <class C>
__device__ __forceinline__ device::Blocks find_blocks(const Params& params, const TileOf<C>& tile,
                                                      const VisibleKeysOf<C>& visible) {
  const int last_row = min(tile.first_row + rows_of_tile<C>(params), tile.end_row) - 1;
  const device::Blocks blocks = {device::block_start<C::BLOCK_K>(visible.first(tile.first_row)),
                                 device::block_start<C::BLOCK_K>(visible.last(last_row))};
  if constexpr (C::MIXED) {
    if (tile.shares > 1) return device::split_blocks<C::BLOCK_K>(blocks, tile.split, tile.shares);
  }
  if constexpr (!C::CAN_SPLIT) return blocks;
  return device::split_blocks<C::BLOCK_K>(blocks, tile.split, params.partials.splits);
}

// The blocks of a tile, each named by its first key, and the shifts of what its rows see.
struct TileBlocks {
  int first, last;  // the CTA visits these
  int first_shift, last_shift;
};

// The blocks of a warpgroup, likewise. Where a range is empty, its last block is before its first.
// The four warps of a warpgroup issue products together, so it is one range for them all.
struct GroupBlocks {
  int seen_first, seen_last;    // some row of the warpgroup sees some key of these
  int clear_first, clear_last;  // every row of the warpgroup sees every key of these
};

// The batch and head of a tile: with them a consumer needs no division.
struct TileHead {
  int batch, head;
};

// With PREPARES_TILES: behind the message about the tile in a stage of Q, what the producer finds
// out about the tile, so that the consumers need not, who have no product running meanwhile.
template <class C>
struct BlocksMessage {
  TileBlocks tile;
  GroupBlocks groups[C::WARPGROUPS];
  alignas(16) TileHead head;
};
template <class C>
__device__ __forceinline__ BlocksMessage<C>& blocks_message(unsigned char* shared, int stage) {
  static_assert(sizeof(BlocksMessage<C>) == C::BLOCKS_BYTES);
  return *reinterpret_cast<BlocksMessage<C>*>(shared + C::BLOCKS_SMEM + stage * C::BLOCKS_BYTES);
}

template <class C>
__device__ __forceinline__ GroupBlocks find_group_blocks(const Params& params, const Tile& tile,
                                                         const VisibleKeysOf<C>& visible,
                                                         const device::Blocks& blocks, int group) {
  int rows = C::CAN_PACK ? rows_of_tile<C>(params) : C::GROUP_ROWS;  // of each head
  if constexpr (C::PACKS) rows = params.groups.rows;
  const int first_row = tile.first_row + group * (C::PACKS ? rows : C::GROUP_ROWS);
  const int last_row = min(first_row + rows, tile.end_row) - 1;
  return {
      .seen_first = max(device::block_start<C::BLOCK_K>(visible.first(first_row)), blocks.first),
      .seen_last = last_row < first_row ? -1 : visible.last(last_row),
      .clear_first = visible.first(last_row),
      .clear_last = visible.last(first_row) - (C::BLOCK_K - 1)};
}

// What the rows of a tile see, as a consumer learns it: from the producer's message, or from the
// tile.
template <class C>
__device__ __forceinline__ VisibleKeysOf<C> visible_keys_of(const ParamsOf<C>& all_params,
                                                            unsigned char* shared, const Tile& tile,
                                                            int q_stage) {
  if constexpr (C::PREPARES_TILES) {
    const TileBlocks& message = blocks_message<C>(shared, q_stage).tile;
    return {message.first_shift, message.last_shift, tile.nk};
  } else {
    return find_visible_keys<C>(all_params, tile);
  }
}

// Finds the blocks that the CTA visits, and those of the warpgroup that has the 64 rows number
// `place`.
template <class C>
__device__ __forceinline__ void find_blocks_of_group(const Params& params, unsigned char* shared,
                                                     const TileOf<C>& tile, int q_stage,
                                                     const VisibleKeysOf<C>& visible, int place,
                                                     device::Blocks& all_blocks,
                                                     GroupBlocks& blocks) {
  if constexpr (C::PREPARES_TILES) {
    const BlocksMessage<C>& message = blocks_message<C>(shared, q_stage);
    all_blocks = {message.tile.first, message.tile.last};
    blocks = message.groups[place];
  } else {
    all_blocks = find_blocks<C>(params, tile, visible);
    blocks = find_group_blocks<C>(params, tile, visible, all_blocks, place);
  }
}

// The index of the CTA's next tile, for the whole warp. With a counter the CTA that is done first
// takes the next tile, so that tiles of unequal length are shared out evenly. Else every second
// round is handed out in reverse order: the CTA with the longest tile of the first round gets the
// shortest of the second.
__device__ __forceinline__ unsigned next_tile(const Params& params, unsigned index) {
  if (params.taken_gmem == nullptr) return 2 * gridDim.x * (index / gridDim.x + 1) - 1 - index;
  unsigned taken = 0;
  if (threadIdx.x % 32 == 0) taken = atomicAdd(params.taken_gmem, 1);
  return gridDim.x + uniform(taken);
}

// With CUTS_TILES: the row tile that a tile is a part of, and its rows in there.
struct TilePart {
  unsigned tile;
  int first_row, rows;
};
template <class C>
__device__ __forceinline__ TilePart find_part(const Params& params, unsigned index) {
  const auto whole = static_cast<unsigned>(params.whole_tiles);
  if (index < whole) return {index, 0, C::BLOCK_Q};
  const unsigned parts = (C::BLOCK_Q + params.part_rows - 1) / params.part_rows;
  const unsigned tile = (index - whole) / parts;
  const unsigned part = index - whole - tile * parts;
  return {whole + tile, static_cast<int>(part) * params.part_rows, params.part_rows};
}

// A row tile, the batch and the heads that it is of.
struct FoundTile {
  device::Work work;
  int batch, head, kv_head;
};

// With PACKS: device::find_work() for packed sequences, where a tile has `tile_rows` of a head.
// Nothing is divided by them. A whole warp calls it.
__device__ __forceinline__ device::Work find_grouped_work(const AttentionParams& params,
                                                          const GroupHeads& groups, int tile_rows,
                                                          unsigned index) {
  const auto heads = static_cast<unsigned>(params.heads_q / groups.count);
  const auto tiles_of = [&](int x) {
    return static_cast<int>(__umulhi(static_cast<unsigned>(x), groups.tile_inverse));
  };
  const auto tile = static_cast<int>(index / heads);
  const int* cu_q = params.cu_seqlens_q_gmem;
  const int* cu_k = params.cu_seqlens_k_gmem;
  // See device::find_varlen_sequence().
  const auto start = [&](int sequence) { return tiles_of(max(cu_q[sequence], 0)) + sequence; };
  device::Work work{};
  work.first_row = -1;
  int batch = 0;  // the answer lies in [batch, batch + count)
  for (int count = params.batch, step = 0; step != 1;) {
    step = (count + 31) / 32;
    const int place = static_cast<int>(threadIdx.x) % 32 * step;
    const bool before = place < count && start(batch + place) <= tile;
    const int hits = __popc(__ballot_sync(~0u, before));
    if (hits == 0) return work;
    batch += (hits - 1) * step;
    count = min(count - (hits - 1) * step, step);
  }
  const auto length = [&](const int* cu_seqlens, int rows) {
    return max(device::sequence_start(cu_seqlens, batch + 1, rows) -
                   device::sequence_start(cu_seqlens, batch, rows),
               0);
  };
  work.batch_head = batch * params.heads_q + static_cast<int>(index % heads) * groups.count;
  work.nq = length(cu_q, params.nq);
  work.nk = length(cu_k, params.nk);
  const int tiles = tiles_of(work.nq + tile_rows - 1);
  // Negative if the sequence has fewer tiles than its share of the grid.
  work.first_row = (tiles - 1 - (tile - start(batch))) * tile_rows;
  return work;
}

// The tile of an index where the kernel before has listed the tiles of packed sequences.
__device__ __forceinline__ device::Work find_listed_work(const Params& params, unsigned index,
                                                         int packed_heads) {
  const AttentionParams& attention = params.attention;
  const unsigned heads = static_cast<unsigned>(attention.heads_q / packed_heads);
  const unsigned number = index / heads;
  const PackedTile tile = reinterpret_cast<const PackedTiles*>(params.taken_gmem)->tiles[number];
  const int head = static_cast<int>(index - number * heads) * packed_heads;
  return {tile.sequence * attention.heads_q + head, tile.first_row, tile.nq, tile.nk};
}

// With PREPARES_TILES: the tile of an index. The first copy of a CTA waits for it, and the copies
// of a tile for the next one, so it does what device::find_work() does with fewer instructions: it
// divides only where it must, and numbers without a sign.
template <class C>
__device__ __forceinline__ FoundTile find_tile(const Params& all_params, unsigned index) {
  const AttentionParams& params = all_params.attention;
  FoundTile found{};
  constexpr bool ONLY_PACKED = C::PACKS && !C::SHORT;  // sequences
  if (!ONLY_PACKED && params.cu_seqlens_q_gmem == nullptr) {
    const unsigned tiles = (static_cast<unsigned>(params.nq) + C::BLOCK_Q - 1) / C::BLOCK_Q;
    const unsigned group_heads = params.order.heads_per_group;
    unsigned first_head = 0;
    if (index >= group_heads * tiles) first_head = index / (group_heads * tiles) * group_heads;
    const unsigned heads =
        min(group_heads, static_cast<unsigned>(params.batch * params.heads_q) - first_head);
    index -= first_head * tiles;
    const unsigned from_last = index / heads;
    found.work.batch_head = static_cast<int>(first_head + index - from_last * heads);
    found.work.nq = params.nq;
    found.work.nk = params.nk;
    found.work.first_row = C::BLOCK_Q * (static_cast<int>(tiles) - 1 -
                                         params.order.from_last(static_cast<int>(from_last)));
  } else if (C::TAKES_LISTS && all_params.listed) {
    found.work = find_listed_work(all_params, index, C::PACKS ? all_params.groups.count : 1);
  } else if (C::SHORT && all_params.part_rows == ONE_TILE_EACH) {
    index *= static_cast<unsigned>(all_params.groups.count);
    const unsigned batch = index / static_cast<unsigned>(params.heads_q);
    const auto length = [&](const int* cu_seqlens, int rows) {
      return max(device::sequence_start(cu_seqlens, batch + 1, rows) -
                     device::sequence_start(cu_seqlens, batch, rows),
                 0);
    };
    found.work.batch_head = static_cast<int>(index);
    found.work.nq = length(params.cu_seqlens_q_gmem, params.nq);
    found.work.nk = length(params.cu_seqlens_k_gmem, params.nk);
    found.work.first_row = found.work.nq > 0 ? 0 : -1;
  } else if constexpr (C::PACKS) {
    found.work = find_grouped_work(params, all_params.groups, rows_of_tile<C>(all_params), index);
  } else {
    found.work = device::find_work<C::BLOCK_Q>(params, static_cast<int>(index));
  }
  const auto batch_head = static_cast<unsigned>(found.work.batch_head);
  const auto heads_q = static_cast<unsigned>(params.heads_q);
  const unsigned batch = batch_head < heads_q ? 0 : batch_head / heads_q;
  const unsigned head = batch_head - batch * heads_q;
  const auto heads_per_kv = static_cast<unsigned>(params.heads_per_kv);
  found.batch = static_cast<int>(batch);
  found.head = static_cast<int>(head);
  found.kv_head = static_cast<int>(heads_per_kv == 1 ? head : head / heads_per_kv);
  return found;
}

}  // namespace archflash::hopper
