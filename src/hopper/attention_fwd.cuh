// Attention forward on TMA, mbarriers and wgmma, for compute capability 9.0: fp16, bf16 or e4m3
// inputs, fp32 scores, sums and output accumulators.
//
// The CTAs share out row tiles (BLOCK_Q query rows of a head, the longest first). For each tile a
// CTA visits the visible blocks of keys from the last one, which may be ragged, back to the first,
// with an online softmax.
//
// clang-format off
//                      each tile                  each block of K          each block of V
//
//   producer, 1 warp   wait q_empty               wait k_empty             wait v_empty
//                      find the tile, load Q      load K                   load V; clear rows of the
//                        | q_full                   | k_full                 | v_full  next sequence
//                        v                          v                        v
//   turning warps, 3,                                                      wait raw_full, v_empty
//   of 8-bit V, in                                                         turn the block, clear rows
//   some calls                                                               | v_full, raw_empty
//                                                                            v
//   consumers,         wait q_full                wait k_full              wait v_full
//   WARPGROUPS of      read the tile's message    start S = Q K^T          start O += P V of the block
//   128 threads        last: output rows through    | k_empty, when done     | v_empty   before
//                        | q_empty   Q's part       v                        v
//   producer           next tile                  next K of the stage      next V of the stage
//
//   one step of a consumer warpgroup, which keeps the tensor cores busy during its softmax:
//
//   tensor cores   S of block b | O += P V of block b + 1
//   warps                       | maxima, exponentials and sums of block b | P of b in 16 bits
// clang-format on
//
// A consumer warpgroup owns 64 rows: their scores, P and outputs never leave its registers. Without
// IN_TURNS no warpgroup waits for another one.
//
// 8-bit V is turned, so that the keys of a column lie side by side. In calls for which turns_v()
// holds the other warps of the producer's warpgroup do that, a block at a time: the producer loads
// V into a ring of its own, and these warps arrive at v_full. Elsewhere transpose_v.cuh has turned
// it into the workspace, with zeros behind the end of a sequence; there this kernel starts early
// (Launch::starts_early): the producer waits for the other one's end before it loads V.
//
// The tiles, stages and the memory plan are in config.cuh, the barriers and the hazards that they
// close in tile.cuh, the choice among the kernels in plan.cpp, budgets and measurements in
// NOTES.md.
#pragma once

#include <cstdint>

#include "common/math/attention_work.cuh"
#include "common/math/chunked_keys.cuh"
#include "common/math/descales.cuh"
#include "common/math/few_rows.cuh"
#include "common/math/fp8_softmax.cuh"
#include "common/math/online_softmax.cuh"
#include "common/math/quad.cuh"
#include "common/math/row_tiles.h"
#include "common/math/slab_load.cuh"
#include "common/math/tile_walk.cuh"
#include "common/math/visible_keys.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/named_barrier.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"
#include "common/ptx/wgmma.cuh"
#include "hopper/cache_params.h"
#include "hopper/cache_rows.cuh"
#include "hopper/cap_scores.cuh"
#include "hopper/config.cuh"
#include "hopper/drop_weights.cuh"
#include "hopper/params.h"
#include "hopper/tile.cuh"
#include "hopper/transpose_v.cuh"

