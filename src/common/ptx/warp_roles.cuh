// What warps of different roles in one CTA need: one leader, registers of their
// own.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// elect.sync: PTX ISA, "Parallel Synchronization and Communication Instructions: elect.sync" (sm_90
// and up). True in one lane of the converged warp, always the same one.
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

// setmaxnreg: PTX ISA, "Miscellaneous Instructions: setmaxnreg" (sm_90a, sm_120f and others; not in
// plain targets). All warps of a warpgroup take part. dec gives registers back to the CTA's pool,
// inc waits until the pool has them; 24 to 256, a multiple of 8.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace archflash::ptx
