// For CTAs whose warps have different roles: the election of one lane, and the registers that each
// role takes.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// elect.sync: PTX ISA, "Parallel Synchronization and Communication Instructions: elect.sync" (sm_90
// and up). Returns true in one lane of the converged warp, always the same one.
__device__ __forceinline__ bool elect_sync() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xFFFFFFFF;\n"
      "selp.b32 %0, 1, 0, elected;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// setmaxnreg: PTX ISA, "Miscellaneous Instructions: setmaxnreg" (sm_90a, sm_120f and others; plain
// targets lack it). Sets the registers of each thread, a multiple of 8 from 24 to 256. All warps of
// a warpgroup call it. dec returns registers to the CTA's pool; inc waits until the pool has
// enough.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace archflash::ptx
