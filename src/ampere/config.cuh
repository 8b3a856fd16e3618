// The tile sizes of each ampere kernel. Compile-time numbers only, in plain C++: the kernels and
// plan.cpp both include them.
#pragma once

#include "common/image_dtype.h"
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
//                                 head_dim       m_    block step                       CTAs
//                               q,k   v   warps tiles _k   _keys stages Q in           per SM
using D32Large     = LateConfig<
                     Config<DTYPE,  32,  32, 4,   2,  128,   64,  2,     QIn::Registers, 3>>;
using D32Medium    = LateConfig<
                     Config<DTYPE,  32,  32, 4,   2,  128,  128,  2,     QIn::Shared,    2>>;
using D32Few       = LateConfig<
                     Config<DTYPE,  32,  32, 4,   1,  128,  128,  2,     QIn::Registers, 3>>;
using D64Large     = LateConfig<
                     Config<DTYPE,  64,  64, 4,   2,  128,  128,  2,     QIn::Shared,    2>>;
using D64Medium    = Config<DTYPE,  64,  64, 4,   2,   64,   64,  2,     QIn::Registers, 2>;
using D64Short     = ShortConfig<
                     Config<DTYPE,  64,  64, 4,   1,   80,   80,  1,     QIn::Registers, 4>>;
using D64Groups    = KeyGroupsConfig<
                     Config<DTYPE,  64,  64, 4,   1,  128,   64,  2,     QIn::Registers, 2>>;
using D96Large     = Config<DTYPE,  96,  96, 4,   2,   64,   64,  2,     QIn::Shared,    2>;
using D96Medium    = Config<DTYPE,  96,  96, 4,   2,   64,   64,  1,     QIn::Shared,    2>;
using D128Large    = Config<DTYPE, 128, 128, 4,   2,   64,   64,  2,     QIn::Shared,    2>;
using D128Medium   = Config<DTYPE, 128, 128, 4,   2,   64,   64,  1,     QIn::Shared,    2>;
using D128Small    = Config<DTYPE, 128, 128, 4,   2,   32,   32,  1,     QIn::Shared,    2>;
using D128Groups   = KeyGroupsConfig<
                     Config<DTYPE, 128, 128, 4,   2,  128,   64,  2,     QIn::Shared,    1>>;
using D128GroupsFew = KeyGroupsConfig<
                     Config<DTYPE, 128, 128, 4,   1,  128,   64,  2,     QIn::Registers, 1>>;
using D192Large    = Config<DTYPE, 192, 128, 4,   2,   64,   64,  1,     QIn::Shared,    2>;
using D192Medium   = Config<DTYPE, 192, 128, 4,   2,   32,   32,  1,     QIn::Shared,    2>;
using D256Large    = LateConfig<
                     Config<DTYPE, 256, 256, 4,   1,   64,   64,  1,     QIn::Shared,    2>>;
using D256Medium   = LateConfig<
                     Config<DTYPE, 256, 256, 8,   1,   64,   64,  1,     QIn::Shared,    1>>;
using D256Small    = LateConfig<
                     Config<DTYPE, 256, 256, 8,   1,   32,   32,  1,     QIn::Shared,    1>>;

// For few rows: 4 warps of 16 rows.
//                                         head_dim  block                      CTAs
//                                        q,k   v    _k   stages Q in           per SM
using D64Few       = FewRowsConfig<DTYPE,  64,  64, 128,  2,     QIn::Registers, 2>;
using D96Few       = FewRowsConfig<DTYPE,  96,  96,  64,  2,     QIn::Registers, 2>;
using D128Few      = FewRowsConfig<DTYPE, 128, 128,  64,  2,     QIn::Registers, 2>;
using D192Few      = FewRowsConfig<DTYPE, 192, 128,  32,  2,     QIn::Shared,    2>;
using D256Few      = FewRowsConfig<DTYPE, 256, 256,  32,  2,     QIn::Shared,    2>;

