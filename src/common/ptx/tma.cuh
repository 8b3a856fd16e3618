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
