// The tiles of the hopper kernels that take masks as data. Compile-time numbers only, in plain C++.
#pragma once

#include <cstdint>

#include "common/mask_params.h"
#include "hopper/config.cuh"

namespace archflash::hopper {

constexpr int MASKED_CONTEXT_BYTES = 48;  // what consumers read of a tile besides its message

// order_tiles.cuh: the most tiles that are ordered, the threads of a CTA, and the tiles whose
// places it finds.
constexpr int MOST_ORDERED = 1024;
constexpr int ORDER_THREADS = 1024;
constexpr int ORDER_TILES = ORDER_THREADS / 32;

// A Config whose kernel reads attn_mask, key_ranges, alibi_slopes and block_mask. A tile is one row
// of blocks of block_mask, or of rows of several heads within one.
template <class Base>
struct MaskedConfig : SeekingConfig<Base> {
  // The registers do not suffice for words of 16-bit elements beside the scores.
  static constexpr bool LOADS_ADDED_LATE = true;

  // Behind what the Config has: a message for each stage of K, and what is
  // known of the tile for each stage of Q.
  static constexpr int BLOCK_MESSAGE_SMEM = Base::BLOCKS_SMEM;
  static constexpr int CONTEXT_SMEM = BLOCK_MESSAGE_SMEM + Base::STAGES * BLOCK_MESSAGE_BYTES;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + Base::Q_STAGES * MASKED_CONTEXT_BYTES;

  static_assert(Base::CAN_PACK && Base::BLOCK_Q == MASK_BLOCK && Base::BLOCK_K == MASK_BLOCK,
                "hopper/masked_fwd.cuh: a tile and a block of keys are a block of block_mask");
  static_assert(!Base::FP8 && !Base::IN_TURNS);
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

// clang-format off
//                                           head_dim    warp-  block         Q       CTAs     in
//                                         q,k   v       groups  _k   stages  stages  per SM   turns   split
template <DType T>
using D64Masked  = MaskedConfig<Config<T,  64,  64,  1,      64,  4,      1,      2,     false,  true>>;
template <DType T>
using D128Masked = MaskedConfig<Config<T, 128, 128,  1,      64,  3,      1,      2,     false,  true>>;
template <DType T>
using D256Masked = MaskedConfig<Config<T, 256, 256,  1,      64,  2,      1,      1,     false,  true>>;
// clang-format on

}  // namespace archflash::hopper
