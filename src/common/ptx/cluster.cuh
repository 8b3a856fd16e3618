// What CTAs of a cluster have in common: addresses of each other's shared memory, barriers there,
// one barrier of all.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// mapa: PTX ISA, "Data Movement and Conversion Instructions: mapa" (sm_90 and up). What lies at
// `smem` of this CTA, in the CTA of that rank.
__device__ __forceinline__ uint32_t mapa_shared_cluster(uint32_t smem, uint32_t rank) {
  uint32_t cluster_smem;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(cluster_smem) : "r"(smem), "r"(rank));
  return cluster_smem;
}

// mbarrier.arrive at a barrier of any CTA of the cluster: PTX ISA, "Parallel Synchronization and
// Communication Instructions: mbarrier.arrive" (sm_90 and up). Release semantics in this CTA.
__device__ __forceinline__ void mbarrier_arrive_shared_cluster(uint32_t barrier_cluster_smem) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier_cluster_smem)
               : "memory");
}
// The same with release semantics in the cluster, and try_wait with acquire semantics there. Note:
// ptxas makes a fence of the whole GPU of one (MEMBAR.ALL.GPU) and empties the L1 cache after the
// other (CCTL.IVALL).
__device__ __forceinline__ void mbarrier_arrive_release_cluster(uint32_t barrier_cluster_smem) {
  asm volatile(
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier_cluster_smem)
      : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait_parity_acquire_cluster(uint32_t barrier_smem,
                                                                         uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], %2;\n"
      "selp.b32 %0, 1, 0, complete;\n"
      "}\n"
      : "=r"(complete)
      : "r"(barrier_smem), "r"(parity)
      : "memory");
  return complete != 0;
}
__device__ __forceinline__ void mbarrier_wait_parity_acquire_cluster(uint32_t barrier_smem,
                                                                     uint32_t parity) {
  while (!mbarrier_try_wait_parity_acquire_cluster(barrier_smem, parity)) {
  }
}

// barrier.cluster: PTX ISA, "Parallel Synchronization and Communication Instructions:
// barrier.cluster" (sm_90 and up). All threads of all CTAs arrive and wait.
__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace archflash::ptx
