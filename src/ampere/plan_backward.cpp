// ampere: BackwardProblem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "ampere/backward_config.cuh"
#include "common/planning/backward.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/masks.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"

namespace archflash::ampere {

const Description& describe();

namespace {

using core::backward_tile;

// NOTES.md has their speeds. The last sets of each head dimension fit 99 KB.
constexpr core::BackwardTile TILES[] = {
    backward_tile<D32<DType::F16>>("d32"),
    backward_tile<D64Wide<DType::F16>>("d64_wide", 2.5),
    backward_tile<D64<DType::F16>>("d64"),
    backward_tile<D96<DType::F16>>("d96", 6),
    backward_tile<D128Wide<DType::F16>>("d128_wide", 4.5),
    backward_tile<D128<DType::F16>>("d128"),
    backward_tile<D192Keys<DType::F16>>("d192_keys"),
    backward_tile<D192Queries<DType::F16>>("d192_queries"),
    backward_tile<D192Wide<DType::F16>>("d192_wide"),
    backward_tile<D160<DType::F16>>("d160"),
    backward_tile<D256Wide<DType::F16>>("d256_wide"),
    backward_tile<D256Values<DType::F16>>("d256_values"),
    backward_tile<D256Keys<DType::F16>>("d256_keys"),
    backward_tile<D256Queries<DType::F16>>("d256_queries"),
};

constexpr size_t BEHIND_D64_WIDE = 2;
static_assert(std::string_view(TILES[BEHIND_D64_WIDE].name) == "d64");

constexpr core::BackwardTile MASKED_TILES[] = {
    backward_tile<D64Masked<DType::F16>>("d64_masked"),
    backward_tile<D128Masked<DType::F16>>("d128_masked"),
    backward_tile<D256ValuesMasked<DType::F16>>("d256_values_masked"),
    backward_tile<D256KeysMasked<DType::F16>>("d256_keys_masked"),
    backward_tile<D256QueriesMasked<DType::F16>>("d256_queries_masked"),
};

// With dropout and without masks as data, a softcap and the like. MASKED_TILES take what these do
// not, and head dimensions above 128 where an SM has less than 227 KB.
constexpr core::BackwardTile DROPOUT_TILES[] = {
    backward_tile<BackwardD64Dropout<DType::F16>>("d64_dropout"),
    backward_tile<BackwardD128WideDropout<DType::F16>>("d128_wide_dropout", 8),
    backward_tile<BackwardD128Dropout<DType::F16>>("d128_dropout"),
    backward_tile<BackwardD256WideDropout<DType::F16>>("d256_wide_dropout"),
};

// The kernels that need more shared memory than 8.x and 12.x have.
const std::string WIDE_IMAGE = "ampere/bwd_wide_";

// Whether `d64`, two CTAs on an SM that take 32 queries at a time, is faster than `d64_wide` with
// 128: where it computes an eighth fewer rows, and its CTAs come in full rounds or in many.
// Measured on an H200 (docs/lab/ampere.md).
bool small_blocks_pay(const Problem& call, const Device& device) {
  constexpr int64_t CTAS_PER_SM = 2, MANY_ROUNDS = 5;
  using Wide = D64Wide<DType::F16>;
  using Small = D64<DType::F16>;
  static_assert(Wide::ROWS == Small::ROWS);
  if (call.varlen || std::max(call.d, call.dv) <= D32<DType::F16>::HEAD_DIM) return false;
  const int64_t wide_rows = core::ceil_div(call.nq, Wide::BLOCK) * Wide::BLOCK;
  const int64_t small_rows = core::ceil_div(call.nq, Small::BLOCK) * Small::BLOCK;
  if (8 * wide_rows < 9 * small_rows) return false;
  if (!core::equal_tiles(call)) return true;
  const int64_t tiles = call.batch * call.heads_kv * core::ceil_div(call.nk, Small::ROWS);
  const int64_t workers = CTAS_PER_SM * device.sm_count, rounds = core::ceil_div(tiles, workers);
  return rounds > MANY_ROUNDS || 10 * tiles >= 9 * rounds * workers;
}

// The kernels that can cut tiles (bwd_cut.cu), for GPUs from 9.0 on that have their shared memory.
constexpr std::string_view CUTTING[] = {"d32",       "d64_wide",  "d96",
                                        "d128_wide", "d192_wide", "d256_wide"};

// How many CTAs share out each of the `last` tiles that are left for the last round of CTAs; 1: one
// has all of it. Times are in query rows that a tile passes meanwhile.
int64_t parts_of_last_tiles(const Problem& call, const core::BackwardTile& tile, int64_t last,
                            int64_t workers) {
  // What a CTA's start and end take, and what parts take in all: they are written in fp32, and read
  // and added up. Measured on an H200 (docs/lab/ampere.md).
  constexpr int64_t START = 256, PARTS = 128, MOST_PARTS = 16;
  constexpr int64_t MOST_ROUNDS = 2;  // of parts, which keeps what they leave small
  const int64_t blocks = core::ceil_div(call.nq, tile.dq_block);
  const int64_t block_rows = tile.dq_block * (call.heads_q / call.heads_kv);
  const auto time_of = [&](int64_t parts) {
    const int64_t rows = START + core::ceil_div(blocks, parts) * block_rows;
    return core::ceil_div(last * parts, workers) * rows + (parts > 1 ? PARTS : 0);
  };
  int64_t best = 1;
  const int64_t most = std::min({blocks, MOST_PARTS, MOST_ROUNDS * workers / last});
  for (int64_t parts = 2; parts <= most; ++parts)
    if (time_of(parts) < time_of(best)) best = parts;
  return best;
}

// Cuts the tiles of the last round of a plan's CTAs where that is faster. Only where all tiles take
// the same time, and their rounds are so few that CTAs still end together.
void cut_last_round(LaunchPlan& plan, const BackwardProblem& problem, const Device& device) {
  const Problem& call = problem.call;
  using Params = mma_sync::CuttingBackwardParams;
  constexpr int64_t MOST_ROUNDS = 4, MOST_CTAS = 2;  // on an SM: ptxas is told to allow no more
  const bool built = device.major == 9 || device.major == 10;
  if (!built || !core::equal_tiles(call)) return;
  const std::string word = core::dtype_word(call.dtype);
  const auto launch_of = [&](const std::string& start) {
    return std::ranges::find_if(plan.launches,
                                [&](const Launch& of) { return of.kernel.starts_with(start); });
  };
  const auto main = launch_of("ampere_attention_bwd_");
  const auto last = launch_of("ampere_backward_dq_"), none = plan.launches.end();
  if (main == none || last == none || launch_of("ampere_backward_shares_") != none) return;
  const auto name = std::ranges::find_if(
      CUTTING, [&](std::string_view of) { return main->kernel.ends_with("_" + std::string(of)); });
  if (name == std::end(CUTTING)) return;
  const core::BackwardTile& tile =
      *std::ranges::find_if(TILES, [&](const core::BackwardTile& of) { return *name == of.name; });
  const int64_t workers =
      device.sm_count * std::clamp<int64_t>(device.shared_per_sm / tile.shared_bytes, 1, MOST_CTAS);
  const int64_t tiles = main->grid[0], cut = tiles % workers;
  if (cut == 0 || tiles >= MOST_ROUNDS * device.sm_count) return;
  const int64_t parts = parts_of_last_tiles(call, tile, cut, workers);
  if (parts == 1) return;

  // In turns, parts that are short wait for the tiles of the round before at each of their blocks:
  // the last one of a head that runs then is late by a block for each other one. Measured on an
  // H200 (docs/lab/ampere.md).
  const int64_t heads = call.batch * call.heads_kv;
  const int64_t late = std::min(core::ceil_div(workers, heads), tiles / heads) - 1;
  const int64_t blocks = core::ceil_div(call.nq, tile.dq_block) * (call.heads_q / call.heads_kv);
  if (!problem.deterministic && blocks < 2 * late * parts) {
    constexpr int TURNS = offsetof(BackwardParams, dq_sums) + offsetof(DqSums, turns_gmem);
    for (Launch& launch : plan.launches)
      std::erase_if(launch.pointers, [](const PointerSlot& of) { return of.offset == TURNS; });
  }
  Params params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params.call), main->params.data(), sizeof params.call);
  params.cut.whole = static_cast<int32_t>(tiles - cut);
  params.cut.tiles = static_cast<int32_t>(cut), params.cut.parts = static_cast<int32_t>(parts);
  params.cut.rows = tile.rows, params.cut.columns = call.d + call.dv;
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t part_floats = int64_t{params.cut.rows} * params.cut.columns;
  const int64_t start = workspace.add(cut * parts * part_floats * int64_t{sizeof(float)});
  plan.workspace_bytes = workspace.bytes();
  main->grid[0] += cut * (parts - 1);
  last->grid[0] += core::ceil_div(cut * part_floats, 8 * BACKWARD_DQ_THREADS);
  for (const auto launch : {main, last}) {
    launch->kernel += "_cut";
    launch->image = "ampere/bwd_cut_" + word;
    launch->params = core::bytes(params);  // the last launch finds tiles as the main one does
    add_pointer(*launch, Operand::Workspace,
                offsetof(Params, cut) + offsetof(mma_sync::CutTiles, parts_gmem), start);
  }
}

