// The parameter block of every simt kernel.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/attention_params.h"

namespace archflash::simt {

struct Params : AttentionParams {
  int32_t snake_from;  // CTAs from this index on take the remaining tiles in reverse order
};
static_assert(std::is_trivially_copyable_v<Params>);

}  // namespace archflash::simt
