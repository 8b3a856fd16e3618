// Additions of 16 bytes to global memory by many CTAs.
#pragma once

namespace archflash::ptx {

// Whether the GPU that is compiled for has the instruction below.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool HAS_RED_V4 = true;
#else
constexpr bool HAS_RED_V4 = false;
#endif

// red.relaxed.gpu.global.add.v4.f32: PTX ISA, "Parallel Synchronization and Communication
// Instructions: red" (sm_90 and up). The address must be a multiple of 16. volatile and "memory":
// it changes memory that the compiler does not see it change.
__device__ __forceinline__ void red_add_v4_f32(float* gmem, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                   __cvta_generic_to_global(gmem)),
               "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

}  // namespace archflash::ptx
