// The copies of K and V by the warps of a decoding call (decode_fwd.cuh).
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/kv_cache.cuh"
#include "common/mma_sync/decode_config.cuh"
#include "common/mma_sync/decode_query.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"

namespace archflash::mma_sync {

// The copies of one warp: groups of WARP_KEYS keys, BLOCK_K keys apart.
template <class C>
struct DecodeCopies {
  static constexpr int UNIT = 16;  // keys whose copies have the same addresses but for a start
  static_assert(C::WARP_KEYS == UNIT || C::WARP_KEYS == 2 * UNIT);

  const AttentionParams& params;
  const char *k_gmem, *v_gmem;
  const int32_t* pages_gmem;
  int begin, end;                 // what lies outside becomes zeros
  int first, blocks, block_rows;  // of CacheContext
  int page_shift;                 // the rows of a page are 2^page_shift; -1 if they are not
  bool whole_pages;               // each unit lies in one page, or there are none
  bool same_strides;              // of K and V
  int entry = 0;                  // of the page table, for the group that is copied next

  __device__ __forceinline__ DecodeCopies(const AttentionParams& params, const CacheContext& cta)
      : params(params),
        k_gmem(reinterpret_cast<const char*>(cta.k_gmem)),
        v_gmem(reinterpret_cast<const char*>(cta.v_gmem)),
        pages_gmem(cta.pages_gmem),
        begin(visible_keys<C>(cta).begin()),
        end(cta.visible.nk),
        first(cta.first),
        blocks(cta.blocks),
        block_rows(cta.block_rows) {
    if constexpr (C::PLAIN) {
      pages_gmem = nullptr;
      first = 0;
    }
    page_shift = (block_rows & (block_rows - 1)) == 0 ? __ffs(block_rows) - 1 : -1;
    same_strides = params.k_batch == params.v_batch && params.k_row == params.v_row;
    whole_pages = pages_gmem == nullptr || (block_rows % UNIT == 0 && first % UNIT == 0);
  }

  __device__ __forceinline__ int page_of(int row) const {
    return page_shift >= 0 ? row >> page_shift : row / block_rows;
  }
  // Looks up the pages of the group that is copied next, long before they are needed: lane i that
  // of key i, or of the first key of its unit. Lanes beyond the group repeat those of its keys.
  __device__ __forceinline__ void look_up(int key) {
    if (pages_gmem == nullptr) return;
    const int lane = threadIdx.x % C::WARP_KEYS;
    const int own = whole_pages ? lane & -UNIT : lane;
    entry = pages_gmem[page_of(min(key + own, end - 1) + first)];
  }

  // Starts the copy of the keys from `key` on into a stage, after look_up() of the same key.
  __device__ __forceinline__ void start(uint32_t stage_smem, int key) const {
#pragma unroll
    for (int unit = 0; unit < C::WARP_KEYS; unit += UNIT) {
      const uint32_t k_smem = stage_smem + unit * C::Tile::ROW_BYTES;
      if constexpr (C::PLAIN) {
        start_plain_unit(k_smem, k_smem + C::K_BYTES, key + unit);
        continue;
      }
      int page = entry;
      if constexpr (C::WARP_KEYS > UNIT)
        page = __shfl_sync(device::FULL_WARP, entry, unit + threadIdx.x % UNIT);
      // A page outside the cache is clamped into it.
      page = min(max(page, 0), blocks - 1);
      start_unit(k_smem, k_smem + C::K_BYTES, key + unit, page);
    }
  }

 private:
  // Which 16-byte chunk of a unit's rows a lane copies in each step, in K and in V.
  struct Lane {
    using Tile = typename C::Tile;
    static constexpr int ROWS = 32 / Tile::CHUNKS;  // of a step
    static constexpr int STEPS = UNIT / ROWS;
    static_assert(32 % Tile::CHUNKS == 0 && UNIT % ROWS == 0);
    int row, chunk;
    uint32_t offset;  // of the chunk of step 0 in the tile
    bool in_k, in_v;  // whether the chunk is among the columns that there are

    __device__ __forceinline__ explicit Lane(const AttentionParams& params) {
      const int lane = threadIdx.x % 32;
      row = lane / Tile::CHUNKS;
      chunk = lane % Tile::CHUNKS;
      offset = Tile::offset(row, chunk);
      const int column = chunk * (16 / C::ELEMENT_BYTES);
      in_k = column < params.d;
      in_v = column < params.dv;
    }
    // Where the chunk of a step goes. ROWS is a power of two and `row` is below it, so that the
    // swizzle of row + step * ROWS is that of both joined by XOR.
    __device__ __forceinline__ uint32_t target(uint32_t tile_smem, int step) const {
      return ((tile_smem + offset) ^ (Tile::swizzle(step * ROWS) * 16)) +
             step * ROWS * Tile::ROW_BYTES;
    }
  };

