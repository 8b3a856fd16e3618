// The smaller and the larger of two floats.
#pragma once

namespace archflash::ptx {

// min.NaN.f32, max.NaN.f32: PTX ISA, "Floating Point Instructions: min, max" (sm_80 and up). The
// result is NaN if an operand is, unlike that of fminf or fmaxf. They are not volatile because they
// are pure functions of their operands.
__device__ __forceinline__ float min_nan(float a, float b) {
  float d;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ __forceinline__ float max_nan(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

}  // namespace archflash::ptx
