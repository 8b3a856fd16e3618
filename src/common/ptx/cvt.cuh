// Conversions between float and the 16 bits of an IEEE half, one instruction each, on every target.
#pragma once

#include <cstdint>

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

}  // namespace archflash::ptx
