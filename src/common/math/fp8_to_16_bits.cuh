// Converts 8-bit floating point numbers to fp16 or bf16 by integer operations and one product, four
// numbers at a time, on GPUs with an instruction for it (8.9 and newer) and without. The result is
// exact: both types hold every number of e4m3 and e5m2.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/half2.cuh"

namespace archflash::math {

// How the bits of an 8-bit type become those of DTYPE, fp16 or bf16. Sign, exponent and mantissa
// follow one another in all of them:
//
//   8 bits   s eeee mmm              e4m3; in e5m2 the exponent has a bit more, the mantissa less
//   fp16     s 0eeee mmm0000000      the sign stays in front, the rest moves to the right by `shift`
//   bf16     s 0000eeee mmm0000
//
// The product with `unbias` then makes up for the other exponent bias, for denormals too. A byte
// whose magnitude is infinity or NaN does not become one that way: it has to be found and converted
// by convert_one().
template <DType DTYPE>
struct Fp8Format {
  int shift;
  uint32_t magnitude_bits;  // of each byte, what stays in the high byte of a result
  uint32_t low_bits;        // of each byte, what moves to the low byte
  uint32_t unbias;          // twice, as DTYPE
  uint32_t to_special;      // for each byte, 0x80 less the smallest magnitude that is no number
  bool e4m3;

  __device__ __forceinline__ explicit Fp8Format(DType dtype) : e4m3(dtype == DType::E4M3) {
    constexpr bool FP16 = DTYPE == DType::F16;
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
    return {ptx::fma_x2<DTYPE>(__byte_perm(low, high, 0x5140), unbias, NEGATIVE_ZEROS),
            ptx::fma_x2<DTYPE>(__byte_perm(low, high, 0x7362), unbias, NEGATIVE_ZEROS)};
  }

  // Of the results of several words, joined by |: whether a byte of any is infinity or NaN.
  __device__ __forceinline__ uint32_t find_special(uint32_t word) const {
    return (word & 0x7F7F7F7Fu) + to_special;
  }
  __device__ __forceinline__ static bool any_special(uint32_t found) { return found & 0x80808080u; }

  // Any byte, through fp32.
  __device__ __forceinline__ float convert_one(uint32_t byte) const {
    constexpr uint32_t EXPONENT = 0x7F800000;
    const uint32_t magnitude = byte & 0x7F, bits = magnitude << (e4m3 ? 20 : 21);
    const bool special = magnitude + (to_special & 0xFF) >= 0x80;
    const float number = __uint_as_float(bits) * (e4m3 ? 0x1p120f : 0x1p112f);
    return __uint_as_float((special ? bits | EXPONENT : __float_as_uint(number)) |
                           (byte & 0x80) << 24);
  }
  __device__ __forceinline__ uint2 convert_any(uint32_t word) const {
    return {ptx::cvt_rn_x2_f32<DTYPE>(convert_one(word), convert_one(word >> 8)),
            ptx::cvt_rn_x2_f32<DTYPE>(convert_one(word >> 16), convert_one(word >> 24))};
  }

  // A product is added to these, which changes no result, not even the sign of a zero.
  static constexpr uint32_t NEGATIVE_ZEROS = 0x80008000u;
};

}  // namespace archflash::math