namespace archflash::hopper {

// What a kernel is given: with CACHE it is told of the cache, and with DROPS of dropout, too.
template <class C>
using ParamsOf =
    std::conditional_t<C::CACHE, CacheParams, std::conditional_t<C::DROPS, DroppingParams, Params>>;

template <class C>
__device__ __forceinline__ const Params& call_of(const ParamsOf<C>& params) {
  if constexpr (C::CACHE || C::DROPS) {
    return params.call;
  } else {
    return params;
  }
}

// Query rows of each head that a tile has.
template <class C>
__device__ __forceinline__ int rows_of_tile(const Params& params) {
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
using VisibleKeysOf = std::conditional_t<C::CACHE, math::ChunkedKeys, math::VisibleKeys>;

template <class C>
__device__ __forceinline__ VisibleKeysOf<C> find_visible_keys(const ParamsOf<C>& params,
                                                              const math::Work& work) {
  const math::VisibleKeys visible = math::find_visible_keys(call_of<C>(params).attention, work);
  if constexpr (C::CACHE) {
    return {visible, params.attention_chunk, work.nk - work.nq};
  } else {
    return visible;
  }
}

// The blocks of a tile's share of the keys.
template <class C>
__device__ __forceinline__ math::Blocks find_blocks(const Params& params, const Tile& tile,
                                                    const VisibleKeysOf<C>& visible) {
  const int last_row = min(tile.first_row + rows_of_tile<C>(params), tile.end_row) - 1;
  const math::Blocks blocks = {math::block_start<C::BLOCK_K>(visible.first(tile.first_row)),
                               math::block_start<C::BLOCK_K>(visible.last(last_row))};
  if constexpr (!C::CAN_SPLIT) return blocks;
  return math::split_blocks<C::BLOCK_K>(blocks, tile.split, params.partials.splits);
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

// Whether the CTAs turn 8-bit V. Else it has been turned before.
template <class C>
__device__ __forceinline__ bool turns_v(const Params& params) {
  return C::TURNS_V && (!C::TAKES_TURNED_V || params.v_columns == 0);
}

// With TURNS_V: which rows of the block in a stage of V that is not turned yet count; the others
// are cleared. end = 0: no block follows.
struct RowsToTurn {
  int begin, end;
};
template <class C>
__device__ __forceinline__ RowsToTurn& rows_to_turn(unsigned char* shared, int stage) {
  return *reinterpret_cast<RowsToTurn*>(shared + C::RAW_MESSAGE_SMEM + 8 * stage);
}

template <class C>
__device__ __forceinline__ GroupBlocks find_group_blocks(const Params& params, const Tile& tile,
                                                         const VisibleKeysOf<C>& visible,
                                                         const math::Blocks& blocks, int group) {
  const int first_row = tile.first_row + group * C::GROUP_ROWS;
  const int rows = C::CAN_PACK ? rows_of_tile<C>(params) : C::GROUP_ROWS;  // of each head
  const int last_row = min(first_row + rows, tile.end_row) - 1;
  return {.seen_first = max(math::block_start<C::BLOCK_K>(visible.first(first_row)), blocks.first),
          .seen_last = last_row < first_row ? -1 : visible.last(last_row),
          .clear_first = visible.first(last_row),
          .clear_last = visible.last(first_row) - (C::BLOCK_K - 1)};
}

// --- producer, one warp: tiles, Q, K and V -> shared memory ---

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

// Whether the number of the tile that comes next in a stage of Q is odd.
template <class C>
__device__ __forceinline__ uint32_t parity_of_tile(const RingPosition<C::Q_STAGES>& q_ring) {
  static_assert(C::Q_STAGES <= 2);
  return C::Q_STAGES == 2 ? q_ring.stage : q_ring.parity;
}

// A row tile, the batch and the heads that it is of.
struct FoundTile {
  math::Work work;
  int batch, head, kv_head;
};

// With PREPARES_TILES: the tile of an index. The first copy of a CTA waits for it, and the copies
// of a tile for the next one, so it does what math::find_work() does with fewer instructions: it
// divides only where it must, and numbers without a sign.
template <class C>
__device__ __forceinline__ FoundTile find_tile(const AttentionParams& params, unsigned index) {
  FoundTile found{};
  if (params.cu_seqlens_q_gmem == nullptr) {
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
  } else {
    found.work = math::find_work<C::BLOCK_Q>(params, static_cast<int>(index));
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

template <class C>
__device__ __forceinline__ void produce(const ParamsOf<C>& all_params, unsigned char* shared,
                                        uint32_t shared_smem) {
  const Params& params = call_of<C>(all_params);
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const bool leader = ptx::elect_sync();  // one lane starts copies; all lanes wait and count
  const int shares = shares_of_tile<C>(params);
  RingPosition<C::STAGES> k_ring, v_ring;
  [[maybe_unused]] RingPosition<C::RAW_STAGES> raw_ring;
  RingPosition<C::Q_STAGES> q_ring;
  uint32_t ragged_parity = 0;

  for (unsigned index = blockIdx.x; index < static_cast<unsigned>(params.tiles);
       index = next_tile(params, index)) {
    Tile tile;
    int batch, head, kv_head;
    if constexpr (C::PREPARES_TILES) {
      const FoundTile found = find_tile<C>(attention, index);
      tile = {found.work, 0};
      if (tile.first_row < 0) continue;
      batch = found.batch, head = found.head, kv_head = found.kv_head;
    } else {
      tile = {math::find_work(attention, static_cast<int>(index) / shares, rows_of_tile<C>(params),
                              C::CAN_PACK ? params.packed_heads.count : 1),
              static_cast<int>(index) % shares};
      if (tile.first_row < 0) continue;
      batch = tile.batch_head / attention.heads_q;
      head = tile.batch_head % attention.heads_q;
      kv_head = head / attention.heads_per_kv;
    }
    math::CacheRows cache_rows{};
    if constexpr (C::CACHE) {
      if (tile.nq <= all_params.few_rows) continue;  // another launch serves the sequence
      cache_rows = math::find_cache_rows(all_params.cache, batch);
      tile.nk = cache_rows.count;
    }
    tile.end_row = tile.nq;
    if constexpr (C::TILE_STEP > 0) {
      const math::RowTile rows =
          math::row_tile_from_end(tile.nq, tile.first_row, C::BLOCK_Q, C::TILE_STEP);
      tile.first_row = rows.first_row;
      tile.end_row = rows.end_row;
    }
    const VisibleKeysOf<C> visible = find_visible_keys<C>(all_params, tile);
    const math::Blocks blocks = find_blocks<C>(params, tile, visible);
    // Kernels that turn V give the producer few registers: these values lie in uniform ones, of
    // which there are enough.
    const auto in_uniform_register = [](int x) { return C::TURNS_V ? uniform(x) : x; };
    kv_head = in_uniform_register(kv_head);
    const int keys_start =
        in_uniform_register(math::sequence_start(attention.cu_seqlens_k_gmem, batch, attention.nk));
    // 8-bit V that was turned before: where the keys of the sequence start in a column, and one
    // behind its last key, which is filled up with zeros.
    const int v_columns_start = C::FP8 ? find_v_columns_start(attention, batch) : 0;
    const int v_columns_end = (tile.nk + V_COLUMN_KEYS - 1) / V_COLUMN_KEYS * V_COLUMN_KEYS;
    // The keys that count: rows of V outside are cleared. With PREPARES_TILES nothing else needs nk
    // from here on, and the message about the tile has this end.
    if constexpr (C::PREPARES_TILES) tile.nk = visible.end(tile.nq);
    const int seen_begin = visible.begin();
    const int seen_end = C::PREPARES_TILES ? tile.nk : visible.end(tile.nq);
    // Without cu_seqlens and without a cache TMA reads zeros behind the last key.
    const auto reads_beyond = [&] {
      return C::CACHE || attention.cu_seqlens_k_gmem != nullptr || seen_end < attention.nk;
    };

    const auto find_place = [&](int block) -> CachePlace {
      if constexpr (!C::CACHE) {
        return {};
      } else {
        return SequenceOfCache{all_params.cache, all_params.box_rows, batch, cache_rows}.find(
            block);
      }
    };
    CachePlace next_place{};  // of the block whose K comes next: it is found a block ahead
    const auto load_k = [&](int block) {
      // The products of every consumer warp have read the K that the stage held.
      // mutants: needless-with-one-tile
      ptx::mbarrier_wait_parity(barriers.k_empty(k_ring.stage), k_ring.parity ^ 1);
      if constexpr (C::CACHE) {
        start_cache_load<typename C::KTile>(
            leader, shared_smem + C::K_SMEM + k_ring.stage * C::KTile::BYTES, params.k_map,
            next_place, all_params.cache.blocks, all_params.k_page_groups, all_params.box_rows,
            kv_head, barriers.k_full(k_ring.stage));
      } else if (leader) {
        math::start_load<typename C::KTile, C::PACK>(
            shared_smem + C::K_SMEM + k_ring.stage * C::KTile::BYTES, params.k_map,
            keys_start + block, attention.k_head == 0 ? 0 : kv_head,
            attention.k_batch == 0 ? 0 : batch, barriers.k_full(k_ring.stage));
      }
      k_ring.advance();
      next_place = find_place(block - C::BLOCK_K);
    };
    // `place` is that of the block in a cache.
    const auto load_v = [&](int block, const CachePlace& place) {
      // 8-bit V that was turned before has zeros there.
      const bool ragged =
          !C::FP8 && (block < seen_begin || (block + C::BLOCK_K > seen_end && reads_beyond()));
      const int offset = C::V_SMEM + v_ring.stage * C::VTile::BYTES;
      // The products of every consumer warp have read the V that the stage held.
      ptx::mbarrier_wait_parity(barriers.v_empty(v_ring.stage), v_ring.parity ^ 1);
      if constexpr (C::CACHE) {
        start_cache_load<typename C::VTile>(
            leader, shared_smem + offset, params.v_map, place, all_params.cache.blocks,
            all_params.v_page_groups, all_params.box_rows, kv_head,
            ragged ? barriers.v_ragged() : barriers.v_full(v_ring.stage));
      } else if constexpr (C::FP8) {
        if (leader) {
          using VTile = typename C::VTile;
          ptx::mbarrier_arrive_expect_tx(barriers.v_full(v_ring.stage), VTile::BYTES);
#pragma unroll
          for (int slab = 0; slab < VTile::SLABS; ++slab) {
            // Behind the zeros of this sequence come the keys of the next one: zeros are read from
            // behind the tensor instead.
            const int key = block + slab * VTile::SLAB * C::PACK;
            ptx::cp_async_bulk_tensor_4d_load(
                shared_smem + offset + slab * VTile::SLAB_BYTES, params.v_map,
                key < v_columns_end ? v_columns_start + key : params.v_columns,
                first_v_column<C>(tile), kv_head,
                attention.cu_seqlens_k_gmem == nullptr ? batch : 0, barriers.v_full(v_ring.stage));
          }
        }
      } else if (leader) {
        math::start_load<typename C::VTile>(
            shared_smem + offset, params.v_map, keys_start + block,
            attention.v_head == 0 ? 0 : kv_head, attention.v_batch == 0 ? 0 : batch,
            ragged ? barriers.v_ragged() : barriers.v_full(v_ring.stage));
      }
      if (ragged) {
        ptx::mbarrier_wait_parity(barriers.v_ragged(), ragged_parity);  // V has landed
        ragged_parity ^= 1;
        clear_rows<typename C::VTile>(shared + offset, seen_begin - block, seen_end - block);
        if (leader) ptx::mbarrier_arrive(barriers.v_full(v_ring.stage));
      }
      v_ring.advance();
    };

    // Where the kernel turns V: V as it is, for the warps that turn it.
    [[maybe_unused]] const auto load_raw_v = [&](int block) {
      using RawVTile = typename C::RawVTile;
      // The block that the stage held has been turned.
      ptx::mbarrier_wait_parity(barriers.raw_empty(raw_ring.stage), raw_ring.parity ^ 1);
      if (leader) {
        rows_to_turn<C>(shared, raw_ring.stage) = {seen_begin - block,
                                                   reads_beyond() ? seen_end - block : C::BLOCK_K};
        math::start_load<RawVTile, C::PACK>(
            shared_smem + C::RAW_SMEM + raw_ring.stage * RawVTile::BYTES, params.v_map,
            keys_start + block, attention.v_head == 0 ? 0 : kv_head,
            attention.v_batch == 0 ? 0 : batch, barriers.raw_full(raw_ring.stage));
      }
      raw_ring.advance();
    };

    const bool any_block = blocks.first <= blocks.last;
    // The first block comes before Q: the rings are free while the previous tile still needs Q's
    // part.
    if (any_block) next_place = find_place(blocks.last);
    CachePlace place = next_place;
    if (any_block) load_k(blocks.last);
    if constexpr (C::PRODUCERS == 2) {
      // V's producer has read the message about the tile before.
      ptx::mbarrier_wait_parity(barriers.v_tile_empty(), parity_of_tile<C>(q_ring) ^ 1);
      if (leader) {
        v_tile_message<C>(shared) = {tile, cache_rows.first};
        ptx::mbarrier_arrive(barriers.v_tile_full());
      }
    }
    // The consumers have read the message and Q, and output rows that pass through Q's part have
    // left it.
    // mutants: needless-with-one-tile
    ptx::mbarrier_wait_parity(barriers.q_empty(q_ring.stage), q_ring.parity ^ 1);
    if constexpr (C::PREPARES_TILES) {
      BlocksMessage<C>& message = blocks_message<C>(shared, q_ring.stage);
      const int group = static_cast<int>(threadIdx.x) % 32;
      if (group < C::WARPGROUPS)
        message.groups[group] = find_group_blocks<C>(params, tile, visible, blocks, group);
      if (leader) {
        message.tile = {blocks.first, blocks.last, visible.first_shift, visible.last_shift};
        message.head = {batch, head};
      }
      __syncwarp();  // the leader's arrival stands for every lane's message
    }
    if (leader) {
      tile_message<C>(shared, q_ring.stage) = tile;
      if (any_block) {
        const int q_start = math::sequence_start(attention.cu_seqlens_q_gmem, batch, attention.nq);
        math::start_load<typename C::QTile, C::PACK>(
            shared_smem + C::Q_SMEM + q_ring.stage * C::QTile::BYTES, params.q_map,
            q_start + tile.first_row, attention.q_head == 0 ? 0 : head,
            attention.q_batch == 0 ? 0 : batch, barriers.q_full(q_ring.stage));
      } else {
        ptx::mbarrier_arrive(barriers.q_full(q_ring.stage));  // a tile without keys needs no Q
      }
    }
    if constexpr (C::PREPARES_TILES) math::arrive_beside(leader, barriers.q_full(q_ring.stage));
    q_ring.advance();
    if (C::FP8 && !turns_v<C>(params)) ptx::griddepcontrol_wait();  // V has been turned
#pragma unroll 1
    for (int block = blocks.last; block >= blocks.first; block -= C::BLOCK_K) {
      const CachePlace place_before = next_place;
      if (block > blocks.first) load_k(block - C::BLOCK_K);
      bool loaded = false;
      if constexpr (C::TURNS_V) {
        loaded = turns_v<C>(params);
        if (loaded) load_raw_v(block);
      }
      if constexpr (C::PRODUCERS == 1 && (!C::TURNS_V || C::TAKES_TURNED_V)) {
        if (!loaded) load_v(block, place);
      }
      place = place_before;
    }
  }
  // Where V was turned before, a CTA without tiles, too, ends after the kernel that did it.
  if (C::FP8 && !turns_v<C>(params)) ptx::griddepcontrol_wait();
  send_no_tile<C>(barriers, shared, q_ring, leader);
  if constexpr (C::TURNS_V) {
    if (turns_v<C>(params)) {
      ptx::mbarrier_wait_parity(barriers.raw_empty(raw_ring.stage), raw_ring.parity ^ 1);
      if (leader) {
        rows_to_turn<C>(shared, raw_ring.stage) = {0, 0};
        ptx::mbarrier_arrive(barriers.raw_full(raw_ring.stage));
      }
    }
  }
  if constexpr (C::PRODUCERS == 2) {
    ptx::mbarrier_wait_parity(barriers.v_tile_empty(), parity_of_tile<C>(q_ring) ^ 1);
    if (leader) {
      CachedTile none{};
      none.first_row = -1;
      v_tile_message<C>(shared) = none;
      ptx::mbarrier_arrive(barriers.v_tile_full());
    }
  }
}

// --- with PAGES, another warp: V -> shared memory ---

// Finding and copying the pages of a block takes a warp about as long as the block is multiplied,
// so V has a producer of its own. It has a message of its own about each tile, which comes before
// the tile's Q.
template <class C>
__device__ __forceinline__ void produce_v(const CacheParams& params, unsigned char* shared,
                                          uint32_t shared_smem) {
  using VTile = typename C::VTile;
  const AttentionParams& attention = params.call.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const bool leader = ptx::elect_sync();
  RingPosition<C::STAGES> v_ring;
  uint32_t ragged_parity = 0, v_tile_parity = 0;

  while (true) {
    ptx::mbarrier_wait_parity(barriers.v_tile_full(), v_tile_parity);  // the message is there
    const CachedTile tile = v_tile_message<C>(shared);
    if (tile.first_row < 0) break;
    release(barriers.v_tile_empty());
    v_tile_parity ^= 1;
    const int batch = tile.batch_head / attention.heads_q;
    const int kv_head = tile.batch_head % attention.heads_q / attention.heads_per_kv;
    const SequenceOfCache sequence{
        params.cache, params.box_rows, batch, {tile.first_of_cache, tile.nk}};
    const math::ChunkedKeys visible = find_visible_keys<C>(params, tile);
    const math::Blocks blocks = find_blocks<C>(params.call, tile, visible);
    const int seen_begin = visible.begin(), seen_end = visible.end(tile.nq);
    CachePlace place{};
    if (blocks.first <= blocks.last) place = sequence.find(blocks.last);
#pragma unroll 1
    for (int block = blocks.last; block >= blocks.first; block -= C::BLOCK_K) {
      const int begin = seen_begin - block, end = seen_end - block;  // rows that count
      const bool ragged = begin > 0 || end < C::BLOCK_K;
      const int offset = C::V_SMEM + v_ring.stage * VTile::BYTES;
      const uint32_t full = barriers.v_full(v_ring.stage);
      // The products of every consumer warp have read the V that the stage held.
      ptx::mbarrier_wait_parity(barriers.v_empty(v_ring.stage), v_ring.parity ^ 1);
      start_cache_load<VTile>(leader, shared_smem + offset, params.call.v_map, place,
                              params.cache.blocks, params.v_page_groups, params.box_rows, kv_head,
                              ragged ? barriers.v_ragged() : full);
      place = sequence.find(block - C::BLOCK_K);  // a block ahead
      if (ragged) {
        ptx::mbarrier_wait_parity(barriers.v_ragged(), ragged_parity);  // V has landed
        ragged_parity ^= 1;
        clear_grouped_rows<VTile>(shared + offset, begin, end);
        if (leader) ptx::mbarrier_arrive(full);
      }
      v_ring.advance();
    }
  }
}

// --- where turns_v(), the other warps of the producer's warpgroup: V -> keys side by side ---

// Turns the part of a block that warp `part` of TURNING_WARPS has. 32 keys of 16 columns at a time
// are four matrices of ldmatrix, whose transposition gives a lane the keys 2t and 2t + 1
// (t = lane % 4) of two neighbouring columns: bytes of two such matrices are four keys of a column
// in the order in which pack() has those of P. Column 2c of 16 goes to row c, and 2c + 1 to row
// 8 + c, so that a lane ends with four neighbouring outputs.
template <class C>
__device__ __forceinline__ void turn_block(uint32_t raw_smem, uint32_t turned_smem, int part) {
  using Raw = typename C::RawVTile;
  using Turned = typename C::VTile;
  static_assert(Turned::SLABS == 1, "the keys of a block are one slab's");
  constexpr int GROUPS = C::BLOCK_K / 32;  // of keys
  constexpr int AT_ONCE = 2;               // groups of keys: more loads are under way then
  constexpr int TURNS = C::HEAD_DIM_V / 16 * GROUPS / AT_ONCE;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t from_smem = raw_smem + Raw::offset(lane, 0);
  const uint32_t to_smem = turned_smem + Turned::offset(lane % 16, lane / 16);
#pragma unroll 1
  for (int turn = part; turn < TURNS; turn += C::TURNING_WARPS) {
    const int group = turn % (GROUPS / AT_ONCE) * AT_ONCE, chunk = turn / (GROUPS / AT_ONCE);
    const uint32_t group_smem = Raw::advance(from_smem, chunk) + group * 32 * Raw::ROW_BYTES;
    uint32_t x[AT_ONCE][4];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      ptx::ldmatrix_x4_trans(x[i], group_smem + i * 32 * Raw::ROW_BYTES);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      uint32_t turned[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // 16 keys
        turned[2 * half] = __byte_perm(x[i][2 * half], x[i][2 * half + 1], 0x6420);
        turned[2 * half + 1] = __byte_perm(x[i][2 * half], x[i][2 * half + 1], 0x7531);
      }
      ptx::stmatrix_x4((to_smem ^ (group + i) * 32) + chunk * 16 * Turned::ROW_BYTES, turned);
    }
  }
}

// Called by the turning warps: turns block after block, in the order in which the producer loads.
template <class C>
__device__ __forceinline__ void turn_v(unsigned char* shared, uint32_t shared_smem) {
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int part = uniform(static_cast<int>(threadIdx.x - C::CONSUMER_THREADS) / 32 - 1);
  RingPosition<C::RAW_STAGES> raw_ring;
  RingPosition<C::STAGES> v_ring;
  while (true) {
    ptx::mbarrier_wait_parity(barriers.raw_full(raw_ring.stage), raw_ring.parity);  // it has landed
    const RowsToTurn message = rows_to_turn<C>(shared, raw_ring.stage);
    const int begin = uniform(message.begin), end = uniform(message.end);
    if (end == 0) break;
    if (begin > 0 || end < C::BLOCK_K) {
      // The others may be of the next sequence. With NaN there, 0 * NaN would be NaN.
      if (part == 0) {
        clear_rows<typename C::RawVTile>(shared + C::RAW_SMEM + raw_ring.stage * C::RawVTile::BYTES,
                                         begin, end);
      }
      // The rows are cleared before any warp turns them.
      ptx::bar_sync(1 + C::WARPGROUPS, 32 * C::TURNING_WARPS);
    }
    // The products of every consumer warp have read the V that the stage held.
    ptx::mbarrier_wait_parity(barriers.v_empty(v_ring.stage), v_ring.parity ^ 1);
    turn_block<C>(shared_smem + C::RAW_SMEM + raw_ring.stage * C::RawVTile::BYTES,
                  shared_smem + C::V_SMEM + v_ring.stage * C::VTile::BYTES, part);
    ptx::fence_proxy_async_shared();  // this thread's rows come before wgmma reads them
    release(barriers.v_full(v_ring.stage));
    release(barriers.raw_empty(raw_ring.stage));
    raw_ring.advance();
    v_ring.advance();
  }
}

// --- the other warps of the producer's warpgroup: output rows of no sequence ---

template <class C>
__device__ __forceinline__ void write_rows_of_no_sequence(const Params& params) {
  if (params.attention.cu_seqlens_q_gmem == nullptr) return;
  // With split keys the combining kernel writes these rows.
  if (C::CAN_SPLIT && params.partials.splits > 1) return;
  constexpr int THREADS = C::WARPGROUP - 32 * C::PRODUCERS;
  const int thread = threadIdx.x - C::CONSUMER_THREADS - 32 * C::PRODUCERS;
  const int heads = C::CAN_PACK ? params.packed_heads.count : 1;
  const auto tiles = [&] { return C::SLICES_V ? params.tiles / params.v_slices : params.tiles; };
  for (int64_t index = blockIdx.x; index < tiles(); index += gridDim.x) {
    for (int head = 0; head < heads; ++head) {
      math::write_rows_of_no_sequence(params.attention, static_cast<int>(index), thread, THREADS,
                                      rows_of_tile<C>(params), heads, head);
    }
  }
}

// --- consumers, WARPGROUPS warpgroups: S, P, O and the output rows ---

// The turns of the warpgroups to issue products: named barriers from 1 on, one for each of them.
// A warpgroup hands the turn to the next one, and the last one to the first.
template <class C>
struct Turns {
  static constexpr int THREADS = 2 * C::WARPGROUP;  // of who hands over and who waits
  int group;

  __device__ __forceinline__ void wait() const {
    if constexpr (C::IN_TURNS) ptx::bar_sync(1 + group, THREADS);
  }
  __device__ __forceinline__ void hand_over() const {
    const int next = group + 1 == C::WARPGROUPS ? 0 : group + 1;
    if constexpr (C::IN_TURNS) ptx::bar_arrive(1 + next, THREADS);
  }
};

// Whether a consumer finds where its rows go and how they end while the last P V of a tile runs.
// With 256 columns of V that a CTA turns itself that would spill registers.
template <class C>
consteval bool finds_ends() {
  return C::PREPARES_TILES || (C::FP8 && !C::OVERLAPS && !C::TURNS_V);
}

// Where a warp's rows of a tile go and how they end.
template <class C>
struct TileEnd {
  uint16_t* out_gmem;    // of the warp's first row
  float* lse_gmem;       // likewise; null where no LSE is asked for
  int rows;              // from the warp's first one to the end of the tile; may exceed the warp's
  math::RowEnd ends[2];  // of the rows lane / 4 + 8r

  TileEnd() = default;
  // v_factor: what the outputs are multiplied by.
  __device__ __forceinline__ TileEnd(const math::RowState<C>& state, const AttentionParams& params,
                                     const TileHead& at, const Tile& tile, int warp_row,
                                     float v_factor = 1.0f)
      : lse_gmem(params.lse_gmem), rows(tile.end_row - tile.first_row - warp_row) {
    const int64_t row = math::sequence_start(params.cu_seqlens_q_gmem, at.batch, params.nq) +
                        tile.first_row + warp_row;
    out_gmem = static_cast<uint16_t*>(params.out_gmem) + at.batch * params.out_batch +
               at.head * params.out_head + row * params.out_row;
    if (lse_gmem != nullptr)
      lse_gmem += at.batch * params.lse_batch + at.head * params.lse_head + row;
    const float sink = math::load_sink(params, at.head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      ends[r] = math::finish_lane_row<C>(state, 0, r, sink);
      if constexpr (C::FP8) ends[r].factor *= v_factor;
    }
  }

  // Two neighbouring outputs of row r, from the first one of them on.
  __device__ __forceinline__ uint32_t pair(const float* o, int r) const {
    return ptx::cvt_rn_x2_f32<C::DTYPE>(o[0] * ends[r].factor, o[1] * ends[r].factor);
  }
  // Where a row's outputs from a column on go.
  __device__ __forceinline__ uint16_t* place(const AttentionParams& params, int row,
                                             int column) const {
    return out_gmem + row * params.out_row + column;
  }
  // Writes 8 columns of a row to their place.
  __device__ __forceinline__ void store(const AttentionParams& params, uint16_t* place, int row,
                                        int column, const uint32_t (&x)[4]) const {
    if (row < rows && column < params.dv) ptx::st_global_v4_b32(place, x[0], x[1], x[2], x[3]);
  }
  __device__ __forceinline__ void store_lse() const {
    const int lane = threadIdx.x % 32;
    if (lse_gmem == nullptr || lane % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 8 * r + lane / 4;
      if (row < rows) lse_gmem[row] = ends[r].lse;
    }
  }
};

// Does what math::store_out() does from registers, so that no shared memory is needed: the four
// lanes of a row exchange their columns, and each lane writes 16 bytes.
template <class C>
__device__ __forceinline__ void store_out_by_quads(const math::Outputs<C>& o_rmem,
                                                   const math::RowState<C>& state,
                                                   const AttentionParams& params,
                                                   const math::Work& work, int warp_row) {
  static_assert(C::HEAD_DIM_V % 32 == 0, "the lanes of a quad exchange 32 columns at a time");
  const math::OutRows out(params, work, warp_row);
  const int lane = threadIdx.x % 32;
  uint16_t* out_gmem = out.out_gmem(params);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const math::RowEnd end = math::finish_lane_row<C>(state, 0, r, out.sink);
    const int row = 8 * r + lane / 4;
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; n += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* o = &o_rmem[0][n + i][2 * r];
        words[i] = ptx::cvt_rn_x2_f32<C::DTYPE>(o[0] * end.factor, o[1] * end.factor);
      }
      math::transpose_in_quad(words);
      const int column = 8 * (n + lane % 4);
      if (row < out.rows && column < params.dv) {
        ptx::st_global_v4_b32(out_gmem + row * params.out_row + column, words[0], words[1],
                              words[2], words[3]);
      }
    }
    if (params.lse_gmem != nullptr && lane % 4 == 0 && row < out.rows)
      out.store_lse(params, row, end.lse);
  }
}

// Writes a warp's rows of outputs through `rows`, its own rows of Q's part of shared memory, and
// calls hand_back() before it writes to global memory: its fence would wait for those stores.
template <class C, class HandBack>
__device__ __forceinline__ void store_through_q(const math::Outputs<C>& o_rmem,
                                                const TileEnd<C>& end,
                                                const AttentionParams& params, unsigned char* rows,
                                                const HandBack& hand_back) {
  using QTile = typename C::QTile;
  const int lane = threadIdx.x % 32;
  const uint32_t row_smem =
      static_cast<uint32_t>(__cvta_generic_to_shared(rows)) + QTile::offset(lane % 16, lane / 16);
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
    const float* left = o_rmem[0][n];
    const float* right = o_rmem[0][n + 1];
    const uint32_t x[4] = {end.pair(left, 0), end.pair(left + 2, 1), end.pair(right, 0),
                           end.pair(right + 2, 1)};
    ptx::stmatrix_x4(QTile::advance(row_smem, n), x);
  }
  __syncwarp();  // the warp's rows are complete before any lane reads them
  constexpr int CHUNKS = C::HEAD_DIM_V / 8;
  constexpr int COUNT = C::WARP_ROWS * CHUNKS / 32;  // of a lane
  uint32_t chunks[COUNT][4];
  const auto row = [&](int i) { return (lane + 32 * i) / CHUNKS; };
  const auto chunk = [&](int i) { return (lane + 32 * i) % CHUNKS; };
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const uint4 x = *reinterpret_cast<const uint4*>(rows + QTile::offset(row(i), chunk(i)));
    chunks[i][0] = x.x, chunks[i][1] = x.y, chunks[i][2] = x.z, chunks[i][3] = x.w;
  }
  hand_back();
  uint16_t* place = end.place(params, row(0), 8 * chunk(0));
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if constexpr (32 % CHUNKS != 0) place = end.place(params, row(i), 8 * chunk(i));
    end.store(params, place, row(i), 8 * chunk(i), chunks[i]);
    place += 32 / CHUNKS * params.out_row;  // else to the same column
  }
}

