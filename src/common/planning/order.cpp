#include "common/planning/order.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

#include "common/planning/core_set.h"

namespace archflash::core {
namespace {

// What a search may cost the first call of a problem: well below a millisecond.
constexpr int64_t MOST_RUNS = 2048;
constexpr int64_t MOST_ROWS_TO_TURN = 64;
constexpr int64_t TURN_PLACES = 12;  // where a turned range may begin or end, on any head

// The tiles of all heads in an order: rows[i] is the time of a head's row tile i.
std::vector<Run> runs_of(const std::vector<double>& rows, int64_t heads, const TileOrder& order) {
  const int64_t count = static_cast<int64_t>(rows.size());
  std::vector<Run> runs;
  for (int64_t first = 0; first < heads; first += order.heads_per_group) {
    const int64_t group = std::min<int64_t>(order.heads_per_group, heads - first);
    for (int64_t place = 0; place < count; ++place) {
      const double time = rows[count - 1 - order.from_last(static_cast<int32_t>(place))];
      if (!runs.empty() && runs.back().time == time) {
        runs.back().count += group;
      } else {
        runs.push_back({time, group});
      }
    }
  }
  return runs;
}

// The times of a head's row tiles, from the first to the last.
std::vector<double> times_of_rows(const Problem& problem, const Tile& tile) {
  std::vector<double> times;
  times.reserve(ceil_div(problem.nq, tile.block_q));
  const KeysOfTiles keys(problem, problem.nq, problem.nk);
  for (int64_t row = 0; row < problem.nq; row += tile.block_q)
    times.push_back(static_cast<double>(TILE_KEYS + keys.of(tile.block_q, tile.block_k, row)));
  return times;
}

}  // namespace

int64_t even_size(int64_t all, int64_t most) {
  for (int64_t size = most; 2 * size > most; --size) {
    if (all % size == 0) return size;
  }
  return ceil_div(all, ceil_div(all, most));
}

KeysOfTiles::KeysOfTiles(const Problem& problem, int64_t nq, int64_t nk) : nq_(nq) {
  constexpr int64_t NO_SIDE = int64_t{1} << 62;  // what visible_keys() takes for an open window
  const bool known = !problem.q_offset_default && !problem.q_offset_tensor;
  visible_ = device::visible_keys(
      static_cast<int>(nq), static_cast<int>(nk), known ? problem.q_offset : nk - nq,
      std::min(problem.window_left, NO_SIDE), std::min(problem.window_right, NO_SIDE));
}

int64_t keys_of_tile(const Problem& problem, int block_q, int block_k, int64_t nq, int64_t nk,
                     int64_t first_row) {
  return KeysOfTiles(problem, nq, nk).of(block_q, block_k, first_row);
}

std::vector<Run> merge_equal(std::vector<Run> runs) {
  size_t last = 0;
  for (size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].time == runs[last].time)
      runs[last].count += runs[i].count;
    else
      runs[++last] = runs[i];
  }
  if (!runs.empty()) runs.resize(last + 1);
  return runs;
}

double queue_time(std::span<const Run> runs, int64_t workers) {
  // How many workers are free from which time on, in the order of time; those before `first` are
  // no more.
  std::vector<std::pair<double, int64_t>> free_at;
  free_at.reserve(2 * runs.size() + 16);
  free_at.emplace_back(0, workers);
  size_t first = 0;
  for (const Run& run : runs) {
    for (int64_t left = run.count; left > 0;) {
      const int64_t taken = std::min(left, free_at[first].second);
      const double time = free_at[first].first + run.time;
      auto later = free_at.end();
      while (later[-1].first > time) --later;  // the last ones are the nearest
      if (later[-1].first == time) {
        later[-1].second += taken;
      } else {
        free_at.insert(later, {time, taken});
      }
      if ((free_at[first].second -= taken) == 0) ++first;
      left -= taken;
    }
  }
  return free_at.back().first;
}

