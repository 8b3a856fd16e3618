// The one parameter of the hopper kernels that read a KV cache.
#pragma once

#include <cstdint>

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
  // With PAGES the maps have the dimensions (columns of a slab, 8 rows, slabs, groups of 8 rows,
  // heads), and so many groups lie between two pages.
  int32_t k_page_groups, v_page_groups;
  // Packed sequences of at most so many query rows are left to another launch.
  int32_t few_rows;
  int32_t attention_chunk;  // positions of a chunk of device::ChunkedKeys; 0: no chunks
  AlibiSlopes slopes;       // with them call.attention.transform_scores is set
};

// The parameter of the kernel that makes a 16-bit copy of an 8-bit cache (convert_cache.cuh).
struct ConvertParams {
  AttentionParams attention;  // of the call as it was made: k_gmem and v_gmem are the cache
  KvCache cache;
  void* k_gmem;  // the copies: (batch, capacity, heads_kv, d), and with dv
  void* v_gmem;
  DType cache_dtype;
  int32_t attention_chunk;
  int32_t few_rows;    // sequences of at most so many query rows are left out
  int32_t row_blocks;  // blocks of CONVERTED_ROWS rows in the capacity of a sequence
};

constexpr int CONVERT_WARPS = 8;  // of a CTA of that kernel
constexpr int CONVERTED_ROWS = 32;
constexpr int CONVERTED_COLUMNS = 16;  // that a thread copies at once
constexpr int MOST_CACHE_KEYS = 128;   // the most keys that a kernel reads from a cache at a time

}  // namespace archflash::hopper