// Writes a warp's rows of outputs from registers, where 8-bit V leaves a lane four neighbouring
// ones of every 16 columns of a row: the four lanes of a row write 32 bytes at a time.
template <class C, DType OUT>
__device__ __forceinline__ void store_fp8_rows(const math::Outputs<C>& o_rmem,
                                               const TileEnd<C>& end,
                                               const AttentionParams& params) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 8 * r + lane / 4;
    const float factor = end.ends[r].factor;
    uint16_t* place = end.place(params, row, lane % 4 * 4);
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
      const float* even = &o_rmem[0][n][2 * r];
      const float* odd = &o_rmem[0][n + 1][2 * r];
      const uint32_t first = ptx::cvt_rn_x2_f32<OUT>(even[0] * factor, odd[0] * factor);
      const uint32_t second = ptx::cvt_rn_x2_f32<OUT>(even[1] * factor, odd[1] * factor);
      if (row < end.rows && 8 * n < params.dv) ptx::st_global_v2_b32(place + 8 * n, first, second);
    }
  }
}

// Writes a warp's rows of 16-bit outputs of a tile: to the workspace if its keys are split, else to
// the output, where rows of one head pass through Q's part of shared memory, at `q`, unless Q has
// gone back already.
template <class C>
__device__ __forceinline__ void store_rows(const math::Outputs<C>& o_rmem,
                                           const math::RowState<C>& state, const Params& params,
                                           const Tile& tile, int warp_row, unsigned char* q) {
  using QTile = typename C::QTile;
  const AttentionParams& attention = params.attention;
  if (C::CAN_SPLIT && params.partials.splits > 1) {
    math::store_partials<C>(o_rmem, state, attention, params.partials, params.packed_heads, tile,
                            tile.split, warp_row);
  } else if (C::CAN_PACK && params.packed_heads.count > 1) {
    math::store_packed_out<C>(o_rmem, state, attention, params.packed_heads, tile, warp_row);
  } else if constexpr (C::RELEASES_Q_EARLY) {
    store_out_by_quads<C>(o_rmem, state, attention, tile.rows(), warp_row);
  } else {
    math::store_out<C, QTile>(o_rmem, state, attention, tile.rows(), warp_row,
                              q + warp_row * QTile::ROW_BYTES);
  }
}

