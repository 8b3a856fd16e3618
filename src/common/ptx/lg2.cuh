// Base-2 logarithm, one instruction.
#pragma once

namespace archflash::ptx {

// lg2.approx.ftz.f32: PTX ISA, "Floating Point Instructions: lg2". Of subnormal numbers -inf. Not
// volatile: a pure function of its operand.
__device__ __forceinline__ float lg2_approx_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace archflash::ptx
