// Barriers in shared memory that count arrivals of threads and bytes of asynchronous copies.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier" (here: sm_90 and
// up). A barrier is 8 bytes, 8-byte aligned, and goes from phase to phase: a phase completes when
// all its arrivals are there and no byte that it expects is missing. All are volatile with
// "memory": they order accesses of shared memory that the compiler must keep on their side.

// mbarrier.init: phase 0, `arrivals` arrivals to each phase.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier_smem, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier_smem), "r"(arrivals)
               : "memory");
}

// fence.mbarrier_init: earlier inits of this thread are visible to the asynchronous proxy. A block
// barrier must follow before other threads use them.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive: one arrival, with release semantics in the CTA.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier_smem) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_smem) : "memory");
}

// mbarrier.arrive.expect_tx: the phase waits for `bytes` more, then one arrival.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier_smem, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_smem),
               "r"(bytes)
               : "memory");
}

// mbarrier.try_wait.parity: whether the phase of this parity is complete, with acquire semantics in
// the CTA; may sleep a while before it says no. A new barrier says yes to parity 1.
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

// Until the phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait_parity(uint32_t barrier_smem, uint32_t parity) {
  while (!mbarrier_try_wait_parity(barrier_smem, parity)) {
  }
}

}  // namespace archflash::ptx