// Does what math::mask_rows() does with a word of bits for each row, which takes fewer instructions
// for a score, for the first KEYS keys.
template <class C, int KEYS = C::BLOCK_K>
__device__ __forceinline__ void mask_rows_by_bits(math::Scores<C>& s_rmem,
                                                  const math::VisibleKeys& visible,
                                                  const int (&rows)[2], int first_key) {
  static_assert(KEYS <= 128, "a lane has at most 32 keys of a row");
  // The lane's keys among the first `keys` of the block, counted from its first one: bit 2n + i is
  // key 8n + i.
  const auto below = [](int keys) {
    const int count = 2 * (max(keys, 0) >> 3) + min(max(keys, 0) & 7, 2);
    return count < 32 ? (1u << count) - 1 : ~0u;
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t seen =
        below(visible.last(rows[r]) + 1 - first_key) & ~below(visible.first(rows[r]) - first_key);
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) {
      float& s = s_rmem[0][i / 2][2 * r + i % 2];
      if ((seen >> i & 1) == 0) s = math::MINUS_INFINITY;
    }
  }
}

// Subtracts what ALiBi does from the scores of a block of keys. `row_of_tile`: the first of this
// lane's two rows.
template <class C>
__device__ __forceinline__ void add_alibi(math::Scores<C>& s_rmem, const CacheParams& params,
                                          const Tile& tile, int row_of_tile, int block) {
  const AttentionParams& attention = params.call.attention;
  const AlibiSlopes& slopes = params.slopes;
  const math::PackedHeads& packed = params.call.packed_heads;
  const int batch = tile.batch_head / attention.heads_q;
  const int first_key = block + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int row = row_of_tile + 8 * r, head = tile.batch_head % attention.heads_q;
    if constexpr (C::CAN_PACK) {
      head += min(packed.head(row), packed.count - 1);
      row = packed.row(row);
    }
    const float slope = slopes.gmem[batch * slopes.batch + head * slopes.head];
    const float distance = static_cast<float>(tile.first_row + row + tile.nk - tile.nq - first_key);
#pragma unroll
    for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& s = s_rmem[0][n][2 * r + i];
        s = fmaf(-slope, fabsf(distance - static_cast<float>(8 * n + i)), s);
      }
    }
  }
}

