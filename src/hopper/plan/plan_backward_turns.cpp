#include "hopper/plan/plan_backward_turns.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <vector>

#include "common/planning/backward_parts.h"
#include "common/planning/order.h"
#include "common/planning/tiles.h"

namespace archflash::hopper {
namespace {

// What the model was fitted to: both passes of 80 calls in 12 kinds of turns each (H200,
// 2026-11-30). In a tile it finds the fastest kind of nearly all of them, or one that is at most 3%
// slower. All times are microseconds.
constexpr double ADDITION = 2;       // of one of the two warps that add every second round
constexpr double READING = 0.3;      // of a megabyte of sums, by the kernel behind
constexpr double HALF_ROUND = 0.55;  // of the time of a round
constexpr int64_t MOST_STEPS = 20000;

// A call as the model sees it. A share of a head's rows counts as a head.
struct Schedule {
  int64_t heads, tiles, group;  // group: query heads of a head of K
  int64_t shares, share_rounds, rounds;
  int64_t tile_rows, round_rows;
  bool ends_in_half;    // no row is in the second block of the last round
  int64_t hidden_keys;  // that the first query does not see, under a causal mask; -1: none is
  int64_t ctas;
  TileTimes times;
  double megabytes;  // of a sum of all rounds

  Schedule(const Problem& call, const BackwardTile& tile, const core::RowShares& split,
           const Device& device)
      : heads(call.batch * call.heads_kv * split.shares),
        tiles(core::ceil_div(call.nk, int64_t{tile.rows})),
        group(call.heads_q / call.heads_kv),
        shares(split.shares),
        rounds(core::ceil_div(call.nq, tile.round_rows)),
        tile_rows(tile.rows),
        round_rows(tile.round_rows),
        ends_in_half(tile.round_rows == 128 && (call.nq - 1) % 128 < 64),
        hidden_keys(is_windowed(call) ? call.nk - call.nq : -1),
        ctas(int64_t{tile.ctas_per_sm} * device.sm_count),
        times(times_of(tile)),
        megabytes(static_cast<double>(core::count_rounds(call, tile.round_rows) *
                                      core::sums_bytes_of_round(call, tile)) /
                  (1 << 20)) {
    share_rounds = shares > 1 ? split.rows / round_rows : rounds;
  }

