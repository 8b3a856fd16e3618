// Copies of whole boxes between tensors in global memory and shared memory, by the copy engine.
#pragma once

#include <cstdint>

#include "common/tensor_map.h"

namespace archflash::ptx {

// cp.async.bulk.tensor.4d from global to shared memory: PTX ISA, "Data Movement and Conversion
// Instructions: cp.async.bulk.tensor" (sm_90 and up). One thread starts the copy of the map's box
// at coordinates (c0, c1, c2, c3), c0 innermost; elements outside the tensor arrive as zeros. All
// bytes of the box, those included, are counted to the barrier when they have landed. volatile and
// "memory": it writes shared memory behind the compiler's back.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_load(uint32_t dst_smem,
                                                             const TensorMap& map, int c0, int c1,
                                                             int c2, int c3,
                                                             uint32_t barrier_smem) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(dst_smem),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier_smem)
      : "memory");
}

// The same (sm_100f, sm_103a and others) with a barrier that may be the other CTA's of a pair: both
// addresses are those of mapa or of this CTA.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_load_of_pair(
    uint32_t dst_smem, const TensorMap& map, int c0, int c1, int c2, int c3,
    uint32_t barrier_cluster_smem) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".cta_group::2 [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(dst_smem),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier_cluster_smem)
      : "memory");
}

// cp.async.bulk.tensor.4d from shared to global memory: one thread starts the copy of a box, as
// part of its bulk group. Elements outside the tensor are not written.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_store(const TensorMap& map, int c0, int c1,
                                                              int c2, int c3, uint32_t src_smem) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
      "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(src_smem)
      : "memory");
}

// cp.async.bulk.commit_group: this thread's earlier stores are one group.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// cp.async.bulk.wait_group.read: all groups of this thread have read their shared memory, which may
// be written again.
__device__ __forceinline__ void cp_async_bulk_wait_group_read_0() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// prefetch.tensormap: the map will be used soon. A hint, for maps in the parameters or in constant
// memory as well.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// fence.proxy.async: accesses of shared memory by this thread's own instructions before it come
// before those of the copy engine that a later barrier lets start.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace archflash::ptx