// Launches start early where their image has PTX for 9.0: these kernels wait for what comes before
// them. A main kernel without one of rows before it would not.
void start_early(LaunchPlan& plan, const Problem& call) {
  const std::string prefix =
      std::string("ampere_attention_bwd_") + core::dtype_word(call.dtype) + "_";
  for (size_t i = 0; i < plan.launches.size(); ++i) {
    Launch& launch = plan.launches[i];
    const bool is_main =
        i > 0 && std::ranges::any_of(TILES, [&](const core::BackwardTile& of) {
          return of.dq_block > 0 && launch.kernel.starts_with(prefix + of.name) &&
                 (launch.kernel == prefix + of.name || launch.kernel.ends_with("_cut"));
        });
    launch.uses_pdl = is_main || launch.kernel.starts_with("ampere_backward_rows_") ||
                      launch.kernel.starts_with("ampere_backward_dq_");
  }
}

// The plan of a call with dropout for DROPOUT_TILES: that of the call without it, whose main kernel
// is told what is dropped. Nothing where they do not take it.
std::optional<LaunchPlan> plan_dropout(const BackwardProblem& problem, const Device& device) {
  BackwardProblem undropped = problem;
  undropped.call.dropout_p = 0;
  PlanResult result = core::plan_backward(describe(), DROPOUT_TILES, undropped, device, {}, true);
  auto* plan = std::get_if<LaunchPlan>(&result);
  if (plan == nullptr) return std::nullopt;
  mma_sync::DroppingBackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  params.dropout = core::dropout_params(problem.call);
  params.dropped_heads = core::dropped_heads(problem);
  constexpr int DROPOUT = offsetof(mma_sync::DroppingBackwardParams, dropout);
  for (Launch& launch : plan->launches) {
    if (!launch.kernel.ends_with("_dropout")) continue;
    std::memcpy(static_cast<void*>(&params.call), launch.params.data(), sizeof params.call);
    if (params.call.attention.transform_scores) return std::nullopt;
    launch.params = core::bytes(params);
    launch.image = (launch.kernel.ends_with("_wide_dropout") ? WIDE_IMAGE : "ampere/bwd_dropout_") +
                   core::dtype_word(problem.call.dtype);
    add_pointers(launch, core::dropout_pointers(problem.call, DROPOUT));
  }
  return std::move(*plan);
}

}  // namespace

PlanResult plan_backward(const BackwardProblem& problem, const Device& device) {
  const Problem& call = problem.call;
  if (call.dropout_p != 0 && !is_masked(call)) {
    if (auto plan = plan_dropout(problem, device)) return *std::move(plan);
  }
  const core::MaskedBackwardTiles masked{.tiles = MASKED_TILES, .base_2 = true};
  std::span<const core::BackwardTile> tiles = TILES;
  if (small_blocks_pay(call, device)) tiles = tiles.subspan(BEHIND_D64_WIDE);
  PlanResult result = core::plan_backward(describe(), tiles, problem, device, masked, true);
  if (auto* plan = std::get_if<LaunchPlan>(&result)) {
    cut_last_round(*plan, problem, device);
    start_early(*plan, call);
    for (Launch& launch : plan->launches) {
      if (launch.kernel.ends_with("_wide")) {
        launch.image = WIDE_IMAGE + core::dtype_word(call.dtype);
      } else if (launch.kernel.ends_with("_d96")) {
        launch.image = "ampere/bwd_d96_" + std::string(core::dtype_word(call.dtype));
      }
    }
  }
  return result;
}

}  // namespace archflash::ampere
