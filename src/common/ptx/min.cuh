// The smaller of two floats.
#pragma once

namespace archflash::ptx {

// min.NaN.f32: PTX ISA, "Floating Point Instructions: min" (sm_80 and up). The result is NaN if an
// operand is, unlike that of fminf. It is not volatile because it is a pure function of its
// operands.
__device__ __forceinline__ float min_nan(float a, float b) {
  float d;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

}  // namespace archflash::ptx
