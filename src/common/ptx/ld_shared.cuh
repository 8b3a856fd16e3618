// Loads from shared memory by address. PTX ISA, "Data Movement and Conversion Instructions: ld".
#pragma once

#include <cstdint>

namespace archflash::ptx {

// ld.shared.v2.f32. smem: a multiple of 8.
__device__ __forceinline__ void ld_shared_v2_f32(float (&x)[2], uint32_t smem) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(smem) : "memory");
}

}  // namespace archflash::ptx
