// Communication between the CTAs of a cluster: addresses in each other's shared memory, arrivals at
// each other's barriers, and the barrier of the whole cluster.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// mapa: PTX ISA, "Data Movement and Conversion Instructions: mapa" (sm_90 and up). The cluster
// address of the CTA of this rank that corresponds to the address `smem` of the calling CTA.
__device__ __forceinline__ uint32_t mapa_shared_cluster(uint32_t smem, uint32_t rank) {
  uint32_t cluster_smem;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(cluster_smem) : "r"(smem), "r"(rank));
  return cluster_smem;
}

// ld.shared::cluster: PTX ISA, "Data Movement and Conversion Instructions: ld" (sm_90 and up).
// Loads from the shared memory of any CTA of the cluster. Addresses are multiples of 16 and 8.
__device__ __forceinline__ float4 ld_shared_cluster_v4_f32(uint32_t cluster_smem) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(cluster_smem)
               : "memory");
  return x;
}
__device__ __forceinline__ float2 ld_shared_cluster_v2_f32(uint32_t cluster_smem) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(cluster_smem)
               : "memory");
  return x;
}

// mbarrier.arrive at a barrier of any CTA of the cluster: PTX ISA, "Parallel Synchronization and
// Communication Instructions: mbarrier.arrive" (sm_90 and up). It has release semantics in the
// calling CTA only.
__device__ __forceinline__ void mbarrier_arrive_shared_cluster(uint32_t barrier_cluster_smem) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier_cluster_smem)
               : "memory");
}
// The arrive with release semantics in the cluster, and the try_wait with acquire semantics in the
// cluster. Note: both are slow. ptxas turns the release into a fence of the whole GPU
// (MEMBAR.ALL.GPU) and empties the L1 cache after the acquire (CCTL.IVALL).
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
// barrier.cluster" (sm_90 and up). All threads of all CTAs of the cluster arrive and wait.
__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace archflash::ptx
