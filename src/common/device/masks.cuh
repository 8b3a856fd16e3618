// Masks as data: which keys the rows of a tile see because of key_ranges, block_mask and attn_mask,
// and where the next key is that any of them may see.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/packed_heads.cuh"
#include "common/device/visible_keys.cuh"
#include "common/dtype.h"
#include "common/mask_params.h"
#include "common/ptx/f32_of_half.cuh"

namespace archflash::device {

// Scores of keys that are seen are never below this, so that no product with log2(e) is infinite: a
// row whose mask is finfo.min everywhere weighs its keys equally, as in PyTorch.
constexpr float LOWEST_SCORE = -2.3e38f;  // natural
constexpr float LOWEST_LOG2 = -3.318e38f;

// Position of query 0 of a sequence among its keys, as find_visible_keys() takes it.
__device__ __forceinline__ int64_t find_q_offset(const AttentionParams& params, const Work& work) {
  if (params.offset_mode == OffsetMode::KeysMinusQueries) return work.nk - work.nq;
  if (params.offset_mode == OffsetMode::PerBatch)
    return params.q_offsets_gmem[work.batch_head / params.heads_q];
  return params.q_offset;
}

// A half-open range of keys.
struct KeyRange {
  int begin, end;
};

// The masks of a CTA's tile: rows() rows of each of packed_heads.count heads. `row` below is a row
// of the sequence, `head` a head of the tile.
struct TileMasks {
  const MaskParams& params;
  PackedHeads packed_heads;
  int batch, first_head;
  int first_row, nq, nk;

  __device__ __forceinline__ TileMasks(const MaskParams& params, const AttentionParams& attention,
                                       const Work& work, const PackedHeads& packed_heads)
      : params(params),
        packed_heads(packed_heads),
        batch(work.batch_head / attention.heads_q),
        first_head(work.batch_head % attention.heads_q),
        first_row(work.first_row),
        nq(work.nq),
        nk(work.nk) {}

  __device__ __forceinline__ KeyRange range(int head, int row, int number) const {
    const int32_t* range_gmem = params.ranges_gmem + batch * params.ranges_batch +
                                (first_head + head) * params.ranges_head + row * params.ranges_row +
                                2 * number;
    return {min(max(range_gmem[0], 0), nk), min(max(range_gmem[1], 0), nk)};
  }
  __device__ __forceinline__ float slope(int head) const {
    return params
        .slopes_gmem[batch * params.slopes_batch + (first_head + head) * params.slopes_head];
  }
  // What block_mask says of a row and the block with a key.
  __device__ __forceinline__ uint8_t block(int head, int row, int key) const {
    return params
        .blocks_gmem[batch * params.blocks_batch + (first_head + head) * params.blocks_head +
                     row / MASK_BLOCK * params.blocks_row + key / MASK_BLOCK];
  }
  // The number of the element of attn_mask for a row and key.
  __device__ __forceinline__ int64_t element(int head, int row, int key) const {
    return batch * params.mask_batch + (first_head + head) * params.mask_head +
           row * params.mask_row + key * params.mask_key;
  }

  // The last key up to `key` that lies in a range of any row of the tile; -1 if there is none.
  // Called by whole warps, with the same result in all lanes.
  template <int TILE_ROWS>
  __device__ __forceinline__ int last_in_ranges(int key) const {
    int found = -1;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < TILE_ROWS; i += 32) {
      const int head = packed_heads.head(i), row = first_row + packed_heads.row(i);
      if (head >= packed_heads.count || row >= nq) continue;
#pragma unroll 1
      for (int number = 0; number < params.ranges; ++number) {
        const KeyRange keys = range(head, row, number);
        const int last = min(keys.end - 1, key);
        if (last >= keys.begin) found = max(found, last);
      }
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
      found = max(found, __shfl_xor_sync(0xFFFFFFFFu, found, lanes));
    return found;
  }

