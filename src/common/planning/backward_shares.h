// Tiles of keys whose query rows or heads several CTAs share out, where tiles are so few, or the
// longest of them take so long, that SMs would be idle. Each share writes dK and dV in fp32, for a
// launch behind to add up. Pure host code.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/planning/backward.h"
#include "common/planning/order.h"

namespace archflash::core {

// How the query rows of a tile of keys are shared out: CTAs, and rows of each.
struct RowShares {
  int64_t shares, rows;
};

// The CTAs that go over the tiles of a head of K, of `tile_rows` keys, `block_rows` query rows at a
// time, in the time of which query rows they pass. `heads`: query heads that each goes over.
std::vector<Run> runs_of_keys(const Problem& call, int64_t tile_rows, int64_t block_rows,
                              const RowShares& split, int64_t heads);

// The time that `shares` cost, in query rows that a tile could pass meanwhile: that of the launch
// behind, and of what is written and read again.
double time_of_shares(const Problem& call, int head_dim, int64_t shares);

// The bytes of dK and dV of all heads in fp32.
int64_t share_bytes(const Problem& call);

// How many CTAs share out the query heads of a tile of keys: a divisor of their number.
int64_t share_heads(const Problem& call, const BackwardTile& tile, const Device& device);

// Makes the main launches of `plan` write shares of dK and dV, and adds the launch that adds them
// up ("<folder>_backward_shares_<dtype>"). Their grids have so many CTAs already.
void add_shares(LaunchPlan& plan, const BackwardProblem& problem, const std::string& folder,
                int64_t shares);

}  // namespace archflash::core
