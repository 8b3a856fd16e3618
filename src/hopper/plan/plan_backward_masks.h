// Backward kernels for masks as data: those whose CTAs list the rounds that see their keys, by a
// table of blocks or by a dense attn_mask, and one for an attn_mask that is added. Pure host code.
#pragma once

#include "common/planning/plan.h"
#include "hopper/plan/plan_backward_tiles.h"

namespace archflash::hopper {

// The tile of a main kernel, named after the one whose sums of dQ it has, and its own name.
struct TableTile {
  BackwardTile tile;
  const char* main_name;
};

// Whether TMA brings the elements of attn_mask, up to 64 columns: then CTAs go over all rounds.
bool adds_elements(const BackwardProblem& problem);

// Whether the CTAs of a call list rounds.
bool lists_rounds(const BackwardProblem& problem);

// The tile where either is so.
const TableTile& table_tile_for(const BackwardProblem& problem);

// Adds why a call whose CTAs list rounds cannot be served.
void refuse_table(const BackwardProblem& problem, Reasons& reasons);

// Turns the main launch of `plan` into that of a kernel for a table of blocks, or for a dense
// attn_mask; before all others comes the one that prepares the mask.
void add_table(LaunchPlan& plan, const BackwardProblem& problem, const BackwardTile& tile,
               const Device& device);

// Turns the main launch of `plan` into that of a kernel to which TMA brings the elements.
void add_elements(LaunchPlan& plan, const BackwardProblem& problem, const BackwardTile& tile);

}  // namespace archflash::hopper
