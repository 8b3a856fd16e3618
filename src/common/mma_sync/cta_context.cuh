// What a CTA works on (sequence, rows, keys), which rows each of its warps has, and the copy of a
// block of keys.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/chunked_keys.cuh"
#include "common/device/key_groups.cuh"
#include "common/device/kv_cache.cuh"
#include "common/device/packed_heads.cuh"
#include "common/device/visible_keys.cuh"
#include "common/mma_sync/params.h"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// What the main loop needs to know about its CTA. It lives in shared memory and is read when it is
// needed, because outputs and scores leave few registers.
struct CtaContext {
  const uint16_t* k_gmem;  // first key of the sequence, in units of 16 bits like the strides
  const uint16_t* v_gmem;  // its V
  device::Work work;       // head, rows, lengths
  // The keys that each row sees. Its nk is the end of those that any row of the sequence sees.
  device::VisibleKeys visible;
};

// What the CTA of a kernel for few query rows knows besides: how heads are packed into its tile.
struct FewRowsContext : CtaContext {
  device::PackedHeads packed_heads;
};
// What the CTA of a kernel that reads a KV cache knows besides. k_gmem and v_gmem are then the
// head's first row of the whole cache, or without a page table of the sequence.
struct CacheContext : FewRowsContext {
  const int32_t* pages_gmem;   // pages of the sequence; null: its rows follow one another
  int first;                   // row of the sequence that is its first key
  int blocks, block_rows;      // pages of the cache, rows of a page
  float k_descale, v_descale;  // of the head; 1 but for caches of 8-bit numbers
  int chunk;                   // of device::ChunkedKeys

  // Where a key of the sequence lies. Pages outside the cache are clamped into it.
  __device__ __forceinline__ int64_t offset(int key, int64_t page_stride,
                                            int64_t row_stride) const {
    const unsigned row = key + first;
    const int page = min(max(pages_gmem[row / block_rows], 0), blocks - 1);
    return page * page_stride + static_cast<int64_t>(row % block_rows) * row_stride;
  }
};
template <class C>
using ContextOf = std::conditional_t<C::CACHE, CacheContext,
                                     std::conditional_t<C::CAN_SPLIT, FewRowsContext, CtaContext>>;

// The keys that each row of the CTA sees.
template <class C>
__device__ __forceinline__ decltype(auto) visible_keys(const ContextOf<C>& cta) {
  if constexpr (C::CACHE) {
    return device::ChunkedKeys{cta.visible, cta.chunk, cta.work.nk - cta.work.nq};
  } else {
    return (cta.visible);
  }
}

// Query rows of each head that the CTA's tile has.
template <class C>
__device__ __forceinline__ int rows_of_tile(const ContextOf<C>& cta) {
  if constexpr (C::CAN_SPLIT) return cta.packed_heads.rows();
  return C::BLOCK_Q;
}

// One thread calls this and writes the result to shared memory for all.
__device__ __forceinline__ CtaContext make_cta_context(const AttentionParams& params,
                                                       const device::Work& work) {
  const device::Offsets offsets = device::find_offsets(params, work);
  device::VisibleKeys visible = device::find_visible_keys(params, work);
  visible.nk = visible.end(work.nq);
  return {static_cast<const uint16_t*>(params.k_gmem) + offsets.k,
          static_cast<const uint16_t*>(params.v_gmem) + offsets.v, work, visible};
}

// The rows of a call without a cache, of which CacheParams::cache tells as of one whose blocks are
// the sequences, or with cu_seqlens all of them together.
__device__ __forceinline__ device::CacheRows rows_without_cache(const AttentionParams& params,
                                                                const device::Work& work) {
  const int sequence = work.batch_head / params.heads_q;
  return {device::sequence_start(params.cu_seqlens_k_gmem, sequence, params.nk), work.nk};
}

