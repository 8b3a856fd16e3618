// The tile sizes of each ada kernel. Compile-time numbers only, in plain C++: the kernels and
// plan.cpp both include them.
#pragma once

#include <cstdint>

#include "common/image_dtype.h"
#include "common/mma_sync/config.cuh"

namespace archflash::ada {

// --- 16-bit inputs. The kernel is that of common/mma_sync. The tiles fit the 99 KB of shared
// memory of 8.9. ---

using mma_sync::Config;
using mma_sync::FewRowsConfig;
using mma_sync::QIn;

// clang-format off
//                                 head_dim       m_    block step               CTAs
//                               q,k   v   warps tiles _k   _keys stages  Q in           per SM
using D64        = Config<DTYPE,  64,  64, 4,   2,  128,  128,  1,     QIn::Shared,    2>;
using D96        = Config<DTYPE,  96,  96, 4,   2,   64,   64,  1,     QIn::Shared,    2>;
using D192       = Config<DTYPE, 192, 128, 8,   1,   32,   32,  1,     QIn::Shared,    1>;
using D256       = Config<DTYPE, 256, 256, 8,   1,   32,   32,  1,     QIn::Shared,    1>;

// For few rows: 4 warps of 16 rows.
//                                        head_dim  block              CTAs
//                                       q,k   v    _k   stages Q in           per SM
using D64Few      = FewRowsConfig<DTYPE,  64,  64,  64,  1,     QIn::Registers, 3>;
using D96Few      = FewRowsConfig<DTYPE,  96,  96,  64,  2,     QIn::Registers, 2>;
using D128        = FewRowsConfig<DTYPE, 128, 128,  64,  1,     QIn::Shared,    2>;
using D192Few     = FewRowsConfig<DTYPE, 192, 128,  32,  2,     QIn::Shared,    2>;
using D256Few     = FewRowsConfig<DTYPE, 256, 256,  32,  2,     QIn::Shared,    2>;
// clang-format on

// --- 16-bit inputs whose Q and K are converted to int8 (approximate="int8_qk") ---

struct Int8QkInputs {
  static constexpr int QK_PACK = 2;
  static constexpr int V_PACK = 1;
  static constexpr int CONTEXT_BYTES = 160;
};

// DTYPE is the type of V, P and the output. A step takes the SCALE_ROWS keys that share a scale.
template <DType DTYPE, int HEAD_DIM, int HEAD_DIM_V, int WARPS, int M_TILES, int STAGES,
          int CTAS_PER_SM>
struct Int8Config : Config<DTYPE, HEAD_DIM, HEAD_DIM_V, WARPS, M_TILES, SCALE_ROWS, SCALE_ROWS,
                           STAGES, QIn::Shared, CTAS_PER_SM, Int8QkInputs> {
  static_assert(!is_fp8(DTYPE), "16-bit inputs only");
  static_assert(SCALE_ROWS % (16 * M_TILES) == 0, "the rows of a warp share a scale");
  static_assert(HEAD_DIM <= 260, "127 * 127 * HEAD_DIM < 2^22: sums are exact as floats");
};

// clang-format off
//                                   head_dim       m_            CTAs
//                                 q,k   v   warps tiles stages  per SM
using Int8D64    = Int8Config<DTYPE,  64,  64, 4,   2,    2,       2>;
using Int8D128Large = Int8Config<DTYPE, 128, 128, 4, 2,   2,       2>;
using Int8D128   = Int8Config<DTYPE, 128, 128, 8,   2,    2,       1>;
using Int8D256   = Int8Config<DTYPE, 256, 256, 8,   1,    1,       1>;
// clang-format on

// --- 8-bit inputs ---

struct Fp8Inputs {
  static constexpr int QK_PACK = 2;
  static constexpr int V_PACK = 2;
  static constexpr int CONTEXT_BYTES = 160;
};

template <DType DTYPE, int HEAD_DIM, int HEAD_DIM_V, int WARPS, int M_TILES, int BLOCK_K,
          int STAGES, QIn Q_IN, int CTAS_PER_SM>
struct Fp8Config : Config<DTYPE, HEAD_DIM, HEAD_DIM_V, WARPS, M_TILES, BLOCK_K, BLOCK_K, STAGES,
                          Q_IN, CTAS_PER_SM, Fp8Inputs> {
  static_assert(is_fp8(DTYPE), "8-bit floating point only");
  static_assert(SCALE_ROWS % BLOCK_K == 0, "the keys of a step share a descale");
  static_assert(SCALE_ROWS % (16 * M_TILES) == 0, "the rows of a warp share a descale");
  static_assert(Fp8Config::SHARED_BYTES <= 99 * 1024,
                "CUDA: at most 99 KiB of shared memory in a CTA (8.9)");
};

// clang-format off
//                              head_dim       m_    block                CTAs
//                            q,k   v   warps tiles _k    stages   Q in           per SM
template <DType T>
using Fp8D64     = Fp8Config<T,  64,  64, 4,   1,   64,    2,     QIn::Registers, 3>;
template <DType T>
using Fp8D128    = Fp8Config<T, 128, 128, 4,   1,   64,    2,     QIn::Registers, 2>;
template <DType T>
using Fp8D192    = Fp8Config<T, 192, 128, 4,   1,   64,    2,     QIn::Shared,    2>;
template <DType T>
using Fp8D256    = Fp8Config<T, 256, 256, 4,   1,   64,    1,     QIn::Shared,    2>;
// clang-format on

}  // namespace archflash::ada
