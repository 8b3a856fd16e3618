// The one parameter of the hopper kernels that read a KV cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/kv_cache.h"
#include "hopper/params.h"

namespace archflash::hopper {

// The fewest rows of a page that a copy by TMA takes: the swizzle repeats after so many.
constexpr int FEWEST_BOX_ROWS = 8;

struct CacheParams {
  Params call;  // its k_map and v_map have the dimensions (columns, rows of a block, heads, blocks)
  KvCache cache;
  // Rows that one copy takes: all of a kernel's block of keys, or with a page table a divisor of
  // them and of the rows of a page.
  int32_t box_rows;
  // Packed sequences of at most so many query rows are left to another launch.
  int32_t few_rows;
};
static_assert(std::is_trivially_copyable_v<CacheParams>);
static_assert(offsetof(CacheParams, call) == 0, "addresses are counted from the call's start");

}  // namespace archflash::hopper
