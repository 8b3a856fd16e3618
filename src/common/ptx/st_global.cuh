// Vector stores to global memory. They are written as instructions because the compiler may split a
// C++ store of a vector type into scalar stores.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// st.global.v4.b32: PTX ISA, "Data Movement and Conversion Instructions: st". The address must be a
// multiple of 16. volatile and "memory": it writes memory that the compiler does not see it write.
__device__ __forceinline__ void st_global_v4_b32(void* dst_gmem, uint32_t x, uint32_t y, uint32_t z,
                                                 uint32_t w) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(dst_gmem)),
               "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// st.global.v2.b32 stores 8 bytes. The address must be a multiple of 8.
__device__ __forceinline__ void st_global_v2_b32(void* dst_gmem, uint32_t x, uint32_t y) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(dst_gmem)), "r"(x),
               "r"(y)
               : "memory");
}

}  // namespace archflash::ptx
