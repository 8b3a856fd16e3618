// The tiles of the hopper kernels for tables of blocks (table_fwd.cuh). Compile-time numbers only,
// in plain C++.
#pragma once

#include <cstdint>

#include "common/image_dtype.h"
#include "common/mask_params.h"
#include "hopper/config.cuh"

namespace archflash::hopper {

// A CTA has STREAMS_ streams: a consumer warpgroup and a producer warp each, with tiles, rings and
// barriers of their own. Base is the Config of one of them, whose tile is a row of blocks of
// block_mask, and whose stages hold K or V, as they come. The last stream has LAST_STAGES_ of them,
// for which shared memory suffices. KEYS_: attn_mask says which keys count, the same for all rows;
// other calls have kernels of their own, which that would slow by 3%.
template <class Base, int STREAMS_, int LAST_STAGES_, int PRODUCER_REGISTERS_, bool KEYS_ = false>
struct TableConfig : Base {
  static constexpr int STREAMS = STREAMS_;
  static constexpr bool KEYS = KEYS_;
  static constexpr int CONSUMER_THREADS = Base::WARPGROUP * STREAMS;
  static constexpr int THREADS = CONSUMER_THREADS + Base::WARPGROUP;
  static constexpr int LAUNCH_REGISTERS = Base::SM_REGISTERS / THREADS / 8 * 8;
  static constexpr int PRODUCER_REGISTERS = PRODUCER_REGISTERS_;
  static constexpr int CONSUMER_REGISTERS =
      consumer_registers(LAUNCH_REGISTERS, STREAMS, PRODUCER_REGISTERS);
  static constexpr bool MOVES_REGISTERS = true;
  static constexpr int LAST_STAGES = LAST_STAGES_;

  // Shared memory of a stream, in bytes: barriers | a message for each stage | two messages about
  // tiles, since the next one is written while this one is still read | Q | ring of K and V.
  static constexpr int BARRIER_SMEM = 0;
  static constexpr int BARRIERS = 2 + 4 * Base::STAGES + 1;
  static constexpr int BLOCK_SMEM = (BARRIER_SMEM + 8 * BARRIERS + 15) / 16 * 16;
  static constexpr int BLOCK_BYTES = 16;
  static constexpr int TABLE_MESSAGE_SMEM = BLOCK_SMEM + Base::STAGES * BLOCK_BYTES;
  static constexpr int TABLE_MESSAGE_BYTES = 48;
  static constexpr int Q_SMEM =
      (TABLE_MESSAGE_SMEM + 2 * TABLE_MESSAGE_BYTES + 1023) / 1024 * 1024;  // where swizzles start
  static constexpr int K_SMEM = Q_SMEM + Base::QTile::BYTES;
  static constexpr int V_SMEM = K_SMEM;
  static constexpr int STREAM_BYTES = K_SMEM + Base::STAGES * Base::KTile::BYTES;
  static constexpr int SHARED_BYTES =
      STREAMS * STREAM_BYTES - (Base::STAGES - LAST_STAGES) * Base::KTile::BYTES;

  static_assert(!Base::FP8 && !Base::OVERLAPS && Base::WARPGROUPS == 1 && Base::Q_STAGES == 1);
  static_assert(STREAMS <= 4, "the warps of the producers' warpgroup");
  static_assert(Base::BLOCK_Q == MASK_BLOCK && Base::BLOCK_K == MASK_BLOCK &&
                    Base::TILE_STEP == MASK_BLOCK,
                "a tile and a block of keys are a block of block_mask");
  static_assert(3 <= LAST_STAGES && LAST_STAGES <= Base::STAGES,
                "the next K comes while this one and a V are read");
  static_assert(Base::VTile::BYTES == Base::KTile::BYTES, "a stage holds either");
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

// clang-format off
constexpr Variant TABLE_64  = {.head_dim = 64,  .block_k = 64, .stages = 5, .overlaps = false};
constexpr Variant TABLE_128 = {.head_dim = 128, .block_k = 64, .stages = 4, .overlaps = false};
using D64Table      = TableConfig<Config<DTYPE, TABLE_64>, 4, 5, 32>;
using D64TableKeys  = TableConfig<Config<DTYPE, TABLE_64>, 4, 5, 32, true>;
using D128Table     = TableConfig<Config<DTYPE, TABLE_128>, 3, 3, 56>;
using D128TableKeys = TableConfig<Config<DTYPE, TABLE_128>, 3, 3, 56, true>;
// clang-format on

}  // namespace archflash::hopper
