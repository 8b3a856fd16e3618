// A 4-byte copy from global to shared memory, for data that is not aligned to more.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// cp.async.ca: PTX ISA, "Data Movement and Conversion Instructions: cp.async" (sm_80 and up).
// Copies the first `source_bytes` (0 to 4) of 4 and fills the rest with zeros. volatile and
// "memory": it writes shared memory behind the compiler's back.
__device__ __forceinline__ void cp_async_ca_4(uint32_t dst_smem, const void* src_gmem,
                                              uint32_t source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst_smem),
               "l"(__cvta_generic_to_global(src_gmem)), "r"(source_bytes)
               : "memory");
}

}  // namespace archflash::ptx
