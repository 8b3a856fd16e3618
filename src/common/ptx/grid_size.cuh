// The number of CTAs, read anew at each use. PTX ISA, "Special Registers: %nctaid".
#pragma once

namespace archflash::ptx {

// gridDim.x is a constant to the compiler, which keeps it in a register across a loop.
__device__ __forceinline__ int mov_nctaid_x_volatile() {
  int ctas;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(ctas));
  return ctas;
}

}  // namespace archflash::ptx
