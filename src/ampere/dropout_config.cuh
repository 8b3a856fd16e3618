// The tile sizes of the ampere kernels with dropout, for many query rows. Those for the head
// dimensions 64, 128 and 256 serve all below them, too, so that the wheel stays small.
// Compile-time numbers only, in plain C++.
#pragma once

#include "ampere/config.cuh"

namespace archflash::ampere {

// clang-format off
//                             head_dim       m_    block step        Q in   CTAs
//                           q,k   v   warps tiles _k   _keys stages regs   per SM
template <DType T>
using D64LargeDropout  =
                     Config<T,  64,  64, 4,   2,  128,   64,  2,     false, 2>;
template <DType T>
using D64MediumDropout =
                     Config<T,  64,  64, 4,   2,   64,   64,  2,     true,  2>;
template <DType T>
using D128Dropout  = Config<T, 128, 128, 4,   2,   64,   64,  1,     false, 2>;
template <DType T>
using D256Dropout  = LateConfig<
                     Config<T, 256, 256, 4,   1,   64,   64,  1,     false, 2>>;
// clang-format on

}  // namespace archflash::ampere
