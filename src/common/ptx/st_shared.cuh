// Stores to shared memory by its own addresses.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// st.shared.b32: PTX ISA, "Data Movement and Conversion Instructions: st". volatile and "memory":
// it writes memory that the compiler does not see it write.
__device__ __forceinline__ void st_shared_b32(uint32_t smem, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem), "r"(x) : "memory");
}

}  // namespace archflash::ptx
