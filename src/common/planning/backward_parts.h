// A backward pass in parts, one after another, that share one workspace. Pure host code.
//
// The workspace of a backward pass grows with the call: its sums of dQ in fp32 have whole blocks of
// rows and the columns of the kernel's tile, which for rows of few queries or of few columns is
// many times what the gradients take. Heads have nothing to do with one another, so a call whose
// workspace is too large is computed for some of its heads after the others.
#pragma once

#include <cstdint>
#include <functional>

#include "common/planning/backward_problem.h"
#include "common/planning/plan.h"

namespace archflash::core {

// The bytes of workspace that a call may take in one part.
int64_t most_workspace(const BackwardProblem& problem);

// The plan of a folder for a call or for a part of it.
using PlanBackward = std::function<PlanResult(const BackwardProblem&, const Device&)>;

// The folder's plan of the call as it is, if its workspace is within what the call may take or the
// call has no more than a part's work; else the launches of one part after another. What a call may
// take, and the least work of a part, are in backward_parts.cpp.
PlanResult plan_in_parts(const BackwardProblem& problem, const Device& device,
                         const PlanBackward& plan);

}  // namespace archflash::core
