// Reads of special registers that the compiler must not keep.
#pragma once

namespace archflash::ptx {

// %tid.x: PTX ISA, "Special Registers: %tid". volatile for a reason: threadIdx.x is a constant to
// the compiler, which then keeps every address derived from it in registers across a loop; this one
// is read anew each time.
__device__ __forceinline__ int mov_tid_x_volatile() {
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  return tid;
}

}  // namespace archflash::ptx
