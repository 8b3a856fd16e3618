// Parameters of hopper's backward kernels for few query rows.
#pragma once

#include "common/mask_params.h"
#include "common/masked_backward_params.h"
#include "hopper/backward/backward_params.h"

namespace archflash::hopper {

// With a dense attn_mask, whose elements the consumers read themselves.
struct MaskedRowsParams {
  BackwardKernelParams call;
  MaskParams masks;
  MaskGradientParams dmask;
  KeptScoresParams kept;  // of dS, if its address is not null
};

}  // namespace archflash::hopper
