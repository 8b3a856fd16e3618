// The order in which the row tiles of all heads are computed. Pure host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "common/attention_params.h"
#include "common/device/visible_keys.cuh"
#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::core {

// The time that a tile's start and end take, as keys that it could pass meanwhile. Measured on an
// H200 (2026-11-23): 110 to 250 keys in the kernels of ampere and blackwell_consumer.
constexpr int64_t TILE_KEYS = 192;

// Keys in the blocks that a tile of rows [first_row, first_row + block_q) of a sequence of nq rows
// and nk keys visits. A position offset that only the device knows counts as its default.
int64_t keys_of_tile(const Problem& problem, int block_q, int block_k, int64_t nq, int64_t nk,
                     int64_t first_row);

// The keys that tiles of one sequence visit, as keys_of_tile() counts them, for many of its tiles.
class KeysOfTiles {
 public:
  KeysOfTiles(const Problem& problem, int64_t nq, int64_t nk);
  int64_t of(int block_q, int block_k, int64_t first_row) const {
    const int64_t last_row = std::min(first_row + block_q, nq_) - 1;
    const int first_key = visible_.first(static_cast<int>(first_row));
    const int last_key = visible_.last(static_cast<int>(last_row));
    if (last_key < first_key) return 0;
    return int64_t{last_key / block_k - first_key / block_k + 1} * block_k;
  }

 private:
  device::VisibleKeys visible_;
  int64_t nq_;
};

// `count` tiles, one after another, that take `time` each.
struct Run {
  double time;
  int64_t count;
};

// Joins neighbouring runs of equal times.
std::vector<Run> merge_equal(std::vector<Run> runs);

// The time until all tiles are done if the next one always goes to the worker that is free first.
double queue_time(std::span<const Run> runs, int64_t workers);

// The time until all tiles of a call are done in the order of choose_order(), by which kernels
// whose tiles have other sizes can be compared. All packed sequences count as having the mean
// length, and as filling half of their last tile.
double walk_time(const Problem& problem, const Device& device, const Tile& tile);

// At most `most` of `all`, so that groups of this size are equal, or all but the last one. A size
// that divides `all` is taken if it is at least half of what is possible.
int64_t even_size(int64_t all, int64_t most);

// The order for kernels whose next tile goes to whoever is free first.
//
// Heads follow one another in groups, whose tiles come from the longest to the shortest under a
// causal mask. Groups keep what is read at the same time in L2: a group's K and V fit half of it,
// or at least TILES_AT_A_TIME tiles that read the same K and V are computed at the same time, and
// memory is read once for all of them. But each group starts with its longest tiles, so that few
// groups share the work out more evenly. Where all tiles take the same time, a group is one head of
// K and V.
TileOrder choose_order(const Problem& problem, const Device& device, const Tile& tile);
constexpr int64_t TILES_AT_A_TIME = 4;

}  // namespace archflash::core
