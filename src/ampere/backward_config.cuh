// The tile sizes of each backward kernel of ampere.
#pragma once

#include "common/masked_backward_params.h"
#include "common/mma_sync/backward_config.cuh"
#include "common/mma_sync/fused_bwd_config.cuh"

namespace archflash::ampere {

using mma_sync::BackwardConfig;
using mma_sync::DropoutBackwardConfig;
using mma_sync::FusedBackwardConfig;

// clang-format off
// All gradients in one kernel.
//                                           head_dim  key       m_          dQ row  CTAs
//                                          q,k   v  warps split tiles block warps  per SM
template <DType T>
using D32          = FusedBackwardConfig<T,  32,  32, 4,    1,    2,    64,  4,      2>;
template <DType T>
using D64Wide      = FusedBackwardConfig<T,  64,  64, 4,    2,    2,   128,  4,      1>;
template <DType T>
using D64          = FusedBackwardConfig<T,  64,  64, 4,    1,    2,    32,  1,      2>;
template <DType T>
using D96          = FusedBackwardConfig<T,  96,  96, 4,    2,    2,    64,  4,      1>;
template <DType T>
using D128Wide     = FusedBackwardConfig<T, 128, 128, 4,    2,    2,    64,  2,      1>;
template <DType T>
using D128         = FusedBackwardConfig<T, 128, 128, 2,    2,    2,    32,  1,      2>;
template <DType T>
using D192Wide     = FusedBackwardConfig<T, 192, 192, 2,    4,    2,    64,  2,      1>;
template <DType T>
using D160         = FusedBackwardConfig<T, 160, 160, 2,    2,    2,    32,  2,      2>;
template <DType T>
using D192V128     = FusedBackwardConfig<T, 192, 128, 2,    2,    2,    32,  1,      2>;
template <DType T>
using D192V128Medium = FusedBackwardConfig<T, 192, 128, 4,  2,    2,    32,  2,      1>;
template <DType T>
using D256Medium   = FusedBackwardConfig<T, 256, 256, 4,    2,    1,    32,  2,      1>;
template <DType T>
using D256Wide     = FusedBackwardConfig<T, 256, 256, 2,    4,    2,    64,  2,      1>;

// For 163 KB of shared memory.
template <DType T>
using D64Medium    = mma_sync::SharedScoresConfig<D64Wide<T>>;
template <DType T>
using D128Medium   = mma_sync::SharedScoresConfig<D128Wide<T>>;
template <DType T>
using D192Medium   = mma_sync::SharedScoresConfig<D192Wide<T>>;

// One kernel for the gradients of keys, one for those of queries.
//                                                           head_dim       m_          CTAs
//                                                          q,k   v  warps tiles block per SM
// With 256 columns each, dK and dV of a row do not fit the registers of a warp together.
template <DType T>
using D256Values   = BackwardConfig<T, Owns::Keys,    DV,      256, 256, 4,   1,   16,   2>;
template <DType T>
using D256Keys     = BackwardConfig<T, Owns::Keys,    DK,      256, 256, 4,   1,   16,   2>;
template <DType T>
using D256Queries  = BackwardConfig<T, Owns::Queries, DQ,      256, 256, 4,   1,   16,   2>;

// With masks as data, or dropout, in at most 99 KB of shared memory.
template <DType T>
using D64Masked    = MaskedBackwardConfig<FusedBackwardConfig<T, 64, 64, 2, 2, 2, 64, 2, 2>>;
template <DType T>
using D128Masked   = MaskedBackwardConfig<D128<T>>;
template <DType T>
using D256ValuesMasked = MaskedBackwardConfig<D256Values<T>>;
template <DType T>
using D256KeysMasked = MaskedBackwardConfig<D256Keys<T>>;
template <DType T>
using D256QueriesMasked = MaskedBackwardConfig<D256Queries<T>>;
// clang-format on

// With dropout and without masks as data, in at most 99 KB of shared memory. The tiles of 128 keys
// have no registers for the random bits at head dimension 64.
template <DType T>
using BackwardD64Dropout = DropoutBackwardConfig<FusedBackwardConfig<T, 64, 64, 2, 2, 2, 64, 2, 2>>;
template <DType T>
using BackwardD128Dropout = DropoutBackwardConfig<D128<T>>;

// Tiles with dropout for GPUs that give a CTA 227 KB or more.
template <DType T>
using BackwardD128WideDropout = DropoutBackwardConfig<D128Wide<T>>;
template <DType T>
using BackwardD256WideDropout = DropoutBackwardConfig<D256Wide<T>>;

}  // namespace archflash::ampere
