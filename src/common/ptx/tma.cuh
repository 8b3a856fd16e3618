// Copies of boxes between tensors in global memory and shared memory by the copy engine (TMA).
#pragma once

#include <cstdint>

#include "common/tensor_map.h"

namespace archflash::ptx {

// cp.async.bulk.tensor.4d from global to shared memory: PTX ISA, "Data Movement and Conversion
// Instructions: cp.async.bulk.tensor" (sm_90 and up). One thread starts the copy of the map's box
// at coordinates (c0, c1, c2, c3), c0 innermost; elements outside the tensor arrive as zeros. When
// the box has arrived, all its bytes, zeros included, are counted at the barrier. volatile and
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

// Loads a box as cp_async_bulk_tensor_4d_load() does, from a tensor map of five dimensions; c0 is
// the coordinate of the innermost one.
__device__ __forceinline__ void cp_async_bulk_tensor_5d_load(uint32_t dst_smem,
                                                             const TensorMap& map, int c0, int c1,
                                                             int c2, int c3, int c4,
                                                             uint32_t barrier_smem) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(dst_smem),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier_smem)
      : "memory");
}

// createpolicy: PTX ISA, "Data Movement and Conversion Instructions: createpolicy" (sm_80 and up).
// A policy is a hint for a copy: which lines L2 gives up first, and which last.
__device__ __forceinline__ uint64_t createpolicy_evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t createpolicy_evict_last() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void cp_async_bulk_tensor_4d_load(uint32_t dst_smem,
                                                             const TensorMap& map, int c0, int c1,
                                                             int c2, int c3, uint32_t barrier_smem,
                                                             uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(dst_smem),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier_smem), "l"(policy)
      : "memory");
}

// The load for a pair of CTAs (sm_100f, sm_103a and others): the barrier may be in the other CTA of
// the pair. Both addresses are addresses of this CTA or results of mapa.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_load_of_pair(
    uint32_t dst_smem, const TensorMap& map, int c0, int c1, int c2, int c3,
    uint32_t barrier_cluster_smem) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".cta_group::2 [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(dst_smem),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier_cluster_smem)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_4d_load_of_pair(uint32_t dst_smem,
                                                                     const TensorMap& map, int c0,
                                                                     int c1, int c2, int c3,
                                                                     uint32_t barrier_cluster_smem,
                                                                     uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".cta_group::2.L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(dst_smem),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier_cluster_smem), "l"(policy)
      : "memory");
}

// cp.async.bulk.tensor.4d from shared to global memory: one thread starts the copy of a box and
// adds it to its current bulk group. Elements outside the tensor are not written.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_store(const TensorMap& map, int c0, int c1,
                                                              int c2, int c3, uint32_t src_smem) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
      "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(src_smem)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_4d_store(const TensorMap& map, int c0, int c1,
                                                              int c2, int c3, uint32_t src_smem,
                                                              uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint "
      "[%0, {%1, %2, %3, %4}], [%5], %6;" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(src_smem), "l"(policy)
      : "memory");
}

// cp.reduce.async.bulk adds `bytes` bytes of floats from shared memory to those in global memory,
// each on its own, in an order that is not known. One thread starts it and adds it to its current
// bulk group. Addresses and size are multiples of 16.
__device__ __forceinline__ void cp_reduce_async_bulk_add_f32(float* dst_gmem, uint32_t src_smem,
                                                             uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(dst_gmem)),
               "r"(src_smem), "r"(bytes)
               : "memory");
}

// cp.async.bulk.commit_group closes the group of this thread's stores since the last commit.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// cp.async.bulk.wait_group.read 0 waits until all groups of this thread have read their shared
// memory, which may then be overwritten.
__device__ __forceinline__ void cp_async_bulk_wait_group_read_0() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// prefetch.tensormap is a hint that the map will be used soon. The map may also be in the kernel's
// parameters or in constant memory.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// fence.proxy.async orders this thread's earlier accesses of shared memory before accesses by the
// copy engine that start after a later barrier.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace archflash::ptx
