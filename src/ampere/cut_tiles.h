// How CTAs share out tiles of keys (common/mma_sync/key_tiles.cuh). Pure host code.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "common/backward_params.h"
#include "common/mma_sync/params.h"
#include "common/planning/backward.h"
#include "common/planning/plan.h"

namespace archflash::ampere {

// The start of the names of the images of bwd_plain.cu.
inline const std::string PLAIN_IMAGE = "ampere/bwd_plain_";

// Where in a BackwardParams the address of the turns is.
constexpr int TURNS = offsetof(BackwardParams, dq_sums) + offsetof(DqSums, turns_gmem);

// How the tiles of a call are cut, in the order of their CTAs.
using Runs = std::vector<mma_sync::TileRun>;

// Whether the tiles of a call are those of a causal mask, from the longest to the shortest.
bool shrinking_tiles(const Problem& call);

// How the tiles of a call are cut where that is faster; else nothing. Only where their rounds are
// so few that CTAs still end together.
Runs cut_tiles(const BackwardProblem& problem, const core::BackwardTile& tile, const Launch& main,
               const Device& device);

// Makes CTAs share out tiles: `main` and the launch behind it, which adds up their parts.
void share_out(LaunchPlan& plan, const BackwardProblem& problem, const core::BackwardTile& tile,
               const Device& device, const Runs& runs, mma_sync::CuttingBackwardParams& params,
               Launch& main, Launch& last);

}  // namespace archflash::ampere
