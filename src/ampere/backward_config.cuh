// The tile sizes of each backward kernel of ampere.
#pragma once

#include "common/image_dtype.h"
#include "common/masked_backward_params.h"
#include "common/mma_sync/backward_config.cuh"
#include "common/mma_sync/fused_bwd_config.cuh"

namespace archflash::ampere {

using mma_sync::BackwardConfig;
using mma_sync::DropoutBackwardConfig;
using mma_sync::FusedBackwardConfig;

// clang-format off
// All gradients in one kernel.
//                                               head_dim  key       m_          dQ row  CTAs
//                                              q,k   v  warps split tiles block warps  per SM
using D32          = FusedBackwardConfig<DTYPE,  32,  32, 4,    1,    2,    64,  4,      2>;
using D64Wide      = FusedBackwardConfig<DTYPE,  64,  64, 4,    2,    2,   128,  4,      1>;
using D64          = FusedBackwardConfig<DTYPE,  64,  64, 4,    1,    2,    32,  1,      2>;
using D96          = FusedBackwardConfig<DTYPE,  96,  96, 4,    2,    2,    64,  4,      1>;
using D128Wide     = FusedBackwardConfig<DTYPE, 128, 128, 4,    2,    2,    64,  2,      1>;
using D128         = FusedBackwardConfig<DTYPE, 128, 128, 2,    2,    2,    32,  1,      2>;
using D192Wide     = FusedBackwardConfig<DTYPE, 192, 192, 2,    4,    2,    64,  2,      1>;
using D160         = FusedBackwardConfig<DTYPE, 160, 160, 2,    2,    2,    32,  2,      2>;
using D192V128     = FusedBackwardConfig<DTYPE, 192, 128, 2,    2,    2,    32,  1,      2>;
using D192V128Medium = FusedBackwardConfig<DTYPE, 192, 128, 4,  2,    2,    32,  2,      1>;
using D256Medium   = FusedBackwardConfig<DTYPE, 256, 256, 4,    2,    1,    32,  2,      1>;
using D256Wide     = FusedBackwardConfig<DTYPE, 256, 256, 2,    4,    2,    64,  2,      1>;

// For 163 KB of shared memory.
using D64Medium    = mma_sync::SharedScoresConfig<D64Wide>;
using D128Medium   = mma_sync::SharedScoresConfig<D128Wide>;
using D192Medium   = mma_sync::SharedScoresConfig<D192Wide>;

// One kernel for the gradients of keys, one for those of queries.
//                                                           head_dim       m_          CTAs
//                                                          q,k   v  warps tiles block per SM
// With 256 columns each, dK and dV of a row do not fit the registers of a warp together.
using D256Values   = BackwardConfig<DTYPE, Owns::Keys,    DV,      256, 256, 4,   1,   16,   2>;
using D256Keys     = BackwardConfig<DTYPE, Owns::Keys,    DK,      256, 256, 4,   1,   16,   2>;
using D256Queries  = BackwardConfig<DTYPE, Owns::Queries, DQ,      256, 256, 4,   1,   16,   2>;

// With masks as data, or dropout, in at most 99 KB of shared memory.
using D64Masked    = MaskedBackwardConfig<FusedBackwardConfig<DTYPE, 64, 64, 2, 2, 2, 64, 2, 2>>;
using D128Masked   = MaskedBackwardConfig<D128>;
using D256ValuesMasked = MaskedBackwardConfig<D256Values>;
using D256KeysMasked = MaskedBackwardConfig<D256Keys>;
using D256QueriesMasked = MaskedBackwardConfig<D256Queries>;
// clang-format on

// With dropout and without masks as data, in at most 99 KB of shared memory.
using BackwardD64Dropout = DropoutBackwardConfig<D64>;
using BackwardD128Dropout = DropoutBackwardConfig<D128>;

// Tiles with dropout for GPUs that give a CTA 227 KB or more.
using BackwardD128WideDropout = DropoutBackwardConfig<D128Wide>;
using BackwardD256WideDropout = DropoutBackwardConfig<D256Wide>;

}  // namespace archflash::ampere
