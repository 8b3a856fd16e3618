// Stores by TMA from tensor maps of five dimensions. PTX ISA, "Data Movement and Conversion
// Instructions: cp.async.bulk.tensor" (sm_90 and up).
#pragma once

#include <cstdint>

#include "common/tensor_map.h"

namespace archflash::ptx {

// cp.async.bulk.tensor.5d from shared to global memory: one thread starts the copy of a box and
// adds it to its current bulk group. Elements outside the tensor are not written.
__device__ __forceinline__ void cp_async_bulk_tensor_5d_store(const TensorMap& map, int c0, int c1,
                                                              int c2, int c3, int c4,
                                                              uint32_t src_smem) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
      "[%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(src_smem)
      : "memory");
}

}  // namespace archflash::ptx
