// The plans of calls over latent rows (qv) and with lists of keys. Pure host code.
#pragma once

#include "common/planning/plan.h"
#include "common/problem.h"

namespace archflash::ampere {

PlanResult plan_with_qv(const Problem& problem, const Device& device);
PlanResult plan_lists(const Problem& problem, const Device& device);

}  // namespace archflash::ampere
