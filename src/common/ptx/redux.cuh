// Values that the lanes of a warp combine.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// The bits of x that any lane of the warp has. redux.sync.or.b32: PTX ISA, "Parallel
// Synchronization and Communication Instructions: redux.sync" (sm_80 and up).
__device__ __forceinline__ uint32_t or_of_warp(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_or_sync(0xFFFFFFFFu, x);
#else
  for (int lanes = 16; lanes > 0; lanes /= 2) x |= __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
  return x;
#endif
}

}  // namespace archflash::ptx
