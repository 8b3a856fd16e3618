// The one parameter of the blackwell_consumer kernels for tables of blocks.
#pragma once

#include "blackwell_consumer/params.h"
#include "common/mask_params.h"

namespace archflash::blackwell_consumer {

struct TableParams {
  Params call;
  MaskParams masks;  // block_mask alone
};

}  // namespace archflash::blackwell_consumer
