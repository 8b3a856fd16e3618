// Values that the compiler must read anew, or must keep.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// %tid.x: PTX ISA, "Special Registers: %tid". threadIdx.x is a constant to the compiler, which
// therefore keeps every address derived from it in registers across a loop. This read is volatile,
// so that the thread index is read anew, and the addresses are computed anew, at each use.
__device__ __forceinline__ int mov_tid_x_volatile() {
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  return tid;
}

// %nctaid.x: PTX ISA, "Special Registers: %nctaid". Volatile as above, for gridDim.x.
__device__ __forceinline__ int mov_nctaid_x_volatile() {
  int ctas;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(ctas));
  return ctas;
}

// mov.b32: PTX ISA, "Data Movement and Conversion Instructions: mov". It is volatile, so that the
// result stays in a register; otherwise the compiler would compute x anew at each use.
__device__ __forceinline__ uint32_t mov_b32_volatile(uint32_t x) {
  uint32_t y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace archflash::ptx
