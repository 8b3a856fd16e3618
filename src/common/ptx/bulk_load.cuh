// Bulk copies from global to shared memory without a tensor map. PTX ISA, "Data Movement and
// Conversion Instructions: cp.async.bulk".
#pragma once

#include <cstdint>

namespace archflash::ptx {

// Starts a copy of `bytes` whose end counts at a barrier, which has been told to expect them.
// Addresses and size are multiples of 16. With .shared::cluster ptxas adds a call for other CTAs'
// memory on 12.x, and then ignores setmaxnreg.
__device__ __forceinline__ void cp_async_bulk_load(uint32_t dst_smem, const void* src_gmem,
                                                   uint32_t bytes, uint32_t barrier_smem) {
  asm volatile(
      "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(dst_smem),
      "l"(__cvta_generic_to_global(src_gmem)), "r"(bytes), "r"(barrier_smem)
      : "memory");
}

}  // namespace archflash::ptx
