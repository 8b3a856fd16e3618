// The small kernels before and behind the forward kernel. They start early (Launch::uses_pdl), as
// it does, and wait for what comes before them.
#pragma once

#include "common/device/combine_splits.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "hopper/params.h"

namespace archflash::hopper {

// Clears the counter by which CTAs take their tiles. The attention kernel may start meanwhile: its
// CTAs wait before they read anything.
__device__ __forceinline__ void clear_counter(const CounterParams& params) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // what comes before this call is done with the workspace
  *params.taken_gmem = 0;
}

// Combines the shares of the keys, when all are there.
template <DType DTYPE>
__device__ __forceinline__ void combine(const CombineParams& params) {
  ptx::griddepcontrol_wait();
  device::combine_splits<DTYPE>(params);
}

}  // namespace archflash::hopper
