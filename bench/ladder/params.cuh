// The parameter block of every rung of every ladder, which bench/ladder/rungs.py writes.
#pragma once

#include <cstdint>

#include "common/tensor_map.h"

namespace archflash::ladder {

// All tensors are (heads, n, head dim), contiguous; `heads` counts those of the whole batch.
template <class Element>
struct RungParams {
  const Element* q_gmem;
  const Element* k_gmem;
  const Element* v_gmem;
  Element* out_gmem;
  int32_t n;
  float exp2_scale;               // log2(e) / sqrt(head dim)
  float scale;                    // 1 / sqrt(head dim)
  int32_t causal;                 // 1: row i sees the keys up to i
  TensorMap q_map, k_map, v_map;  // for rungs that use TMA: (head dim, n, heads, 1)
};

}  // namespace archflash::ladder
