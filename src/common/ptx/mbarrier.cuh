// Barriers in shared memory. They count arrivals of threads and bytes of asynchronous copies.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// How many arrivals a barrier counts for a warp: that of one lane, behind a __syncwarp().
// compute-sanitizer's racecheck follows an arrival only for the lane that arrives, so in a build
// for it every lane does.
#ifdef ARCHFLASH_EVERY_LANE_ARRIVES
constexpr uint32_t ARRIVALS_OF_WARP = 32;
#else
constexpr uint32_t ARRIVALS_OF_WARP = 1;
#endif

// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier" (these need sm_90).
// A barrier is 8 bytes, aligned to 8 bytes, and goes through phases. A phase completes when all its
// arrivals have come and no byte that it expects is missing; then the next one begins. All wrappers
// are volatile with "memory", because the compiler must not move accesses of shared memory across
// them.

// mbarrier.init starts phase 0. Each phase waits for `arrivals` arrivals.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier_smem, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier_smem), "r"(arrivals)
               : "memory");
}

// fence.mbarrier_init makes this thread's earlier inits visible to the asynchronous proxy. A
// barrier of the CTA must follow before other threads use the barriers.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.init for a barrier at which warps arrive, and `others` threads.
__device__ __forceinline__ void mbarrier_init_for_warps(uint32_t barrier_smem, uint32_t warps,
                                                        uint32_t others = 0) {
  mbarrier_init(barrier_smem, warps * ARRIVALS_OF_WARP + others);
}

// mbarrier.arrive counts one arrival, with release semantics in the CTA.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier_smem) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_smem) : "memory");
}

// mbarrier.arrive.expect_tx makes the phase expect `bytes` more, then counts one arrival.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier_smem, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_smem),
               "r"(bytes)
               : "memory");
}

// mbarrier.try_wait.parity returns whether the phase of this parity is complete, with acquire
// semantics in the CTA. It may sleep a while before it returns false. A new barrier returns true
// for parity 1, as if a phase before phase 0 had completed.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32_t barrier_smem, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.b32 %0, 1, 0, complete;\n"
      "}\n"
      : "=r"(complete)
      : "r"(barrier_smem), "r"(parity)
      : "memory");
  return complete != 0;
}

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait_parity(uint32_t barrier_smem, uint32_t parity) {
  while (!mbarrier_try_wait_parity(barrier_smem, parity)) {
  }
}

}  // namespace archflash::ptx
