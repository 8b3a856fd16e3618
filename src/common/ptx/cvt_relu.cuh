// Conversions between float and 16-bit floating point that make negative numbers 0.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace archflash::ptx {

// cvt.rn.relu.{f16x2,bf16x2}.f32 (sm_80 and up): PTX ISA, "Data Movement and Conversion
// Instructions: cvt". Converts two floats, rounding to nearest even, and packs them into the halves
// of one register; what is below 0 becomes 0, and NaN stays NaN.
template <DType DTYPE>
__device__ __forceinline__ uint32_t cvt_rn_relu_x2_f32(float low, float high) {
  static_assert(DTYPE == DType::F16 || DTYPE == DType::BF16, "16-bit outputs only");
  uint32_t pair;
  if constexpr (DTYPE == DType::F16) {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

}  // namespace archflash::ptx
