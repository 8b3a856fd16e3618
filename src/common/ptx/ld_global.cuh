// A load of global memory that another kernel may write before this one reads it.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// ld.global: PTX ISA, "Data Movement and Conversion Instructions: ld". Neither volatile nor with
// "memory": the compiler may move it as freely as __ldg(), which is for memory that nothing writes
// while the kernel runs. So it must take its address from where it was read behind the wait for
// whoever writes.
__device__ __forceinline__ uint32_t ld_global_b32(const uint32_t* gmem) {
  uint32_t x;
  asm("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(gmem)));
  return x;
}

}  // namespace archflash::ptx