  // Rows that no row of the sequence sees become zeros: of a unit that has some, each copy is told
  // how much it reads.
  __device__ __forceinline__ void start_plain_unit(uint32_t k_smem, uint32_t v_smem,
                                                   int key) const {
    const Lane at(params);
    const int first_row = key + at.row;
    const char* k = k_gmem + first_row * params.k_row * C::ELEMENT_BYTES + at.chunk * 16;
    const char* v = v_gmem + first_row * params.v_row * C::ELEMENT_BYTES + at.chunk * 16;
    const bool whole = key >= begin && key + UNIT <= end;
#pragma unroll
    for (int step = 0; step < Lane::STEPS; ++step) {
      const int row = first_row + step * Lane::ROWS;
      const uint32_t bytes = whole || (row >= begin && row < end) ? 16 : 0;
      if (at.in_k) ptx::cp_async_cg_16(at.target(k_smem, step), k, bytes);
      if (at.in_v) ptx::cp_async_cg_16(at.target(v_smem, step), v, bytes);
      k += Lane::ROWS * params.k_row * C::ELEMENT_BYTES;
      v += Lane::ROWS * params.v_row * C::ELEMENT_BYTES;
    }
  }

  // page: that of the unit's first key, or of the lane's own key, which is lane % UNIT.
  __device__ __forceinline__ void start_unit(uint32_t k_smem, uint32_t v_smem, int key,
                                             int page) const {
    const Lane at(params);
    if (whole_pages && key >= begin && key + UNIT <= end) {
      int64_t k_row = key, v_row = key;  // of the first key, in elements
      if (pages_gmem == nullptr) {
        k_row *= params.k_row;
        v_row *= params.v_row;
      } else {
        const int row = key + first, row_of_page = row - page_of(row) * block_rows;
        k_row = page * params.k_batch + row_of_page * params.k_row;
        v_row = page * params.v_batch + row_of_page * params.v_row;
      }
      const char* k = k_gmem + (k_row + at.row * params.k_row) * C::ELEMENT_BYTES + at.chunk * 16;
      const char* v = v_gmem + (v_row + at.row * params.v_row) * C::ELEMENT_BYTES + at.chunk * 16;
#pragma unroll
      for (int step = 0; step < Lane::STEPS; ++step) {
        if (at.in_k) ptx::cp_async_cg_16(at.target(k_smem, step), k);
        k += Lane::ROWS * params.k_row * C::ELEMENT_BYTES;
      }
#pragma unroll
      for (int step = 0; step < Lane::STEPS; ++step) {
        if (at.in_v) ptx::cp_async_cg_16(at.target(v_smem, step), v);
        v += Lane::ROWS * params.v_row * C::ELEMENT_BYTES;
      }
      return;
    }
    // Lanes 0 to 15 find where a row of K lies, the others where one of V does, in elements. The
    // lanes that copy a row ask them. Rows that no row of the sequence sees become zeros.
    const int lane = threadIdx.x % 32;
    const bool of_k = lane < UNIT;
    const int64_t row_stride = of_k ? params.k_row : params.v_row;
    const int own_key = min(key + lane % UNIT, end - 1);
    int64_t own = own_key * row_stride;
    if (pages_gmem != nullptr) {
      const int row = own_key + first, row_of_page = row - page_of(row) * block_rows;
      own = page * (of_k ? params.k_batch : params.v_batch) + row_of_page * row_stride;
    }
#pragma unroll
    for (int step = 0; step < Lane::STEPS; ++step) {
      const int row = step * Lane::ROWS + at.row;
      const uint32_t bytes = key + row >= begin && key + row < end ? 16 : 0;
      const int64_t k_row = __shfl_sync(device::FULL_WARP, own, row);
      int64_t v_row = k_row;
      if (!same_strides) v_row = __shfl_sync(device::FULL_WARP, own, UNIT + row);
      const int of_row = at.chunk * 16;
      if (at.in_k) {
        ptx::cp_async_cg_16(at.target(k_smem, step), k_gmem + k_row * C::ELEMENT_BYTES + of_row,
                            bytes);
      }
      if (at.in_v) {
        ptx::cp_async_cg_16(at.target(v_smem, step), v_gmem + v_row * C::ELEMENT_BYTES + of_row,
                            bytes);
      }
    }
  }
};

}  // namespace archflash::mma_sync
