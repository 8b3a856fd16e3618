#include "common/planning/makespan.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "common/planning/core_set.h"

namespace archflash::core {
namespace {

// Adds the shares of one tile that visits so many keys.
void add(std::vector<TileTime>& tiles, int64_t kv_head, int64_t keys, const TileChoice& tile) {
  const int64_t blocks = keys / tile.block_k;
  for (int64_t split = 0; split < tile.splits; ++split) {
    const int64_t share = blocks / tile.splits + (split < blocks % tile.splits ? 1 : 0);
    const auto time = static_cast<double>(TILE_KEYS + share * tile.block_k);
    tiles.insert(tiles.end(), tile.v_slices, {kv_head, time});
  }
}

// Cuts the tiles from whole_tiles on: each becomes as many shorter ones as it has parts.
std::vector<TileTime> in_parts(const std::vector<TileTime>& tiles, const TileChoice& tile) {
  const auto whole = static_cast<int64_t>(tiles.size()) < tile.whole_tiles
                         ? static_cast<int64_t>(tiles.size())
                         : tile.whole_tiles;
  std::vector<TileTime> parts(tiles.begin(), tiles.begin() + whole);
  for (auto cut = tiles.begin() + whole; cut != tiles.end(); ++cut) {
    for (int64_t row = 0; row < tile.block_q; row += tile.part_rows) {
      const int64_t rows = std::min(tile.part_rows, tile.block_q - row);
      parts.push_back({cut->kv_head, cut->time * share_of_rows(rows, tile.block_q)});
    }
  }
  return parts;
}

// The CTAs of a plan whose shares have places (TileChoice::share_keys): those of the first share,
// then those of the next one, and of each from the last tile to the first that sees any of its
// keys. All heads' CTAs of a place follow one another.
std::vector<TileTime> shares_in_places(const Problem& problem, const TileChoice& tile) {
  std::vector<TileTime> ctas;
  for (int64_t split = 0; split < tile.splits; ++split) {
    const int64_t begin = split * tile.share_keys;
    for (int64_t index = ceil_div(problem.nq, tile.block_q) - 1; index >= 0; --index) {
      const int64_t seen = keys_of_tile(problem, tile.block_q, tile.block_k, problem.nq, problem.nk,
                                        index * tile.block_q);
      if (seen <= begin) break;
      const auto time = static_cast<double>(TILE_KEYS + std::min(tile.share_keys, seen - begin));
      for (int64_t head = 0; head < problem.batch * problem.heads_q; ++head)
        ctas.push_back({head * problem.heads_kv / problem.heads_q, time});
    }
  }
  return ctas;
}

RowTileSize size_of(const TileChoice& tile) { return {tile.block_q, tile.block_k, tile.row_step}; }

int64_t workers_of(const LaunchPlan& plan) {
  const TileChoice& tile = plan.tile;
  const int64_t room = int64_t{plan.device.sm_count} * tile.ctas_per_sm;
  return std::max<int64_t>(std::min(room, tile.ctas) / tile.cluster, 1);
}

}  // namespace

double time_of_walk(std::span<const Run> runs, int64_t workers, Walk walk) {
  if (walk == Walk::Queue) return queue_time(runs, workers);
  std::vector<double> until(workers, 0);
  int64_t place = 0;  // in the round
  bool reversed = false;
  for (const Run& run : runs) {
    for (int64_t left = run.count; left > 0;) {
      const int64_t taken = std::min(left, workers - place);
      double* const first = until.data() + (reversed ? workers - place - taken : place);
      for (int64_t i = 0; i < taken; ++i) first[i] += run.time;
      left -= taken, place += taken;
      if (place == workers) place = 0, reversed = !reversed;
    }
  }
  return *std::max_element(until.begin(), until.end());
}

Makespan makespan(std::span<const double> times, int64_t workers, Walk walk) {
  Makespan result{.workers = workers};
  const double sum = std::accumulate(times.begin(), times.end(), 0.0);
  const double longest = times.empty() ? 0 : *std::max_element(times.begin(), times.end());
  result.ideal = std::max(sum / static_cast<double>(workers), longest);
  std::vector<Run> runs;
  for (const double time : times) {
    if (runs.empty() || runs.back().time != time) runs.push_back({time, 0});
    ++runs.back().count;
  }
  result.time = time_of_walk(runs, workers, walk);
  return result;
}

std::vector<TileTime> tile_times(const LaunchPlan& plan, const Lengths& lengths) {
  const Problem& problem = plan.problem;
  const TileChoice& tile = plan.tile;
  // Heads that are packed into one tile count as one.
  const int64_t packed = std::max(tile.packed_heads, 1);
  const int64_t heads_per_kv = problem.heads_q / problem.heads_kv / packed;
  std::vector<TileTime> tiles;
  tiles.reserve(tile.tiles * tile.splits * tile.v_slices);
  if (problem.varlen) {
    // The places of a sequence, as find_varlen_sequence() shares them out.
    int64_t start = 0;
    for (size_t sequence = 0; sequence < lengths.q.size(); ++sequence) {
      const int64_t nq = lengths.q[sequence], nk = lengths.k[sequence];
      int64_t places = (start + nq) / tile.block_q - start / tile.block_q + 1;
      if (tile.one_tile_each) places = 1;
      const int64_t needed = ceil_div(nq, tile.block_q);
      start += nq;
      const KeysOfTiles keys(problem, nq, nk);
      for (int64_t place = 0; place < places; ++place) {
        const int64_t index = needed - 1 - place;
        for (int64_t head = 0; head < problem.heads_q / packed; ++head) {
          if (index >= 0) {
            add(tiles, head / heads_per_kv, keys_of_row_tile(keys, size_of(tile), nq, index), tile);
          } else {
            tiles.insert(tiles.end(), tile.splits * tile.v_slices, {head / heads_per_kv, 0});
          }
        }
      }
    }
    return tiles;
  }
  if (tile.share_keys > 0) return shares_in_places(problem, tile);
  const TileOrder order{.heads_per_group = 1,
                        .turned_begin = static_cast<int32_t>(tile.turned_begin),
                        .turned_end = static_cast<int32_t>(tile.turned_end)};
  const int64_t rows = ceil_div(problem.nq, tile.block_q);
  const int64_t heads = problem.batch * problem.heads_q / packed;
  const int64_t group = tile.heads_per_group > 0 ? tile.heads_per_group / packed : heads;
  const KeysOfTiles keys_of(problem, problem.nq, problem.nk);
  for (int64_t first = 0; first < heads; first += group) {
    for (int64_t place = 0; place < rows; ++place) {
      const int64_t index = rows - 1 - order.from_last(static_cast<int>(place));
      const int64_t keys = keys_of_row_tile(keys_of, size_of(tile), problem.nq, index);
      for (int64_t head = first; head < std::min(first + group, heads); ++head)
        add(tiles, head / heads_per_kv, keys, tile);
    }
  }
  return tile.part_rows > 0 ? in_parts(tiles, tile) : tiles;
}

Walk walk_of(const LaunchPlan& plan) {
  const int64_t tiles = plan.tile.tiles * plan.tile.splits * plan.tile.v_slices;
  const bool one_each = plan.tile.ctas >= tiles * plan.tile.cluster;
  return one_each || plan.tile.counts_tiles || plan.tile.share_keys > 0 ? Walk::Queue
                                                                        : Walk::Rounds;
}

Makespan makespan(const LaunchPlan& plan, const Lengths& lengths) {
  std::vector<double> times;
  for (const TileTime& tile : tile_times(plan, lengths)) times.push_back(tile.time);
  return makespan(times, workers_of(plan), walk_of(plan));
}

double reads_of_keys(const LaunchPlan& plan) {
  const Problem& problem = plan.problem;
  const int64_t kv_heads = problem.batch * problem.heads_kv;
  const int64_t in_group =
      std::min(ceil_div(plan.tile.heads_per_group * problem.heads_kv, problem.heads_q), kv_heads);
  if (in_group * kv_head_bytes(problem) <= plan.device.l2_bytes / 2) return 1;
  const std::vector<TileTime> tiles = tile_times(plan, {});
  const size_t workers = workers_of(plan);
  double keys = 0;  // that come from memory
  for (size_t begin = 0; begin < tiles.size(); begin += workers) {
    std::map<int64_t, double> longest;
    for (size_t i = begin; i < std::min(begin + workers, tiles.size()); ++i) {
      double& of_this = longest[tiles[i].kv_head];
      of_this = std::max(of_this, tiles[i].time - TILE_KEYS);
    }
    for (const auto& [head, of_this] : longest) keys += of_this;
  }
  const int64_t all = kv_heads * problem.nk;
  return std::max(keys / static_cast<double>(std::max<int64_t>(all, 1)), 1.0);
}

}  // namespace archflash::core
