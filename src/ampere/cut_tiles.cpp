#include "ampere/cut_tiles.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "common/planning/backward_shares.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/order.h"
#include "common/planning/workspace.h"

namespace archflash::ampere {
namespace {

// What the parts of tiles take in all, in the query rows that a tile passes meanwhile: they are
// written in fp32, and read and added up. Measured on an H200 (docs/lab/ampere.md).
constexpr int64_t parts_time(const core::BackwardTile& tile) {
  return std::min(3 * tile.head_dim / 2, 96);
}
constexpr int64_t MOST_PARTS = mma_sync::CutTiles::MOST_PARTS;
constexpr int64_t MOST_ROUNDS_OF_PARTS = 2;  // which keeps what they leave small

// Where all tiles take the same time: the `last` ones, which are left for the last round of CTAs.
Runs cut_last_tiles(const Problem& call, const core::BackwardTile& tile, int64_t tiles,
                    int64_t workers) {
  constexpr int64_t START = 256;  // what a CTA's start and end take, in query rows
  const int64_t last = tiles % workers;
  if (last == 0) return {};
  const int64_t blocks = core::ceil_div(call.nq, tile.dq_block);
  const int64_t block_rows = tile.dq_block * (call.heads_q / call.heads_kv);
  const auto time_of = [&](int64_t parts) {
    const int64_t rows = START + core::ceil_div(blocks, parts) * block_rows;
    return core::ceil_div(last * parts, workers) * rows + (parts > 1 ? parts_time(tile) : 0);
  };
  int64_t best = 1;
  const int64_t most = std::min({blocks, MOST_PARTS, MOST_ROUNDS_OF_PARTS * workers / last});
  for (int64_t parts = 2; parts <= most; ++parts)
    if (time_of(parts) < time_of(best)) best = parts;
  if (best == 1) return {};
  Runs runs;
  if (tiles > last) runs.push_back({static_cast<int32_t>(tiles - last), 1});
  runs.push_back({static_cast<int32_t>(last), static_cast<int32_t>(best)});
  return runs;
}

// The time of a causal call whose tiles are not cut, in query rows, if `shares` CTAs share out the
// query heads of each.
double uncut_time(const Problem& call, const core::BackwardTile& tile, int64_t workers,
                  int64_t shares) {
  const core::RowShares whole{1, core::ceil_div(call.nq, tile.dq_block) * tile.dq_block};
  std::vector<core::Run> runs = core::runs_of_keys(call, tile.rows, tile.dq_block, whole,
                                                   call.heads_q / call.heads_kv / shares);
  for (core::Run& run : runs) run.count = call.batch * call.heads_kv * shares;
  const double behind = shares > 1 ? core::time_of_shares(call, tile.head_dim, shares) : 0;
  return core::queue_time(runs, workers) + behind;
}

// Under a causal mask: each tile has so many parts that none has more than a certain number of
// blocks. The tiles of all heads come from the longest to the shortest.
Runs cut_causal_tiles(const Problem& call, const core::BackwardTile& tile, int64_t workers,
                      double uncut) {
  const int64_t heads = call.batch * call.heads_kv, group = call.heads_q / call.heads_kv;
  const core::RowShares whole{1, core::ceil_div(call.nq, tile.dq_block) * tile.dq_block};
  const std::vector<core::Run> times =
      core::runs_of_keys(call, tile.rows, tile.dq_block, whole, group);
  const double start = core::runs_of_keys(call, tile.rows, tile.dq_block, {1, 0}, 1)[0].time;
  const auto blocks_of = [&](const core::Run& run) {
    return static_cast<int64_t>(run.time - start) / (tile.dq_block * group);
  };
  Runs best;
  double best_time = uncut;
  const int64_t longest = blocks_of(times.front());
  for (int64_t most = 2; most <= std::min(longest, MOST_PARTS); ++most) {
    const int64_t quota = core::ceil_div(longest, most);
    Runs runs;
    std::vector<core::Run> ctas;
    int64_t count = 0;
    for (const core::Run& run : times) {
      const int64_t blocks = blocks_of(run);
      const int64_t parts = std::max<int64_t>(core::ceil_div(blocks, quota), 1);
      const int64_t rows = core::ceil_div(blocks, parts) * tile.dq_block * group;
      ctas.push_back({start + static_cast<double>(rows), heads * parts});
      count += heads * parts;
      if (runs.empty() || runs.back().parts != parts)
        runs.push_back({0, static_cast<int32_t>(parts)});
      runs.back().tiles += static_cast<int32_t>(heads);
    }
    if (count > MOST_ROUNDS_OF_PARTS * workers) break;
    const double time = core::queue_time(ctas, workers) + parts_time(tile);
    if (time < best_time) best = std::move(runs), best_time = time;
  }
  return best;
}

}  // namespace

bool shrinking_tiles(const Problem& call) { return !call.varlen && core::is_triangle(call); }

Runs cut_tiles(const BackwardProblem& problem, const core::BackwardTile& tile, const Launch& main,
               const Device& device) {
  constexpr int64_t MOST_ROUNDS = 4;
  const Problem& call = problem.call;
  const int64_t tiles = main.grid[0], workers = core::workers_of(tile, device);
  // Blocks of 32 queries of 64 columns leave parts too little (docs/lab/ampere.md), but for heads
  // of one tile.
  const bool small = tile.dq_block < 64 && tile.head_dim <= 64 && !tile.whole_heads;
  if (tiles >= MOST_ROUNDS * device.sm_count || small) return {};
  if (core::equal_tiles(call)) return cut_last_tiles(call, tile, tiles, workers);
  BackwardParams params;
  std::memcpy(static_cast<void*>(&params), main.params.data(), sizeof params);
  const bool one_group = params.attention.order.heads_per_group >= call.batch * call.heads_kv;
  if (!shrinking_tiles(call) || problem.deterministic || !one_group) return {};
  const int64_t shares = core::share_heads(call, tile, device);
  return cut_causal_tiles(call, tile, workers, uncut_time(call, tile, workers, shares));
}

void share_out(LaunchPlan& plan, const BackwardProblem& problem, const core::BackwardTile& tile,
               const Device& device, const Runs& runs, mma_sync::CuttingBackwardParams& params,
               Launch& main, Launch& last) {
  const Problem& call = problem.call;
  const int64_t heads = call.batch * call.heads_kv, tiles = main.grid[0];
  // In turns, parts that are short wait for the tiles of the round before at each of their blocks:
  // the last one of a head that runs then is late by a block for each other one. Measured on an
  // H200 (docs/lab/ampere.md).
  const int64_t late =
      std::min(core::ceil_div(core::workers_of(tile, device), heads), tiles / heads) - 1;
  const int64_t blocks = core::ceil_div(call.nq, tile.dq_block) * (call.heads_q / call.heads_kv);
  const bool waits = !core::equal_tiles(call) || blocks < 2 * late * runs.back().parts;
  if (!problem.deterministic && waits) {
    for (Launch& launch : plan.launches)
      std::erase_if(launch.pointers, [](const PointerSlot& of) { return of.offset == TURNS; });
  }
  std::ranges::copy(runs, params.cut.runs);
  params.cut.rows = tile.rows, params.cut.columns = call.d + call.dv;
  int64_t ctas = 0, cut = 0, parts = 0;
  for (const mma_sync::TileRun& run : runs) {
    ctas += int64_t{run.tiles} * run.parts;
    if (run.parts > 1) cut += run.tiles, parts += int64_t{run.tiles} * run.parts;
  }
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t part_floats = int64_t{params.cut.rows} * params.cut.columns;
  const int64_t start = workspace.add(parts * part_floats * int64_t{sizeof(float)});
  plan.workspace_bytes = workspace.bytes();
  main.grid[0] = ctas;
  last.grid[0] += core::ceil_div(cut * part_floats, 8 * BACKWARD_DQ_THREADS);
  last.kernel += "_parts", last.image = PLAIN_IMAGE + core::dtype_word(call.dtype);
  last.params = core::bytes(params);  // it finds tiles as the main launch does
  constexpr size_t PARTS =
      offsetof(mma_sync::CuttingBackwardParams, cut) + offsetof(mma_sync::CutTiles, parts_gmem);
  for (Launch* launch : {&main, &last}) add_pointer(*launch, Operand::Workspace, PARTS, start);
}

}  // namespace archflash::ampere
