// A store by TMA that one lane of a warp starts without a branch: around the instruction a branch
// can cost the whole kernel registers. PTX ISA, "Data Movement and Conversion Instructions:
// cp.async.bulk.tensor" (sm_90 and up).
#pragma once

#include <cstdint>

#include "common/tensor_map.h"

namespace archflash::ptx {

// cp.async.bulk.tensor.4d from shared to global memory: the lane for which `starts` holds starts
// the copy of a box and adds it to its current bulk group. Elements outside the tensor are not
// written.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_store_if(bool starts, const TensorMap& map,
                                                                 int c0, int c1, int c2, int c3,
                                                                 uint32_t src_smem) {
  asm volatile(
      "{\n"
      ".reg .pred starts;\n"
      "setp.ne.b32 starts, %6, 0;\n"
      "@starts cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
      "[%0, {%1, %2, %3, %4}], [%5];\n"
      "}\n" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(src_smem), "r"(static_cast<uint32_t>(starts))
      : "memory");
}

}  // namespace archflash::ptx
