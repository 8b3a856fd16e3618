// Which weights dropout keeps, drawn for all rows and keys that a lane has of 16 rows and 32 keys
// of P, whose fragments are those of mma.sync or of wgmma with queries as rows.
#pragma once

#include <cstdint>

#include "common/device/dropout.cuh"
#include "common/device/uniform.cuh"
#include "common/dropout_params.h"
#include "common/ptx/prmt.cuh"

namespace archflash::device {

// The random bits of a head, for a whole warp.
__device__ __forceinline__ Dropout find_dropout(const DropoutParams& params, int batch_head) {
  Dropout dropout(params, batch_head);
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

// Draws which weights of 16 rows and 32 keys are kept, as masks of P packed to 16 bits: of the
// fragment a of the first 16 keys and of that of the others. query: the first of the lane's two
// rows, of which the other one is 8 behind it; key: the lane's first one. Both are counted from a
// multiple of 16 and of 32, so that two Philox have the bits of all 16 elements.
__device__ __forceinline__ void draw_kept(uint32_t (&first_rmem)[4], uint32_t (&second_rmem)[4],
                                          const Dropout& dropout, int query, int key) {
  const uint32_t threshold = dropout.threshold * 0x10001;
  const DropoutBits even = dropout.bits(query, key), odd = dropout.bits(query, key + 1);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t of_even = kept_flags(even.words[2 * r + half], threshold);
      const uint32_t of_odd = kept_flags(odd.words[2 * r + half], threshold);
      // A half's highest bit fills a half of the mask: that of the even key the low one.
      uint32_t (&kept)[4] = half == 0 ? first_rmem : second_rmem;
      kept[r] = ptx::prmt_b32(of_even, of_odd, 0xDD99);      // of the low halves
      kept[2 + r] = ptx::prmt_b32(of_even, of_odd, 0xFFBB);  // of the high halves: 8 keys further
    }
  }
}

}  // namespace archflash::device
