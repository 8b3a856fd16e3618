// How evenly the walk over row tiles fills a GPU: a model that explain and tests ask. Pure host
// code.
//
// A tile takes as long as the keys of its blocks, and TILE_KEYS more for its start and end
// (order.h). The CTAs of an SM share it evenly, so that each of them is one worker. Times are in
// keys, as a worker passes them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/device/row_tiles.h"
#include "common/planning/order.h"
#include "common/planning/plan.h"

namespace archflash::core {

// The time of a tile that has `rows` rows of its kernel's block_q, beside that of a whole one: the
// warps without rows leave the SM to the others. Measured on an H200 (2026-11-28): 0.59 to 0.70 of
// the time with a third of the rows, 0.72 with half of them, 0.77 with two thirds.
constexpr double share_of_rows(int64_t rows, int64_t block_q) {
  return 0.55 + 0.45 * static_cast<double>(rows) / static_cast<double>(block_q);
}

// Who computes which tile.
enum class Walk {
  // Tiles are handed out in rounds, one to each worker, every second round in reverse order
  // (device::SharedTileIndex).
  Rounds,
  // The next tile goes to the worker that is free first. A grid with a CTA for each tile does this,
  // and so do CTAs that stay and count tiles up.
  Queue,
};

struct Makespan {
  int64_t workers = 0;
  double time = 0;   // until the last worker is done
  double ideal = 0;  // if the work were shared out evenly; at least the longest tile

  double share() const { return time > 0 ? ideal / time : 1; }
};

// The time of a walk over tiles that take `times`, in this order.
Makespan makespan(std::span<const double> times, int64_t workers, Walk walk);
// The time until the last worker of a walk over runs of equal tiles is done.
double time_of_walk(std::span<const Run> runs, int64_t workers, Walk walk);

// Query rows and keys of a row tile; row_step: TileChoice::row_step.
struct RowTileSize {
  int32_t block_q, block_k;
  int64_t row_step;
};
// The keys that row tile number `index` of a sequence of nq rows visits.
inline int64_t keys_of_row_tile(const KeysOfTiles& keys, const RowTileSize& tile, int64_t nq,
                                int64_t index) {
  int64_t row = index * tile.block_q, rows = tile.block_q;
  if (tile.row_step > 0) {
    const device::RowTile moved = device::row_tile_from_end(
        static_cast<int>(nq), static_cast<int>(row), tile.block_q, static_cast<int>(tile.row_step));
    row = moved.first_row, rows = moved.end_row - moved.first_row;
  }
  return keys.of(static_cast<int>(rows), tile.block_k, row);
}

// Lengths of the packed sequences of a call.
struct Lengths {
  std::vector<int64_t> q, k;
};

// A row tile, or a share of its keys.
struct TileTime {
  int64_t kv_head;  // of all sequences together; of packed ones the number in its sequence
  double time;      // 0: a place that its sequence leaves empty
};

// The tiles of a plan's first launch in the order in which its kernel counts them
// (device::find_work). `lengths` is read for packed sequences only. Position offsets that only the
// device knows count as their default.
std::vector<TileTime> tile_times(const LaunchPlan& plan, const Lengths& lengths);

Walk walk_of(const LaunchPlan& plan);

// The model of a plan's first launch.
Makespan makespan(const LaunchPlan& plan, const Lengths& lengths);

// How often K and V come from memory, on average: once where those of a group of heads stay in half
// of L2; otherwise tiles that run at the same time share what they read, and later ones read anew.
// Calls with packed sequences have no such model.
double reads_of_keys(const LaunchPlan& plan);

}  // namespace archflash::core
