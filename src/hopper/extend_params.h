// Launches of kernels whose parameter begins with that of a plain call. Pure host code.
#pragma once

#include <cstring>
#include <vector>

#include "common/planning/plan.h"

namespace archflash::hopper {

// The parameter of a kernel that is told more than the call, so far with the call alone.
template <class AllParams>
AllParams extend_params(const Launch& launch) {
  AllParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(&params.call, launch.params.data(), sizeof params.call);
  return params;
}

inline void add_pointers(Launch& launch, const std::vector<PointerSlot>& more) {
  launch.pointers.insert(launch.pointers.end(), more.begin(), more.end());
}

}  // namespace archflash::hopper
