// Atomic operations on global memory that order what comes before and behind them.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// atom.acq_rel.gpu.global.add.s32: PTX ISA, "Parallel Synchronization and Communication
// Instructions: atom". Adds x and returns what was there. What this thread did before, and what
// others did before a barrier that it has passed, is visible to whoever adds later, and what was
// done before earlier additions is visible to this thread. volatile and "memory": it changes memory
// that the compiler does not see it change.
__device__ __forceinline__ int32_t atom_add_acq_rel_s32(int32_t* gmem, int32_t x) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(gmem)), "r"(x)
               : "memory");
  return before;
}

}  // namespace archflash::ptx
