// Finds the keys that a list names (common/key_lists.h) in K and V, with a cache or without one.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/kv_cache.cuh"
#include "common/device/packed_heads.cuh"
#include "common/device/visible_keys.cuh"
#include "common/key_lists.h"
#include "common/kv_cache.h"

namespace archflash::device {

// The rows and heads of a tile whose rows all have one list. The tiles of a list follow one
// another, so that what they read together stays in L2. first_row is negative where a list has
// fewer rows than the others.
__device__ __forceinline__ Work find_list_work(const AttentionParams& params, const KeyLists& lists,
                                               const PackedHeads& packed, int index) {
  const int head_tiles = params.heads_per_kv / packed.count;
  const int row_tiles = (lists.list_rows + packed.rows() - 1) / packed.rows();
  const int number_of_lists = (params.nq + lists.list_rows - 1) / lists.list_rows;
  const int tile = index % (head_tiles * row_tiles);
  index /= head_tiles * row_tiles;
  const int list = index % number_of_lists;
  const int kv_head = index / number_of_lists;  // of all sequences
  Work work{};
  work.batch_head = kv_head * params.heads_per_kv + tile % head_tiles * packed.count;
  work.first_row = list * lists.list_rows + tile / head_tiles * packed.rows();
  work.nq = params.nq;
  if (work.first_row >= work.nq) work.first_row = -1;
  return work;
}

// Where a key lies: in which block of the cache (without one: in which sequence), at which row.
// position: its number in its sequence, or with physical indices its place in the cache; NO_KEY:
// the entry names no key, or one that no row of the tile sees.
constexpr int NO_KEY = -1;
struct KeyPlace {
  int block, row, position;
};

// One list.
struct KeyList {
  const int32_t* entries_gmem;
  int count;       // entries that count
  int sequence;    // of K and V
  CacheRows rows;  // of the sequence, or with physical indices of the whole cache
  bool physical;
  int first, last;  // positions that any row of the tile sees

  // The entry at a place of the list, which is loaded now and looked up by find().
  __device__ __forceinline__ int entry(int place) const {
    return place < count ? entries_gmem[place] : NO_KEY;
  }
  // Where the key of an entry lies. A page outside the cache is clamped into it, an entry that no
  // row sees names no key.
  __device__ __forceinline__ KeyPlace find(const KvCache& cache, int entry) const {
    if (entry < first || entry > last) return {0, 0, NO_KEY};
    const int row = entry + rows.first;
    if (physical) return {row / cache.block_rows, row % cache.block_rows, entry};
    const int block = min(max(find_cache_block(cache, sequence, row), 0), cache.blocks - 1);
    return {block, row % cache.block_rows, entry};
  }
};

// The keys of a sequence that its lists may name.
__device__ __forceinline__ CacheRows find_listed_rows(const KvCache& cache, int sequence) {
  return cache.seqlens_gmem == nullptr ? CacheRows{0, cache.capacity}
                                       : find_cache_rows(cache, sequence);
}

// The list of a tile. visible: what causal and window let its rows see; last_row: the tile's last.
__device__ __forceinline__ KeyList find_key_list(const AttentionParams& params,
                                                 const KeyLists& lists, const Work& work,
                                                 const CacheRows& rows, const VisibleKeys& visible,
                                                 int last_row) {
  const int sequence = work.batch_head / params.heads_q;
  const int kv_head = work.batch_head % params.heads_q / params.heads_per_kv;
  const int number = work.first_row / lists.list_rows;
  KeyList list;
  list.entries_gmem =
      lists.indices_gmem + sequence * lists.batch + kv_head * lists.head + number * lists.row;
  list.count = lists.topk;
  if (lists.lengths_gmem != nullptr) {
    const int length =
        lists.lengths_gmem[sequence * lists.lengths_batch + kv_head * lists.lengths_head +
                           number * lists.lengths_row];
    list.count = min(max(length, 0), lists.topk);
  }
  list.sequence = sequence;
  list.rows = rows;
  list.physical = lists.physical != 0;
  list.first = visible.first(work.first_row);
  list.last = visible.last(last_row);
  return list;
}

}  // namespace archflash::device