// The rows of the CTA's sequence, with a cache or without one.
__device__ __forceinline__ device::CacheRows find_rows(const CacheParams& params,
                                                       const device::Work& work) {
  return params.cache.seqlens_gmem == nullptr
             ? rows_without_cache(params.attention, work)
             : device::find_cache_rows(params.cache, work.batch_head / params.attention.heads_q);
}

// make_cta_context() for a KV cache, of which attention sees `rows` of the CTA's sequence.
template <class C>
__device__ __forceinline__ CacheContext make_cache_context(const CacheParams& params,
                                                           const device::Work& work,
                                                           const device::CacheRows& rows) {
  const AttentionParams& attention = params.attention;
  const KvCache& cache = params.cache;
  CacheContext cta;
  static_cast<CtaContext&>(cta) = make_cta_context(attention, work);
  cta.packed_heads = params.packed_heads;
  const int sequence = work.batch_head / attention.heads_q;
  const int kv_head = work.batch_head % attention.heads_q / attention.heads_per_kv;
  cta.first = rows.first;
  cta.blocks = cache.blocks;
  cta.block_rows = cache.block_rows;
  cta.chunk = params.attention_chunk;
  cta.visible.nk = visible_keys<C>(cta).end(work.nq);
  int64_t k_start = kv_head * attention.k_head, v_start = kv_head * attention.v_head;
  cta.pages_gmem = nullptr;
  if (cache.page_table_gmem != nullptr) {
    cta.pages_gmem = cache.page_table_gmem + sequence * cache.page_table_row;
  } else if (rows.count > 0) {
    const int block = min(max(device::find_cache_block(cache, sequence, 0), 0), cache.blocks - 1);
    k_start += block * attention.k_batch + rows.first * attention.k_row;
    v_start += block * attention.v_batch + rows.first * attention.v_row;
  }
  constexpr int ELEMENT_BYTES = C::FP8_CACHE ? 1 : 2;
  const auto at = [](const void* gmem, int64_t element) {
    return reinterpret_cast<const uint16_t*>(static_cast<const char*>(gmem) +
                                             element * ELEMENT_BYTES);
  };
  cta.k_gmem = at(attention.k_gmem, k_start);
  cta.v_gmem = at(attention.v_gmem, v_start);
  const auto load = [&](const Descale& descale) {
    if (!C::FP8_CACHE || descale.gmem == nullptr) return 1.0f;
    return descale.gmem[sequence * descale.batch + kv_head * descale.head];
  };
  cta.k_descale = load(params.k_descale);
  cta.v_descale = load(params.v_descale);
  return cta;
}

// The query rows of this thread's warp, of one head or of each of its packed heads.
template <class C>
struct WarpRows {
  int first, last;  // last < first: the warp has no rows

  __device__ __forceinline__ explicit WarpRows(const ContextOf<C>& cta) {
    if constexpr (C::CAN_SPLIT) {
      const int warp_row = ptx::mov_tid_x_volatile() / 32 * C::WARP_ROWS;
      const device::PackedHeads& packed = cta.packed_heads;
      first = cta.work.first_row + packed.row(warp_row);
      const int rows = packed.head(warp_row) < packed.count ? min(C::WARP_ROWS, packed.rows()) : 0;
      last = min(first + rows, cta.work.nq) - 1;
    } else {
      first = cta.work.first_row + device::warp_first_row<C>(ptx::mov_tid_x_volatile());
      last = min(first + C::WARP_ROWS, cta.work.nq) - 1;
    }
  }
  // Whether the warp has rows and one of them sees one of the STEP_KEYS keys from key_first on.
  template <class Visible>
  __device__ __forceinline__ bool any_sees(const Visible& visible, int key_first) const {
    return (last >= first) & !visible.hides(first, last, key_first, key_first + C::STEP_KEYS - 1);
  }
  // Whether every row of the warp sees all of these keys, so that no score needs a mask.
  template <class Visible>
  __device__ __forceinline__ bool all_see(const Visible& visible, int key_first) const {
    return !visible.masks(first, last, key_first, key_first + C::STEP_KEYS - 1);
  }
};

