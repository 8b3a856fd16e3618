// What a CTA and its warps know of their work, and how a block of keys is loaded.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/math/attention_work.cuh"
#include "common/math/visible_keys.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// What the main loop needs to know of its CTA. In shared memory, read when it is needed: outputs
// and scores leave few registers.
struct Place {
  const uint16_t* k_gmem;  // of the sequence's first key; units of 16 bits, as strides count them
  const uint16_t* v_gmem;
  math::Work work;
  math::VisibleKeys visible;
};

// Called by one thread, for all.
__device__ __forceinline__ Place find_place(const AttentionParams& params, const math::Work& work) {
  const math::Offsets offsets = math::find_offsets(params, work);
  return {static_cast<const uint16_t*>(params.k_gmem) + offsets.k,
          static_cast<const uint16_t*>(params.v_gmem) + offsets.v, work,
          math::find_visible_keys(params, work)};
}

// The rows of this thread's warp.
template <class C>
struct WarpRows {
  int first, last;  // last before first: none

  __device__ __forceinline__ explicit WarpRows(const Place& place) {
    first = place.work.first_row + ptx::mov_tid_x_volatile() / 32 * C::WARP_ROWS;
    last = min(first + C::WARP_ROWS, place.work.nq) - 1;
  }
  __device__ __forceinline__ bool any_sees(const math::VisibleKeys& visible, int key_first) const {
    return last >= first && !visible.hides(first, last, key_first, key_first + C::STEP_KEYS - 1);
  }
  __device__ __forceinline__ bool all_see(const math::VisibleKeys& visible, int key_first) const {
    return !visible.masks(first, last, key_first, key_first + C::STEP_KEYS - 1);
  }
};

// Starts the copy of a block of keys.
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
