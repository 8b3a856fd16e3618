// The tile sizes of each ampere kernel. Compile-time numbers only, in plain C++: the kernels and
// plan.cpp both include them.
#pragma once

#include "common/mma_sync/config.cuh"

namespace archflash::ampere {

using mma_sync::Config;

// clang-format off
//                             head_dim       m_    block step        Q in   CTAs
//                           q,k   v   warps tiles _k   _keys stages regs   per SM
template <DType T>
using D64Large     = Config<T,  64,  64, 4,   2,  128,  128,  2,     false, 2>;
template <DType T>
using D64Medium    = Config<T,  64,  64, 4,   2,   64,   64,  2,     true,  2>;
template <DType T>
using D64Few       = Config<T,  64,  64, 4,   1,  128,  128,  2,     true,  2>;
template <DType T>
using D96Large     = Config<T,  96,  96, 4,   2,   64,   64,  2,     false, 2>;
template <DType T>
using D96Medium    = Config<T,  96,  96, 4,   2,   64,   64,  1,     false, 2>;
template <DType T>
using D128Large    = Config<T, 128, 128, 4,   2,   64,   64,  2,     false, 2>;
template <DType T>
using D128Medium   = Config<T, 128, 128, 4,   2,   64,   64,  1,     false, 2>;
template <DType T>
using D128Small    = Config<T, 128, 128, 4,   2,   32,   32,  1,     false, 2>;
template <DType T>
using D128Few      = Config<T, 128, 128, 4,   1,   64,   64,  2,     true,  2>;
template <DType T>
using D192Large    = Config<T, 192, 128, 4,   2,   64,   64,  1,     false, 2>;
template <DType T>
using D192Medium   = Config<T, 192, 128, 4,   2,   32,   32,  1,     false, 2>;
template <DType T>
using D256Large    = Config<T, 256, 256, 4,   1,   64,   64,  1,     false, 2>;
template <DType T>
using D256Medium   = Config<T, 256, 256, 8,   1,   64,   64,  1,     false, 1>;
template <DType T>
using D256Small    = Config<T, 256, 256, 8,   1,   32,   32,  1,     false, 1>;
// clang-format on

}  // namespace archflash::ampere
