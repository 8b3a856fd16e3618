// The tiles of the kernels for listed rows of K and V (gather_fwd.cuh), and their parameter.
// Compile-time numbers only, in plain C++: the kernel and plan_gather.cpp both include them.
#pragma once

#include <cstdint>

#include "common/image_dtype.h"
#include "common/key_lists.h"
#include "common/mma_sync/params.h"
#include "hopper/config.cuh"

namespace archflash::hopper {

struct GatherParams {
  mma_sync::CacheParams call;
  KeyLists lists;
  int32_t tiles;  // row tiles, each as often as its keys have shares
  int32_t unused;
};

// A CTA owns 64 rows for each consumer warpgroup, all of one list, which it visits block_k places
// at a time. Four warps gather the rows of K and V that these name.
template <DType DTYPE_, Variant VARIANT_>
struct GatherConfig : Config<DTYPE_, VARIANT_> {
  using Base = Config<DTYPE_, VARIANT_>;
  static constexpr bool CAN_SPLIT = true;
  static constexpr int PRODUCER_WARPS = 4;
  static constexpr int WARP_KEYS = Base::BLOCK_K / PRODUCER_WARPS;
  static constexpr int WARP_ROWS_OF_Q = Base::BLOCK_Q / PRODUCER_WARPS;
  // Enough registers to find where rows lie before a stage is free: then the copies follow one
  // another at once.
  static constexpr int PRODUCER_REGISTERS = 72;
  static constexpr int CONSUMER_REGISTERS =
      consumer_registers(Base::LAUNCH_REGISTERS, Base::WARPGROUPS, PRODUCER_REGISTERS);
  static constexpr bool MOVES_REGISTERS = Base::LAUNCH_REGISTERS < CONSUMER_REGISTERS;

  // Behind the barriers: the positions of the keys of each stage, and of each producer warp whether
  // the scores of its keys need nothing but a softmax.
  static constexpr int POSITIONS_SMEM = Base::MESSAGE_SMEM;
  static constexpr int POSITIONS_BYTES = 4 * (Base::BLOCK_K + PRODUCER_WARPS);
  static constexpr int SHARED_BYTES = POSITIONS_SMEM + Base::STAGES * POSITIONS_BYTES;
  static_assert(POSITIONS_BYTES % 16 == 0);
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

constexpr Variant gathers(Variant variant) {
  variant.overlaps = false;
  return variant;
}

// Two warpgroups where so many rows share a list: each row that is gathered then serves 128.
// clang-format off
using D64Gather       = GatherConfig<DTYPE, gathers({.head_dim = 64,  .block_k = 128, .stages = 3, .ctas_per_sm = 2})>;
using D64GatherLarge  = GatherConfig<DTYPE, no_overlap({.head_dim = 64,  .warpgroups = 2, .block_k = 128, .stages = 5})>;
using D128Gather      = GatherConfig<DTYPE, gathers({.head_dim = 128, .block_k = 96, .stages = 2, .ctas_per_sm = 2})>;
using D128GatherLarge = GatherConfig<DTYPE, gathers({.head_dim = 128, .warpgroups = 2, .block_k = 128, .stages = 3})>;
using D256Gather      = GatherConfig<DTYPE, gathers({.head_dim = 256, .block_k = 64, .stages = 3})>;
using D256GatherLarge = GatherConfig<DTYPE, gathers({.head_dim = 256, .warpgroups = 2, .block_k = 64, .stages = 2})>;
// clang-format on

}  // namespace archflash::hopper
