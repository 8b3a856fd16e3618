// Bulk copies from shared to global memory without a tensor map. PTX ISA, "Data Movement and
// Conversion Instructions: cp.async.bulk".
#pragma once

#include <cstdint>

namespace archflash::ptx {

// Writes `bytes` of shared memory to global memory. One thread starts it and adds it to its current
// bulk group. Addresses and size are multiples of 16.
__device__ __forceinline__ void cp_async_bulk_store(float* dst_gmem, uint32_t src_smem,
                                                    uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(dst_gmem)),
               "r"(src_smem), "r"(bytes)
               : "memory");
}

}  // namespace archflash::ptx