  int64_t steps() const { return heads * tiles * share_rounds * group; }
  int64_t steps_of_tile() const { return share_rounds * group; }
  int64_t first_round(int64_t tile) const {
    if (hidden_keys < 0) return 0;
    return std::max<int64_t>(tile * tile_rows - hidden_keys, 0) / round_rows;
  }
};

// The head and the tile of a CTA's turn to start, as backward_order.cuh finds them.
struct Place {
  int64_t head, tile;
  bool upwards;
};

Place place_of(int64_t index, const Schedule& call, const KeyTileOrder& order) {
  const int64_t group = std::min(order.group_heads, call.heads);
  const int64_t first_head = index / (call.tiles * group) * group;
  const int64_t of_group = std::min(group, call.heads - first_head);
  const int64_t in_group = index - first_head * call.tiles;
  const int64_t in_a_row = order.tiles_in_a_row;
  const int64_t first_tile = in_group / (of_group * in_a_row) * in_a_row;
  const int64_t of_row = std::min(in_a_row, call.tiles - first_tile);
  const int64_t in_rows = in_group - first_tile * of_group;
  Place place{first_head + in_rows / of_row, first_tile + in_rows % of_row, false};
  place.upwards = place.head < order.upward_heads;
  if (place.upwards) place.tile = call.tiles - 1 - place.tile;
  return place;
}

// The time until all tiles have added to the sums of dQ, which the last kernel has then read; where
// it is above `limit`, any time above that.
double time_of(const Schedule& call, const KeyTileOrder& order, const Turns& turns,
               double limit = std::numeric_limits<double>::infinity()) {
  const int64_t chains = turns.tiles > 0 ? turns.sums / 2 : turns.sums > 2 ? turns.sums : 1;
  const int64_t steps = call.rounds * call.group;  // of all rows of a head
  // When each sum of a round may be added to again. Shares of a head have rounds of their own.
  std::vector<float> added(static_cast<size_t>(call.heads / call.shares * turns.sums * steps));
  std::priority_queue<double, std::vector<double>, std::greater<>> free;
  const double reading = READING * call.megabytes * static_cast<double>(turns.sums);
  double end = 0;
  for (int64_t index = 0; index < call.heads * call.tiles; ++index) {
    const Place place = place_of(index, call, order);
    double now = call.times.start;
    if (static_cast<int64_t>(free.size()) >= call.ctas) now += free.top(), free.pop();
    const int64_t first_of_share = place.head % call.shares * call.share_rounds;
    const int64_t first = std::max(call.first_round(place.tile), first_of_share);
    const int64_t last = std::min(first_of_share + call.share_rounds, call.rounds) - 1;
    // The step that it begins with, counted in rounds and in these in heads, the last head first.
    int64_t start = last, head = 0, apart = 0;
    if (place.upwards) {
      start = first;
    } else if (turns.tiles > 0) {
      apart = place.tile / chains % turns.tiles << turns.steps_shift;
      const int64_t round = first_of_share + apart / call.group;
      if (round >= first && round <= last)
        start = round, head = call.group - 1 - apart % call.group;
    } else if (turns.sums == 2) {
      start = std::min(first + place.tile * call.tile_rows / call.round_rows, last);
    }
    float* const sums = added.data() + place.head / call.shares * turns.sums * steps;
    double before = 0, before_that = 0;  // when the last two rounds were handed to TMA
    double warps[2] = {};
    int64_t round = start;
    const bool leaves_out =
        call.ends_in_half && !place.upwards && turns.sums != 2 && turns.tiles == 0;
    for (int64_t step = 0; step < (last - first + 1) * call.group; ++step) {
      const bool half = leaves_out && round == call.rounds - 1;
      now = std::max(now + (half ? HALF_ROUND : 1) * call.times.round, before_that);
      int64_t sum = place.tile % chains;
      if (turns.tiles > 0) {
        const int64_t at = (round - first_of_share) * call.group + call.group - 1 - head;
        sum = 2 * sum + (at > apart ? 1 : 0);
      } else if (turns.sums == 2) {
        sum = !place.upwards && round > start ? 1 : 0;
      }
      float& of_sum = sums[sum * steps + round * call.group + head];
      const double adds = std::max({now, warps[step % 2], static_cast<double>(of_sum)});
      of_sum = static_cast<float>(adds + call.times.hand_over);
      warps[step % 2] = adds + ADDITION;
      before_that = before, before = adds;
      if (++head < call.group) continue;
      head = 0;
      round += place.upwards ? 1 : -1;
      if (round < first) round = last;
    }
    const double done = std::max(now + call.times.end, before);
    free.push(done);
    end = std::max(end, done);
    if (end + reading > limit) break;
  }
  return end + reading;
}

// The time without an order.
double time_without_turns(const Schedule& call) {
  std::vector<core::Run> runs;
  for (int64_t tile = 0; tile < call.tiles; ++tile) {
    double time = 0;
    for (int64_t share = 0; share < call.shares; ++share) {
      const int64_t first = share * call.share_rounds;
      const int64_t rounds = std::min(first + call.share_rounds, call.rounds) -
                             std::max(first, call.first_round(tile));
      time = call.times.start + call.times.end +
             call.times.round * static_cast<double>(std::max<int64_t>(rounds, 0) * call.group);
      runs.push_back({time, call.heads / call.shares});
    }
  }
  return core::queue_time(runs, call.ctas) + READING * call.megabytes;
}

// Other turns that a kernel knows.
std::vector<Turns> other_turns(const BackwardProblem& problem, const BackwardTile& tile,
                               const Schedule& schedule, int64_t group_heads,
                               const Device& device) {
  constexpr int64_t CHAINS[] = {3, 4, 6, 8, 12, 16, 24, 32}, MOST_SWAPPED = 4;
  constexpr double L2_MEGABYTES = 22;
  constexpr int64_t WAVES_OF_PARTS = 8;
  const Problem& call = problem.call;
  const bool in_parts = schedule.heads * schedule.tiles >= WAVES_OF_PARTS * device.sm_count;
  const auto fits = [&](int64_t sums) {
    const double megabytes = static_cast<double>(sums) * schedule.megabytes;
    return megabytes <= L2_MEGABYTES &&
           (!in_parts ||
            megabytes * (1 << 20) <= static_cast<double>(core::most_workspace(problem)));
  };
  std::vector<Turns> found = {{1}};
  if (!tile.swaps_keys && tile.ctas_per_sm == 1) found.push_back({2});
  for (const int64_t number : CHAINS) {
    const int64_t chains = std::min(number, schedule.tiles);
    if (chains <= 2 || !fits(chains) || (tile.swaps_keys && chains > MOST_SWAPPED)) break;
    found.push_back({chains});
    if (chains == schedule.tiles) break;
  }
  if (tile.ctas_per_sm > 1 || (is_windowed(call) && call.nk < 4 * call.nq)) return found;
  const int64_t heads = std::max<int64_t>(std::min(schedule.heads, group_heads), 1);
  const int64_t together =
      std::min(schedule.tiles, core::ceil_div(int64_t{device.sm_count}, heads));
  const int64_t steps = schedule.steps_of_tile();
  for (const int64_t chains : {1, 2}) {
    const int64_t of_chain = core::ceil_div(together, chains);
    if (of_chain <= 1 || of_chain > steps || (chains > 1 && !fits(2 * chains))) continue;
    if (tile.swaps_keys && chains > 1) continue;
    Turns turns{2 * chains};
    while (of_chain << (turns.steps_shift + 1) <= steps) ++turns.steps_shift;
    turns.tiles = core::ceil_div(steps, int64_t{1} << turns.steps_shift);
    found.push_back(turns);
  }
  return found;
}

// Replaces the order and turns that rules have chosen by faster ones, where the model knows any.
// Returns the time that it expects of them; infinity: it does not know.
double improve_turns(const BackwardProblem& problem, const BackwardTile& tile,
                     const core::RowShares& split, const Device& device, KeyTileOrder& order,
                     Turns& turns) {
  constexpr double UNKNOWN_TIME = std::numeric_limits<double>::infinity();
  if (!is_modelled(problem, tile)) return UNKNOWN_TIME;
  const Schedule schedule(problem.call, tile, split, device);
  if (schedule.steps() > MOST_STEPS) return UNKNOWN_TIME;
  double best = time_of(schedule, order, turns);
  if (best < 1.03 * time_without_turns(schedule)) return best;
  const double time_of_rules = best;
  const KeyTileOrder given = order;
  const int64_t sums_of_rules = turns.sums;
  for (const Turns& other : other_turns(problem, tile, schedule, order.group_heads, device)) {
    // Heads that go upwards have one sum. With many keys, and above 128 columns, one sum was slower
    // than the model says.
    if (given.upward_heads > 0 && other.sums <= 2) continue;
    const bool many_keys = problem.call.nk >= 4 * problem.call.nq;
    if (other.sums == 1 && sums_of_rules > 1 && (many_keys || tile.head_dim > 128)) continue;
    KeyTileOrder as_well = given;
    as_well.upward_heads = 0;
    const double limit = std::min(best, 0.96 * time_of_rules - 1);
    const double time = time_of(schedule, as_well, other, limit);
    if (time < limit) best = time, order = as_well, turns = other;
  }
  return best;
}

}  // namespace

bool is_modelled(const BackwardProblem& problem, const BackwardTile& tile) {
  return problem.deterministic && !tile.writes_dq && !tile.ends_dq &&
         is_plain_or_causal(problem.call);
}

Ways find_ways(const BackwardProblem& problem, const BackwardTile& tile, const Shares& shares,
               const Device& device, bool asked) {
  // More were slower where K comes to where V was.
  constexpr int64_t CHAINS_OF_SWAPPED = 4;
  const Problem& call = problem.call;
  Ways ways{shares, problem, {}, {}, 0};
  ways.shared.call = with_shared_heads(call, shares.heads);
  const core::RowShares& split = shares.rows;
  ways.order = order_tiles(ways.shared, tile, split, device);
  ways.turns =
      find_turns(ways.shared, tile, split, ways.order.group_heads, !tile.swaps_keys, device);
  if (tile.swaps_keys && ways.turns.tiles == 0)
    ways.turns.sums = ways.turns.sums == 2 ? 1 : std::min(ways.turns.sums, CHAINS_OF_SWAPPED);
  // The smaller share has no rounds for some of the tiles that would start apart.
  const bool uneven = shares.heads * shares.heads_of_share != call.heads_q / call.heads_kv;
  if (uneven && ways.turns.tiles > 0) ways.turns = {};
  ways.time = std::numeric_limits<double>::infinity();
  if (asked && !uneven)
    ways.time = improve_turns(ways.shared, tile, split, device, ways.order, ways.turns);
  return ways;
}

Shares share_out_in_turns(const BackwardProblem& problem, const BackwardTile& tile,
                          const Device& device) {
  const Shares shares = share_out(problem.call, tile, device);
  const int64_t group = problem.call.heads_q / std::max<int64_t>(problem.call.heads_kv, 1);
  if (shares.rows.shares == 1 || group == 1 || tile.swaps_keys || !is_modelled(problem, tile))
    return shares;
  Shares best = shares;
  double best_time = find_ways(problem, tile, shares, device, true).time;
  const int64_t rounds = whole_rows(problem.call, tile).rows / tile.round_rows;
  for (int64_t heads = 1; heads <= group; ++heads) {
    const int64_t rows = shares.all() / heads;
    if (group % heads != 0 || shares.all() % heads != 0 || rows > rounds) continue;
    const int64_t of_share = core::ceil_div(rounds, rows);
    if ((rows - 1) * of_share >= rounds) continue;  // a share would be empty
    const core::RowShares split{rows, of_share * tile.round_rows};
    const Shares other{heads, rows > 1 ? split : whole_rows(problem.call, tile), group / heads};
    const double time = find_ways(problem, tile, other, device, true).time;
    if (time < 0.95 * best_time) best = other, best_time = time;
  }
  return best;
}

}  // namespace archflash::hopper
