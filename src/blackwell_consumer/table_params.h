// The one parameter of the blackwell_consumer kernels for tables of blocks.
#pragma once

#include <cstddef>
#include <type_traits>

#include "blackwell_consumer/params.h"
#include "common/mask_params.h"

namespace archflash::blackwell_consumer {

struct TableParams {
  Params call;
  MaskParams masks;  // block_mask alone
};
static_assert(std::is_trivially_copyable_v<TableParams>);
static_assert(offsetof(TableParams, call) == 0, "the plan of a call without masks is extended");

}  // namespace archflash::blackwell_consumer
