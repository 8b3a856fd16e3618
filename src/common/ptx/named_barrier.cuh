// Barriers among some warps of a CTA.
#pragma once

namespace archflash::ptx {

// bar.sync and bar.arrive with a barrier's number (1 to 15; 0 is that of __syncthreads) and how
// many threads take part, those that arrive and those that wait: PTX ISA, "Parallel Synchronization
// and Communication Instructions: bar". Whole warps call them. bar.sync waits for all `threads`;
// bar.arrive counts a warp and goes on.
__device__ __forceinline__ void bar_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace archflash::ptx
