// Copies blocks of keys out of a KV cache, whose lengths and page table are on the device.
#pragma once

#include <cstdint>

#include "common/device/kv_cache.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "hopper/cache/cache_params.h"

namespace archflash::hopper {

// Where a lane's part of a block of keys lies in the cache: `block` is a page, or without a page
// table a sequence, as the caller gave it, and `row` the first row in there.
struct CachePlace {
  int block, row;
};

// The cache as a producer's warp sees it for a sequence.
struct SequenceOfCache {
  const KvCache& cache;
  int box_rows;
  int sequence;
  device::CacheRows rows;

  // The place of box number `lane` of the block of keys that begins with key `first_key`. Behind
  // the sequence's last key the page of that key stands in, and before its first key that one's:
  // such rows are never used. Nothing waits here for the entry of the page table.
  __device__ __forceinline__ CachePlace find(int first_key) const {
    const int key = min(first_key + static_cast<int>(threadIdx.x) % 32 * box_rows, rows.count - 1);
    const int inside = max(key, 0);
    const int block = device::find_cache_block(cache, sequence, inside);
    if (cache.page_table_gmem == nullptr) return {block, rows.first + first_key};
    return {block, inside % cache.block_rows / box_rows * box_rows};
  }
};

// The rows of a sequence in pages of 2^page_shift rows without padding. Few rows need a block of
// keys in less time than divisions would take.
struct SequenceInPages {
  const KvCache& cache;
  int box_rows, page_shift;
  int sequence, count;

  __device__ __forceinline__ CachePlace find(int first_key) const {
    const int key = min(first_key + static_cast<int>(threadIdx.x) % 32 * box_rows, count - 1);
    const int inside = max(key, 0);
    const int* pages = cache.page_table_gmem + sequence * cache.page_table_row;
    return {pages[inside >> page_shift], inside & ((1 << page_shift) - box_rows)};
  }
};

// Starts the copies of one head's block of keys, each lane that of its box of `box_rows` rows, and
// makes the barrier expect all its bytes. What a page table names outside the cache is clamped.
// `page_groups`: for a GroupedTile, groups of 8 rows from one page to the next. Called by all
// lanes, of which `leader` is one.
template <class Tile>
__device__ __forceinline__ void start_cache_load(bool leader, uint32_t tile_smem,
                                                 const TensorMap& map, const CachePlace& place,
                                                 int blocks, int page_groups, int box_rows,
                                                 int head, uint32_t barrier_smem) {
  if (leader) ptx::mbarrier_arrive_expect_tx(barrier_smem, Tile::BYTES);
  __syncwarp();  // the bytes are expected before they come
  const int first = static_cast<int>(threadIdx.x) % 32 * box_rows;
  if (first >= Tile::ROWS) return;
  const int block = min(max(place.block, 0), blocks - 1);
  if constexpr (requires { Tile::GROUP_BYTES; }) {
    const int group = block * page_groups + place.row / Tile::GROUP_ROWS;
    ptx::cp_async_bulk_tensor_5d_load(tile_smem + first / Tile::GROUP_ROWS * Tile::GROUP_BYTES, map,
                                      0, 0, 0, group, head, barrier_smem);
  } else {
#pragma unroll
    for (int slab = 0; slab < Tile::SLABS; ++slab) {
      ptx::cp_async_bulk_tensor_4d_load(
          tile_smem + slab * Tile::SLAB_BYTES + first * Tile::ROW_BYTES, map, slab * Tile::SLAB,
          place.row, head, block, barrier_smem);
    }
  }
}

// device::clear_rows() of a GroupedTile.
template <class Tile>
__device__ __forceinline__ void clear_grouped_rows(unsigned char* tile, int begin, int end) {
  constexpr int CHUNKS = Tile::COLUMNS / 8;
  begin = min(max(begin, 0), Tile::ROWS);
  const int kept = max(min(end, Tile::ROWS) - begin, 0);  // rows
#pragma unroll 1
  for (int chunk = static_cast<int>(threadIdx.x) % 32; chunk < (Tile::ROWS - kept) * CHUNKS;
       chunk += 32) {
    const int row = chunk / CHUNKS + (chunk < begin * CHUNKS ? 0 : kept);
    *reinterpret_cast<uint4*>(tile + Tile::offset(row, chunk % CHUNKS)) = uint4{};
  }
  ptx::fence_proxy_async_shared();  // the stores come before the tensor cores read
  __syncwarp();                     // all lanes' stores come before the arrival of one
}

}  // namespace archflash::hopper
