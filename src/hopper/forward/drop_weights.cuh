// Dropout of P, which a warpgroup has in registers: which elements are kept.
#pragma once

#include <cstdint>

#include "common/device/dropout.cuh"
#include "common/device/kept_weights.cuh"
#include "common/dropout_params.h"
#include "hopper/forward/products.cuh"

namespace archflash::hopper {

using device::find_dropout;
using device::kept_flags;

// Which elements of a block of keys are kept, as masks of P as pack() lays it out. query: the first
// of the lane's two rows, of which the other one is 8 behind it; key: the lane's first one.
template <class C>
__device__ __forceinline__ void draw_kept(Probabilities<C>& kept_rmem,
                                          const device::Dropout& dropout, int query, int key) {
  static_assert(!C::FP8 && C::BLOCK_K % 32 == 0, "the bits of 32 keys are drawn together");
#pragma unroll
  for (int first = 0; first < C::BLOCK_K; first += 32) {
    device::draw_kept(kept_rmem[0][first / 16], kept_rmem[0][first / 16 + 1], dropout, query,
                      key + first);
  }
}

// Sets the elements of P that are not kept to 0.
template <class C>
__device__ __forceinline__ void drop(Probabilities<C>& p_rmem, const Probabilities<C>& kept_rmem) {
#pragma unroll
  for (int k = 0; k < C::BLOCK_K / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) p_rmem[0][k][i] &= kept_rmem[0][k][i];
  }
}

}  // namespace archflash::hopper
