// The one parameter of every blackwell_dc kernel.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/descales.h"
#include "common/device/packed_heads.cuh"
#include "common/dtype.h"
#include "common/partials.h"
#include "common/tensor_map.h"

namespace archflash::blackwell_dc {

struct Params {
  AttentionParams attention;
  int32_t tiles;  // row tiles of all heads, times partials.splits, which the CTAs share out
  Partials partials;
  device::PackedHeads packed_heads;  // for kernels that can pack heads
  TensorMap q_map, k_map, v_map, out_map;
  // For 8-bit inputs only. With them attention.rule.tanh_scale is set even if there is no softcap.
  Descales descales;
  DType out_dtype;  // of 8-bit inputs F16 or BF16, of others theirs or F32
};

}  // namespace archflash::blackwell_dc
