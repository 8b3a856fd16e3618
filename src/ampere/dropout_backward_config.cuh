// The tile sizes of the backward kernels of ampere with dropout and without masks as data.
// Compile-time numbers only, in plain C++.
#pragma once

#include "ampere/backward_config.cuh"
#include "common/mma_sync/dropout_backward_config.cuh"

namespace archflash::ampere {

using mma_sync::DropoutBackwardConfig;

// In at most 99 KB of shared memory. The tiles of 128 keys have no registers for the random bits at
// head dimension 64.
template <DType T>
using BackwardD64Dropout = DropoutBackwardConfig<FusedBackwardConfig<T, 64, 64, 2, 2, 2, 64, 2, 2>>;
template <DType T>
using BackwardD128Dropout = DropoutBackwardConfig<D128<T>>;

// From 227 KB on.
template <DType T>
using BackwardD128WideDropout = DropoutBackwardConfig<D128Wide<T>>;
template <DType T>
using BackwardD256WideDropout = DropoutBackwardConfig<D256Wide<T>>;

}  // namespace archflash::ampere
