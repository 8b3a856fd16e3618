// The tile of the kernel for chosen rows of a latent cache (mla_gather_fwd.cuh), and its parameter.
// Compile-time numbers only, in plain C++: the kernel and plan_mla_gather.cpp both include them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/key_lists.h"
#include "hopper/mla_config.cuh"

namespace archflash::hopper {

struct MlaGatherParams {
  mma_sync::CacheParams call;
  const void* qv_gmem;  // as attention.q_gmem, with dv columns; strides in elements
  int64_t qv_batch, qv_head, qv_row;
  KeyLists lists;
  int32_t tiles;  // times partials.splits, which the CTAs share out
};
static_assert(std::is_trivially_copyable_v<MlaGatherParams>);
static_assert(offsetof(MlaGatherParams, call) == 0,
              "core::pointers() counts from the block's start");

template <class C>
struct MlaGatherBarriers;
struct MlaGatherTile;  // both in mla_gather_pipeline.cuh

// A tile is heads of one query. A block of keys is 64 places of its list, whose rows four warps
// gather by cp.async, 16 each.
template <DType DTYPE_>
struct MlaGatherConfig : MlaConfig<DTYPE_> {
  using Base = MlaConfig<DTYPE_>;
  using Params = MlaGatherParams;
  using Barriers = MlaGatherBarriers<MlaGatherConfig>;
  using Tile = MlaGatherTile;
  static constexpr bool GATHERS = true;
  static constexpr int PRODUCER_WARPS = 4;
  static constexpr int WARP_KEYS = Base::BLOCK_K / PRODUCER_WARPS;
  static constexpr int PRODUCER_REGISTERS = 56;
  static constexpr int CONSUMER_REGISTERS = 224;
  static_assert(PRODUCER_REGISTERS + Base::WARPGROUPS * CONSUMER_REGISTERS <=
                168 * (Base::WARPGROUPS + 1));

  // Output rows of a warp on their way out, in the part of shared memory of its own rows of P.
  using OutTile = device::SlabTile<64, Base::WARP_ROWS>;
  static_assert(OutTile::BYTES == Base::WARP_ROWS * Base::PTile::ROW_BYTES);

  // Shared memory as the base has it up to the barriers, then: barriers | messages about tiles |
  // which places of the block in each stage name a key that the query sees, a bit each | which
  // warps of warpgroup 0 have raised bases | more row sums.
  static constexpr int TILE_MESSAGES = 2;
  // Full and empty of the stages, P of each warpgroup, Q, messages.
  static constexpr int BARRIERS = Base::STAGES * 4 + Base::WARPGROUPS + 2 + 2 * TILE_MESSAGES;
  static constexpr int TILE_SMEM = Base::BARRIER_SMEM + (8 * BARRIERS + 15) / 16 * 16;
  static constexpr int TILE_BYTES = 64;
  static constexpr int SEEN_SMEM = TILE_SMEM + TILE_MESSAGES * TILE_BYTES;
  static constexpr int RAISED_SMEM = SEEN_SMEM + 8 * Base::STAGES;  // a byte of each warp
  static constexpr int NEXT_SUM_SMEM = RAISED_SMEM + 16;            // row sums of every second tile
  static constexpr int SHARED_BYTES = NEXT_SUM_SMEM + Base::WARPGROUPS * Base::BLOCK_Q * 4;
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

}  // namespace archflash::hopper
