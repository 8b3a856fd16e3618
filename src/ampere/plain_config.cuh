// The backward kernels of ampere for calls that ask for nothing but a causal mask or a window, on
// GPUs with TMA.
#pragma once

#include "ampere/backward_config.cuh"
#include "common/image_dtype.h"
#include "common/mma_sync/fused_bwd_config.cuh"

namespace archflash::ampere {

using mma_sync::BulkSumsConfig;
using mma_sync::OnlyTileConfig;
using mma_sync::PackedBackwardConfig;
using mma_sync::PlainBackwardConfig;

using D32Plain = PlainBackwardConfig<D32>;
using D64WidePlain = PlainBackwardConfig<D64Wide>;
using D64WideBulk = PlainBackwardConfig<BulkSumsConfig<D64Wide>>;
using D64Plain = PlainBackwardConfig<D64>;
using D96Plain = PlainBackwardConfig<D96>;
using D128WidePlain = PlainBackwardConfig<D128Wide>;
using D128WideBulk = PlainBackwardConfig<BulkSumsConfig<D128Wide>>;
using D192WidePlain = PlainBackwardConfig<D192Wide>;
using D192WideBulk = PlainBackwardConfig<BulkSumsConfig<D192Wide>>;
using D160Plain = PlainBackwardConfig<D160>;
using D192V128Plain = PlainBackwardConfig<D192V128>;
using D256WidePlain = PlainBackwardConfig<D256Wide>;

// Heads whose keys are one tile: of 128 keys, or few, of 64. Small blocks of queries let three or
// four CTAs run on an SM, and code that is executed once is short.
// clang-format off
//                                              head_dim  key       m_          dQ row  CTAs
//                                             q,k   v  warps split tiles block warps  per SM
using D32Only      = OnlyTileConfig<PlainBackwardConfig<
                     FusedBackwardConfig<DTYPE, 32,  32, 4,    1,    2,   32,   2,      3>>>;
using D32FewOnly   = OnlyTileConfig<PlainBackwardConfig<
                     FusedBackwardConfig<DTYPE, 32,  32, 4,    1,    1,   32,   2,      4>>>;
using D64FewOnly   = OnlyTileConfig<PlainBackwardConfig<
                     FusedBackwardConfig<DTYPE, 64,  64, 4,    1,    1,   32,   2,      3>>>;
// clang-format on
using D64Only = OnlyTileConfig<D64Plain>;
using D64OnlyDropout = mma_sync::DropoutBackwardConfig<D64Only>;
using D96Only = OnlyTileConfig<D96Plain>;
using D128WideOnly = OnlyTileConfig<D128WidePlain>;

// Packed sequences.
using D64WidePacked = PackedBackwardConfig<D64Wide>;
using D64WidePackedBulk = PackedBackwardConfig<BulkSumsConfig<D64Wide>>;
using D64WidePackedOnly = OnlyTileConfig<D64WidePacked>;
using D96Packed = PackedBackwardConfig<D96>;
using D96PackedOnly = OnlyTileConfig<D96Packed>;
using D128WidePacked = PackedBackwardConfig<D128Wide>;
using D128WidePackedBulk = PackedBackwardConfig<BulkSumsConfig<D128Wide>>;
using D128WidePackedOnly = OnlyTileConfig<D128WidePacked>;

}  // namespace archflash::ampere
