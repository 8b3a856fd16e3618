// Finds the tiles of a call of mixed lengths (mixed_params.h), before the attention kernel, which
// starts early and waits for it: lengths are on the device only. One CTA.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/chunked_keys.cuh"
#include "common/device/kv_cache.cuh"
#include "common/device/uniform.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "hopper/cache/mixed_params.h"

namespace archflash::hopper {

// A sequence and what its tiles cost, in blocks of keys that one warpgroup passes.
struct MixedSequence {
  int nq, nk;
  bool few;      // its heads are packed
  int blocks;    // of keys that any of its few rows sees
  int tiles;     // of a head, or of packed heads
  int64_t cost;  // of all heads
};

__device__ __forceinline__ MixedSequence find_mixed_sequence(const MixedParams& params,
                                                             int sequence) {
  constexpr int COST_OF_MANY = 2;  // all warpgroups multiply
  const AttentionParams& attention = params.call.attention;
  MixedSequence found{};
  if (sequence >= attention.batch) return found;
  const int* cu_q = attention.cu_seqlens_q_gmem;
  found.nq = max(device::sequence_start(cu_q, sequence + 1, attention.nq) -
                     device::sequence_start(cu_q, sequence, attention.nq),
                 0);
  found.nk = device::find_cache_rows(params.cache, sequence).count;
  if (found.nq == 0) return found;
  const device::Work work{sequence * attention.heads_q, 0, found.nq, found.nk};
  const device::ChunkedKeys visible{device::find_visible_keys(attention, work),
                                    params.attention_chunk, found.nk - found.nq};
  const int block_k = params.tiles.block_k, block_q = params.tiles.block_q;
  const auto blocks_of = [&](int first_row, int last_row) {
    const int first = visible.first(first_row), last = visible.last(last_row);
    return last < first ? 0 : last / block_k - first / block_k + 1;
  };
  const int packed_rows = params.call.packed_heads.rows();
  found.few = found.nq <= FEW_ROWS;
  found.tiles =
      (found.nq + (found.few ? packed_rows : block_q) - 1) / (found.few ? packed_rows : block_q);
  if (found.few) {
    found.blocks = blocks_of(0, found.nq - 1);
    found.cost = static_cast<int64_t>(found.blocks) * found.tiles * params.tiles.heads_kv;
  } else {
    const int both = blocks_of(0, min(block_q, found.nq) - 1) +
                     blocks_of((found.tiles - 1) * block_q, found.nq - 1);
    found.cost = int64_t{COST_OF_MANY} * found.tiles * both / 2 * attention.heads_q;
  }
  return found;
}

// What the sequences before one have: tiles of packed heads, of these shares beyond the first one
// of each tile and tiles of several shares, and tiles of one head.
struct MixedPlace {
  int few, extra, shared, many;

