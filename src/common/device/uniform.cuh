// Values that are the same in all lanes of a warp.
#pragma once

namespace archflash::device {

constexpr unsigned FULL_WARP = 0xFFFFFFFFu;

// Returns x, which must be the same in all lanes of a warp. After the shuffle the assembler knows
// that it is: it keeps x in a uniform register and computes with it once for the warp, instead of
// computing or moving x at each use.
template <typename T>
__device__ __forceinline__ T uniform(T x) {
  // mutants: same-in-all-lanes (tests/sim/tags.py)
  return __shfl_sync(FULL_WARP, x, 0);
}

}  // namespace archflash::device
