// Converts rows of 8-bit floating point numbers to fp16 or bf16, in their order, on every GPU from
// compute capability 8.0 on.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/ptx/fma_x2.cuh"

namespace archflash::device {

// Two numbers at a time, exactly, to the 16-bit format DTYPE. The bits of a magnitude are shifted
// to where DTYPE has exponent and mantissa, and the product with a power of two makes up for the
// other exponent bias, for subnormal numbers too. What is no number (infinity or NaN in e5m2, NaN
// in e4m3) is what carries into the next bit of the exponent when `lowest` is added; the bits of
// the exponent from there on are set then. In fp16, where e5m2 has its exponent, nothing has to be
// made up for.
template <DType DTYPE>
struct Fp8To16Bits {
  int shift;
  uint32_t magnitudes, lowest, carries, fill, unbias;  // of two numbers, but for `fill`

  __device__ __forceinline__ explicit Fp8To16Bits(DType format) {
    const bool e4m3 = format == DType::E4M3;
    const auto twice = [](uint32_t bits) { return bits << 16 | bits; };
    if constexpr (DTYPE == DType::F16) {
      shift = e4m3 ? 1 : 0;
      magnitudes = twice(e4m3 ? 0x3F80 : 0x7F00);
      lowest = twice(e4m3 ? 0x0080 : 0);
      carries = twice(e4m3 ? 0x4000 : 0);
      fill = 1;
      unbias = twice(e4m3 ? 0x5C00 : 0x3C00);  // 2^8, 1
    } else {
      shift = e4m3 ? 4 : 3;
      magnitudes = twice(e4m3 ? 0x07F0 : 0x0FE0);
      lowest = twice(e4m3 ? 0x0010 : 0x0080);
      carries = twice(e4m3 ? 0x0800 : 0x1000);
      fill = e4m3 ? 0xF : 0x7;
      unbias = twice(e4m3 ? 0x7B80 : 0x7780);  // 2^120, 2^112
    }
  }

  // The numbers of 16 bytes, in their order: the first eight in `low`.
  __device__ __forceinline__ void convert(const uint4& bytes, uint4& low, uint4& high) const {
    low = {pair<0>(bytes.x), pair<1>(bytes.x), pair<0>(bytes.y), pair<1>(bytes.y)};
    high = {pair<0>(bytes.z), pair<1>(bytes.z), pair<0>(bytes.w), pair<1>(bytes.w)};
  }

 private:
  // The numbers of bytes 0 and 1 of a word, or of bytes 2 and 3.
  template <int HALF>
  __device__ __forceinline__ uint32_t pair(uint32_t word) const {
    constexpr uint32_t SIGNS = 0x80008000u, NEGATIVE_ZEROS = SIGNS;
    const uint32_t high_bytes = __byte_perm(word, 0, HALF == 0 ? 0x1404 : 0x3424);
    const uint32_t magnitude = high_bytes >> shift & magnitudes;
    const uint32_t special = (magnitude + lowest) & carries;
    const uint32_t bits = (high_bytes & SIGNS | magnitude) + special * fill;
    return ptx::fma_rn_x2<DTYPE>(bits, unbias, NEGATIVE_ZEROS);
  }
};

}  // namespace archflash::device
