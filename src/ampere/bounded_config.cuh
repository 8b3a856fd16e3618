// The tile sizes of the kernels for calls whose rows see all keys up to one
// (common/mma_sync/bounded_fwd.cuh).
#pragma once

#include "ampere/dense_config.cuh"

namespace archflash::ampere {

// clang-format off
// CTAs share out the keys of 64 rows. With Groups they have an SM each.
//                             head_dim       m_    block step                       CTAs
//                           q,k   v   warps tiles _k   _keys stages Q in           per SM
template <DType T>
using D32Shares       = Config<T,  32,  32, 4, 1,  128,  128,  2,     QIn::Registers, 3>;
template <DType T>
using D64Shares       = Config<T,  64,  64, 4, 1,  128,  128,  2,     QIn::Registers, 2>;
template <DType T>
using D64SharesThree  = Config<T,  64,  64, 4, 1,  128,   64,  2,     QIn::Registers, 3>;
template <DType T>
using D96Shares       = Config<T,  96,  96, 4, 1,   64,   64,  2,     QIn::Registers, 2>;
template <DType T>
using D128Shares      = Config<T, 128, 128, 4, 1,   64,   64,  2,     QIn::Registers, 2>;
template <DType T>
using D128SharesGroups = D128GroupsFew<T>;
template <DType T>
using D160Shares      = Config<T, 160, 160, 4, 1,   64,   64,  2,     QIn::Registers, 2>;
template <DType T>
using D256Shares      = Config<T, 256, 256, 4, 1,   32,   32,  2,     QIn::Shared,    2>;

// 128 rows, whose keys one CTA has: many row tiles.
template <DType T>
using D64Causal       = D64Large<T>;
template <DType T>
using D96Causal       = D96Large<T>;
template <DType T>
using D128Causal      = LateConfig<D128Large<T>>;

// Packed sequences of few rows, and of more.
template <DType T>
using D32Packed       = D32Shares<T>;
template <DType T>
using D32PackedLarge  = D32Medium<T>;
template <DType T>
using D64Packed       = Config<T,  64,  64, 4, 1,   64,   64,  2,     QIn::Registers, 3>;
template <DType T>
using D64PackedLarge  = D64Large<T>;
template <DType T>
using D80Packed       = D80DenseFew<T>;
template <DType T>
using D80PackedLarge  = D80Dense<T>;
template <DType T>
using D96Packed       = D96Shares<T>;
template <DType T>
using D96PackedLarge  = D96Large<T>;
template <DType T>
using D128Packed      = D128Shares<T>;
template <DType T>
using D128PackedLarge = D128Causal<T>;
// clang-format on

}  // namespace archflash::ampere
