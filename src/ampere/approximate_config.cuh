// The tile sizes of the kernels for approximate=. Compile-time numbers only, in plain C++: the
// kernels and plan_approximate.cpp both include them.
#pragma once

#include "common/image_dtype.h"
#include "common/mma_sync/config.cuh"

namespace archflash::ampere {

// A Config whose Q and K are int8, with one scale for each row; V is fp16, or int8 too. Shared
// memory: Q | K, V, the scales of K of each stage | CtaContext | the scale and shift of each row of
// Q.
struct Int8QkInputs {
  static constexpr int QK_PACK = 2;
  static constexpr int V_PACK = 1;
  static constexpr int CONTEXT_BYTES = 128;
};
struct Int8Inputs : Int8QkInputs {
  static constexpr int V_PACK = 2;
};
template <class Base>
struct Int8QkConfig : Base {
  static constexpr bool INT8_QK = true;
  static constexpr bool INT8_PV = Base::V_PACK == 2;
  static constexpr int SCALES_SMEM = Base::V_SMEM + Base::V_BYTES;  // from the start of a stage
  static constexpr int KEY_SCALES = INT8_PV ? 3 : 1;  // of a key: as many rows of BLOCK_K floats
  static constexpr int STAGE_BYTES = Base::STAGE_BYTES + Base::BLOCK_K * KEY_SCALES * 4;
  static constexpr int CONTEXT_SMEM = Base::K_SMEM + Base::STAGES * STAGE_BYTES;
  static constexpr int ROWS_SMEM = CONTEXT_SMEM + Base::CONTEXT_BYTES;
  static constexpr int SHARED_BYTES = ROWS_SMEM + Base::BLOCK_Q * 8;
  static_assert(STAGE_BYTES % 128 == 0, "swizzles permute whole 128-byte lines");
  static_assert(127 * 127 * Base::HEAD_DIM < 1 << 22 &&
                    (!INT8_PV || 255 * 127 * Base::STEP_KEYS < 1 << 22),
                "sums are exact as floats");
  static_assert(SHARED_BYTES <= 99 * 1024, "CUDA: at most 99 KiB in a CTA (8.6, 8.9, 12.0)");
};

using mma_sync::QIn;

// P V sums fp16 over the STEP_KEYS keys of a step, so a step is 64 keys where registers allow it.
// clang-format off
//                              head_dim       m_    block step               CTAs
//                            q,k   v   warps tiles _k   _keys stages Q in           per SM
template <int D, int WARPS, int M_TILES, int KEYS, int STAGES, int CTAS_PER_SM>
using Int8Qk = Int8QkConfig<mma_sync::Config<
                       DType::F16, D, D, WARPS, M_TILES, KEYS, KEYS, STAGES, QIn::Shared,
                       CTAS_PER_SM, Int8QkInputs>>;
using Int8D64    = Int8Qk< 64, 4, 2, 64, 2, 2>;
using Int8D128   = Int8Qk<128, 8, 2, 64, 2, 1>;
using Int8D256   = Int8Qk<256, 8, 1, 32, 2, 1>;

template <int D, int KEYS>
using Int8QkMasked = Int8QkConfig<mma_sync::MaskedConfig<mma_sync::Config<
                       DType::F16, D, D, 4, 1, KEYS, KEYS, 2, QIn::Shared, 2, Int8QkInputs, true>>>;
using Int8D64Masked  = Int8QkMasked< 64, 64>;
using Int8D128Masked = Int8QkMasked<128, 64>;
using Int8D256Masked = Int8QkMasked<256, 32>;

// P and V in int8 too.
template <int D, int WARPS, int M_TILES, int KEYS, int CTAS_PER_SM>
using Int8Pv = Int8QkConfig<mma_sync::Config<
                       DType::F16, D, D, WARPS, M_TILES, KEYS, KEYS, 2, QIn::Shared,
                       CTAS_PER_SM, Int8Inputs>>;
using Int8PvD64  = Int8Pv< 64, 4, 1, 96, 2>;
using Int8PvD128 = Int8Pv<128, 8, 1, 96, 1>;
using Int8PvD256 = Int8Pv<256, 8, 1, 32, 1>;

template <int D, int KEYS>
using Int8PvMasked = Int8QkConfig<mma_sync::MaskedConfig<mma_sync::Config<
                       DType::F16, D, D, 4, 1, KEYS, KEYS, 2, QIn::Shared, 2, Int8Inputs,
                       true>>>;
using Int8PvD64Masked  = Int8PvMasked< 64, 64>;
using Int8PvD128Masked = Int8PvMasked<128, 64>;
using Int8PvD256Masked = Int8PvMasked<256, 32>;

// Q and K as they are.
template <class Base>
struct Fp16SumsConfig : Base {
  static constexpr bool INT8_QK = false;
  static constexpr bool INT8_PV = false;
  static constexpr int CONTEXT_BYTES = 128;
  static constexpr int SHARED_BYTES = Base::CONTEXT_SMEM + CONTEXT_BYTES;
  static_assert(SHARED_BYTES <= 99 * 1024, "CUDA: at most 99 KiB in a CTA (8.6, 8.9, 12.0)");
};
using Fp16SumsD64  = Fp16SumsConfig<mma_sync::Config<
                       DTYPE,  64,  64, 4, 2, 64, 64, 2, QIn::Registers, 2>>;
using Fp16SumsD128 = Fp16SumsConfig<mma_sync::Config<
                       DTYPE, 128, 128, 8, 2, 32, 32, 2, QIn::Shared, 1>>;
using Fp16SumsD256 = Fp16SumsConfig<mma_sync::Config<
                       DTYPE, 256, 256, 8, 1, 32, 32, 1, QIn::Shared, 1>>;

template <int D, int KEYS>
using Fp16SumsMasked = Fp16SumsConfig<mma_sync::MaskedConfig<mma_sync::Config<
                       DTYPE, D, D, 4, 1, KEYS, KEYS, 2, QIn::Shared, 1, mma_sync::Inputs16, true>>>;
using Fp16SumsD128Masked = Fp16SumsMasked<128, 64>;
using Fp16SumsD256Masked = Fp16SumsMasked<256, 32>;
// clang-format on

}  // namespace archflash::ampere