  // The first and the last key in a range of any row of the tile; begin > end if there is none.
  // Called by whole warps, with the same result in all lanes.
  template <int TILE_ROWS>
  __device__ __forceinline__ KeyRange all_ranges() const {
    KeyRange found{INT32_MAX, 0};
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < TILE_ROWS; i += 32) {
      const int head = packed_heads.head(i), row = first_row + packed_heads.row(i);
      if (head >= packed_heads.count || row >= nq) continue;
#pragma unroll 1
      for (int number = 0; number < params.ranges; ++number) {
        const KeyRange keys = range(head, row, number);
        if (keys.begin < keys.end) found = {min(found.begin, keys.begin), max(found.end, keys.end)};
      }
    }
    return {__reduce_min_sync(0xFFFFFFFFu, found.begin), __reduce_max_sync(0xFFFFFFFFu, found.end)};
  }

  // The last key from `begin` to `key` in a block of which any row of the tile sees anything; -1 if
  // there is none. The rows of a tile lie in one row of blocks. Called by whole warps, with the
  // same result in all lanes.
  __device__ __forceinline__ int last_in_blocks(int key, int begin) const {
    const int heads = params.blocks_head == 0 ? 1 : packed_heads.count;
#pragma unroll 1
    for (int number = key / MASK_BLOCK; number >= begin / MASK_BLOCK; number -= 32) {
      const int of_lane = number - static_cast<int>(threadIdx.x % 32);
      bool seen = false;
#pragma unroll 1
      for (int head = 0; head < heads && of_lane >= 0; ++head)
        seen |= block(head, first_row, of_lane * MASK_BLOCK) != BLOCK_UNSEEN;
      const unsigned lanes = __ballot_sync(0xFFFFFFFFu, seen);
      if (lanes != 0) {
        const int found = number - (__ffs(static_cast<int>(lanes)) - 1);
        return min(found * MASK_BLOCK + MASK_BLOCK - 1, key);
      }
    }
    return -1;
  }

  // The first key of the last block of BLOCK_K keys, from the one at `begin` to the one with `key`,
  // of which any row of the tile may see a key; -1 if there is none. Called by whole warps, with
  // the same result in all lanes.
  template <int TILE_ROWS, int BLOCK_K>
  __device__ __forceinline__ int last_block(int key, int begin) const {
    static_assert(MASK_BLOCK % BLOCK_K == 0 && MASK_BLOCK % TILE_ROWS == 0);
    while (key >= begin) {
      const int before = key;
      if (params.ranges_gmem != nullptr) key = last_in_ranges<TILE_ROWS>(key);
      if (params.blocks_gmem != nullptr && key >= begin) key = last_in_blocks(key, begin);
      if (key < begin) break;
      const bool both = params.ranges_gmem != nullptr && params.blocks_gmem != nullptr;
      if (!both || key == before) return key & -BLOCK_K;
      // The table may have left the ranges: look there again, until nothing changes.
    }
    return -1;
  }
};

// The walk of a main loop over the blocks of keys from `begin` on of which any row of the tile may
// see a key, from the last one back to the first. find_masks() is the TileMasks.
template <class C, class FindMasks>
struct SeenKeyBlocks {
  FindMasks find_masks;
  int begin;

  __device__ __forceinline__ bool has(int block) const { return block >= 0; }
  // The first key of the block behind `block`, negative if there is none. A main loop calls it once
  // for a block.
  __device__ __forceinline__ int look_behind(int block) const {
    return find_masks().template last_block<C::BLOCK_Q, C::BLOCK_K>(block - 1, begin);
  }
  __device__ __forceinline__ bool has_next(int found) const { return found >= 0; }
  __device__ __forceinline__ int next(int found) const { return found; }
};

// An element of attn_mask as a number that is added to a score in natural logarithms: -inf for a
// key that is not seen. Elements of 16 bits are of type DTYPE and half 0 or 1 of a word.
__device__ __forceinline__ float added(uint8_t kept) { return kept ? 0.0f : MINUS_INFINITY; }
__device__ __forceinline__ float added(float x) { return x; }
template <DType DTYPE>
__device__ __forceinline__ float added_of_half(uint32_t word, int half = 0) {
  return ptx::f32_of_half<DTYPE>(word, half);
}

}  // namespace archflash::device
