// The descales of 8-bit tensors, as kernel parameters. Plain C++.
#pragma once

#include <cstdint>

namespace archflash {

// A stored number times its descale is the number that it stands for. There is one descale for the
// whole tensor, for each head, or for each block of SCALE_ROWS rows.
struct Descale {
  const float* gmem;           // null: all descales are 1
  int64_t batch, head, block;  // strides in elements; 0 along a dimension that shares one descale
};

struct Descales {
  Descale q, k, v;
  int64_t heads_per_q_descale;  // query heads that share a descale of q: 1 or heads_per_kv
};

}  // namespace archflash
