// The one parameter of every blackwell_consumer kernel.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/descales.h"
#include "common/device/equal_tiles.cuh"
#include "common/device/packed_heads.cuh"
#include "common/dtype.h"
#include "common/partials.h"
#include "common/tensor_map.h"

namespace archflash::blackwell_consumer {

struct Params {
  AttentionParams attention;
  int32_t tiles;  // row tiles of all heads, times partials.splits, which the CTAs share out
  TensorMap q_map, k_map, v_map;
  // For 8-bit inputs only. With them attention.rule.tanh_scale is set even if there is no softcap.
  Descales descales;
  DType out_dtype;  // of 8-bit inputs F16 or BF16, of others theirs or F32
  // For kernels that can split keys and pack heads.
  Partials partials;
  device::PackedHeads packed_heads;
  device::TileDivisors divisors;  // those of the group are used without cu_seqlens only
};

}  // namespace archflash::blackwell_consumer
