// The producer: one warp, which finds the tiles and copies Q, K and V to shared memory by TMA. With
// PAGES another warp copies V.
#pragma once

#include <cstdint>

#include "common/device/row_tiles.h"
#include "common/device/slab_load.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "hopper/cache/cache_params.h"
#include "hopper/cache/cache_rows.cuh"
#include "hopper/cache/mixed_order.cuh"
#include "hopper/config.cuh"
#include "hopper/forward/grouped_load.cuh"
#include "hopper/forward/pipeline.cuh"
#include "hopper/forward/transpose_v.cuh"
#include "hopper/forward/walk.cuh"
#include "hopper/params.h"

namespace archflash::hopper {

template <class C>
__device__ __forceinline__ auto sequence_of_cache(const ParamsOf<C>& params, int sequence,
                                                  const device::CacheRows& rows) {
  if constexpr (C::MIXED) {
    return SequenceInPages{params.cache, params.box_rows, params.tiles.page_shift, sequence,
                           rows.count};
  } else {
    return SequenceOfCache{params.cache, params.box_rows, sequence, rows};
  }
}

// Whether the number of the tile that comes next in a stage of Q is odd.
template <class C>
__device__ __forceinline__ uint32_t parity_of_tile(const RingPosition<C::Q_STAGES>& q_ring) {
  static_assert(C::Q_STAGES <= 2);
  return C::Q_STAGES == 2 ? q_ring.stage : q_ring.parity;
}

// With MIXED: how many tiles there are, and the tile of a number of the walk. They are read anew
// for each tile, so that they need no registers meanwhile.
__device__ __forceinline__ unsigned count_mixed_tiles(const MixedParams& params) {
  const TileCounts& counts = *params.tiles.counts_gmem;
  return counts.few + counts.many;
}
template <class C>
__device__ __forceinline__ MixedTile find_mixed_tile(const MixedParams& params, unsigned index) {
  const MixedTiles& tiles = params.tiles;
  const AttentionParams& attention = params.call.attention;
  const MixedItem item = find_mixed_item(tiles, attention.heads_q, index);
  const TileEntry entry = *item.entry;
  const bool packed = entry.shares > 0;
  MixedTile tile;
  tile.batch_head =
      entry.sequence * attention.heads_q + item.head * (packed ? attention.heads_per_kv : 1);
  tile.nq = entry.nq, tile.nk = entry.nk;
  tile.split = entry.share, tile.shares = entry.shares;
  tile.slot = entry.slot * tiles.heads_kv + item.head * entry.shares;
  const int first_row = entry.first_row;
  device::RowTile rows{first_row, min(first_row + params.call.packed_heads.rows(), entry.nq)};
  if (!packed)
    rows = device::row_tile_from_end(entry.nq, entry.first_row, C::BLOCK_Q, C::TILE_STEP);
  tile.first_row = rows.first_row, tile.end_row = rows.end_row;
  return tile;
}

// With MIXED: tells V's producer of a tile, when it has read the message about the one before.
template <class C>
__device__ __forceinline__ void send_tile_to_v(const Barriers<C>& barriers, unsigned char* shared,
                                               const MixedTile& tile, uint32_t parity,
                                               bool leader) {
  ptx::mbarrier_wait_parity(barriers.v_tile_empty(), parity);
  if (!leader) return;
  v_tile_message<C>(shared) = tile;
  ptx::mbarrier_arrive(barriers.v_tile_full());
}

// With MIXED: the message about a tile and the copy of its Q, as V's producer was told of it: so
// the tile needs no registers meanwhile. Rows of packed heads fill the first warpgroup's part of Q.
// Called by one thread.
template <class C>
__device__ __forceinline__ void load_mixed_q(const MixedParams& params, const Barriers<C>& barriers,
                                             unsigned char* shared, uint32_t shared_smem, int stage,
                                             bool any_block) {
  using QTile = typename C::QTile;
  const AttentionParams& attention = params.call.attention;
  const MixedTile& tile = v_tile_message<C>(shared);
  const uint32_t full = barriers.q_full(stage);
  tile_message<C, MixedTile>(shared, stage) = tile;
  if (!any_block) return ptx::mbarrier_arrive(full);  // a tile without keys needs no Q
  const int head = attention.q_head == 0 ? 0 : tile.batch_head % attention.heads_q;
  const int row = device::sequence_start(attention.cu_seqlens_q_gmem,
                                         tile.batch_head / attention.heads_q, attention.nq) +
                  tile.first_row;
  const uint32_t q_smem = shared_smem + C::Q_SMEM + stage * QTile::BYTES;
  if (!tile.is_packed()) {
    device::start_load<QTile>(q_smem, params.call.q_map, row, head, 0, full);
    return;
  }
  ptx::mbarrier_arrive_expect_tx(full, C::GROUP_ROWS * 2 * C::HEAD_DIM);
#pragma unroll
  for (int slab = 0; slab < QTile::SLABS; ++slab) {
    ptx::cp_async_bulk_tensor_4d_load(q_smem + slab * QTile::SLAB_BYTES, params.tiles.q_map,
                                      slab * QTile::SLAB, row, head, 0, full);
  }
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
  if constexpr (!C::FP8) {
    // The kernel may have started early: it reads nothing and writes nothing before what comes
    // before it is done. Kernels for 8 bits wait for V instead, further down.
    if (leader && attention.nk > 0) {  // without keys there are no maps of them
      ptx::prefetch_tensormap(params.k_map);
      ptx::prefetch_tensormap(params.q_map);
      ptx::prefetch_tensormap(params.v_map);
      if constexpr (C::MIXED) ptx::prefetch_tensormap(all_params.tiles.q_map);
      if constexpr (C::STORES_BY_TMA) ptx::prefetch_tensormap(all_params.out_map);
    }
    ptx::griddepcontrol_wait();
  }
  const auto wait_for_transposed_v = [&] {
    if (C::FP8 && !transposes_v<C>(params)) ptx::griddepcontrol_wait();
  };
  const auto is_there = [&](unsigned index) {
    if constexpr (C::MIXED) return index < count_mixed_tiles(all_params);
    return index < static_cast<unsigned>(params.tiles);
  };

  // With MIXED the next tile is taken before the last blocks of this one are loaded, so that its
  // number is there when the copies have begun.
  [[maybe_unused]] unsigned taken = 0;
  const auto take_next = [&] {
    if constexpr (C::MIXED) {
      if (threadIdx.x % 32 == 0) taken = atomicAdd(params.taken_gmem, 1);
    }
  };
  const auto next = [&](unsigned index) {
    if constexpr (C::MIXED) return gridDim.x + uniform(taken);
    wait_for_transposed_v();  // the other kernel has cleared the counter
    return next_tile(params, index);
  };

  for (unsigned index = blockIdx.x; is_there(index); index = next(index)) {
    TileOf<C> tile;
    int batch, head, kv_head;
    [[maybe_unused]] TilePart part{index, 0, C::BLOCK_Q};
    if constexpr (C::CUTS_TILES && !C::PACKS) part = find_part<C>(params, index);
    if constexpr (C::MIXED) {
      tile = find_mixed_tile<C>(all_params, index);
      const auto heads_q = static_cast<unsigned>(attention.heads_q);
      const auto batch_head = static_cast<unsigned>(tile.batch_head);
      batch = static_cast<int>(batch_head / heads_q);
      head = static_cast<int>(batch_head % heads_q);
      kv_head =
          static_cast<int>(batch_head % heads_q / static_cast<unsigned>(attention.heads_per_kv));
      send_tile_to_v<C>(barriers, shared, tile, parity_of_tile<C>(q_ring) ^ 1, leader);
    } else if constexpr (C::PREPARES_TILES) {
      const FoundTile found = find_tile<C>(params, part.tile);
      tile = {found.work, 0};
      if (tile.first_row < 0) {
        if (C::TAKES_LISTS && params.listed) break;  // the list has no more
        continue;
      }
      batch = found.batch, head = found.head, kv_head = found.kv_head;
    } else {
      if (C::TAKES_LISTS && params.listed) {
        tile = {find_listed_work(params, index, 1), 0};
        if (tile.first_row < 0) break;  // the list has no more
      } else {
        tile = {
            device::find_work(attention, static_cast<int>(index) / shares, rows_of_tile<C>(params),
                              C::CAN_PACK ? params.packed_heads.count : 1),
            static_cast<int>(index) % shares};
        if (tile.first_row < 0) continue;
      }
      batch = tile.batch_head / attention.heads_q;
      head = tile.batch_head % attention.heads_q;
      kv_head = head / attention.heads_per_kv;
    }
    device::CacheRows cache_rows{};
    if constexpr (C::MIXED) {
      cache_rows = {0, tile.nk};
    } else if constexpr (C::CACHE) {
      if (tile.nq <= all_params.few_rows) continue;  // another launch serves the sequence
      cache_rows = device::find_cache_rows(all_params.cache, batch);
      tile.nk = cache_rows.count;
    }
    if constexpr (!C::MIXED) tile.end_row = tile.nq;
    if constexpr (C::PACKS) {
      tile.end_row = min(tile.nq, tile.first_row + rows_of_tile<C>(params));
    } else if constexpr (C::TILE_STEP > 0 && !C::MIXED) {
      const device::RowTile rows =
          device::row_tile_from_end(tile.nq, tile.first_row, C::BLOCK_Q, C::TILE_STEP);
      tile.first_row = rows.first_row;
      tile.end_row = rows.end_row;
      if constexpr (C::CUTS_TILES) {
        tile.first_row += part.first_row;
        tile.end_row = min(tile.end_row, tile.first_row + part.rows);
        if (tile.first_row >= tile.end_row) continue;  // the row tile has fewer parts
      }
    }
    const VisibleKeysOf<C> visible = find_visible_keys<C>(all_params, tile);
    const device::Blocks blocks = find_blocks<C>(params, tile, visible);
    // Kernels that transpose V give the producer few registers: these values lie in uniform ones,
    // of which there are enough.
    const auto in_uniform_register = [](int x) { return C::TRANSPOSES_V ? uniform(x) : x; };
    kv_head = in_uniform_register(kv_head);
    const int keys_start = in_uniform_register(
        device::sequence_start(attention.cu_seqlens_k_gmem, batch, attention.nk));
    // 8-bit V that was transposed before: where the keys of the sequence start in a column, and one
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
        return sequence_of_cache<C>(all_params, batch, cache_rows).find(block);
      }
    };
    CachePlace next_place{};  // of the block whose K comes next: it is found a block ahead
    const auto load_k = [&](int block) {
      // The products of every consumer warp have read the K that the stage held.
      // mutants: needless-with-one-tile (tests/sim/tags.py)
      ptx::mbarrier_wait_parity(barriers.k_empty(k_ring.stage), k_ring.parity ^ 1);
      if constexpr (C::CACHE) {
        start_cache_load<typename C::KTile>(
            leader, shared_smem + C::K_SMEM + k_ring.stage * C::KTile::BYTES, params.k_map,
            next_place, all_params.cache.blocks, all_params.k_page_groups, all_params.box_rows,
            kv_head, barriers.k_full(k_ring.stage));
      } else if (leader) {
        device::start_load<typename C::KTile, C::PACK>(
            shared_smem + C::K_SMEM + k_ring.stage * C::KTile::BYTES, params.k_map,
            keys_start + block, attention.k_head == 0 ? 0 : kv_head,
            attention.k_batch == 0 ? 0 : batch, barriers.k_full(k_ring.stage));
      }
      k_ring.advance();
      next_place = find_place(block - C::BLOCK_K);
    };
    // `place` is that of the block in a cache.
    const auto load_v = [&](int block, const CachePlace& place) {
      // 8-bit V that was transposed before has zeros there.
      const bool ragged = !C::FP8 && !C::SHORT &&
                          (block < seen_begin || (block + C::BLOCK_K > seen_end && reads_beyond()));
      const int offset = C::V_SMEM + v_ring.stage * C::VTile::BYTES;
      if constexpr (C::CLEARS_BESIDE) {
        if (ragged) {
          ptx::mbarrier_wait_parity(barriers.v_cleared(), ragged_parity ^ 1);
          if (leader)
            rows_to_clear<C>(shared) = {seen_begin - block, seen_end - block, v_ring.stage};
        }
      }
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
        device::start_load<typename C::VTile>(
            shared_smem + offset, params.v_map, keys_start + block,
            attention.v_head == 0 ? 0 : kv_head, attention.v_batch == 0 ? 0 : batch,
            ragged ? barriers.v_ragged() : barriers.v_full(v_ring.stage));
      }
      if (C::CLEARS_BESIDE) {
        ragged_parity ^= ragged ? 1 : 0;
      } else if (ragged) {
        ptx::mbarrier_wait_parity(barriers.v_ragged(), ragged_parity);  // V has landed
        ragged_parity ^= 1;
        clear_rows<typename C::VTile>(shared + offset, seen_begin - block, seen_end - block);
        if (leader) ptx::mbarrier_arrive(barriers.v_full(v_ring.stage));
      }
      v_ring.advance();
    };

    // Where the kernel transposes V: V as it is, for the warps that do so.
    [[maybe_unused]] const auto load_raw_v = [&](int block) {
      using RawVTile = typename C::RawVTile;
      // The block that the stage held has been transposed.
      ptx::mbarrier_wait_parity(barriers.raw_empty(raw_ring.stage), raw_ring.parity ^ 1);
      if (leader) {
        rows_to_transpose<C>(shared, raw_ring.stage) = {
            seen_begin - block, reads_beyond() ? seen_end - block : C::BLOCK_K};
        device::start_load<RawVTile, C::PACK>(
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
    if constexpr (C::PRODUCERS == 2 && !C::MIXED) {
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
    ptx::mbarrier_wait_parity(barriers.q_empty(q_ring.stage), free_parity<C>(q_ring));
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
      if constexpr (C::MIXED) {
        load_mixed_q<C>(all_params, barriers, shared, shared_smem, q_ring.stage, any_block);
      } else {
        tile_message<C>(shared, q_ring.stage) = tile;
        if (any_block) {
          const int q_start =
              device::sequence_start(attention.cu_seqlens_q_gmem, batch, attention.nq);
          const uint32_t q_smem = shared_smem + C::Q_SMEM + q_ring.stage * C::QTile::BYTES;
          const int first_head = attention.q_head == 0 ? 0 : head;
          if constexpr (C::PACKS) {
            load_grouped_q<C>(params, tile, q_start + tile.first_row, first_head,
                              C::SHORT && attention.q_batch != 0 ? batch : 0, q_smem,
                              barriers.q_full(q_ring.stage));
          } else {
            device::start_load<typename C::QTile, C::PACK>(
                q_smem, params.q_map, q_start + tile.first_row, first_head,
                attention.q_batch == 0 ? 0 : batch, barriers.q_full(q_ring.stage));
          }
        } else {
          ptx::mbarrier_arrive(barriers.q_full(q_ring.stage));  // a tile without keys needs no Q
        }
      }
    }
    if constexpr (C::PREPARES_TILES) device::arrive_beside(leader, barriers.q_full(q_ring.stage));
    q_ring.advance();
    wait_for_transposed_v();
    if (!any_block) take_next();
#pragma unroll 1
    for (int block = blocks.last; block >= blocks.first; block -= C::BLOCK_K) {
      if (block == min(blocks.last, blocks.first + 2 * C::BLOCK_K)) take_next();
      const CachePlace place_before = next_place;
      if (block > blocks.first) load_k(block - C::BLOCK_K);
      // The output rows of the tile before have left the ring of V. Q has one stage, whose parity
      // counts tiles, and goes back in each tile: so no tile is missed where one has no keys.
      if constexpr (C::STORES_THROUGH_V) {
        if (block == blocks.last) ptx::mbarrier_wait_parity(barriers.v_free(), q_ring.parity);
      }
      bool loaded = false;
      if constexpr (C::TRANSPOSES_V) {
        loaded = transposes_v<C>(params);
        if (loaded) load_raw_v(block);
      }
      if constexpr (C::PRODUCERS == 1 && (!C::TRANSPOSES_V || C::TAKES_TRANSPOSED_V)) {
        if (!loaded) load_v(block, place);
      }
      place = place_before;
    }
  }
  // Where V was transposed before, a CTA without tiles, too, ends after the kernel that did it.
  wait_for_transposed_v();
  send_no_tile<C, TileOf<C>>(barriers, shared, q_ring, leader);
  if constexpr (C::CLEARS_BESIDE) {
    ptx::mbarrier_wait_parity(barriers.v_cleared(), ragged_parity ^ 1);
    if (leader) {
      rows_to_clear<C>(shared) = {0, 0, -1};
      ptx::mbarrier_arrive(barriers.v_ragged());
    }
  }
  // The next kernel may start where CTAs of this one have ended. Asked for when this one starts,
  // the small CTAs of a kernel of few would gather on the first SMs that are free.
  if constexpr (!C::FP8) ptx::griddepcontrol_launch_dependents();
  if constexpr (C::TRANSPOSES_V) {
    if (transposes_v<C>(params)) {
      ptx::mbarrier_wait_parity(barriers.raw_empty(raw_ring.stage), raw_ring.parity ^ 1);
      if (leader) {
        rows_to_transpose<C>(shared, raw_ring.stage) = {0, 0};
        ptx::mbarrier_arrive(barriers.raw_full(raw_ring.stage));
      }
    }
  }
  if constexpr (C::PRODUCERS == 2) {
    ptx::mbarrier_wait_parity(barriers.v_tile_empty(), parity_of_tile<C>(q_ring) ^ 1);
    if (leader) {
      VTileMessage<C> none{};
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
__device__ __forceinline__ void produce_v(const ParamsOf<C>& params, unsigned char* shared,
                                          uint32_t shared_smem) {
  using VTile = typename C::VTile;
  const AttentionParams& attention = params.call.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const bool leader = ptx::elect_sync();
  RingPosition<C::STAGES> v_ring;
  uint32_t ragged_parity = 0, v_tile_parity = 0;

  while (true) {
    ptx::mbarrier_wait_parity(barriers.v_tile_full(), v_tile_parity);  // the message is there
    const VTileMessage<C> tile = v_tile_message<C>(shared);
    if (tile.first_row < 0) break;
    release(barriers.v_tile_empty());
    v_tile_parity ^= 1;
    const int batch = tile.batch_head / attention.heads_q;
    const int kv_head = tile.batch_head % attention.heads_q / attention.heads_per_kv;
    int first_of_cache = 0;
    if constexpr (!C::MIXED) first_of_cache = tile.first_of_cache;
    const auto sequence = sequence_of_cache<C>(params, batch, {first_of_cache, tile.nk});
    const device::ChunkedKeys visible = find_visible_keys<C>(params, tile);
    const device::Blocks blocks = find_blocks<C>(params.call, tile, visible);
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

}  // namespace archflash::hopper
