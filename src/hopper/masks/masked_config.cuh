// The tiles of the hopper kernels that take mask tensors, and what is known of blocks of keys.
// Compile-time numbers only, in plain C++.
#pragma once

#include <cstdint>

#include "common/image_dtype.h"
#include "common/mask_params.h"
#include "hopper/config.cuh"

namespace archflash::hopper {

// What a block of keys needs: a byte of flags for each warpgroup. 0: its rows see no key of the
// block. SEEN alone: the masks change nothing.
constexpr uint32_t STATE_SEEN = 1;     // some row sees some key
constexpr uint32_t STATE_HIDDEN = 2;   // some key is hidden; the summary's bits say which
constexpr uint32_t STATE_ADDED = 4;    // something else than 0 is added
constexpr uint32_t STATE_HUGE = 8;     // some of it is not below LARGEST_ADDED
constexpr uint32_t STATE_RANGED = 16;  // key_ranges hide some key of some row
constexpr uint32_t STATE_BEYOND = 32;  // a row's position hides some; no part of the summary
constexpr uint32_t STATE_SLOPED = 64;  // alibi_slopes change all scores; no part of the summary
// There is no summary: some may be huge or -inf. Then a warp looks at its elements.
constexpr uint32_t STATE_UNREAD = 128;
// In a summary alone: all elements are lowest, or -inf.
constexpr uint32_t SUMMARY_LOWEST = 128;

// Elements below it can be added before the scores are scaled, if the scale is not below
// 1 / LARGEST_FACTOR: their product is finite.
constexpr float LARGEST_ADDED = 0x1p100f;
constexpr float LARGEST_FACTOR = 0x1p20f;
// Sums of scores and elements below it are right if no element was looked at.
constexpr float LARGEST_SUM = 0x1p99f;
// In an element of 16 bits that is not below LARGEST_ADDED, these two bits of the exponent are set:
// it is then 2^65 or more in bfloat16, and 2^9 or more in float16.
constexpr uint32_t HIGH_EXPONENT = 0x4000, NEXT_EXPONENT = 0x2000;

// Elements up to it are lowest, such as the least number of bfloat16, which masks hide keys with.
// Where a row also has a high one, which is above half of that, their keys' weights are 0.
constexpr float LOWEST_ADDED = -0x1p126f;

// The summary of a block: a word of bits for each thread of a consumer warpgroup. Bit 16r + 2n + i
// is the key 8n + 2 (lane % 4) + i of the row lane / 4 + 8r of the warp.
constexpr int SUMMARY_WORDS = 128;
constexpr int SUMMARY_THREADS = 128;  // of the CTA that makes it
// Which rows of a block have a high element, a bit for each. A row that does not exist has one.
constexpr int HIGH_BYTES = MASK_BLOCK / 8;

// copy_mask.cuh: the warps of a CTA, and the rows that each copies.
constexpr int COPY_WARPS = 4, COPY_WARP_ROWS = 4;
constexpr int COPY_ROWS = COPY_WARPS * COPY_WARP_ROWS;

// order_tiles.cuh: the most tiles that are ordered, the threads of a CTA, and the tiles whose
// places it finds.
constexpr int MOST_ORDERED = 1024;
constexpr int ORDER_THREADS = 1024;
constexpr int ORDER_TILES = ORDER_THREADS / 32;

// What the producer says of the next block of keys when it starts the copy of one.
struct BlockMessage {
  int32_t key;      // the first one
  uint32_t states;  // of each warpgroup
  int32_t last;     // whether there is none: the tile has no more blocks
};
constexpr int BLOCK_MESSAGE_BYTES = 16;
static_assert(sizeof(BlockMessage) <= BLOCK_MESSAGE_BYTES);

// A Config of whose producer's warpgroup only the producer is there, so that more registers are
// left for each thread, and none move.
template <class Base>
struct LoneProducer : Base {
  static constexpr int THREADS = Base::CONSUMER_THREADS + 32;
  static constexpr int LAUNCH_REGISTERS = Base::SM_REGISTERS / Base::CTAS_PER_SM / THREADS / 8 * 8;
  static constexpr bool MOVES_REGISTERS = false;
};

// A Config whose kernel takes mask tensors. The producer also finds out which blocks a tile sees,
// for which it needs more registers.
template <class Base, int PRODUCER_REGISTERS_>
struct MaskedConfig : Base {
  // Between the barriers and the messages: which keys of the tile count.
  static constexpr int COUNTED_SMEM = Base::BARRIER_SMEM + 8 * Base::BARRIERS;
  static_assert(COUNTED_SMEM + 8 <= Base::MESSAGE_SMEM, "an odd number of barriers leaves room");
  // These kernels lay out other things behind BLOCKS_SMEM, where PREPARES_TILES has its messages.
  static constexpr bool PREPARES_TILES = false, HALVES = false;
  static constexpr bool CHANGES_PLACES = false, CUTS_TILES = false;
  static constexpr bool STORES_BY_TMA = false, SHORT = false, PACKS = false;
  static constexpr bool CLEARS_BESIDE = false;
  static constexpr int PRODUCER_REGISTERS = PRODUCER_REGISTERS_;
  static constexpr int CONSUMER_REGISTERS =
      consumer_registers(Base::LAUNCH_REGISTERS, Base::WARPGROUPS, PRODUCER_REGISTERS);
  static constexpr bool MOVES_REGISTERS =
      Base::MOVES_REGISTERS && Base::LAUNCH_REGISTERS < CONSUMER_REGISTERS;
  static_assert(!Base::FP8 && Base::WARPGROUPS <= 4);
};

// Each lane reads the masks of its scores itself (masks_in_place.cuh): attn_mask, key_ranges,
// alibi_slopes and block_mask, in any combination. A tile is one row of blocks of block_mask, or of
// rows of several heads within one. The search spills with 64 registers, but D = 256 has none to
// give.
template <class Base>
struct InPlaceConfig : MaskedConfig<Base, Base::HEAD_DIM <= 128 ? 72 : 64> {
  static constexpr bool SUMMARIZED = false, KEEPS_Q = false, SHARES_Q = false;
  // With more than 64 columns the registers do not suffice for words of 16-bit elements beside the
  // scores and P, with any number not for masks beside P. Elements are loaded a row at a time.
  static constexpr bool LOADS_ADDED_LATE = Base::HEAD_DIM > 64, MASKS_TAKE_P = true;
  static constexpr bool LOADS_ROWS = true, WIDE = false, ADDS_ALONE = false, COPIES_OWN = false;
  // Q goes back when the scores of a tile's last block are there, so that the next one comes during
  // their softmax and the end of the tile. Output rows do not pass through its part.
  static constexpr bool RELEASES_Q_EARLY = true;
  // Messages about tiles, and what is known of them besides: the next one is written while this one
  // is still read.
  static constexpr int TILE_MESSAGES = 2;
  static constexpr int MASK_STAGES = 0;

