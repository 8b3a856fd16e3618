// Additions to global memory by many CTAs, and the loads and stores by which they take turns.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// red.relaxed.gpu.global.add.f32: PTX ISA, "Parallel Synchronization and Communication
// Instructions: red". volatile and "memory": it changes memory that the compiler does not see it
// change.
__device__ __forceinline__ void red_add_f32(float* gmem, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(gmem)),
               "f"(x)
               : "memory");
}

// ld.relaxed.gpu and ld.acquire.gpu: PTX ISA, "Data Movement and Conversion Instructions: ld". The
// second one orders what the thread does later behind what another thread did before it released
// the value that is read.
__device__ __forceinline__ int32_t ld_relaxed_s32(const int32_t* gmem) {
  int32_t x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];"
               : "=r"(x)
               : "l"(__cvta_generic_to_global(gmem))
               : "memory");
  return x;
}
__device__ __forceinline__ int32_t ld_acquire_s32(const int32_t* gmem) {
  int32_t x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
               : "=r"(x)
               : "l"(__cvta_generic_to_global(gmem))
               : "memory");
  return x;
}

// st.release.gpu: what this thread did before, and what others did before a barrier that it has
// passed, is visible to whoever acquires the value.
__device__ __forceinline__ void st_release_s32(int32_t* gmem, int32_t x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(gmem)), "r"(x)
               : "memory");
}

}  // namespace archflash::ptx
