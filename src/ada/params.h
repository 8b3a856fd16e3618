// The one parameter of every 8-bit ada kernel. Those for 16-bit inputs take AttentionParams.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/attention_params.h"
#include "common/problem.h"

namespace archflash::ada {

// What stored numbers stand for: themselves times a float, one for the tensor, each head, or each
// block of SCALE_ROWS rows. Strides in elements, 0 where the same one serves.
struct Descale {
  const float* gmem;  // null: 1
  int64_t batch, head, block;
};

struct Params {
  // q, k and v are read as pairs of bytes: their strides count those. tanh_scale is always set.
  AttentionParams attention;
  Descale q, k, v;
  int32_t heads_per_q_descale;  // query heads that share a descale of q: 1 or heads_per_kv
  DType out_dtype;              // F16 or BF16
};
static_assert(std::is_trivially_copyable_v<Params>);

}  // namespace archflash::ada
