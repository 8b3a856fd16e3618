// Base-2 exponential, one instruction.
#pragma once

namespace archflash::ptx {

// ex2.approx.ftz.f32: PTX ISA, "Floating Point Instructions: ex2". 2^-inf = +0; subnormal inputs
// and results are 0. Not volatile: a pure function of its operand.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace archflash::ptx