  // Behind what the Config has: the second message about a tile, a message for each stage of K, and
  // what is known of the tile for each message.
  static constexpr int CONTEXT_BYTES = 80;
  static constexpr int BLOCK_MESSAGE_SMEM =
      Base::BLOCKS_SMEM + (TILE_MESSAGES - 1) * TILE_MESSAGE_BYTES;
  static constexpr int CONTEXT_SMEM = BLOCK_MESSAGE_SMEM + Base::STAGES * BLOCK_MESSAGE_BYTES;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + TILE_MESSAGES * CONTEXT_BYTES;

  static_assert(Base::CAN_PACK && Base::BLOCK_Q == MASK_BLOCK && Base::BLOCK_K == MASK_BLOCK,
                "a tile and a block of keys are a block of block_mask");
  static_assert(Base::WARPGROUPS == 1, "what the producer says of a block is for one warpgroup");
  static_assert(Base::Q_STAGES == 1, "the parity of the stage is the number of the message");
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

// Registers of SummarizedConfig's producer, which finds out less where elements are added alone.
constexpr int summarized_producer_registers(int warpgroups, bool adds_alone) {
  if (adds_alone && warpgroups > 1) return 64;
  return warpgroups == 3 ? 80 : 72;
}

// The kernel reads a summary of attn_mask or key_ranges (masks_summarized.cuh). Its block of keys
// is one or more of the summary's. Consumers get a multiple of 8 registers each, and the rest is
// the producer's. WIDE: elements that are added have 32 bits, and take two stages.
// ADDS_ALONE: all that there is are elements of 16 bits that are added, of which nobody has made a
// summary. They are added first, and sums that are wrong then mended.
// SHARED: the same of a mask that heads share, which may have a summary.
// COPIES_OWN: each warp copies the elements of its own rows, which TMA cannot read.
template <class Base, bool WIDE_ = false, bool ADDS_ALONE_ = false, bool COPIES_OWN_ = false,
          bool SHARED_ = false>
struct SummarizedConfig
    : MaskedConfig<Base, summarized_producer_registers(Base::WARPGROUPS, ADDS_ALONE_)> {
  static constexpr bool SUMMARIZED = true, MASKS_TAKE_P = false;
  static constexpr bool WIDE = WIDE_, ADDS_ALONE = ADDS_ALONE_, COPIES_OWN = COPIES_OWN_;
  static constexpr bool SHARED = SHARED_;
  static constexpr int SUMMARY_BLOCKS = Base::BLOCK_K / MASK_BLOCK;  // of a block of keys
  // Whether elements that are added wait in registers for the scores, and so go back while the
  // products run. Larger tiles have no registers for them.
  static constexpr bool KEEPS_ELEMENTS =
      Base::HEAD_DIM == 64 && Base::WARPGROUPS > 1 && !ADDS_ALONE;
  // Whether Q is kept in registers: a product of 64 rows and 64 keys that reads both from shared
  // memory takes all that this can give.
  static constexpr bool KEEPS_Q = Base::HEAD_DIM == 64 && Base::WARPGROUPS > 1 && !ADDS_ALONE;
  // With 256 columns no registers are left to write output rows through Q's part, nor with 96 where
  // warps copy elements: Q goes back early, and there are two messages, as in InPlaceConfig.
  static constexpr bool RELEASES_Q_EARLY =
      Base::HEAD_DIM > 128 || (COPIES_OWN && Base::Q_STAGES == 1);
  static constexpr int TILE_MESSAGES = RELEASES_Q_EARLY ? 2 : Base::Q_STAGES;

  // Behind what the Config has: the second message about a tile | ring of what is added | a message
  // for each stage of K | a barrier for each stage of what is added | what is known of the tile for
  // each stage of Q. Where SHARES_Q, the second stage of what is added is the second stage of Q,
  // and a call in which something is added uses the first stage of Q alone.
  using MaskTile = device::SlabTile<Base::BLOCK_K, Base::BLOCK_Q>;
  static constexpr int MASK_STAGES = COPIES_OWN ? 1 : 2;
  static constexpr int MASK_BARRIERS = COPIES_OWN ? 0 : MASK_STAGES;
  static constexpr int BARRIERS = Base::BARRIERS + MASK_BARRIERS;
  static constexpr int MESSAGES_END =
      Base::BLOCKS_SMEM + (TILE_MESSAGES - Base::Q_STAGES) * TILE_MESSAGE_BYTES;
  static constexpr int MASK_SMEM =
      (MESSAGES_END + MaskTile::ALIGNMENT - 1) / MaskTile::ALIGNMENT * MaskTile::ALIGNMENT;
  static constexpr bool SHARES_Q = MASK_SMEM + MASK_STAGES * MaskTile::BYTES > 226 * 1024;
  static constexpr int MASK_STEP =  // bytes from the first stage to the second
      SHARES_Q ? Base::Q_SMEM + Base::QTile::BYTES - MASK_SMEM : MaskTile::BYTES;
  static constexpr int CONTEXT_BYTES = 64;
  static constexpr int BLOCK_MESSAGE_SMEM =
      MASK_SMEM + (SHARES_Q ? MASK_STAGES - 1 : MASK_STAGES) * MaskTile::BYTES;
  static constexpr int MASK_BARRIER_SMEM = BLOCK_MESSAGE_SMEM + Base::STAGES * BLOCK_MESSAGE_BYTES;
  static constexpr int CONTEXT_SMEM = MASK_BARRIER_SMEM + 8 * MASK_BARRIERS;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + TILE_MESSAGES * CONTEXT_BYTES;

  static_assert(ADDS_ALONE == !Base::OVERLAPS, "masked_mainloop.cuh has one step for each");
  static_assert(!COPIES_OWN || (ADDS_ALONE && Base::WARPGROUPS == 1 && Base::BLOCK_K == 64),
                "a lane of a warp copies two keys, and sees every block that comes");
  static_assert(!Base::CAN_SPLIT && Base::TILE_STEP == MASK_BLOCK &&
                    Base::BLOCK_K % MASK_BLOCK == 0,
                "a warpgroup's rows are a row of blocks of the summary");
  static_assert(!SHARES_Q || (Base::Q_STAGES == 2 && MASK_STAGES == 2 &&
                              MaskTile::BYTES == Base::QTile::BYTES),
                "a stage of what is added is a stage of Q");
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

// clang-format off
using D64Masked  = InPlaceConfig<Config<DTYPE, few({.head_dim = 64, .block_k = 64, .stages = 4, .ctas_per_sm = 2})>>;
using D128Masked = InPlaceConfig<D128Few>;
using D256Masked = InPlaceConfig<D256Few>;
using D64Three   = LoneProducer<Config<DTYPE, Variant{.head_dim = 64, .block_k = 64, .stages = 2, .q_stages = 2, .ctas_per_sm = 3}>>;
using D256Two    = Config<DTYPE, in_turns({.head_dim = 256, .warpgroups = 2, .block_k = 64, .stages = 2})>;
using D64Dense   = SummarizedConfig<Config<DTYPE, in_turns({.head_dim = 64, .warpgroups = 3, .block_k = 64, .stages = 4, .q_stages = 2})>>;
using D64DenseShort = SummarizedConfig<D64Three>;
using D64Added   = SummarizedConfig<Config<DTYPE, no_overlap({.head_dim = 64, .warpgroups = 4, .block_k = 64, .stages = 4, .q_stages = 2})>, false, true>;
using D64Shared   = SummarizedConfig<Config<DTYPE, no_overlap({.head_dim = 64, .warpgroups = 4, .block_k = 64, .stages = 4, .q_stages = 2})>, false, true, false, true>;
using D64AddedShort = SummarizedConfig<LoneProducer<Config<DTYPE, Variant{.head_dim = 64, .block_k = 64, .stages = 2, .q_stages = 2, .ctas_per_sm = 3, .overlaps = false}>>, false, true>;
using D64Windows = SummarizedConfig<LoneProducer<Config<DTYPE, Variant{.head_dim = 64, .block_k = 64, .stages = 2, .q_stages = 2, .ctas_per_sm = 3, .overlaps = false}>>, false, true, true>;
using D96Windows = SummarizedConfig<LoneProducer<Config<DTYPE, Variant{.head_dim = 96, .block_k = 64, .stages = 2, .q_stages = 1, .ctas_per_sm = 3, .overlaps = false}>>, false, true, true>;
using D128Dense  = SummarizedConfig<D128Medium>;
using D256Dense  = SummarizedConfig<D256Two>;
using D64Wide    = SummarizedConfig<D64Three, true>;
using D128Wide   = SummarizedConfig<D128Medium, true>;
using D256Wide   = SummarizedConfig<D256Two, true>;
// clang-format on

}  // namespace archflash::hopper
