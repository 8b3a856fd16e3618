// The tile sizes of each ampere kernel. Compile-time numbers only, in plain C++: the kernels and
// plan.cpp both include them.
#pragma once

#include "common/mma_sync/config.cuh"
#include "common/mma_sync/decode_config.cuh"

namespace archflash::ampere {

using mma_sync::Config;
using mma_sync::DropoutConfig;
using mma_sync::FewRowsConfig;
using mma_sync::KeyGroupsConfig;
using mma_sync::LateConfig;
using mma_sync::MaskedConfig;
using mma_sync::QIn;
using mma_sync::ShortConfig;

// Large, Medium and Small serve calls of many query rows on GPUs with more or less shared memory.
// Short is for few keys. D64Groups and
// D128GroupsFew are for few CTAs.
// clang-format off
//                             head_dim       m_    block step                       CTAs
//                           q,k   v   warps tiles _k   _keys stages Q in           per SM
template <DType T>
using D32Large     = LateConfig<
                     Config<T,  32,  32, 4,   2,  128,   64,  2,     QIn::Registers, 3>>;
template <DType T>
using D32Medium    = LateConfig<
                     Config<T,  32,  32, 4,   2,  128,  128,  2,     QIn::Shared,    2>>;
template <DType T>
using D32Few       = LateConfig<
                     Config<T,  32,  32, 4,   1,  128,  128,  2,     QIn::Registers, 3>>;
template <DType T>
using D64Large     = LateConfig<
                     Config<T,  64,  64, 4,   2,  128,  128,  2,     QIn::Shared,    2>>;
template <DType T>
using D64Medium    = Config<T,  64,  64, 4,   2,   64,   64,  2,     QIn::Registers, 2>;
template <DType T>
using D64Short     = ShortConfig<
                     Config<T,  64,  64, 4,   1,   80,   80,  1,     QIn::Registers, 4>>;
template <DType T>
using D64Groups    = KeyGroupsConfig<
                     Config<T,  64,  64, 4,   1,  128,   64,  2,     QIn::Registers, 2>>;
template <DType T>
using D96Large     = Config<T,  96,  96, 4,   2,   64,   64,  2,     QIn::Shared,    2>;
template <DType T>
using D96Medium    = Config<T,  96,  96, 4,   2,   64,   64,  1,     QIn::Shared,    2>;
template <DType T>
using D128Large    = Config<T, 128, 128, 4,   2,   64,   64,  2,     QIn::Shared,    2>;
template <DType T>
using D128Medium   = Config<T, 128, 128, 4,   2,   64,   64,  1,     QIn::Shared,    2>;
template <DType T>
using D128Small    = Config<T, 128, 128, 4,   2,   32,   32,  1,     QIn::Shared,    2>;
template <DType T>
using D128Groups   = KeyGroupsConfig<
                     Config<T, 128, 128, 4,   2,  128,   64,  2,     QIn::Shared,    1>>;
template <DType T>
using D128GroupsFew = KeyGroupsConfig<
                     Config<T, 128, 128, 4,   1,  128,   64,  2,     QIn::Registers, 1>>;
template <DType T>
using D192Large    = Config<T, 192, 128, 4,   2,   64,   64,  1,     QIn::Shared,    2>;
template <DType T>
using D192Medium   = Config<T, 192, 128, 4,   2,   32,   32,  1,     QIn::Shared,    2>;
template <DType T>
using D256Large    = LateConfig<
                     Config<T, 256, 256, 4,   1,   64,   64,  1,     QIn::Shared,    2>>;
template <DType T>
using D256Medium   = LateConfig<
                     Config<T, 256, 256, 8,   1,   64,   64,  1,     QIn::Shared,    1>>;
template <DType T>
using D256Small    = LateConfig<
                     Config<T, 256, 256, 8,   1,   32,   32,  1,     QIn::Shared,    1>>;

// For few rows: 4 warps of 16 rows.
//                                     head_dim  block                      CTAs
//                                    q,k   v    _k   stages Q in           per SM
template <DType T>
using D64Few       = FewRowsConfig<T,  64,  64, 128,  2,     QIn::Registers, 2>;
template <DType T>
using D96Few       = FewRowsConfig<T,  96,  96,  64,  2,     QIn::Registers, 2>;
template <DType T>
using D128Few      = FewRowsConfig<T, 128, 128,  64,  2,     QIn::Registers, 2>;
template <DType T>
using D192Few      = FewRowsConfig<T, 192, 128,  32,  2,     QIn::Shared,    2>;
template <DType T>
using D256Few      = FewRowsConfig<T, 256, 256,  32,  2,     QIn::Shared,    2>;

// With masks as data: 4 warps of 16 rows, in at most 99 KB of shared memory. A kernel serves every
// head dimension up to its own.
template <DType T>
using D64Masked    = MaskedConfig<
                     FewRowsConfig<T,  64,  64,  64,  2,     QIn::Registers, 2>>;
template <DType T>
using D128Masked   = MaskedConfig<D128Few<T>>;
template <DType T>
using D256Masked   = MaskedConfig<D256Few<T>>;
// clang-format on

// With dropout and many query rows. A kernel serves every head dimension up to its own, so that the
// wheel stays small.
template <DType T>
using D64LargeDropout = DropoutConfig<Config<T, 64, 64, 4, 2, 128, 64, 2, QIn::Shared, 2>>;
template <DType T>
using D64MediumDropout = DropoutConfig<D64Medium<T>>;
template <DType T>
using D128Dropout = DropoutConfig<D128Medium<T>>;
template <DType T>
using D256Dropout = DropoutConfig<D256Large<T>>;

// For few rows, where K and V are a KV cache in q's dtype.
template <DType T>
using D64Cache = mma_sync::CacheConfig<D64Few<T>>;
template <DType T>
using D96Cache = mma_sync::CacheConfig<D96Few<T>>;
template <DType T>
using D128Cache = mma_sync::CacheConfig<D128Few<T>>;
template <DType T>
using D192Cache = mma_sync::CacheConfig<D192Few<T>>;
template <DType T>
using D256Cache = mma_sync::CacheConfig<D256Few<T>>;

// Kernels for a KV cache with masks as data.
template <DType T>
using D64MaskedCache =
    mma_sync::MaskedCacheConfig<FewRowsConfig<T, 64, 64, 64, 2, QIn::Registers, 2>>;
template <DType T>
using D128MaskedCache = mma_sync::MaskedCacheConfig<D128Few<T>>;
template <DType T>
using D256MaskedCache = mma_sync::MaskedCacheConfig<D256Few<T>>;

// For at most 16 rows that share a head of K, without a KV cache or with one in q's dtype. head_dim
// is that of q, k and v.
//                                            head        keys                        CTAs
//                                            _dim warps  each  stages Q in           per SM
// clang-format off
template <DType T>
using D64Decode    = mma_sync::DecodeConfig<T,  64, 4,   32,    2,     QIn::Registers, 2>;
template <DType T>
using D128Decode   = mma_sync::DecodeConfig<T, 128, 4,   16,    2,     QIn::Shared,    3>;
template <DType T>
using D256Decode   = mma_sync::DecodeConfig<T, 256, 2,   16,    2,     QIn::Shared,    2>;
template <DType T>
using D64MaskedDecode  = mma_sync::MaskedDecodeConfig<D64Decode<T>>;
template <DType T>
using D128MaskedDecode = mma_sync::MaskedDecodeConfig<D128Decode<T>>;
template <DType T>
using D256MaskedDecode = mma_sync::MaskedDecodeConfig<D256Decode<T>>;

// For a KV cache of 8-bit numbers, whatever the number of rows is.
template <DType T>
using D64CacheFp8  = mma_sync::Fp8DecodeConfig<T,  64, 4,   32,    4,     QIn::Registers, 3>;
template <DType T>
using D128CacheFp8 = mma_sync::Fp8DecodeConfig<T, 128, 4,   32,    2,     QIn::Shared,    3>;
template <DType T>
using D256CacheFp8 = mma_sync::Fp8DecodeConfig<T, 256, 2,   32,    2,     QIn::Shared,    3>;
// clang-format on

}  // namespace archflash::ampere