// Starts the copy of BLOCK_K rows of K or V from `key` on. Rows before `begin` and from `end` on
// become zeros. K has none of the former, because masks hide what it has there.
constexpr int NO_BEGIN = INT32_MIN;
template <class C, class Tile>
__device__ __forceinline__ void start_keys(uint32_t tile_smem, const uint16_t* keys_gmem,
                                           int64_t row_stride, int columns, int key, int begin,
                                           int end) {
  // mutants: ragged-copy-of-whole-block (tests/sim/tags.py)
  if (key >= begin && key + C::BLOCK_K <= end) {
    start_load<C, Tile, C::BLOCK_K>(tile_smem, keys_gmem, key, row_stride * 2, columns);
  } else {
    start_ragged_load<C, Tile, C::BLOCK_K>(tile_smem, keys_gmem + key * row_stride, row_stride,
                                           max(begin, key) - key, end - key, columns);
  }
}

// start_keys() for a paged KV cache. Each lane looks up where one of its warp's rows lies, and the
// lanes that copy that row ask it.
template <class C, class Tile>
__device__ __forceinline__ void start_paged_keys(uint32_t tile_smem, const uint16_t* keys_gmem,
                                                 int64_t page_stride, int64_t row_stride,
                                                 int columns, int key, const CacheContext& cta) {
  using Lane = CopyLane<C, Tile>;
  constexpr int WARP_ROWS = 32 / Tile::GROUP;  // that a warp copies in a step
  constexpr int STEPS = C::BLOCK_K / Lane::ROWS_PER_STEP;
  static_assert(C::BLOCK_K % Lane::ROWS_PER_STEP == 0 && STEPS * WARP_ROWS <= 32,
                "a lane looks up one row at most");
  const Lane lane;
  const int thread = ptx::mov_tid_x_volatile();
  const int step_of_lane = thread % 32 / WARP_ROWS;
  const int row = step_of_lane * Lane::ROWS_PER_STEP + thread / 32 * WARP_ROWS + thread % WARP_ROWS;
  const device::ChunkedKeys visible = visible_keys<C>(cta);
  int64_t own = -1;  // of a row that becomes zeros
  if (step_of_lane < STEPS && key + row >= visible.begin() && key + row < visible.nk)
    own = cta.offset(key + row, page_stride, row_stride);
  const uint32_t target = tile_smem + lane.offset;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int64_t offset =
        __shfl_sync(0xFFFFFFFFu, own, step * WARP_ROWS + thread % 32 / Tile::GROUP);
    const bool valid = offset >= 0;
    const uint16_t* source = valid ? keys_gmem + offset + lane.column : keys_gmem;
#pragma unroll
    for (int group = 0; group < Lane::GROUPS; ++group) {
      if (lane.column + group * Lane::GROUP_COLUMNS < columns) {
        ptx::cp_async_cg_16(
            target + step * Lane::ROWS_PER_STEP * Tile::ROW_BYTES + group * Tile::GROUP * 16,
            source + (valid ? group * Lane::GROUP_COLUMNS : 0), valid ? 16 : 0);
      }
    }
  }
}

// start_keys() for a KV cache, with pages or without.
template <class C, class Tile>
__device__ __forceinline__ void start_cached_keys(uint32_t tile_smem, const uint16_t* keys_gmem,
                                                  int64_t page_stride, int64_t row_stride,
                                                  int columns, int key, const CacheContext& cta) {
  if (cta.pages_gmem == nullptr) {
    start_keys<C, Tile>(tile_smem, keys_gmem, row_stride, columns, key,
                        visible_keys<C>(cta).begin(), cta.visible.nk);
  } else {
    start_paged_keys<C, Tile>(tile_smem, keys_gmem, page_stride, row_stride, columns, key, cta);
  }
}

}  // namespace archflash::mma_sync
