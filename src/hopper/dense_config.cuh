// The tiles of the hopper kernels for a dense attn_mask or key_ranges, and what is known of blocks.
// Compile-time numbers only, in plain C++.
#pragma once

#include <cstdint>

#include "common/mask_params.h"
#include "hopper/config.cuh"

namespace archflash::hopper {

// What the summary says of MASK_BLOCK rows and keys: a byte of flags. 0: no row sees any key. SEEN
// alone: the mask changes nothing.
constexpr uint32_t STATE_SEEN = 1;     // some row sees some key
constexpr uint32_t STATE_HIDDEN = 2;   // some key is hidden; the summary's bits say which
constexpr uint32_t STATE_ADDED = 4;    // something else than 0 is added
constexpr uint32_t STATE_HUGE = 8;     // some of it is not below LARGEST_ADDED
constexpr uint32_t STATE_RANGED = 16;  // key_ranges hide some key of some row
constexpr uint32_t STATE_BEYOND = 32;  // a row's position hides some; no part of the summary
constexpr uint32_t STATE_SLOPED = 64;  // alibi_slopes change all scores; no part of the summary
// There is no summary: some may be huge or -inf. Then a warp looks at its elements.
constexpr uint32_t STATE_UNREAD = 128;

// Elements below it can be added before the scores are scaled, if the scale is not below
// 1 / LARGEST_FACTOR: their product is finite.
constexpr float LARGEST_ADDED = 0x1p100f;
constexpr float LARGEST_FACTOR = 0x1p20f;
// In an element of 16 bits that is not below LARGEST_ADDED, these two bits of the exponent are set:
// it is then 2^65 or more in bfloat16, and 2^9 or more in float16.
constexpr uint32_t HIGH_EXPONENT = 0x4000, NEXT_EXPONENT = 0x2000;

// The summary of a block: a word of bits for each thread of a consumer warpgroup. Bit 16r + 2n + i
// is the key 8n + 2 (lane % 4) + i of the row lane / 4 + 8r of the warp.
constexpr int SUMMARY_WORDS = 128;
constexpr int SUMMARY_THREADS = 128;  // of the CTA that makes it

constexpr int DENSE_CONTEXT_BYTES = 64;  // what consumers read of a tile besides its message

// A Config whose kernel reads an attn_mask that was summarized. Its block of keys is one or more of
// the summary's.
template <class Base>
struct DenseConfig : SeekingConfig<Base> {
  static constexpr int SUMMARY_BLOCKS = Base::BLOCK_K / MASK_BLOCK;  // of a block of keys
  // Whether elements that are added wait in registers for the scores, and so go back while the
  // products run. Larger tiles have no registers for them.
  static constexpr bool KEEPS_ELEMENTS = Base::HEAD_DIM == 64;
  // Whether Q is kept in registers: a product of 64 rows and 64 keys that reads both from shared
  // memory takes all that this can give.
  static constexpr bool KEEPS_Q = Base::HEAD_DIM == 64;
  // Three warpgroups of consumers get a multiple of 8 registers each, and the rest is the
  // producer's.
  static constexpr int PRODUCER_REGISTERS =
      Base::WARPGROUPS == 3 ? 80 : SeekingConfig<Base>::PRODUCER_REGISTERS;
  static_assert(consumer_registers(Base::LAUNCH_REGISTERS, Base::WARPGROUPS, PRODUCER_REGISTERS) ==
                SeekingConfig<Base>::CONSUMER_REGISTERS);

  // Behind what the Config has: ring of what is added | a message for each stage of K | a barrier
  // for each stage of what is added | what is known of the tile for each stage of Q. Where
  // SHARES_Q, the second stage of what is added is the second stage of Q, and a call in which
  // something is added uses the first stage of Q alone.
  using MaskTile = math::SlabTile<Base::BLOCK_K, Base::BLOCK_Q>;
  static constexpr int MASK_STAGES = 2;
  static constexpr int BARRIERS = Base::BARRIERS + MASK_STAGES;
  static constexpr int MASK_SMEM =
      (Base::BLOCKS_SMEM + MaskTile::ALIGNMENT - 1) / MaskTile::ALIGNMENT * MaskTile::ALIGNMENT;
  static constexpr bool SHARES_Q = MASK_SMEM + MASK_STAGES * MaskTile::BYTES > 226 * 1024;
  static constexpr int MASK_STEP =  // bytes from the first stage to the second
      SHARES_Q ? Base::Q_SMEM + Base::QTile::BYTES - MASK_SMEM : MaskTile::BYTES;
  static constexpr int BLOCK_MESSAGE_SMEM =
      MASK_SMEM + (SHARES_Q ? MASK_STAGES - 1 : MASK_STAGES) * MaskTile::BYTES;
  static constexpr int MASK_BARRIER_SMEM = BLOCK_MESSAGE_SMEM + Base::STAGES * BLOCK_MESSAGE_BYTES;
  static constexpr int CONTEXT_SMEM = MASK_BARRIER_SMEM + 8 * MASK_STAGES;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + Base::Q_STAGES * DENSE_CONTEXT_BYTES;

  static_assert(!Base::CAN_PACK && Base::TILE_STEP == MASK_BLOCK && Base::BLOCK_K % MASK_BLOCK == 0,
                "hopper/dense_fwd.cuh: a warpgroup's rows are a row of blocks of the summary");
  static_assert(!Base::FP8 && Base::OVERLAPS && Base::WARPGROUPS <= 4);
  static_assert(!SHARES_Q || (Base::Q_STAGES == 2 && MASK_STAGES == 2 &&
                              MaskTile::BYTES == Base::QTile::BYTES),
                "a stage of what is added is a stage of Q");
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

// clang-format off
template <DType T> using D64Dense  = DenseConfig<Config<T, in_turns({.head_dim = 64, .warpgroups = 3, .block_k = 64, .stages = 4, .q_stages = 2})>>;
template <DType T> using D128Dense = DenseConfig<D128Medium<T>>;
// clang-format on

}  // namespace archflash::hopper
