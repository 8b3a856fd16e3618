// The tile sizes of the ampere kernels that take masks as data: 4 warps of 16 rows, in at most 99
// KB of shared memory. A kernel serves every head dimension up to its own.
#pragma once

#include "common/mma_sync/masked_config.cuh"

namespace archflash::ampere {

using mma_sync::FewRowsConfig;
using mma_sync::MaskedConfig;

// clang-format off
//                                                 head_dim  block       Q in   CTAs
//                                                q,k   v    _k   stages regs   per SM
template <DType T>
using D64Masked  = MaskedConfig<FewRowsConfig<T,  64,  64,  64,  2,     true,  2>>;
template <DType T>
using D128Masked = MaskedConfig<FewRowsConfig<T, 128, 128,  64,  2,     true,  2>>;
template <DType T>
using D256Masked = MaskedConfig<FewRowsConfig<T, 256, 256,  32,  2,     false, 2>>;
// clang-format on

}  // namespace archflash::ampere
