// Dropout of the weights that a warpgroup has in registers: which of them are kept.
#pragma once

#include <cstdint>

#include "common/dropout_params.h"
#include "common/math/dropout.cuh"
#include "common/math/uniform.cuh"
#include "common/ptx/prmt.cuh"
#include "hopper/tile.cuh"

namespace archflash::hopper {

// The random bits of a head, for a whole warp.
__device__ __forceinline__ math::Dropout find_dropout(const DropoutParams& params, int batch_head) {
  math::Dropout dropout(params, batch_head);
  dropout.key[0] = uniform(dropout.key[0]);
  dropout.key[1] = uniform(dropout.key[1]);
  dropout.offset = uniform(dropout.offset);
  return dropout;
}

// Compares the 16 random bits in each half of `bits` with those of `threshold`: the highest bit of
// that half of the result is set if the element is kept.
__device__ __forceinline__ uint32_t kept_flags(uint32_t bits, uint32_t threshold) {
  constexpr uint32_t HIGHEST = 0x80008000;
  // No half borrows from the other one: the highest bit is set first.
  const uint32_t differences = (bits | HIGHEST) - (threshold & ~HIGHEST);
  return (bits & ~threshold) | (~(bits ^ threshold) & differences);
}

// Which weights of a block of keys are kept, as masks of P as pack() lays it out. query: the first
// of the lane's two rows, of which the other one is 8 behind it; key: the lane's first one.
template <class C>
__device__ __forceinline__ void draw_kept(Probabilities<C>& kept_rmem, const math::Dropout& dropout,
                                          int query, int key) {
  static_assert(!C::FP8 && C::BLOCK_K % 32 == 0, "the bits of 32 keys are drawn together");
  const uint32_t threshold = dropout.threshold * 0x10001;
#pragma unroll
  for (int first = 0; first < C::BLOCK_K; first += 32) {
    const math::DropoutBits even = dropout.bits(query, key + first);
    const math::DropoutBits odd = dropout.bits(query, key + first + 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t of_even = kept_flags(even.words[2 * r + half], threshold);
        const uint32_t of_odd = kept_flags(odd.words[2 * r + half], threshold);
        // A half's highest bit fills a half of the mask: that of the even key the low one.
        uint32_t (&kept)[4] = kept_rmem[0][first / 16 + half];
        kept[r] = ptx::prmt_b32(of_even, of_odd, 0xDD99);      // of the low halves
        kept[2 + r] = ptx::prmt_b32(of_even, of_odd, 0xFFBB);  // of the high halves: 8 keys further
      }
    }
  }
}

// Sets the weights that are not kept to 0.
template <class C>
__device__ __forceinline__ void drop(Probabilities<C>& p_rmem, const Probabilities<C>& kept_rmem) {
#pragma unroll
  for (int k = 0; k < C::BLOCK_K / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) p_rmem[0][k][i] &= kept_rmem[0][k][i];
  }
}

}  // namespace archflash::hopper
