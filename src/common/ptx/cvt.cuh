// Conversions between float and 16-bit or 8-bit floating point, one instruction each.
#pragma once

#include <cstdint>

#include "common/problem.h"

namespace archflash::ptx {

// cvt.f32.f16: PTX ISA, "Data Movement and Conversion Instructions: cvt". Exact.
__device__ __forceinline__ float cvt_f32_f16(uint16_t half_bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half_bits));
  return x;
}

// cvt.rn.f16.f32: to nearest even; values beyond the range of half become infinite.
__device__ __forceinline__ uint16_t cvt_rn_f16_f32(float x) {
  uint16_t half_bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half_bits) : "f"(x));
  return half_bits;
}

// cvt.rn.{f16x2,bf16x2}.f32 (sm_80 and up): two floats to the halves of one register, to nearest
// even.
template <DType DTYPE>
__device__ __forceinline__ uint32_t cvt_rn_x2_f32(float low, float high) {
  static_assert(DTYPE == DType::F16 || DTYPE == DType::BF16, "16-bit outputs only");
  uint32_t pair;
  if constexpr (DTYPE == DType::F16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32 (sm_89 and up): two floats to two bytes, to nearest even;
// beyond the largest number (448, 57344) they become that, NaN stays NaN.
template <DType DTYPE>
__device__ __forceinline__ uint16_t cvt_rn_satfinite_x2_f32(float low, float high) {
  static_assert(DTYPE == DType::E4M3 || DTYPE == DType::E5M2, "8-bit outputs only");
  uint16_t pair;
  if constexpr (DTYPE == DType::E4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

}  // namespace archflash::ptx