// Does what math::find_warp_descale() does, where no descale is by blocks of keys and the head is
// known: without descales it divides nothing. `row`: one of the warp's rows.
__device__ __forceinline__ math::WarpDescale find_head_descale(const Descales& descales,
                                                               const AttentionParams& attention,
                                                               const TileHead& at, int row) {
  math::WarpDescale result{1.0f, 1.0f};
  if (descales.q.gmem != nullptr) {
    const int q_head = at.head / static_cast<int>(descales.heads_per_q_descale);
    result.qk =
        math::descale_of_head(descales.q, at.batch, q_head)[row / SCALE_ROWS * descales.q.block];
  }
  if (descales.k.gmem != nullptr || descales.v.gmem != nullptr) {
    const int kv_head = at.head / attention.heads_per_kv;
    if (descales.k.gmem != nullptr)
      result.qk *= *math::descale_of_head(descales.k, at.batch, kv_head);
    if (descales.v.gmem != nullptr)
      result.v = *math::descale_of_head(descales.v, at.batch, kv_head);
  }
  return result;
}

template <class C>
__device__ __forceinline__ void consume(const ParamsOf<C>& all_params, unsigned char* shared,
                                        uint32_t shared_smem) {
  const Params& params = call_of<C>(all_params);
  using QTile = typename C::QTile;
  constexpr int SCORES = C::BLOCK_K / 2, OUTPUTS = C::PASS_COLUMNS / 2,
                WORDS = C::BLOCK_K / (4 * C::PACK);
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int group = uniform(static_cast<int>(threadIdx.x) / C::WARPGROUP);
  const Turns<C> turns{group};
  if (group == C::WARPGROUPS - 1) turns.hand_over();  // warpgroup 0 begins
  RingPosition<C::STAGES> k_ring, v_ring;
  RingPosition<C::Q_STAGES> q_ring;

  while (true) {
    ptx::mbarrier_wait_parity(barriers.q_full(q_ring.stage), q_ring.parity);  // Q has landed
    const Tile tile = tile_message<C>(shared, q_ring.stage);
    if (tile.first_row < 0) break;
    // Which 64 rows of the tile the warpgroup has. Under a causal mask one half of a tile of 128
    // rows sees fewer keys than the other, so two warpgroups change places with each tile.
    const int place = C::HALVES ? group ^ uniform(q_ring.stage) : group;
    const int warp_row = static_cast<int>(threadIdx.x / 32 * C::WARP_ROWS) +
                         (C::HALVES ? (place - group) * C::GROUP_ROWS : 0);
    VisibleKeysOf<C> visible;
    if constexpr (C::PREPARES_TILES) {
      const TileBlocks& message = blocks_message<C>(shared, q_ring.stage).tile;
      visible = {message.first_shift, message.last_shift, tile.nk};
    } else {
      visible = find_visible_keys<C>(all_params, tile);
    }
    bool all_need_more = attention.transform_scores;
    float exp2_scale = attention.exp2_scale;
    math::KeyDescales key_descales{};  // null: one descale serves all keys
    math::WarpDescale warp_descale{1.0f, 1.0f};
    if constexpr (C::FP8) {
      if constexpr (C::TAKES_DESCALES_BY_BLOCK)
        key_descales = math::find_key_descales(params.descales, attention, tile);
      if constexpr (C::PREPARES_TILES && !C::SPARES_REGISTERS) {
        static_assert(!C::TAKES_DESCALES_BY_BLOCK, "find_head_descale() knows none by block");
        warp_descale = find_head_descale(params.descales, attention,
                                         blocks_message<C>(shared, q_ring.stage).head,
                                         min(tile.first_row + warp_row, tile.nq - 1));
      } else {
        warp_descale =
            math::find_warp_descale(params.descales, attention, tile, tile.first_row + warp_row);
      }
      exp2_scale *= warp_descale.qk;
      if constexpr (C::SPARES_REGISTERS) {  // uniform registers are left
        warp_descale.qk = uniform(warp_descale.qk);
        exp2_scale = uniform(exp2_scale);
      }
      all_need_more |= key_descales.k_gmem != nullptr || !(exp2_scale >= math::SMALLEST_NORMAL);
    } else if constexpr (C::CACHE) {  // the cache may be the copy of one of 8 bits
      if (params.descales.k.gmem != nullptr) {
        exp2_scale *= math::find_warp_descale(params.descales, attention, tile, 0).qk;
        all_need_more |= !(exp2_scale >= math::SMALLEST_NORMAL);
      }
      exp2_scale = uniform(exp2_scale);
    }
    math::Blocks all_blocks;  // those that the CTA visits
    GroupBlocks blocks;
    if constexpr (C::PREPARES_TILES) {
      const BlocksMessage<C>& message = blocks_message<C>(shared, q_ring.stage);
      all_blocks = {message.tile.first, message.tile.last};
      blocks = message.groups[place];
    } else {
      all_blocks = find_blocks<C>(params, tile, visible);
      blocks = find_group_blocks<C>(params, tile, visible, all_blocks, group);
    }
    all_blocks = {uniform(all_blocks.first), uniform(all_blocks.last)};
    // The first of the bare blocks, whose scores need no more than a softmax.
    const int bare_first = uniform(all_need_more ? INT32_MAX : blocks.clear_first);
    blocks = {uniform(blocks.seen_first), uniform(blocks.seen_last), uniform(blocks.clear_first),
              uniform(blocks.clear_last)};
    // Whether a block that is not bare must be masked. Without a softcap and descales it always
    // must. With one of them no block is bare, also where every row sees every key and nothing has
    // to be masked. With 8 bits, a cache or dropout all are masked: to ask would spill registers.
    const auto hides_some = [&](int block) {
      return C::FP8 || C::CACHE || C::DROPS || block < blocks.clear_first ||
             block > blocks.clear_last;
    };
    k_ring = {uniform(k_ring.stage), uniform(k_ring.parity)};
    v_ring = k_ring;
    unsigned char* q = shared + C::Q_SMEM + uniform(q_ring.stage) * QTile::BYTES;
    const ptx::WgmmaDescriptor q_descriptor =
        describe_q<C>(shared_smem, uniform(q_ring.stage), place);

    int lane_rows[2];  // this lane's query rows
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * r;
      lane_rows[r] = tile.first_row + (C::CAN_PACK ? params.packed_heads.row(row) : row);
    }

    [[maybe_unused]] const auto dropout = [&] {
      if constexpr (C::DROPS) {
        return find_dropout(all_params.dropout, tile.batch_head);
      } else {
        return nullptr;
      }
    }();

    math::Scores<C> s_rmem;
    Probabilities<C> p_rmem;
    [[maybe_unused]] Probabilities<C> kept_rmem;  // masks of P: what is not dropped
    math::Outputs<C> o_rmem = {};
    PassOutputs<C> part_rmem;  // O += P V of the last blocks, if SUMS_IN_PARTS
    int part_keys = 0;         // the keys of these blocks
    PassOutputs<C>& products_rmem = products_of<C>(o_rmem, part_rmem);
    float* const s = &s_rmem[0][0][0];
    float* const o = &products_rmem[0][0][0];
    uint32_t* const p = &p_rmem[0][0][0];
    math::RowState<C> state;
    math::clear(state);
    state.large = false;

    const auto begin_qk = [&] { start_qk<C>(s_rmem, q_descriptor, shared_smem, k_ring.stage); };
    const auto begin_pv = [&] {
      // mutants: fence-before-both-products
      start_pv<C>(products_rmem, p_rmem, shared_smem, v_ring.stage,
                  !C::SUMS_IN_PARTS || part_keys > 0);
      part_keys += C::BLOCK_K;
    };
    const auto wait_for_outputs = [&] {
      ptx::wgmma_wait_group<0>();
      ptx::registers_change<OUTPUTS>(o);
    };
    // Adds a part of the sums to the outputs. `pass`: which PASS_COLUMNS columns of V it is of.
    const auto add = [&](const PassOutputs<C>& part, int pass) {
      constexpr int TILES = C::PASS_COLUMNS / 8;
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o_rmem[0][pass * TILES + n][i] += part[0][n][i];
      }
    };
    const auto add_part = [&] {
      if constexpr (C::SUMS_IN_PARTS) {
        add(part_rmem, 0);
        part_keys = 0;
      }
    };
    // Without OVERLAPS: O += P V from beginning to end, PASS_COLUMNS columns at a time, of which
    // PARTS are multiplied at the same time. Calls meanwhile() while the first ones are.
    const auto multiply_pv = [&](const auto& meanwhile) {
      constexpr int PASSES = C::HEAD_DIM_V / C::PASS_COLUMNS;
      PassOutputs<C> parts_rmem[C::PARTS];
      const auto part = [&](int pass) { return &parts_rmem[pass % C::PARTS][0][0][0]; };
      const auto begin = [&](int pass) {
        start_pv<C>(parts_rmem[pass % C::PARTS], p_rmem, shared_smem, v_ring.stage, false,
                    pass * C::PASS_COLUMNS);
      };
      ptx::mbarrier_wait_parity(barriers.v_full(v_ring.stage), v_ring.parity);  // V has landed
      if constexpr (C::PARTS == 2) begin(0);
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        const int next = pass + C::PARTS - 1;
        if (next < PASSES) begin(next);
        if (pass == 0) meanwhile();
        if (C::PARTS == 2 && next < PASSES) {
          ptx::wgmma_wait_group<1>();
        } else {
          ptx::wgmma_wait_group<0>();
        }
        ptx::registers_change<OUTPUTS>(part(pass));
        add(parts_rmem[pass % C::PARTS], pass);
      }
      ptx::registers_change<WORDS>(p);
      release(barriers.v_empty(v_ring.stage));
      v_ring.advance();
    };
    // What a block needs whose keys are not all visible, or whose scores are capped or have a
    // descale of their own. Returns the scale for weigh().
    const auto finish_scores = [&](int block) {
      float scale = exp2_scale;
      if constexpr (C::FP8) {
        scale = math::descale_scores<C>(s_rmem, attention, key_descales, warp_descale, block);
      } else if constexpr (C::CACHE) {
        // The message is read anew, so that it needs no registers between the blocks.
        const Tile& message = tile_message<C>(shared, q_ring.stage);
        scale = math::descale_scores<C>(
            s_rmem, attention, key_descales,
            math::find_warp_descale(params.descales, attention, message, 0), block);
      } else if (!C::DROPS && attention.transform_scores) {
        cap_scores<C>(s_rmem, attention.tanh_scale, attention.softcap);
      }
      if constexpr (C::SPARES_REGISTERS) {
        // The thread's number is read anew, so that its rows need no registers between the blocks.
        const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
        const int row =
            tile.first_row + static_cast<int>(thread / 32 * C::WARP_ROWS + thread % 32 / 4);
        const int rows[2] = {row, row + 8};
        math::mask_rows<C>(s_rmem, visible, rows, block + static_cast<int>(thread % 4 * 2));
      } else if constexpr (C::CACHE) {
        const Tile& message = tile_message<C>(shared, q_ring.stage);
        const int row_of_tile = warp_row + static_cast<int>(threadIdx.x) % 32 / 4;
        if (all_params.slopes.gmem != nullptr)
          add_alibi<C>(s_rmem, all_params, message, row_of_tile, block);
        const math::ChunkedKeys keys{visible, all_params.attention_chunk, message.nk - message.nq};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          math::mask_row<C>(s_rmem, keys.of_row(lane_rows[r]), 0, r, 0,
                            block + static_cast<int>(threadIdx.x) % 4 * 2);
        }
      } else if (hides_some(block)) {
        mask_rows_by_bits<C>(s_rmem, visible, lane_rows,
                             block + static_cast<int>(threadIdx.x) % 4 * 2);
      }
      return scale;
    };
    // Dropout: which weights of a block are kept. It needs no scores, so that it takes the time in
    // which they are computed.
    const auto draw = [&](int block) {
      if constexpr (C::DROPS)
        draw_kept<C>(kept_rmem, dropout, lane_rows[0],
                     block + static_cast<int>(threadIdx.x) % 4 * 2);
    };
    const auto pack_kept = [&] {
      pack<C>(s_rmem, p_rmem);
      if constexpr (C::DROPS) drop<C>(p_rmem, kept_rmem);
    };
    // Waits for O += P V of the block before: its V can go then, and P may be overwritten.
    const auto finish_pv = [&] {
      wait_for_outputs();
      ptx::registers_change<WORDS>(p);
      release(barriers.v_empty(v_ring.stage));
      v_ring.advance();
    };
    const auto rescale_outputs = [&](const float (&corrections)[2]) {
      rescale<C>(o_rmem, corrections);
      if constexpr (C::SUMS_IN_PARTS && C::OVERLAPS) rescale<C>(part_rmem, corrections);
    };
    // FP8: adds the sums of the last blocks to the outputs if they are of enough keys. From then on
    // the outputs are in the unit of `block`, where each block of V has a descale of its own.
    const auto add_full_part = [&](int block) {
      if (part_keys >= (key_descales.v_gmem != nullptr ? C::BLOCK_K : C::PART_KEYS)) add_part();
      if (key_descales.v_gmem != nullptr)
        math::change_unit<C>(o_rmem, key_descales, warp_descale, block, INT32_MAX);
    };
    const auto skip_block = [&] {
      // A block that is masked for this warpgroup; others may see it. The warps still wait for it:
      // otherwise they could lap the ring and hand back a stage a phase too early.
      // mutants: few-skipped-blocks
      ptx::mbarrier_wait_parity(barriers.k_full(k_ring.stage), k_ring.parity);
      release(barriers.k_empty(k_ring.stage));
      k_ring.advance();
      turns.wait();  // each warpgroup takes one turn for a block
      turns.hand_over();
      // mutants: few-skipped-blocks
      ptx::mbarrier_wait_parity(barriers.v_full(v_ring.stage), v_ring.parity);
      release(barriers.v_empty(v_ring.stage));
      v_ring.advance();
    };

    // The first block of the warpgroup, whose P V the next step starts.
    const auto first_step = [&](int block) {
      ptx::mbarrier_wait_parity(barriers.k_full(k_ring.stage), k_ring.parity);  // K has landed
      turns.wait();
      begin_qk();
      turns.hand_over();
      draw(block);
      ptx::wgmma_wait_group<0>();
      ptx::registers_change<SCORES>(s);
      release(barriers.k_empty(k_ring.stage));
      k_ring.advance();
      float scale = exp2_scale;
      if (block < bare_first || block > blocks.clear_last) scale = finish_scores(block);
      const auto nothing_to_rescale = [](const float (&)[2]) {};  // the outputs are still 0
      scale = follow_maxima<C, true>(s_rmem, state, scale, nothing_to_rescale);
      weigh_rows<C>(s_rmem, state, scale);
      if (key_descales.v_gmem != nullptr)
        math::change_unit<C>(o_rmem, key_descales, warp_descale, block, block);
      pack_kept();
    };
    // first_step() of a warpgroup that sees the first half of the block only, and has no score
    // capped.
    const auto first_half_step = [&](int block) {
      if constexpr (C::HALVES) {
        constexpr int KEYS = C::BLOCK_K / 2;
        ptx::mbarrier_wait_parity(barriers.k_full(k_ring.stage), k_ring.parity);  // K has landed
        turns.wait();
        start_qk<C, KEYS>(s_rmem, q_descriptor, shared_smem, k_ring.stage);
        turns.hand_over();
        ptx::wgmma_wait_group<0>();
        ptx::registers_change<KEYS / 2>(s);
        release(barriers.k_empty(k_ring.stage));
        k_ring.advance();
        mask_rows_by_bits<C, KEYS>(s_rmem, visible, lane_rows,
                                   block + static_cast<int>(threadIdx.x) % 4 * 2);
        const auto nothing_to_rescale = [](const float (&)[2]) {};  // the outputs are still 0
        const float scale =
            follow_maxima<C, true, KEYS>(s_rmem, state, exp2_scale, nothing_to_rescale);
        weigh_rows<C, KEYS>(s_rmem, state, scale);
        // P V multiplies the whole block: a branch around its second half, in the step that all
        // blocks share, would cost more.
#pragma unroll
        for (int n = KEYS / 8; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s_rmem[0][n][i] = 0.0f;
        }
        pack<C>(s_rmem, p_rmem);
      }
    };
    const auto step_alone = [&]<bool MASKED>(int block) {
      turns.wait();
      multiply_pv([] {});
      ptx::mbarrier_wait_parity(barriers.k_full(k_ring.stage), k_ring.parity);  // K has landed
      begin_qk();
      turns.hand_over();
      ptx::wgmma_wait_group<0>();
      ptx::registers_change<SCORES>(s);
      release(barriers.k_empty(k_ring.stage));
      k_ring.advance();
      float scale = exp2_scale;
      if constexpr (MASKED) scale = finish_scores(block);
      scale = follow_maxima<C>(s_rmem, state, scale, rescale_outputs);
      weigh_and_pack<C>(s_rmem, p_rmem, state, scale);
    };
    const auto step_overlapped = [&]<bool MASKED>(int block) {
      ptx::mbarrier_wait_parity(barriers.k_full(k_ring.stage), k_ring.parity);  // K has landed
      turns.wait();
      begin_qk();
      ptx::mbarrier_wait_parity(barriers.v_full(v_ring.stage), v_ring.parity);  // V has landed
      begin_pv();
      turns.hand_over();
      draw(block);
      ptx::wgmma_wait_group<1>();  // the scores are there
      ptx::registers_change<SCORES>(s);
      release(barriers.k_empty(k_ring.stage));
      k_ring.advance();
      float scale = exp2_scale;
      if constexpr (MASKED) scale = finish_scores(block);
      bool raised = false;
      float corrections[2];
      const auto note = [&](const float (&wanted)[2]) {
        raised = true;
        corrections[0] = wanted[0], corrections[1] = wanted[1];
      };
      scale = follow_maxima<C>(s_rmem, state, scale, note);
      weigh_rows<C>(s_rmem, state, scale);
      finish_pv();
      pack_kept();
      if (raised) rescale_outputs(corrections);
      add_full_part(block);
    };

    const auto step = [&]<bool MASKED>(int block) {
      if constexpr (C::OVERLAPS) {
        step_overlapped.template operator()<MASKED>(block);
      } else {
        step_alone.template operator()<MASKED>(block);
      }
    };

    // No product reads the tile's Q from here on.
    const auto release_q_early = [&] {
      if constexpr (C::RELEASES_Q_EARLY) release(barriers.q_empty(q_ring.stage));
    };
    // With finds_ends(): how the tile ends, and what is written then, while Q goes back.
    const auto find_end = [&] {
      if constexpr (C::PREPARES_TILES) {
        return TileEnd<C>(state, attention, blocks_message<C>(shared, q_ring.stage).head, tile,
                          warp_row, warp_descale.v);
      } else {
        const TileHead at{tile.batch_head / attention.heads_q, tile.batch_head % attention.heads_q};
        return TileEnd<C>(state, attention, at, tile, warp_row, warp_descale.v);
      }
    };
    const auto end_tile = [&]([[maybe_unused]] const TileEnd<C>& end) {
      if constexpr (finds_ends<C>() && C::FP8) {
        if (params.out_dtype == DType::F16) {
          store_fp8_rows<C, DType::F16>(o_rmem, end, attention);
        } else {
          store_fp8_rows<C, DType::BF16>(o_rmem, end, attention);
        }
        end.store_lse();
      } else if constexpr (finds_ends<C>()) {
        store_through_q<C>(o_rmem, end, attention, q + warp_row * QTile::ROW_BYTES,
                           [&] { hand_back_q(barriers, q_ring.stage); });
        end.store_lse();
      }
    };

    // The blocks, from the last to the first: those after the last one that the warpgroup sees,
    // those that it sees, and those before. Of those that it sees, some need masks at either end:
    // both ends run the same code, which is long, where that spills no registers.
    int block = all_blocks.last;
