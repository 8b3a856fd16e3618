// Whether the last round of tiles of a backward call is computed in parts (backward_parts.cuh).
// Pure host code.
#pragma once

#include <cstdint>

#include "common/planning/backward.h"
#include "hopper/plan_backward_order.h"
#include "hopper/plan_backward_tiles.h"

namespace archflash::hopper {

// From tile `first` on, tiles have so many parts, of so many query rows; 0 parts: none has.
// sums: of dQ that each round then has in turns; 0: as many as without parts.
struct Parts {
  int64_t first = 0, parts = 0, rows = 0, sums = 0;
};

// The parts of a call's last round of tiles, where that leaves at least half of the SMs idle, or
// those that take the place of its shares of rows.
// in_turns: whether CTAs take turns, as `turns` says.
Parts find_parts(const BackwardProblem& problem, const BackwardTile& tile, const Shares& shares,
                 bool in_turns, const Turns& turns, const Device& device);

// Gives the tiles of the plan's main launch their parts, which its parameters know of already, and
// the launch the kernel that merges them.
void add_parts(LaunchPlan& plan, const BackwardTile& tile, const Parts& parts);

}  // namespace archflash::hopper
