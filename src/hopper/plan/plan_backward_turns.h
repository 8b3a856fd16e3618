// Which turns deterministic calls take (plan_backward_order.h), by a model of their schedule. Pure
// host code.
#pragma once

#include "hopper/plan/plan_backward_order.h"
#include "hopper/plan/plan_backward_tiles.h"
#include "hopper/plan/plan_backward_times.h"

namespace archflash::hopper {

// What a call does with a tile, but for tables of blocks.
struct Ways {
  Shares shares;
  BackwardProblem shared;  // as the CTAs see it
  KeyTileOrder order;
  Turns turns;
  double time;  // microseconds that the model expects on an H200; infinity: it does not know
};

// Whether the model knows calls of this kind.
bool is_modelled(const BackwardProblem& problem, const BackwardTile& tile);

// asked: for an order, which other calls may have, too. Then the model replaces what rules choose
// by faster turns, where it knows any.
Ways find_ways(const BackwardProblem& problem, const BackwardTile& tile, const Shares& shares,
               const Device& device, bool asked);

// How CTAs share out heads and rows: as many shares as without an order, of more heads or of fewer
// where the model says that this is faster.
Shares share_out_in_turns(const BackwardProblem& problem, const BackwardTile& tile,
                          const Device& device);

}  // namespace archflash::hopper