#pragma unroll 1
    for (; block >= all_blocks.first && block > blocks.seen_last; block -= C::BLOCK_K) skip_block();
    if (block >= blocks.seen_first) {
      if (C::HALVES && !all_need_more && blocks.seen_last < block + C::BLOCK_K / 2) {
        first_half_step(block);
      } else {
        first_step(block);
      }
      block -= C::BLOCK_K;
#pragma unroll(C::MASKED_STEPS)
      for (int end = 0; end < 2; ++end) {
#pragma unroll 1
        for (; block >= blocks.seen_first && (end == 1 || block > blocks.clear_last);
             block -= C::BLOCK_K)
          step.template operator()<true>(block);
        if (end == 1) break;
#pragma unroll 1
        for (; block >= blocks.seen_first && block >= bare_first; block -= C::BLOCK_K)
          step.template operator()<false>(block);
      }
      if constexpr (!(C::FP8 && finds_ends<C>())) release_q_early();
      if constexpr (C::OVERLAPS) {
        ptx::mbarrier_wait_parity(barriers.v_full(v_ring.stage), v_ring.parity);  // V has landed
        begin_pv();
        const auto finish = [&] {
          wait_for_outputs();
          ptx::registers_change<WORDS>(p);
          add_part();
          // mutants: needless-with-one-tile
          release(barriers.v_empty(v_ring.stage));
          v_ring.advance();
        };
        if constexpr (C::PREPARES_TILES) {
          const TileEnd<C> end = find_end();
          finish();
          end_tile(end);
        } else {
          finish();
        }
      } else if constexpr (finds_ends<C>()) {
        TileEnd<C> end;
        multiply_pv([&] {
          end = find_end();
          release_q_early();
        });
        end_tile(end);
      } else {
        multiply_pv([] {});
      }
    } else {
      if constexpr (finds_ends<C>()) {
        const TileEnd<C> end = find_end();
        release_q_early();
        end_tile(end);
      } else {
        release_q_early();
      }
    }
