// The tile sizes of each backward kernel of ampere.
#pragma once

#include "common/mma_sync/backward_config.cuh"

namespace archflash::ampere {

using mma_sync::BackwardConfig;

// clang-format off
//                                                           head_dim       m_          CTAs
//                                                          q,k   v  warps tiles block per SM
template <DType T>
using D64Keys      = BackwardConfig<T, Owns::Keys,    DK | DV,  64,  64, 4,   2,   32,   2>;
template <DType T>
using D64Queries   = BackwardConfig<T, Owns::Queries, DQ,       64,  64, 4,   2,   32,   2>;
template <DType T>
using D128Keys     = BackwardConfig<T, Owns::Keys,    DK | DV, 128, 128, 8,   1,   32,   1>;
template <DType T>
using D128Queries  = BackwardConfig<T, Owns::Queries, DQ,      128, 128, 4,   2,   32,   2>;
template <DType T>
using D192Keys     = BackwardConfig<T, Owns::Keys,    DK | DV, 192, 128, 4,   1,   32,   2>;
template <DType T>
using D192Queries  = BackwardConfig<T, Owns::Queries, DQ,      192, 128, 4,   1,   32,   2>;
// With 256 columns each, dK and dV of a row do not fit the registers of a warp together.
template <DType T>
using D256Values   = BackwardConfig<T, Owns::Keys,    DV,      256, 256, 4,   1,   16,   2>;
template <DType T>
using D256Keys     = BackwardConfig<T, Owns::Keys,    DK,      256, 256, 4,   1,   16,   2>;
template <DType T>
using D256Queries  = BackwardConfig<T, Owns::Queries, DQ,      256, 256, 4,   1,   16,   2>;
// clang-format on

}  // namespace archflash::ampere
