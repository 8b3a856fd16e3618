// The base-2 exponential in one instruction.
#pragma once

namespace archflash::ptx {

// ex2.approx.ftz.f32: PTX ISA, "Floating Point Instructions: ex2". 2^-inf is +0; subnormal inputs
// and results count as 0. It is not volatile because it is a pure function of its operand.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace archflash::ptx
