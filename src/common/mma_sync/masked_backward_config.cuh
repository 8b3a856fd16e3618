// A kernel of the backward pass on mma.sync that takes masks as data and drops weights.
// Compile-time numbers only, in plain C++.
#pragma once

#include "common/mask_params.h"
#include "common/masked_backward_params.h"
#include "common/math/host_device.h"

namespace archflash::mma_sync {

// A BackwardConfig or FusedBackwardConfig whose kernel does so.
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

}  // namespace archflash::mma_sync
