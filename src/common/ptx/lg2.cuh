// The base-2 logarithm in one instruction.
#pragma once

namespace archflash::ptx {

// lg2.approx.ftz.f32: PTX ISA, "Floating Point Instructions: lg2". The logarithm of 0 and of
// subnormal numbers is -inf. It is not volatile because it is a pure function of its operand.
__device__ __forceinline__ float lg2_approx_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace archflash::ptx
