// The tile sizes of the simt kernels that read a KV cache: few rows in a warp, so that the packed
// heads of one position waste little, and small enough for every GPU.
#pragma once

#include "simt/config.cuh"

namespace archflash::simt {

template <class Base>
struct CacheConfig : Base {
  static constexpr bool CAN_SPLIT = true;
  static_assert(Base::SHARED_BYTES <= SMALLEST_SHARED_LIMIT);
};

// clang-format off
//                                       head       lane thread block   p_    d_  key_ CTAs   short
//                                       _dim warps _rows _rows   _k keys step step per SM sums
using F32D64Cache  = CacheConfig<Config<DType::F32,   64,    4,    2,    4,   64,  32,   8,   8,   3, true>>;
using F32D128Cache = CacheConfig<F32D128Small>;
using F32D256Cache = CacheConfig<F32D256Small>;
// clang-format on

}  // namespace archflash::simt
