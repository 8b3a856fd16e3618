// The plan of gradients where a head has few query rows (rows_bwd.cuh). Pure host code.
#pragma once

#include <cstdint>

#include "common/planning/backward_rounds.h"
#include "hopper/plan/plan_backward_tiles.h"

namespace archflash::hopper {

// A kernel whose CTAs have all query rows of a head.
struct RowsTile : core::RoundsTile {
  int64_t most_rows;
  int64_t block;       // keys at a time
  int64_t row_tiles;   // steps of a block
  bool packed;         // it serves packed sequences
  bool sums_elements;  // of the gradient of a mask that sequences share: a CTA adds its part once
};

// The tile for a call, or null: then CTAs own keys.
const RowsTile* rows_tile_for(const BackwardProblem& problem, const Device& device);

// Whether the rows of a call leave one of the row tiles of such a tile empty, and a tile of keys
// may serve it as well. Then whether that is expected to be faster.
bool leaves_rows_empty(const BackwardProblem& problem, const RowsTile& tile);
bool wastes_rows(const Problem& call, const RowsTile& tile, const BackwardTile& of_keys,
                 const Device& device);

// The plan with such a tile, or the reasons why not.
PlanResult plan_rows(const BackwardProblem& problem, const RowsTile& tile, const Device& device);

}  // namespace archflash::hopper
