// Converts 8-bit floating point numbers to fp16 or bf16, and fp32 to 8 bits, by integer operations
// and products, on GPUs with instructions for it (8.9 and newer) and without. The former is exact:
// both types hold every number of e4m3 and e5m2.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/half2.cuh"

namespace archflash::math {

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

// Four numbers at a time. Sign, exponent and mantissa follow one another in all of these types:
//
//   8 bits   s eeee mmm              e4m3; in e5m2 the exponent has a bit more, the mantissa less
//   fp16     s 0eeee mmm0000000      the sign stays in front, the rest moves to the right by
//   `shift` bf16     s 0000eeee mmm0000
//
// The product with `unbias` then makes up for the other exponent bias, for denormals too. A byte
// that is infinity or NaN does not become one that way: it has to be found, and converted by
// convert_any().
template <DType DTYPE>
struct Fp8Words {
  DType dtype;  // of the bytes
  int shift;
  uint32_t magnitude_bits;  // of each byte, what stays in the high byte of a result
  uint32_t low_bits;        // of each byte, what moves to the low byte
  uint32_t unbias;          // twice, as DTYPE
  uint32_t to_special;      // for each byte, 0x80 less the smallest magnitude that is no number

  __device__ __forceinline__ explicit Fp8Words(DType dtype) : dtype(dtype) {
    constexpr bool FP16 = DTYPE == DType::F16;
    const bool e4m3 = dtype == DType::E4M3;
    shift = FP16 ? (e4m3 ? 1 : 0) : (e4m3 ? 4 : 3);
    magnitude_bits = 0x01010101u * (0x7Fu >> shift);
    low_bits = 0x01010101u * (0xFFu << (8 - shift) & 0xFFu);
    unbias = FP16 ? (e4m3 ? 0x5C005C00u : 0x3C003C00u)   // 2^8, 1
                  : (e4m3 ? 0x7B807B80u : 0x77807780u);  // 2^120, 2^112
    to_special = e4m3 ? 0x01010101u : 0x04040404u;
  }

  // The four bytes of `word` as two pairs. Infinities and NaN become other numbers.
  __device__ __forceinline__ uint2 convert(uint32_t word) const {
    const uint32_t high = (word & 0x80808080u) | (word >> shift & magnitude_bits);
    const uint32_t low = word << (8 - shift) & low_bits;
    // What is added changes no product, not even the sign of a zero.
    constexpr uint32_t NEGATIVE_ZEROS = 0x80008000u;
    return {ptx::fma_x2<DTYPE>(__byte_perm(low, high, 0x5140), unbias, NEGATIVE_ZEROS),
            ptx::fma_x2<DTYPE>(__byte_perm(low, high, 0x7362), unbias, NEGATIVE_ZEROS)};
  }

  // any_special() of this, joined by | over words, says whether a byte of any is infinity or NaN.
  __device__ __forceinline__ uint32_t find_special(uint32_t word) const {
    return (word & 0x7F7F7F7Fu) + to_special;
  }
  __device__ __forceinline__ static bool any_special(uint32_t found) { return found & 0x80808080u; }

  // convert() for any bytes, infinities and NaN too, but slower.
  __device__ __forceinline__ uint2 convert_any(uint32_t word) const {
    const Fp8Format format(dtype);
    const auto pair = [&](uint32_t bytes) {
      return ptx::cvt_rn_x2_f32<DTYPE>(format.to_float(bytes), format.to_float(bytes >> 8));
    };
    return {pair(word), pair(word >> 16)};
  }
};

}  // namespace archflash::math
