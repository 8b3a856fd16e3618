// The parameter blocks of the simt kernels.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/packed_heads.cuh"
#include "common/dropout_params.h"
#include "common/dtype.h"
#include "common/key_lists.h"
#include "common/kv_cache.h"
#include "common/mask_params.h"
#include "common/partials.h"

namespace archflash::simt {

struct Params : AttentionParams {
  int32_t snake_from;  // CTAs from this index on take the remaining tiles in reverse order
  DType out_dtype;     // that of the inputs, or F32
};

struct MaskedParams {
  AttentionParams attention;
  MaskParams masks;
  DropoutParams dropout;
};

struct CacheParams {
  AttentionParams attention;  // nk is the capacity of a sequence
  Partials partials;
  device::PackedHeads packed_heads;
  KvCache cache;
  AlibiSlopes slopes;
  int32_t attention_chunk;  // positions of a chunk of device::ChunkedKeys; 0: no chunks
  MaskParams masks;         // attn_mask and key_ranges, of rows of packed queries where they are
  int64_t mask_keys;        // the last keys of a sequence that attn_mask is about
};

struct GatherParams {
  CacheParams call;
  KeyLists lists;
};

}  // namespace archflash::simt
