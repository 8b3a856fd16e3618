// The plans of calls with approximate=. Pure host code.
#pragma once

#include "common/planning/plan.h"
#include "common/problem.h"

namespace archflash::ampere {

PlanResult plan_approximate(const Problem& problem, const Device& device);

}  // namespace archflash::ampere
