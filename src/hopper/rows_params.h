// The parameter of hopper's backward kernels for few query rows with a dense attn_mask, whose
// elements their consumers read themselves.
#pragma once

#include "common/mask_params.h"
#include "common/masked_backward_params.h"
#include "hopper/backward_params.h"

namespace archflash::hopper {

struct MaskedRowsParams {
  BackwardKernelParams call;
  MaskParams masks;
  MaskGradientParams dmask;
};

}  // namespace archflash::hopper
