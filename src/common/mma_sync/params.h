// The one parameter of the kernels on mma.sync for 16-bit inputs. Those for many query rows take
// ManyRowsParams or with dropout DroppingParams, those for few take FewRowsParams, those with a KV
// cache CacheParams, and those with masks as data MaskedParams.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/attention_params.h"
#include "common/backward_params.h"
#include "common/descales.h"
#include "common/device/host_device.h"
#include "common/device/packed_heads.cuh"
#include "common/dropout_params.h"
#include "common/dropped_heads.h"
#include "common/dtype.h"
#include "common/kv_cache.h"
#include "common/mask_params.h"
#include "common/partials.h"

namespace archflash::mma_sync {

struct ManyRowsParams {
  AttentionParams attention;
  DType out_dtype;  // that of the inputs, or F32
};

struct FewRowsParams {
  AttentionParams attention;
  Partials partials;
  device::PackedHeads packed_heads;
  DType out_dtype;  // that of the inputs, or F32, where keys are not split and heads not packed
};

struct CacheParams {
  AttentionParams attention;  // nk is the capacity of a sequence
  Partials partials;
  device::PackedHeads packed_heads;
  KvCache cache;
  // Used where the cache holds 8-bit numbers: what they are multiplied by, and their dtype.
  Descale k_descale, v_descale;
  DType cache_dtype;
  int32_t attention_chunk;  // positions of a chunk of device::ChunkedKeys; 0: no chunks
  AlibiSlopes slopes;       // read by the kernels of decode_fwd.cuh only
  // Where packed sequences of few rows and of many are served by a launch each: the former have at
  // most so many rows; decode_fwd.cuh serves them, attention_fwd.cuh the others. 0: one launch.
  int32_t few_rows;
};

struct MaskedParams {
  FewRowsParams call;
  MaskParams masks;
  DropoutParams dropout;
};

// With a KV cache attn_mask is bool and about the last mask_keys keys of each sequence; rows of
// packed queries are those of all sequences together.
struct MaskedCacheParams {
  CacheParams call;
  MaskParams masks;
  int64_t mask_keys;
};

struct DroppingParams {
  AttentionParams attention;
  DropoutParams dropout;
};

// The parameter block of the backward kernels with dropout and without masks as data.
struct DroppingBackwardParams {
  BackwardParams call;
  DropoutParams dropout;
  DroppedHeads dropped_heads;
};

// The parameter of the kernel of attention_fwd.cuh with Config C.
template <class C>
using ParamsOf = std::conditional_t<
    C::CACHE, CacheParams,
    std::conditional_t<C::CAN_SPLIT, FewRowsParams,
                       std::conditional_t<C::DROPS, DroppingParams, ManyRowsParams>>>;

// Whether the outputs are fp32.
template <class Params>
ARCHFLASH_HOST_DEVICE bool writes_f32(const Params& params) {
  if constexpr (requires { params.out_dtype; }) {
    return params.out_dtype == DType::F32;
  } else {
    return false;
  }
}

template <class Params>
ARCHFLASH_HOST_DEVICE const AttentionParams& attention_of(const Params& params) {
  if constexpr (requires { params.attention; }) {
    return params.attention;
  } else {
    return params;
  }
}

}  // namespace archflash::mma_sync
