// The parameter of kernels that compute gradients of calls with masks as data or dropout.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/host_device.h"
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

// The configuration of a backward kernel that takes masks as data and drops weights, made of that
// of one that does not.
template <class Backward>
struct MaskedBackwardConfig : Backward {
  using Params = MaskedBackwardParams;
  static constexpr bool MASKED = true;
  static_assert(MASK_BLOCK % Backward::ROWS == 0 && MASK_BLOCK % Backward::BLOCK == 0,
                "a tile lies in one block of block_mask");
};

// The part of a kernel's parameter that every backward kernel has.
template <class C>
ARCHFLASH_HOST_DEVICE constexpr const BackwardParams& call_of(const typename C::Params& params) {
  if constexpr (requires { params.call; }) {
    return params.call;
  } else {
    return params;
  }
}

}  // namespace archflash
