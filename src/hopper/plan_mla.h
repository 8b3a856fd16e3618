// The plan of a call over a latent cache. Pure host code.
#pragma once

#include "common/planning/plan.h"
#include "common/problem.h"

namespace archflash::hopper {

// Whether a call has a second query, so that its cache holds latent rows.
bool has_latent_cache(const Problem& problem);

// The plan of such a call, which describe() has no reason against; or the reasons why not.
PlanResult plan_latent_cache(const Problem& problem, const Device& device);

}  // namespace archflash::hopper
