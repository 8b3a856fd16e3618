// The one parameter of the hopper kernels that take masks as data.
#pragma once

#include <cstddef>
#include <type_traits>

#include "common/mask_params.h"
#include "hopper/params.h"

namespace archflash::hopper {

struct MaskedParams {
  Params call;
  MaskParams masks;
  // The numbers of the last `ordered` tiles in the order in which they are taken, in the workspace.
  int32_t* order_gmem;
  int32_t ordered;
};
static_assert(std::is_trivially_copyable_v<MaskedParams>);
static_assert(offsetof(MaskedParams, call) == 0, "the plan of a call without masks is extended");

}  // namespace archflash::hopper
