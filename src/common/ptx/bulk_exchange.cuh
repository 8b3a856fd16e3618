// Bulk copies from a CTA's shared memory to that of another one of its cluster. PTX ISA, "Data
// Movement and Conversion Instructions: cp.async.bulk" (sm_90 and up).
#pragma once

#include <cstdint>

namespace archflash::ptx {

// Copies `bytes` and counts them at a barrier of the CTA that gets them: dst and barrier are
// cluster addresses of it. Addresses and size are multiples of 16. One thread starts it.
__device__ __forceinline__ void cp_async_bulk_exchange(uint32_t dst_cluster_smem, uint32_t src_smem,
                                                       uint32_t bytes,
                                                       uint32_t barrier_cluster_smem) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(dst_cluster_smem),
      "r"(src_smem), "r"(bytes), "r"(barrier_cluster_smem)
      : "memory");
}

}  // namespace archflash::ptx
