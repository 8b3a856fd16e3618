// The backward kernels of ampere for calls that ask for nothing but a causal mask or a window, on
// GPUs with TMA.
#pragma once

#include "ampere/backward_config.cuh"
#include "common/mma_sync/fused_bwd_config.cuh"

namespace archflash::ampere {

using mma_sync::BulkSumsConfig;
using mma_sync::OnlyTileConfig;
using mma_sync::PackedBackwardConfig;
using mma_sync::PlainBackwardConfig;

template <DType T>
using D32Plain = PlainBackwardConfig<D32<T>>;
template <DType T>
using D64WidePlain = PlainBackwardConfig<D64Wide<T>>;
template <DType T>
using D64WideBulk = PlainBackwardConfig<BulkSumsConfig<D64Wide<T>>>;
template <DType T>
using D64Plain = PlainBackwardConfig<D64<T>>;
template <DType T>
using D96Plain = PlainBackwardConfig<D96<T>>;
template <DType T>
using D128WidePlain = PlainBackwardConfig<D128Wide<T>>;
template <DType T>
using D128WideBulk = PlainBackwardConfig<BulkSumsConfig<D128Wide<T>>>;
template <DType T>
using D192WidePlain = PlainBackwardConfig<D192Wide<T>>;
template <DType T>
using D192WideBulk = PlainBackwardConfig<BulkSumsConfig<D192Wide<T>>>;
template <DType T>
using D160Plain = PlainBackwardConfig<D160<T>>;
template <DType T>
using D192V128Plain = PlainBackwardConfig<D192V128<T>>;
template <DType T>
using D256WidePlain = PlainBackwardConfig<D256Wide<T>>;

// Heads whose keys are one tile: of 128 keys, or few, of 64. Small blocks of queries let three or
// four CTAs run on an SM, and code that is executed once is short.
// clang-format off
//                                          head_dim  key       m_          dQ row  CTAs
//                                         q,k   v  warps split tiles block warps  per SM
template <DType T>
using D32Only      = OnlyTileConfig<PlainBackwardConfig<
                     FusedBackwardConfig<T, 32,  32, 4,    1,    2,   32,   2,      3>>>;
template <DType T>
using D32FewOnly   = OnlyTileConfig<PlainBackwardConfig<
                     FusedBackwardConfig<T, 32,  32, 4,    1,    1,   32,   2,      4>>>;
template <DType T>
using D64FewOnly   = OnlyTileConfig<PlainBackwardConfig<
                     FusedBackwardConfig<T, 64,  64, 4,    1,    1,   32,   2,      3>>>;
// clang-format on
template <DType T>
using D64Only = OnlyTileConfig<D64Plain<T>>;
template <DType T>
using D96Only = OnlyTileConfig<D96Plain<T>>;
template <DType T>
using D128WideOnly = OnlyTileConfig<D128WidePlain<T>>;

// Packed sequences.
template <DType T>
using D64WidePacked = PackedBackwardConfig<D64Wide<T>>;
template <DType T>
using D64WidePackedBulk = PackedBackwardConfig<BulkSumsConfig<D64Wide<T>>>;
template <DType T>
using D64WidePackedOnly = OnlyTileConfig<D64WidePacked<T>>;
template <DType T>
using D96Packed = PackedBackwardConfig<D96<T>>;
template <DType T>
using D96PackedOnly = OnlyTileConfig<D96Packed<T>>;
template <DType T>
using D128WidePacked = PackedBackwardConfig<D128Wide<T>>;
template <DType T>
using D128WidePackedBulk = PackedBackwardConfig<BulkSumsConfig<D128Wide<T>>>;
template <DType T>
using D128WidePackedOnly = OnlyTileConfig<D128WidePacked<T>>;

}  // namespace archflash::ampere
