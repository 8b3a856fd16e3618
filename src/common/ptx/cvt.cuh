// Conversions between float and 16-bit or 8-bit floating point, one instruction each.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace archflash::ptx {

// cvt.f32.f16: PTX ISA, "Data Movement and Conversion Instructions: cvt". The result is exact.
__device__ __forceinline__ float cvt_f32_f16(uint16_t half_bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half_bits));
  return x;
}

// cvt.rn.f16.f32 rounds to nearest even. Values beyond the range of half become infinite.
__device__ __forceinline__ uint16_t cvt_rn_f16_f32(float x) {
  uint16_t half_bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half_bits) : "f"(x));
  return half_bits;
}

// cvt.rn.{f16x2,bf16x2}.f32 (sm_80 and up) converts two floats, rounding to nearest even, and packs
// them into the halves of one register.
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

// cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32 (sm_89 and up) converts two floats to two bytes, rounding to
// nearest even. Values beyond the largest number (448 or 57344) become that number; NaN stays NaN.
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

// cvt.rn.f16x2.e4m3x2 (sm_89 and up) converts two bytes to two numbers of fp16, exactly.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e4m3x2(uint16_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
}

}  // namespace archflash::ptx
