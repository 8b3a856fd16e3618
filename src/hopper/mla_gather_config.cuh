// The tile of the kernel for listed rows of a latent cache (mla_fwd.cuh with GATHERS), and its
// parameter. Compile-time numbers only, in plain C++: the kernel and plan_mla_gather.cpp both
// include them.
#pragma once

#include <cstdint>

#include "common/key_lists.h"
#include "common/packed_rows.h"
#include "hopper/mla_config.cuh"

namespace archflash::hopper {

struct MlaGatherParams {
  mma_sync::CacheParams call;
  const void* qv_gmem;  // as attention.q_gmem, with dv columns; strides in elements
  int64_t qv_batch, qv_head, qv_row;
  KeyLists lists;
};

// A tile is heads of one query. A block of keys is 64 places of its list, whose rows four warps
// gather, 16 each.
template <DType DTYPE_>
struct MlaGatherConfig : MlaConfig<DTYPE_> {
  using Base = MlaConfig<DTYPE_>;
  using Params = MlaGatherParams;
  static constexpr bool GATHERS = true;
  static constexpr int PRODUCER_WARPS = 4;
  static constexpr int WARP_KEYS = Base::BLOCK_K / PRODUCER_WARPS;
  // Enough registers to find where rows lie before a stage is free: then the copies follow one
  // another at once.
  static constexpr int PRODUCER_REGISTERS = 72;
  static constexpr int CONSUMER_REGISTERS = 216;
  static_assert(PRODUCER_REGISTERS + Base::WARPGROUPS * CONSUMER_REGISTERS <=
                168 * (Base::WARPGROUPS + 1));

  // Behind what the base has: which places of the block in each stage name a key that the query
  // sees, a bit each.
  static constexpr int SEEN_SMEM = Base::SHARED_BYTES;
  static constexpr int SHARED_BYTES = SEEN_SMEM + 8 * Base::STAGES;
  static_assert(SEEN_SMEM % 8 == 0);
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

// Rows are packed: what is gathered is converted before it is stored.
struct MlaPackedParams : MlaGatherParams {
  PackedRows packed;
  int32_t unused;
};
template <DType DTYPE_>
struct MlaPackedConfig : MlaGatherConfig<DTYPE_> {
  using Base = MlaGatherConfig<DTYPE_>;
  using Params = MlaPackedParams;
  static constexpr bool PACKED = true;
  static constexpr int LIST_SMEM = Base::SHARED_BYTES;  // of each producer warp
  static constexpr int SHARED_BYTES = LIST_SMEM + 16 * Base::PRODUCER_WARPS;
  static_assert(LIST_SMEM % 16 == 0);
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

// Two CTAs of a cluster have other heads of the same query. Each converts half of the rows of a
// block and sends them to the other one, since converting takes longer than the products.
template <DType DTYPE_>
struct MlaPackedPairConfig : MlaPackedConfig<DTYPE_> {
  using Base = MlaPackedConfig<DTYPE_>;
  static constexpr bool PAIRS = true;
  static constexpr int WARP_KEYS = Base::BLOCK_K / 2 / Base::PRODUCER_WARPS;
};

}  // namespace archflash::hopper
