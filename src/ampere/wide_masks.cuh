// What masks as data make of the scores of a pair of warps (wide_fwd.cuh). Each warp of a pair
// finds the masks of half of the keys before Q K^T and leaves them in shared memory, because no
// registers are left for them; both read them behind the exchange of the scores, whose barrier
// serves both.
//
// Scores are logarithms to base 2 here, as in mma_sync/masked_fwd.cuh.
#pragma once

#include <cstdint>

#include "ampere/wide_config.cuh"
#include "common/device/lane_masks.cuh"
#include "common/device/online_softmax.cuh"
#include "common/mma_sync/masked_fwd.cuh"
#include "common/mma_sync/params.h"
#include "common/ptx/special_registers.cuh"

namespace archflash::ampere {

// What is in shared memory of the masks of a pair's scores: what is added to each score, in
// logarithms to base 2 and -inf where the key is not seen, for each key tile as fragments d; and of
// either warp, which has found those of every second half of the keys, whether its half has any key
// that is seen, and whether it changes any score.
template <class C>
struct PairMasks {
  float4 added[C::BLOCK_K / 8][32];
  uint8_t any[2], changes[2];
};

template <class C>
__device__ __forceinline__ PairMasks<C>& masks_of_pair(unsigned char* shared) {
  return reinterpret_cast<PairMasks<C>*>(shared + C::MASK_SMEM)[ptx::mov_tid_x_volatile() / 64];
}

// Finds the masks of a warp's half of the keys from `block` on.
template <class C>
__device__ __forceinline__ void find_half_masks(const mma_sync::MaskedParams& params,
                                                const mma_sync::MaskedContext& cta, int block,
                                                unsigned char* shared) {
  using Half = typename C::MaskedHalf;
  const unsigned thread = ptx::mov_tid_x_volatile(), lane = thread % 32, share = thread / 32 % 2;
  PairMasks<C>& pair = masks_of_pair<C>(shared);
  device::LaneMasks<Half> found;
  device::find_lane_masks<Half>(found, params.masks, params.call.attention, cta,
                                mma_sync::first_row_of_warp<Half>(thread),
                                block + share * Half::STEP_KEYS);
  if (lane == 0) pair.any[share] = found.any, pair.changes[share] = found.changes;
  if (!found.changes) return;
  device::Scores<Half> added = {};  // what the masks make of scores of 0
  device::apply_lane_masks<Half>(added, found, params.masks, 1.0f);
#pragma unroll
  for (int n = 0; n < Half::STEP_KEYS / 8; ++n) {
    const float (&x)[4] = added[0][n];
    pair.added[share * (Half::STEP_KEYS / 8) + n][lane] = {x[0], x[1], x[2], x[3]};
  }
}

// Masks a warp's scores. Returns whether any of its rows sees any key: the same for both warps.
template <class C>
__device__ __forceinline__ bool apply_pair_masks(device::Scores<typename C::Warp>& s_rmem,
                                                 unsigned char* shared) {
  constexpr int TILES = C::MaskedHalf::STEP_KEYS / 8;
  const PairMasks<C>& pair = masks_of_pair<C>(shared);
  const unsigned lane = ptx::mov_tid_x_volatile() % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!pair.changes[half]) continue;
#pragma unroll
    for (int n = half * TILES; n < (half + 1) * TILES; ++n) {
      const float4 x = pair.added[n][lane];
      const float added[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = s_rmem[0][n][i];
        s += added[i];
        if (s < device::LOWEST_LOG2) s = device::LOWEST_LOG2;
        // Selecting makes the old value irrelevant, even if it was NaN.
        if (added[i] == device::MINUS_INFINITY) s = device::MINUS_INFINITY;
      }
    }
  }
  return pair.any[0] || pair.any[1];
}

}  // namespace archflash::ampere