#pragma unroll 1
    for (; block >= all_blocks.first; block -= C::BLOCK_K) skip_block();

    if constexpr (finds_ends<C>()) {
      // end_tile() has written the rows.
    } else if constexpr (C::FP8) {
      // The lane that knows it tells the others the unit of the last block.
      math::store_fp8_out<C>(o_rmem, state, attention, params.out_dtype, tile.rows(), warp_row,
                             uniform(warp_descale.v), first_v_column<C>(tile));
    } else {
      if constexpr (C::CACHE) {
        if (params.descales.v.gmem != nullptr) {
          const float v = math::find_warp_descale(params.descales, attention, tile, 0).v;
          const float factors[2] = {v, v};
          rescale<C>(o_rmem, factors);
        }
      }
      if constexpr (C::DROPS) {  // the weights that are left weigh more
        const float factors[2] = {all_params.dropout.scale, all_params.dropout.scale};
        rescale<C>(o_rmem, factors);
      }
      store_rows<C>(o_rmem, state, params, tile, warp_row, q);
    }
    if constexpr (!C::RELEASES_Q_EARLY && !C::PREPARES_TILES) hand_back_q(barriers, q_ring.stage);
    q_ring.advance();
  }
  // The last turn that was handed over: no warpgroup waits for it, and a barrier must not end with
  // arrivals.
  if (group == 0) turns.wait();
}

