// A kernel of the backward pass on mma.sync that drops weights and knows no masks as data.
// Compile-time numbers only, in plain C++.
#pragma once

#include "common/mma_sync/params.h"

namespace archflash::mma_sync {

// A FusedBackwardConfig whose kernel does so.
template <class Backward>
struct DropoutBackwardConfig : Backward {
  using Params = DroppingBackwardParams;
  static constexpr bool DROPS = true;
  static_assert(Backward::M_TILES == 2 && Backward::PART % 16 == 0,
                "a lane has all elements that share their random bits: 32 keys by 16 queries");
};

}  // namespace archflash::mma_sync
