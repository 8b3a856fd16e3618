// The tile sizes of the kernels for calls whose rows see all keys up to one
// (common/mma_sync/bounded_fwd.cuh).
#pragma once

#include "ampere/dense_config.cuh"
#include "common/image_dtype.h"

namespace archflash::ampere {

// clang-format off
// CTAs share out the keys of 64 rows. With Groups they have an SM each.
//                                 head_dim       m_    block step                       CTAs
//                               q,k   v   warps tiles _k   _keys stages Q in           per SM
using D32Shares       = Config<DTYPE,  32,  32, 4, 1,  128,  128,  2,     QIn::Registers, 3>;
using D64Shares       = Config<DTYPE,  64,  64, 4, 1,  128,  128,  2,     QIn::Registers, 2>;
using D64SharesThree  = Config<DTYPE,  64,  64, 4, 1,  128,   64,  2,     QIn::Registers, 3>;
using D96Shares       = Config<DTYPE,  96,  96, 4, 1,   64,   64,  2,     QIn::Registers, 2>;
using D128Shares      = Config<DTYPE, 128, 128, 4, 1,   64,   64,  2,     QIn::Registers, 2>;
using D128SharesGroups = D128GroupsFew;
using D160Shares      = Config<DTYPE, 160, 160, 4, 1,   64,   64,  2,     QIn::Registers, 2>;
using D256Shares      = Config<DTYPE, 256, 256, 4, 1,   32,   32,  2,     QIn::Shared,    2>;

// 128 rows, whose keys one CTA has: many row tiles.
using D64Causal       = D64Large;
using D96Causal       = D96Large;
using D128Causal      = LateConfig<D128Large>;

// Packed sequences of few rows, and of more.
using D32Packed       = D32Shares;
using D32PackedLarge  = D32Medium;
using D64Packed       = Config<DTYPE,  64,  64, 4, 1,   64,   64,  2,     QIn::Registers, 3>;
using D64PackedLarge  = D64Large;
using D80Packed       = D80DenseFew;
using D80PackedLarge  = D80Dense;
using D96Packed       = D96Shares;
using D96PackedLarge  = D96Large;
using D128Packed      = D128Shares;
using D128PackedLarge = D128Causal;
// clang-format on

}  // namespace archflash::ampere
