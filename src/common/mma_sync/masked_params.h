// The parameter of the kernels on mma.sync that take masks as data, and dropout.
#pragma once

#include <type_traits>

#include "common/dropout_params.h"
#include "common/mask_params.h"
#include "common/mma_sync/params.h"

namespace archflash::mma_sync {

struct MaskedParams {
  FewRowsParams call;
  MaskParams masks;
  DropoutParams dropout;
};
static_assert(std::is_trivially_copyable_v<MaskedParams>);

}  // namespace archflash::mma_sync
