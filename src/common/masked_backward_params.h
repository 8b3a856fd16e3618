// The parameter of kernels that compute gradients of calls with masks as data or dropout.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/backward_params.h"
#include "common/dropout_params.h"
#include "common/dropped_heads.h"
#include "common/mask_params.h"

namespace archflash {

// The gradient of an added attn_mask, in fp32, to which kernels add; null: it is not wanted.
// Strides are in elements, and 0 along a dimension that is broadcast.
struct MaskGradientParams {
  float* gmem;
  int64_t batch, head, row, key;
};

struct MaskedBackwardParams {
  BackwardParams call;
  MaskParams masks;
  DropoutParams dropout;
  MaskGradientParams dmask;
  DroppedHeads dropped_heads;
};
static_assert(std::is_trivially_copyable_v<MaskedBackwardParams>);

}  // namespace archflash
