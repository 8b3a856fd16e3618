// Outputs of a tile before any product has written them.
#pragma once

#include "common/device/online_softmax.cuh"

namespace archflash::hopper {

template <class C>
__device__ __forceinline__ void clear_outputs(device::Outputs<C>& o_rmem) {
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o_rmem[0][n][i] = 0.0f;
  }
}

}  // namespace archflash::hopper
