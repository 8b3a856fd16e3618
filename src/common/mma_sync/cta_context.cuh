// What a CTA works on (sequence, rows, keys), which rows each of its warps has, and the copy of a
// block of keys.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/attention_params.h"
#include "common/math/attention_work.cuh"
#include "common/math/packed_heads.cuh"
#include "common/math/visible_keys.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// What the main loop needs to know about its CTA. It lives in shared memory and is read when it is
// needed, because outputs and scores leave few registers.
struct CtaContext {
  const uint16_t* k_gmem;     // first key of the sequence, in units of 16 bits like the strides
  const uint16_t* v_gmem;     // its V
  math::Work work;            // head, rows, lengths
  math::VisibleKeys visible;  // the keys that each row sees
};

// Of a kernel for few query rows.
struct FewRowsContext : CtaContext {
  math::PackedHeads packed_heads;
};
template <class C>
using ContextOf = std::conditional_t<C::CAN_SPLIT, FewRowsContext, CtaContext>;

// Query rows of each head that the CTA's tile has.
template <class C>
__device__ __forceinline__ int rows_of_tile(const ContextOf<C>& cta) {
  if constexpr (C::CAN_SPLIT) return cta.packed_heads.rows();
  return C::BLOCK_Q;
}

// One thread calls this and writes the result to shared memory for all.
__device__ __forceinline__ CtaContext make_cta_context(const AttentionParams& params,
                                                       const math::Work& work) {
  const math::Offsets offsets = math::find_offsets(params, work);
  return {static_cast<const uint16_t*>(params.k_gmem) + offsets.k,
          static_cast<const uint16_t*>(params.v_gmem) + offsets.v, work,
          math::find_visible_keys(params, work)};
}

// The query rows of this thread's warp, of one head or of each of its packed heads.
template <class C>
struct WarpRows {
  int first, last;  // last < first: the warp has no rows

  __device__ __forceinline__ explicit WarpRows(const ContextOf<C>& cta) {
    if constexpr (C::CAN_SPLIT) {
      const int warp_row = ptx::mov_tid_x_volatile() / 32 * C::WARP_ROWS;
      const math::PackedHeads& packed = cta.packed_heads;
      first = cta.work.first_row + packed.row(warp_row);
      const int rows = packed.head(warp_row) < packed.count ? min(C::WARP_ROWS, packed.rows()) : 0;
      last = min(first + rows, cta.work.nq) - 1;
    } else {
      first = cta.work.first_row + ptx::mov_tid_x_volatile() / 32 * C::WARP_ROWS;
      last = min(first + C::WARP_ROWS, cta.work.nq) - 1;
    }
  }
  // Whether the warp has rows and one of them sees one of the STEP_KEYS keys from key_first on.
  __device__ __forceinline__ bool any_sees(const math::VisibleKeys& visible, int key_first) const {
    return last >= first && !visible.hides(first, last, key_first, key_first + C::STEP_KEYS - 1);
  }
  // Whether every row of the warp sees all of these keys, so that no score needs a mask.
  __device__ __forceinline__ bool all_see(const math::VisibleKeys& visible, int key_first) const {
    return !visible.masks(first, last, key_first, key_first + C::STEP_KEYS - 1);
  }
};

// Starts the copy of BLOCK_K rows of K or V from `key` on. Rows from nk on become zeros.
template <class C, class Tile>
__device__ __forceinline__ void start_keys(uint32_t tile_smem, const uint16_t* keys_gmem,
                                           int64_t row_stride, int columns, int key, int nk) {
  // mutants: ragged-copy-of-whole-block
  if (key + C::BLOCK_K <= nk) {
    start_load<C, Tile, C::BLOCK_K>(tile_smem, keys_gmem, key, row_stride * 2, columns);
  } else {
    start_ragged_load<C, Tile, C::BLOCK_K>(tile_smem, keys_gmem + key * row_stride, row_stride,
                                           nk - key, columns);
  }
}

}  // namespace archflash::mma_sync
