// The tile of the kernel for listed rows of a latent cache (mla_fwd.cuh with GATHERS), and its
// parameter. Compile-time numbers only, in plain C++: the kernel and plan_mla_gather.cpp both
// include them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/device/divisor.h"
#include "common/key_lists.h"
#include "common/packed_rows.h"
#include "hopper/latent/mla_config.cuh"

namespace archflash::hopper {

// How many of something there are. A CTA splits its number by several of these.
struct MlaCount {
  int32_t count;
  device::Divisor divisor;

  // Returns index % count, and divides index.
  ARCHFLASH_HOST_DEVICE int split(int& index) const {
    const int quotient = divisor.quotient(index);
    const int remainder = index - quotient * count;
    index = quotient;
    return remainder;
  }
};
// A count of 0 becomes 1, so that it can be divided by.
inline MlaCount mla_count(int64_t count) {
  count = std::max<int64_t>(count, 1);
  return {static_cast<int32_t>(count), device::make_divisor(count)};
}

// Shares of a tile, tiles of the heads of a head of K, rows of a list, lists of a head of K, heads
// of K of a sequence; and rows of a block of the cache.
struct MlaListGrid {
  MlaCount shares, head_tiles, list_rows, lists, heads_kv, block_rows;
};

struct MlaGatherParams {
  mma_sync::CacheParams call;
  KeyLists lists;
  MlaListGrid grid;
  // (columns, heads of a tile, tiles of a query's heads, queries of a sequence, sequences). A box
  // has the columns of a slab, and the heads of a tile or of a warp's rows.
  TensorMap qv_map, out_map;
};

// A tile is heads of one query. A block of keys is 64 places of its list, whose rows four warps
// gather, 16 each. Calls that transform their scores (softcap, or a scale that is not positive)
// have kernels of their own: code that most calls do not need would cost them 2 to 4%.
template <DType DTYPE_, bool TRANSFORMS_ = false>
struct MlaGatherConfig : MlaConfig<DTYPE_> {
  using Base = MlaConfig<DTYPE_>;
  using Params = MlaGatherParams;
  static constexpr bool GATHERS = true;
  static constexpr bool TRANSFORMS = TRANSFORMS_;
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
template <DType DTYPE_, bool TRANSFORMS_ = false>
struct MlaPackedConfig : MlaGatherConfig<DTYPE_, TRANSFORMS_> {
  using Base = MlaGatherConfig<DTYPE_, TRANSFORMS_>;
  using Params = MlaPackedParams;
  static constexpr bool PACKED = true;
};

// Two CTAs of a cluster have other heads of the same query. Each converts half of the rows of a
// block and sends them to the other one, since converting takes longer than the products.
template <DType DTYPE_, bool TRANSFORMS_ = false>
struct MlaPackedPairConfig : MlaPackedConfig<DTYPE_, TRANSFORMS_> {
  using Base = MlaPackedConfig<DTYPE_, TRANSFORMS_>;
  static constexpr bool PAIRS = true;
  static constexpr int WARP_KEYS = Base::BLOCK_K / 2 / Base::PRODUCER_WARPS;
};

}  // namespace archflash::hopper
