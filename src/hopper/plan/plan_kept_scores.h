// Plans whose main kernel keeps dS for a launch that adds it up to the gradient of attn_mask
// (kept_scores.cuh). Pure host code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/planning/backward_problem.h"
#include "common/planning/plan.h"
#include "hopper/backward/backward_params.h"

namespace archflash::hopper {

// Whether dS may be kept for the gradient that a call asks for.
bool keeps_scores(const BackwardProblem& problem);

// Where they lie in the workspace.
struct KeptScores {
  KeptScoresParams params;
  int64_t start = 0, is_kept_start = 0;
};

// Takes room for scores of so many whole rows and keys. lists_rounds: the main kernel may leave out
// blocks, and a launch before it clears what says which.
KeptScores keep_scores(LaunchPlan& plan, const BackwardProblem& problem, int64_t row_step,
                       int64_t key_step, bool lists_rounds);

// Gives a launch their addresses; `offset`: of KeptScoresParams among its parameters.
void add_kept_scores(Launch& launch, const KeptScores& kept, size_t offset);

// Adds the launch behind all others. by_rows: warps of the main kernel have 16 rows, not 16 keys.
void add_mask_sums(LaunchPlan& plan, const KeptScores& kept, const BackwardProblem& problem,
                   bool by_rows);

}  // namespace archflash::hopper
