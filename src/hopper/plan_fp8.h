// What plans with 8-bit inputs do about V, whose keys must lie side by side. Pure host code.
#pragma once

#include <cstdint>

#include "common/planning/plan.h"
#include "common/planning/workspace.h"
#include "common/problem.h"
#include "hopper/plan_tiles.h"

namespace archflash::hopper {

// Adds why a call with 8-bit inputs cannot be served.
void refuse_fp8(const Problem& problem, Reasons& reasons);

// Keys of a column of 8-bit V in the workspace.
int64_t v_columns(const Problem& problem);

// CTAs of the kernel that transposes V before the attention kernel.
int64_t transpose_ctas(const Problem& problem);

// Whether the CTAs of a kernel transpose 8-bit V themselves.
bool turns_v(const Problem& problem, const KernelTile& tile);

// Puts the launch that transposes V before that of `plan`, which starts early and then reads V from
// the workspace.
void transpose_v(LaunchPlan& plan, const Problem& problem, const KernelTile& tile,
                 core::Workspace& workspace);

}  // namespace archflash::hopper
