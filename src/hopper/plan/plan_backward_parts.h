// Whether the last round of tiles of a backward call is computed in parts (backward_parts.cuh).
// Pure host code.
#pragma once

#include <cstdint>

#include "common/planning/backward.h"
#include "hopper/plan/plan_backward_order.h"
#include "hopper/plan/plan_backward_tiles.h"

namespace archflash::hopper {

// From tile `first` on, tiles have so many parts, of so many query rows; 0 parts: none has.
// sums: of dQ that each round then has in turns; 0: as many as without parts.
struct Parts {
  int64_t first = 0, parts = 0, rows = 0, sums = 0;
  double gain = 0;  // microseconds; 0: unknown, where they take the place of shares
};

// The parts of a call's last round of tiles, where that leaves at least half of the SMs idle, or
// those that take the place of its shares of rows.
// in_turns: whether CTAs take turns, as `turns` says.
Parts find_parts(const BackwardProblem& problem, const BackwardTile& tile, const Shares& shares,
                 bool in_turns, const Turns& turns, const Device& device);

// Whether parts of a wider tile, which has them, are faster than whole tiles that have none, where
// the parts of both leave no SM a second one: 5 to 11% of the time (docs/lab/hopper.md).
bool is_faster_in_parts(const BackwardProblem& problem, const BackwardTile& tile,
                        const BackwardTile& wider, const Device& device);

// Whether CTAs that stay save more than the parts of a last round would, of `tile`, whose CTAs take
// one tile each.
bool saves_more_than_parts(const BackwardProblem& problem, const BackwardTile& tile,
                           const Device& device);

// Gives the tiles of the plan's main launch their parts, which its parameters know of already, and
// the launch the kernel that merges them.
void add_parts(LaunchPlan& plan, const BackwardTile& tile, const Parts& parts);

}  // namespace archflash::hopper
