// Converts 8-bit floating point numbers to fp32 or fp16, and fp32 to 8 bits, on GPUs with
// instructions for it (8.9 and newer) and without. The former is exact.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/ptx/cvt.cuh"

namespace archflash::device {

// One number at a time, by way of fp32. The magnitude is shifted to where fp32 has exponent and
// mantissa, and the product with `unbias` makes up for the other exponent bias, for denormals too.
// A magnitude from `special` on is no number that the product gives: infinity or NaN in e5m2, NaN
// in e4m3.
struct Fp8Format {
  int shift;
  float unbias;
  uint32_t special;

  __device__ __forceinline__ explicit Fp8Format(DType dtype)
      : shift(dtype == DType::E4M3 ? 20 : 21),
        unbias(dtype == DType::E4M3 ? 0x1p120f : 0x1p112f),
        special(dtype == DType::E4M3 ? 0x7F : 0x7C) {}

  // The number that the low byte stands for, as fp32.
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
};

// The numbers of bytes 0 and 2 of a word, and those of bytes 1 and 3. All of them are FACTOR times
// too small, which is exact.
template <DType FORMAT>
struct Fp8Pairs {
  static_assert(FORMAT == DType::E4M3 || FORMAT == DType::E5M2);
#if __CUDA_ARCH__ >= 890
  static constexpr float FACTOR = 1.0f;
#else
  // Without an instruction for it the bits of e4m3 are moved to where fp16 has them, which leaves
  // the difference of the exponent biases.
  static constexpr float FACTOR = FORMAT == DType::E4M3 ? 256.0f : 1.0f;
#endif

  uint32_t even, odd;

  __device__ __forceinline__ explicit Fp8Pairs(uint32_t word) {
    if constexpr (FORMAT == DType::E5M2) {  // the high byte of the same number in fp16
      even = __byte_perm(word, 0, 0x2404);
      odd = word & 0xFF00FF00u;
    } else {
#if __CUDA_ARCH__ >= 890
      const uint32_t sorted = __byte_perm(word, 0, 0x3120);
      even = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(sorted));
      odd = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(sorted >> 16));
#else
      even = pair_of_high_bytes(word << 8);
      odd = pair_of_high_bytes(word);
#endif
    }
  }

 private:
  // The bits move from s eeee mmm to s 0eeee mmm0000000. NaN, which is all ones in e4m3, would
  // become a number: it alone carries into the highest bit of the exponent when 1 is added to its
  // mantissa, and with that bit it is NaN again.
  __device__ __forceinline__ static uint32_t pair_of_high_bytes(uint32_t bytes) {
    constexpr uint32_t SIGNS = 0x80008000u, MAGNITUDES = 0x3F803F80u;
    constexpr uint32_t LOWEST_BITS = 0x00800080u, HIGHEST_BITS = 0x40004000u;
    const uint32_t magnitudes = bytes >> 1 & MAGNITUDES;
    return (bytes & SIGNS) | magnitudes | ((magnitudes + LOWEST_BITS) & HIGHEST_BITS);
  }
};

}  // namespace archflash::device