// The roles of a CTA's warps, behind the initialisation of the barriers: the consumers' warpgroups,
// the producer's warp, and the others of its warpgroup.
template <class C, class Consume, class Produce, class Others>
__device__ __forceinline__ void run_roles(const Consume& consume, const Produce& produce,
                                          const Others& others) {
  __syncthreads();  // the barriers are initialised before any warp uses them
  if (threadIdx.x < C::CONSUMER_THREADS) {
    if constexpr (C::MOVES_REGISTERS) ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
    consume();
  } else {
    if constexpr (C::MOVES_REGISTERS) ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    if (threadIdx.x < C::CONSUMER_THREADS + 32) {
      produce();
    } else {
      others();
    }
  }
}

template <class C>
__device__ __forceinline__ void attention_fwd(const ParamsOf<C>& all_params) {
  static_assert(!C::CACHE || C::BLOCK_K <= MOST_CACHE_KEYS);
  const Params& params = call_of<C>(all_params);
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  static_assert(C::QTile::ALIGNMENT <= 1024);
  if (threadIdx.x == 0) {
    Barriers<C>{shared_smem + C::BARRIER_SMEM}.initialise(
        turns_v<C>(params) ? C::TURNING_WARPS * ptx::ARRIVALS_OF_WARP : 1);
  }
  run_roles<C>([&] { consume<C>(all_params, shared, shared_smem); },
               [&] { produce<C>(all_params, shared, shared_smem); },
               [&] {
                 if constexpr (C::PRODUCERS == 2) {
                   if (threadIdx.x < C::CONSUMER_THREADS + 64)
                     return produce_v<C>(all_params, shared, shared_smem);
                 }
                 if constexpr (C::TURNS_V) {
                   if (turns_v<C>(params)) turn_v<C>(shared, shared_smem);
                 }
                 write_rows_of_no_sequence<C>(params);
               });
}

}  // namespace archflash::hopper

// An entry point, under the name that plan.cpp asks for. __grid_constant__ keeps the parameter in
// constant memory, where TMA reads the tensor maps.
#define ARCHFLASH_HOPPER_KERNEL(NAME, CONFIG)                                        \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::hopper::ParamsOf<CONFIG> params) {     \
    archflash::hopper::attention_fwd<CONFIG>(params);                                \
  }
