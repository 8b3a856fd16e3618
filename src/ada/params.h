// The one parameter of every 8-bit ada kernel. Those for 16-bit inputs take AttentionParams.
#pragma once

#include <type_traits>

#include "common/attention_params.h"
#include "common/descales.h"
#include "common/problem.h"

namespace archflash::ada {

struct Params {
  // q, k and v are read in units of 16 bits: their strides count those. tanh_scale is always set.
  AttentionParams attention;
  Descales descales;
  DType out_dtype;  // F16 or BF16
};
static_assert(std::is_trivially_copyable_v<Params>);

}  // namespace archflash::ada
