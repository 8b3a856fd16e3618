// The parameters of kernels that drop weights: every element (batch, head, query, key) of P is set
// to 0 or multiplied by `scale`, as common/device/dropout.cuh says.
#pragma once

#include <cstdint>

namespace archflash {

struct DropoutParams {
  const uint64_t* state_gmem;  // seed and offset; null: nothing is dropped
  uint32_t threshold;          // an element whose 16 random bits are below it is dropped
  float scale;                 // 1 / (1 - dropout_p); 1 where nothing is dropped
};

}  // namespace archflash