double walk_time(const Problem& problem, const Device& device, const Tile& tile) {
  Problem mean = problem;
  if (problem.varlen) {
    mean.varlen = false;
    mean.nq /= problem.batch;
    mean.nk /= problem.batch;
  }
  const std::vector<double> times = times_of_rows(mean, tile);
  if (times.empty()) return 0;
  const int64_t heads = mean.batch * mean.heads_q / tile.packed_heads;
  const int64_t rows = static_cast<int64_t>(times.size());
  const int64_t workers = workers_of(tile, device);
  TileOrder order = choose_order(mean, device, tile);
  order.heads_per_group /= tile.packed_heads;
  const bool many = ceil_div(heads, order.heads_per_group) * rows > MOST_RUNS;
  const double time =  // so many tiles come out even
      many ? std::accumulate(times.begin(), times.end(), 0.0) * static_cast<double>(heads) /
                 static_cast<double>(workers)
           : queue_time(runs_of(times, heads, order), workers);
  if (!problem.varlen) return time;
  return time * (static_cast<double>(mean.nq) / tile.block_q + 0.5) / static_cast<double>(rows);
}

TileOrder choose_order(const Problem& problem, const Device& device, const Tile& tile) {
  const int64_t heads_per_kv = problem.heads_q / problem.heads_kv;
  const int64_t kv_heads = problem.batch * problem.heads_kv;
  const int64_t head_bytes = kv_head_bytes(problem);
  const int64_t fitting =
      std::clamp<int64_t>(device.l2_bytes / 2 / std::max<int64_t>(head_bytes, 1), 1, kv_heads);
  const auto order = [&](int64_t heads) {
    return TileOrder{.heads_per_group = static_cast<int32_t>(heads * heads_per_kv)};
  };
  // The kernels read no order for packed sequences.
  if (problem.varlen) return order(even_size(kv_heads, fitting));

  const int64_t rows = ceil_div(problem.nq, tile.block_q);
  const int64_t tiles = tiles_of(problem, tile);
  const bool equal = equal_tiles(problem) || rows == 1;
  if (equal || tiles <= device.sm_count / tile.cluster) {
    // With few keys a CTA ends before its neighbours could share what it has read.
    return order(head_bytes >= 1 << 16 ? 1 : even_size(kv_heads, fitting));
  }
  const int64_t workers = workers_of(tile, device);
  const int64_t most = std::clamp(workers / TILES_AT_A_TIME, fitting, kv_heads);
  TileOrder few = order(even_size(kv_heads, most));  // groups, large ones
  const TileOrder many = order(even_size(kv_heads, fitting));
  const int64_t heads = tiles / rows;  // or packs of heads that share a tile
  if (ceil_div(kv_heads * heads_per_kv, many.heads_per_group) * rows > MOST_RUNS) return many;

  const std::vector<double> times = times_of_rows(problem, tile);
  const double sum = std::accumulate(times.begin(), times.end(), 0.0) * static_cast<double>(heads);
  const double longest = *std::max_element(times.begin(), times.end());
  const double ideal = std::max(sum / static_cast<double>(workers), longest);
  const auto time_of = [&](TileOrder made) {
    made.heads_per_group /= tile.packed_heads;
    return queue_time(runs_of(times, heads, made), workers);
  };
  const auto within = [&](double time, double share) { return ideal >= share * time; };
  const double time_of_many = time_of(many);
  if (within(time_of_many, 0.98)) return many;
  double time = time_of(few);
  if (100 * time_of_many <= 101 * time) few = many, time = time_of_many;
  if (within(time, 0.97) || rows > MOST_ROWS_TO_TURN) return few;

  // The tiles do not divide well among the workers. With some of them in the opposite direction
  // they often do.
  TileOrder best = few;
  const int64_t places = std::min(rows, TURN_PLACES);
  for (int64_t i = 0; i < places && !within(time, 0.97); ++i) {
    for (int64_t j = i + 1; j <= places; ++j) {
      TileOrder turned = few;
      turned.turned_begin = static_cast<int32_t>(i * rows / places);
      turned.turned_end = static_cast<int32_t>(j * rows / places);
      if (turned.turned_end - turned.turned_begin < 2) continue;
      const double of_turned = time_of(turned);
      if (100 * of_turned < 99 * time) best = turned, time = of_turned;
    }
  }
  return best;
}

}  // namespace archflash::core
