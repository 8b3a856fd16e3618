// How long a tile of hopper's backward kernels takes. Pure host code.
#pragma once

#include "hopper/plan/plan_backward_tiles.h"

namespace archflash::hopper {

// Microseconds on an H200, to which plan_backward_turns.cpp was fitted.
struct TileTimes {
  double round, start, end;
  double hand_over = 3.5;  // from an addition to a sum to that of the next tile
};

inline TileTimes times_of(const BackwardTile& tile) {
  if (tile.ctas_per_sm > 1) return {tile.head_dim <= 32 ? 1.2 : 1.5, 2, 2.5, 4.2};
  if (tile.swaps_keys) return {2.1, 2.5, 2, 4.5};
  if (tile.head_dim <= 32) return {2.3, 3, 3};
  if (tile.head_dim <= 64) return {2.9, 3, 3.5};
  if (tile.head_dim <= 96) return {3.6, 3, 3.5};
  if (tile.head_dim <= 128) return {2.1, 3.5, 4};
  if (tile.head_dim <= 192) return {1.9, 3.5, 3.5};
  return {2.4, 3.5, 3.5};
}

}  // namespace archflash::hopper
