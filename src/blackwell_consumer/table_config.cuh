// The tiles of the blackwell_consumer kernels for tables of blocks (table_fwd.cuh). Compile-time
// numbers only, which the kernel and plan.cpp (plain C++) read.
#pragma once

#include "blackwell_consumer/config.cuh"
#include "common/mask_params.h"

namespace archflash::blackwell_consumer {

// A tile is some rows of blocks of block_mask. Behind what the Config has: a message for each stage
// of K, and whether any block comes.
template <class Base>
struct TableConfig : Base {
  static constexpr int ROW_BLOCKS = Base::BLOCK_Q / MASK_BLOCK;
  static constexpr int PRODUCER_REGISTERS = 48;
  static constexpr int CONSUMER_REGISTERS =
      (Base::LAUNCH_REGISTERS * Base::THREADS - PRODUCER_REGISTERS * Base::PRODUCER_THREADS) /
      Base::CONSUMER_THREADS / 8 * 8;
  static constexpr int BLOCK_SMEM = Base::SHARED_BYTES;
  static constexpr int BLOCK_BYTES = 16;
  static constexpr int ANY_SMEM = BLOCK_SMEM + Base::STAGES * BLOCK_BYTES;
  static constexpr int SHARED_BYTES = ANY_SMEM + 16;

  static_assert(!Base::FP8 && !Base::CAN_SPLIT && Base::REGISTERS == Registers::Roles);
  static_assert(Base::BLOCK_K == MASK_BLOCK && MASK_BLOCK % Base::WARP_ROWS == 0 &&
                    Base::BLOCK_Q % MASK_BLOCK == 0,
                "the rows of a warp lie in one row of blocks, and a block of keys is one of them");
  static_assert(SHARED_BYTES <= 99 * 1024, "CUDA: at most 99 KiB of shared memory in a CTA (12.x)");
};
// 128 rows, and four blocks of 64 keys in flight.
using D64Table = TableConfig<Config<DTYPE, 64, 64, 4, 2, 64, 4, true, Registers::Roles, 2>>;
using D128Table = TableConfig<D128Medium>;

}  // namespace archflash::blackwell_consumer
