// A load from shared memory without a branch: around the instruction a branch can cost the whole
// kernel registers. PTX ISA, "Data Movement and Conversion Instructions: ld".
#pragma once

#include <cstdint>

namespace archflash::ptx {

// ld.shared.v4.f32 into x where `loads` holds, the same in all lanes; else x stays as it is.
__device__ __forceinline__ void ld_shared_v4_f32_if(bool loads, float* x, uint32_t smem) {
  asm volatile(
      "{\n"
      ".reg .pred loads;\n"
      "setp.ne.b32 loads, %5, 0;\n"
      "@loads ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
      : "r"(smem), "r"(static_cast<uint32_t>(loads))
      : "memory");
}

}  // namespace archflash::ptx
