// The parameter block of the simt kernels that take masks as data, and dropout.
#pragma once

#include <type_traits>

#include "common/attention_params.h"
#include "common/dropout_params.h"
#include "common/mask_params.h"

namespace archflash::simt {

struct MaskedParams {
  AttentionParams attention;
  MaskParams masks;
  DropoutParams dropout;
};
static_assert(std::is_trivially_copyable_v<MaskedParams>);

}  // namespace archflash::simt
