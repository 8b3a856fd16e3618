#include "hopper/plan/plan_backward_parts.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "common/planning/launch.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"
#include "hopper/backward/backward_params.h"
#include "hopper/plan/plan_backward_times.h"

namespace archflash::hopper {

namespace {

// What the parts of a tile take beside their rounds, in microseconds: all of them, and each one
// that is written and read again, by its kilobytes.
double cost_of_parts(const BackwardTile& tile, int64_t parts) {
  constexpr double COST = 2.5, COST_OF_KILOBYTE = 1.6 / 128;
  const double of_gradients = COST_OF_KILOBYTE * 2 * 4 / 1024 * tile.rows * tile.head_dim;
  return COST + of_gradients * static_cast<double>(parts);
}

int64_t count_tiles(const Problem& call, const BackwardTile& tile) {
  return call.batch * call.heads_kv * core::ceil_div(call.nk, int64_t{tile.rows});
}

}  // namespace

Parts find_parts(const BackwardProblem& problem, const BackwardTile& tile, const Shares& shares,
                 bool in_turns, const Turns& turns, const Device& device) {
  constexpr int64_t MOST_PARTS = 4, FEW_WAVES = 4, MOST_WAVES = 10, MOST_SHARES = 8;
  // Microseconds. In many waves, unmeasured above 64 columns, CTAs do not end together (H200,
  // 2026-12-01).
  constexpr double LEAST_GAIN = 1, LEAST_OF_WAVES = 13;
  const Problem& call = problem.call;
  if (tile.with_parts == nullptr || !is_plain(call) || shares.heads > 1) return {};
  if (shares.rows.shares > 1) {
    if (in_turns || shares.rows.shares > MOST_SHARES) return {};
    return {0, shares.rows.shares, shares.rows.rows};
  }
  const int64_t of_head = core::ceil_div(call.nk, int64_t{tile.rows});
  const int64_t tiles = count_tiles(call, tile);
  const int64_t ctas = int64_t{tile.ctas_per_sm} * device.sm_count;
  const int64_t last = tiles % ctas;
  const bool few_waves = tiles <= FEW_WAVES * ctas;
  const bool more_waves =
      !in_turns && tile.head_dim == 64 && tile.ctas_per_sm == 1 && tiles <= MOST_WAVES * ctas;
  if ((!few_waves && !more_waves) || last == 0) return {};
  const int64_t rounds = core::ceil_div(call.nq, tile.round_rows);
  const double of_round = times_of(tile).round * static_cast<double>(call.heads_q / call.heads_kv);
  Parts parts;
  double most = few_waves ? LEAST_GAIN : LEAST_OF_WAVES;
  for (int64_t number = 2; number <= std::min(ctas / last, MOST_PARTS); ++number) {
    const int64_t of_part = core::ceil_div(rounds, number);
    if (core::ceil_div(rounds, of_part) != number) continue;  // one would be empty
    const double gain =
        of_round * static_cast<double>(rounds - of_part) - cost_of_parts(tile, number);
    if (gain > most)
      parts = {tiles - last, number, of_part * tile.round_rows, 0, gain}, most = gain;
  }
  if (parts.parts == 0) return {};
  if (in_turns && parts.first == 0) {
    // Few tiles have sums of their own, of which two would mean another way to take turns.
    constexpr int64_t FEWEST_SUMS = 3, MOST_SUMS = 8, SUMS_BYTES = int64_t{16} << 20;
    const int64_t bytes =
        core::count_rounds(call, tile.round_rows) * core::sums_bytes_of_round(call, tile);
    parts.sums = std::max(of_head, FEWEST_SUMS);
    if (!tile.reads_many_chains || of_head > MOST_SUMS || parts.sums * bytes > SUMS_BYTES)
      return {};
  } else if (in_turns && (turns.sums == 2 || turns.tiles > 0)) {
    return {};  // a tile tells by where the one before began to which of two sums it adds
  }
  return parts;
}

bool is_faster_in_parts(const BackwardProblem& problem, const BackwardTile& tile,
                        const BackwardTile& wider, const Device& device) {
  constexpr double MARGIN = 0.97;
  const Problem& call = problem.call;
  // With shared heads and turns it is unmeasured.
  if (problem.deterministic || !is_plain(call) || call.heads_q != call.heads_kv ||
      share_out(call, tile, device).all() > 1)
    return false;
  const Parts parts = find_parts(problem, wider, share_out(call, wider, device), false, {}, device);
  if (parts.parts == 0 || parts.first > 0 ||
      count_tiles(call, wider) * parts.parts > device.sm_count)
    return false;
  const TileTimes times = times_of(tile), of_wider = times_of(wider);
  const auto blocks = static_cast<double>(core::ceil_div(2 * call.nq, tile.round_rows));
  const double whole = times.start + times.end + times.round * blocks / 2;
  const double in_parts = of_wider.start + of_wider.end +
                          of_wider.round * static_cast<double>(parts.rows / wider.round_rows) +
                          cost_of_parts(wider, parts.parts);
  return in_parts < MARGIN * whole;
}

bool saves_more_than_parts(const BackwardProblem& problem, const BackwardTile& tile,
                           const Device& device) {
  constexpr double SAVED = 1.4;  // microseconds of each wave (docs/lab/hopper.md)
  const Problem& call = problem.call;
  if (call.heads_q != call.heads_kv) return false;  // unmeasured
  const Shares shares = share_out(call, tile, device);
  if (shares.all() > 1) return false;
  const auto waves =
      static_cast<double>(core::ceil_div(count_tiles(call, tile), int64_t{device.sm_count}));
  return SAVED * waves > find_parts(problem, tile, shares, false, {}, device).gain;
}

void add_parts(LaunchPlan& plan, const BackwardTile& tile, const Parts& parts) {
  using P = BackwardKernelParams;
  constexpr int64_t WARP_ROWS = 16, GRADIENTS = 2;
  Launch* const main = main_launch(plan);
  if (main == nullptr || parts.parts == 0) return;
  const int64_t others = (main->grid[0] - parts.first) * (parts.parts - 1);
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t sums =
      workspace.add(others * GRADIENTS * tile.rows * tile.head_dim * int64_t{sizeof(float)});
  const int64_t done_bytes =
      core::ceil_div(others * (tile.rows / WARP_ROWS) * int64_t{sizeof(int32_t)}, 16) * 16;
  const int64_t done = workspace.add(done_bytes);
  plan.workspace_bytes = workspace.bytes();
  for (Launch* launch : {&plan.launches.front(), main}) {
    add_pointer(*launch, Operand::Workspace, offsetof(P, parts_gmem), sums);
    add_pointer(*launch, Operand::Workspace, offsetof(P, parts_done_gmem), done);
    std::memcpy(launch->params.data() + offsetof(P, parts_done_bytes), &done_bytes,
                sizeof done_bytes);
  }
  main->grid[0] += others;
  main->kernel.replace(main->kernel.rfind(tile.name), std::string::npos, tile.with_parts);
}

}  // namespace archflash::hopper
