// The plans of calls whose rows see all keys up to one, by kernels of few row tiles and of packed
// sequences. Pure host code.
#pragma once

#include <optional>

#include "common/planning/plan.h"
#include "common/problem.h"

namespace archflash::ampere {

// Nothing where another kernel is expected to be faster, or where these do not serve the call.
// dense: what another kernel would take for a call in which every query sees every key; null: none
// serves it.
std::optional<LaunchPlan> plan_shares(const Problem& problem, const Device& device,
                                      const TileChoice* dense);
std::optional<LaunchPlan> plan_packed(const Problem& problem, const Device& device);

}  // namespace archflash::ampere
