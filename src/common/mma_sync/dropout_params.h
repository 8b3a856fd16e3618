// The parameters of the kernels on mma.sync that drop weights and know no masks as data.
#pragma once

#include <cstddef>
#include <type_traits>

#include "common/attention_params.h"
#include "common/backward_params.h"
#include "common/dropout_params.h"
#include "common/dropped_heads.h"

namespace archflash::mma_sync {

struct DroppingParams {
  AttentionParams attention;
  DropoutParams dropout;
};
static_assert(std::is_trivially_copyable_v<DroppingParams>);
static_assert(offsetof(DroppingParams, attention) == 0,
              "core::pointers() counts from the block's start");

struct DroppingBackwardParams {
  BackwardParams call;
  DropoutParams dropout;
  DroppedHeads dropped_heads;
};
static_assert(std::is_trivially_copyable_v<DroppingBackwardParams>);
static_assert(offsetof(DroppingBackwardParams, call) == 0,
              "the plan of a call without dropout is extended");

}  // namespace archflash::mma_sync
