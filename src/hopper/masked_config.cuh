// The tiles of the hopper kernels that take masks as data. Compile-time numbers only, in plain C++.
#pragma once

#include <cstdint>

#include "common/mask_params.h"
#include "hopper/config.cuh"

namespace archflash::hopper {

constexpr int MASKED_CONTEXT_BYTES = 80;  // what consumers read of a tile besides its message

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
  // The walk spills with 64 registers, but D = 256 has none to give.
  static constexpr int PRODUCER_REGISTERS =
      Base::HEAD_DIM <= 128 ? 72 : SeekingConfig<Base>::PRODUCER_REGISTERS;
  static constexpr int CONSUMER_REGISTERS =
      consumer_registers(Base::LAUNCH_REGISTERS, Base::WARPGROUPS, PRODUCER_REGISTERS);
  // Q goes back when the scores of a tile's last block are there, so that the next one comes during
  // their softmax and the end of the tile. Output rows do not pass through its part.
  static constexpr bool RELEASES_Q_EARLY = true;
  // Messages about tiles, and what is known of them besides: the next one is written while this one
  // is still read.
  static constexpr int TILE_MESSAGES = 2;

  // Behind what the Config has: the second message about a tile, a message for each stage of K, and
  // what is known of the tile for each message.
  static constexpr int BLOCK_MESSAGE_SMEM =
      Base::BLOCKS_SMEM + (TILE_MESSAGES - 1) * TILE_MESSAGE_BYTES;
  static constexpr int CONTEXT_SMEM = BLOCK_MESSAGE_SMEM + Base::STAGES * BLOCK_MESSAGE_BYTES;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + TILE_MESSAGES * MASKED_CONTEXT_BYTES;

  static_assert(Base::CAN_PACK && Base::BLOCK_Q == MASK_BLOCK && Base::BLOCK_K == MASK_BLOCK,
                "hopper/masked_fwd.cuh: a tile and a block of keys are a block of block_mask");
  static_assert(!Base::FP8 && !Base::IN_TURNS);
  static_assert(Base::Q_STAGES == 1, "the parity of the stage is the number of the message");
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

// clang-format off
template <DType T> using D64Masked  = MaskedConfig<Config<T, few({.head_dim = 64, .block_k = 64, .stages = 4, .ctas_per_sm = 2})>>;
template <DType T> using D128Masked = MaskedConfig<D128Few<T>>;
template <DType T> using D256Masked = MaskedConfig<D256Few<T>>;
// clang-format on

}  // namespace archflash::hopper
