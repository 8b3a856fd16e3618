// Finds the rows of a sequence in a KV cache (common/kv_cache.h). What points outside the cache is
// clamped for reads and refused for writes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/kv_cache.h"

namespace archflash::device {

// The rows of a sequence that attention sees: `count` rows from row `first` on.
struct CacheRows {
  int first, count;
};

__device__ __forceinline__ CacheRows find_cache_rows(const KvCache& cache, int sequence) {
  const int64_t length = static_cast<int64_t>(cache.seqlens_gmem[sequence]) + cache.n_new;
  const int end =
      static_cast<int>(min(max(length, int64_t{0}), static_cast<int64_t>(cache.capacity)));
  const int padding = cache.leftpad_gmem == nullptr ? 0 : cache.leftpad_gmem[sequence];
  const int first = min(max(padding, 0), end);
  return {first, end - first};
}

// The block that holds a row of a sequence, 0 <= row < capacity, as the caller gave it: it may lie
// outside the cache.
__device__ __forceinline__ int find_cache_block(const KvCache& cache, int sequence, int row) {
  if (cache.page_table_gmem != nullptr)
    return cache.page_table_gmem[sequence * cache.page_table_row + row / cache.block_rows];
  return cache.batch_idx_gmem == nullptr ? sequence : cache.batch_idx_gmem[sequence];
}

}  // namespace archflash::device
