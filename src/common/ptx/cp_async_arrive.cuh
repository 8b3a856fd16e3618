// Arrivals at barriers in shared memory for copies by cp.async.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// cp.async.mbarrier.arrive.noinc: PTX ISA, "Parallel Synchronization and Communication
// Instructions" (these barriers need sm_90). Counts one arrival of this thread at the barrier when
// all its earlier copies by cp.async have landed; the thread goes on. That releases the copies, and
// none of its other stores.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier_smem) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier_smem)
               : "memory");
}

}  // namespace archflash::ptx
