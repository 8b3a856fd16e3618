// Converts 8-bit floating point numbers to fp16 or bf16, and fp32 to 8 bits, by integer operations
// and products in fp32, on GPUs without an instruction for it (below 8.9). The former is exact:
// both types hold every number of e4m3 and e5m2.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/ptx/cvt.cuh"

namespace archflash::math {

// How the bits of an 8-bit type become those of fp32: the magnitude is shifted to where fp32 has
// exponent and mantissa, and the product with `unbias` makes up for the other exponent bias, for
// denormals too. A magnitude from `special` on is no number that the product gives: infinity or
// NaN in e5m2, NaN in e4m3.
struct Fp8Format {
  int shift;
  float unbias;
  uint32_t special;

  __device__ __forceinline__ explicit Fp8Format(DType dtype)
      : shift(dtype == DType::E4M3 ? 20 : 21),
        unbias(dtype == DType::E4M3 ? 0x1p120f : 0x1p112f),
        special(dtype == DType::E4M3 ? 0x7F : 0x7C) {}

  __device__ __forceinline__ float to_float(uint32_t byte) const {
    const uint32_t magnitude = byte & 0x7F;
    const uint32_t bits = magnitude << shift;
    constexpr uint32_t EXPONENT = 0x7F800000;
    const uint32_t number =
        magnitude >= special ? bits | EXPONENT : __float_as_uint(__uint_as_float(bits) * unbias);
    return __uint_as_float(number | (byte & 0x80) << 24);
  }

  // The nearest number, of two the even one; what is too large becomes the largest.
  __device__ __forceinline__ uint8_t from_float(float x) const {
    constexpr uint32_t NOT_A_NUMBER = 0x7F;
    const uint32_t sign = __float_as_uint(x) >> 24 & 0x80;
    const uint32_t bits = __float_as_uint(fabsf(x) * (1.0f / unbias));
    const uint32_t nearest = (bits + (1u << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift;
    const uint32_t magnitude = x == x ? min(nearest, special - 1) : NOT_A_NUMBER;
    return static_cast<uint8_t>(sign | magnitude);
  }

  // The two low bytes of `bytes`, packed.
  template <DType DTYPE>
  __device__ __forceinline__ uint32_t to_16_bits(uint32_t bytes) const {
    return ptx::cvt_rn_x2_f32<DTYPE>(to_float(bytes & 0xFF), to_float(bytes >> 8 & 0xFF));
  }
};

}  // namespace archflash::math
