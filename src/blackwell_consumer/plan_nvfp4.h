// The plan of a call with approximate="nvfp4": K and V to four bits, then attention.
#pragma once

#include "common/planning/plan.h"
#include "common/problem.h"

namespace archflash::blackwell_consumer {

// Adds the reasons why such a call cannot be served, beside those of any call.
void add_nvfp4_reasons(const Problem& problem, const Device& device, Reasons& why_not);

PlanResult plan_nvfp4(const Problem& problem, const Device& device);

}  // namespace archflash::blackwell_consumer
