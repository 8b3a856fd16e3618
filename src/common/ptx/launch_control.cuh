// Cluster launch control: a running cluster takes the work of one that has not started.
#pragma once

#include <cstdint>

namespace archflash::ptx {

constexpr uint32_t LAUNCH_RESPONSE_BYTES = 16;

// clusterlaunchcontrol.try_cancel: PTX ISA, "Parallel Synchronization and Communication
// Instructions: clusterlaunchcontrol.try_cancel" (sm_100 and up). One thread asks that some cluster
// of the grid which has not started never starts. The response, 16 bytes aligned to 16, comes to
// response_smem, and its bytes are counted at the barrier. After a CTA has seen a response that
// says no, it must not ask again.
__device__ __forceinline__ void try_cancel_launch(uint32_t response_smem, uint32_t barrier_smem) {
  asm volatile(
      "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 "
      "[%0], [%1];" ::"r"(response_smem),
      "r"(barrier_smem)
      : "memory");
}
// The same, and the response comes to each CTA of the cluster, at the same addresses in its own
// shared memory (sm_100f and others). No CTA of the cluster may have ended.
__device__ __forceinline__ void try_cancel_launch_for_cluster(uint32_t response_smem,
                                                              uint32_t barrier_smem) {
  asm volatile(
      "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
      ".multicast::cluster::all.b128 [%0], [%1];" ::"r"(response_smem),
      "r"(barrier_smem)
      : "memory");
}

// clusterlaunchcontrol.query_cancel: the x coordinate of the first CTA of the cluster that will not
// start, or -1 if there was none left. Called after a wait for the response.
__device__ __forceinline__ int canceled_cta(uint32_t response_smem) {
  int cta;
  asm volatile(
      "{\n"
      ".reg .b128 response;\n"
      ".reg .pred canceled;\n"
      "ld.shared::cta.b128 response, [%1];\n"
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 canceled, response;\n"
      "mov.b32 %0, -1;\n"
      "@canceled clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %0, response;\n"
      "}\n"
      : "=r"(cta)
      : "r"(response_smem)
      : "memory");
  return cta;
}

}  // namespace archflash::ptx