// With masks as data: 4 warps of 16 rows, in at most 99 KB of shared memory. A kernel serves every
// head dimension up to its own.
using D64Masked    = MaskedConfig<
                     FewRowsConfig<DTYPE,  64,  64,  64,  2,     QIn::Registers, 2>>;
using D128Masked   = MaskedConfig<D128Few>;
using D256Masked   = MaskedConfig<D256Few>;
// clang-format on

// With dropout and many query rows. A kernel serves every head dimension up to its own, so that the
// wheel stays small.
using D64LargeDropout = DropoutConfig<Config<DTYPE, 64, 64, 4, 2, 128, 64, 2, QIn::Shared, 2>>;
using D64MediumDropout = DropoutConfig<D64Medium>;
using D96Dropout = DropoutConfig<D96Medium>;
using D128Dropout = DropoutConfig<D128Medium>;
using D256Dropout = DropoutConfig<D256Large>;

// For few rows, where K and V are a KV cache in q's dtype.
using D64Cache = mma_sync::CacheConfig<D64Few>;
using D96Cache = mma_sync::CacheConfig<D96Few>;
using D128Cache = mma_sync::CacheConfig<D128Few>;
using D192Cache = mma_sync::CacheConfig<D192Few>;
using D256Cache = mma_sync::CacheConfig<D256Few>;

// Kernels for a KV cache with masks as data.
using D64MaskedCache =
    mma_sync::MaskedCacheConfig<FewRowsConfig<DTYPE, 64, 64, 64, 2, QIn::Registers, 2>>;
using D128MaskedCache = mma_sync::MaskedCacheConfig<D128Few>;
using D256MaskedCache = mma_sync::MaskedCacheConfig<D256Few>;

// For at most 16 rows that share a head of K, without a KV cache or with one in q's dtype. head_dim
// is that of q, k and v.
//                                                head        keys                        CTAs
//                                                _dim warps  each  stages Q in           per SM
// clang-format off
using D64Decode    = mma_sync::DecodeConfig<DTYPE,  64, 4,   32,    2,     QIn::Registers, 2>;
using D128Decode   = mma_sync::DecodeConfig<DTYPE, 128, 4,   16,    2,     QIn::Shared,    3>;
using D256Decode   = mma_sync::DecodeConfig<DTYPE, 256, 2,   16,    2,     QIn::Shared,    2>;
using D64PlainDecode   = mma_sync::PlainDecodeConfig<D64Decode>;
using D128PlainDecode  = mma_sync::PlainDecodeConfig<D128Decode>;
using D256PlainDecode  = mma_sync::PlainDecodeConfig<D256Decode>;
using D64JoinedDecode  = mma_sync::JoinedDecodeConfig<D64PlainDecode>;
using D128JoinedDecode = mma_sync::JoinedDecodeConfig<D128PlainDecode>;
using D256JoinedDecode = mma_sync::JoinedDecodeConfig<D256PlainDecode>;
using D64MaskedDecode  = mma_sync::MaskedDecodeConfig<D64Decode>;
using D128MaskedDecode = mma_sync::MaskedDecodeConfig<D128Decode>;
using D256MaskedDecode = mma_sync::MaskedDecodeConfig<D256Decode>;
using D64JoinedMasked  = mma_sync::JoinedDecodeConfig<D64MaskedDecode>;
using D128JoinedMasked = mma_sync::JoinedDecodeConfig<D128MaskedDecode>;
using D256JoinedMasked = mma_sync::JoinedDecodeConfig<D256MaskedDecode>;

// For a KV cache of 8-bit numbers, whatever the number of rows is.
using D64CacheFp8  = mma_sync::Fp8DecodeConfig<DTYPE,  64, 4,   32,    4,     QIn::Registers, 3>;
using D128CacheFp8 = mma_sync::Fp8DecodeConfig<DTYPE, 128, 4,   32,    2,     QIn::Shared,    3>;
using D256CacheFp8 = mma_sync::Fp8DecodeConfig<DTYPE, 256, 2,   32,    2,     QIn::Shared,    3>;
// clang-format on

}  // namespace archflash::ampere
