// Which weights dropout keeps, as factors in fp32.
#pragma once

#include <cstdint>

#include "common/ptx/prmt.cuh"

namespace archflash::device {

// Factors of weights: 1 for those that are kept, else 0. Each takes one permutation and one sum,
// where a comparison and selections would all go to the same pipe.
struct KeptFactors {
  // 2^23 + threshold - 1: the floats from 2^23 to 2^24 are the integers.
  float below;

  __device__ __forceinline__ explicit KeptFactors(uint32_t threshold)
      : below(__uint_as_float(threshold == 0 ? TWO_23 - 2 : TWO_23 - 1 + threshold)) {}

  // The factor of the element whose bits are the lower half of the word (half = 0) or the higher.
  __device__ __forceinline__ float of(uint32_t word, int half) const {
    const uint32_t number = ptx::prmt_b32(word, TWO_23, half == 0 ? 0x7610 : 0x7632);
    return __saturatef(__uint_as_float(number) - below);
  }

 private:
  static constexpr uint32_t TWO_23 = 0x4B000000;  // the bits of 2^23, of which the lower half is 0
};

}  // namespace archflash::device