  __device__ __forceinline__ void add(const MixedPlace& other) {
    few += other.few, extra += other.extra, shared += other.shared, many += other.many;
  }
};

__device__ __forceinline__ void order_mixed(const MixedParams& params) {
  constexpr int WARPS = ORDER_MIXED_THREADS / 32;
  __shared__ int64_t costs[WARPS];
  __shared__ MixedPlace of_warps[WARPS];
  ptx::griddepcontrol_launch_dependents();  // the CTAs of the attention kernel wait
  const AttentionParams& attention = params.call.attention;
  const MixedTiles& tiles = params.tiles;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  for (int i = thread; i < 4 * tiles.slots; i += ORDER_MIXED_THREADS) tiles.done_gmem[i] = 0;
  const int rounds = (attention.batch + ORDER_MIXED_THREADS - 1) / ORDER_MIXED_THREADS;
  MixedSequence own{};
  int64_t cost = 0;
  for (int round = 0; round < rounds; ++round) {
    own = find_mixed_sequence(params, round * ORDER_MIXED_THREADS + thread);
    cost += own.cost;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    cost += __shfl_xor_sync(device::FULL_WARP, cost, lanes);
  if (lane == 0) costs[warp] = cost;
  __syncthreads();  // the sums of all warps are there
  int64_t total = 0;
  for (int i = 0; i < WARPS; ++i) total += costs[i];
  // No share of a tile takes longer than half of the time of a CTA, so that the last one to be
  // taken is soon done.
  const int64_t part = total / (2 * int64_t{tiles.ctas}) + 1;
  const int limit =
      static_cast<int>(min(max(part, int64_t{FEWEST_SHARED_BLOCKS}), int64_t{INT32_MAX}));

  MixedPlace before_round{};
  for (int round = 0; round < rounds; ++round) {
    const int sequence = round * ORDER_MIXED_THREADS + thread;
    if (rounds > 1) own = find_mixed_sequence(params, sequence);
    const int extra = own.few ? max((own.blocks + limit - 1) / limit, 1) - 1 : 0;
    const int few = own.few ? own.tiles : 0, many = own.few ? 0 : own.tiles;
    const MixedPlace mine{few, few * extra, extra > 0 ? few : 0, many};
    MixedPlace end = mine;  // of the lanes up to this one
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const MixedPlace other{__shfl_up_sync(device::FULL_WARP, end.few, lanes),
                             __shfl_up_sync(device::FULL_WARP, end.extra, lanes),
                             __shfl_up_sync(device::FULL_WARP, end.shared, lanes),
                             __shfl_up_sync(device::FULL_WARP, end.many, lanes)};
      if (lane >= lanes) end.add(other);
    }
    if (lane == 31) of_warps[warp] = end;
    __syncthreads();  // the sums of all warps are there
    MixedPlace all = before_round, place = before_round;
    for (int i = 0; i < WARPS; ++i) {
      if (i < warp) place.add(of_warps[i]);
      all.add(of_warps[i]);
    }
    place.add({end.few - mine.few, end.extra - mine.extra, end.shared - mine.shared,
               end.many - mine.many});
    TileEntry entry{sequence, 0, own.nq, own.nk, 0, 0, place.extra + place.shared};
    // There is room for the tiles of sequences that do not overlap, as those of right cu_seqlens.
    const int room = min(many, tiles.most_many - place.many);
    // The last rows first: under a causal mask they see the most keys.
    for (int i = 0; i < room; ++i) {
      entry.first_row = (many - 1 - i) * tiles.block_q;
      tiles.many_gmem[place.many + i] = entry;
    }
    entry.shares = 1 + extra;
    for (int i = 0; i < few * entry.shares; ++i) {
      entry.first_row = i / entry.shares * params.call.packed_heads.rows();
      entry.share = i % entry.shares;
      if (entry.share == 0 && i > 0) entry.slot += entry.shares;
      tiles.few_gmem[place.few + place.extra + i] = entry;
    }
    before_round = all;
    __syncthreads();  // every thread has read the sums, before those of the next round come
  }
  if (thread == 0) {
    const int few = (before_round.few + before_round.extra) * tiles.heads_kv;
    const int many = min(before_round.many, tiles.most_many) * attention.heads_q;
    *tiles.counts_gmem = {0, few, many};
  }
}

// --- the attention kernel's part ---

// A number of the walk over all tiles, and the head of K (few rows) or of q that it is of.
struct MixedItem {
  const TileEntry* entry;
  int head;
};

// Tiles of few rows, which wait for memory, and those of many rows, which multiply, take turns as
// long as there are both, so that CTAs of both kinds run at the same time. Long caches come early.
__device__ __forceinline__ MixedItem find_mixed_item(const MixedTiles& tiles, int heads_q,
                                                     unsigned index) {
  const unsigned few = tiles.counts_gmem->few, many = tiles.counts_gmem->many;
  const unsigned both = min(few, many);
  bool of_few = few > many;
  unsigned number = index - both;
  if (index < 2 * both) of_few = index % 2 == 0, number = index / 2;
  const unsigned heads = of_few ? tiles.heads_kv : heads_q;
  const unsigned entry = number / heads;
  return {(of_few ? tiles.few_gmem : tiles.many_gmem) + entry,
          static_cast<int>(number - entry * heads)};
}

}  // namespace archflash::hopper
