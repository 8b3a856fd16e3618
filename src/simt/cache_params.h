// The parameter block of the simt kernels that read a KV cache.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/attention_params.h"
#include "common/kv_cache.h"
#include "common/math/packed_heads.cuh"
#include "common/partials.h"

namespace archflash::simt {

struct CacheParams {
  AttentionParams attention;  // nk is the capacity of a sequence
  Partials partials;
  math::PackedHeads packed_heads;
  KvCache cache;
  AlibiSlopes slopes;
  int32_t attention_chunk;  // positions of a chunk of math::ChunkedKeys; 0: no chunks
};
static_assert(std::is_trivially_copyable_v<CacheParams>);

}  // namespace archflash::simt
