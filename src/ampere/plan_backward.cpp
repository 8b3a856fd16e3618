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
#include "ampere/list_bwd_config.cuh"
#include "common/planning/backward.h"
#include "common/planning/backward_shares.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/list_backward.h"
#include "common/planning/masks.h"
#include "common/planning/tiles.h"

namespace archflash::ampere {

const Description& describe();

namespace {

using core::backward_tile;

// A tile for GPUs where an SM has room for two of its CTAs.
constexpr core::BackwardTile two_ctas(core::BackwardTile tile) {
  tile.min_ctas_per_sm = 2;
  return tile;
}

// docs/lab/ampere.md has their speeds. The last sets of each head dimension fit 99 KB.
constexpr core::BackwardTile TILES[] = {
    backward_tile<D32>("d32"),
    backward_tile<D64Wide>("d64_wide", 2.5),
    backward_tile<D64Medium>("d64_medium", 2.5),
    backward_tile<D64>("d64"),
    backward_tile<D96>("d96", 6),
    backward_tile<D128Wide>("d128_wide", 4.5),
    backward_tile<D128Medium>("d128_medium", 4.5),
    backward_tile<D128>("d128"),
    two_ctas(backward_tile<D192V128>("d192_128")),
    backward_tile<D192V128Medium>("d192_128_medium"),
    backward_tile<D192V128>("d192_128"),
    two_ctas(backward_tile<D160>("d160")),
    backward_tile<D192Wide>("d192_wide"),
    backward_tile<D192Medium>("d192_medium"),
    backward_tile<D160>("d160"),
    backward_tile<D256Wide>("d256_wide"),
    backward_tile<D256Medium>("d256_medium"),
    backward_tile<D256Values>("d256_values"),
    backward_tile<D256Keys>("d256_keys"),
    backward_tile<D256Queries>("d256_queries"),
};

// Adding to dK and dV bounds those of few rows (docs/lab/ampere.md).
constexpr core::ListTile LIST_TILES[] = {
    core::list_tile<D64Lists>("d64_lists", 280),
    core::list_tile<D64FewLists>("d64_few_lists", 215),
    core::list_tile<D128LargeLists>("d128_large_lists", 780),
    core::list_tile<D128Lists>("d128_lists", 485),
    core::list_tile<D128FewLists>("d128_few_lists", 410),
    core::list_tile<D192LargeLists>("d192_large_lists", 1170),
    core::list_tile<D192Lists>("d192_lists", 645),
    core::list_tile<D192FewLists>("d192_few_lists", 545),
    core::list_tile<D256Lists>("d256_lists", 1000),
    core::list_tile<D256FewLists>("d256_few_lists", 806),
};

constexpr size_t OF_D64 = 3, BEHIND_D192_128_MEDIUM = 10;
static_assert(std::string_view(TILES[OF_D64].name) == "d64");
static_assert(std::string_view(TILES[BEHIND_D192_128_MEDIUM].name) == "d192_128");

constexpr core::BackwardTile MASKED_TILES[] = {
    backward_tile<D64Masked>("d64_masked"),
    backward_tile<D128Masked>("d128_masked"),
    backward_tile<D256ValuesMasked>("d256_values_masked"),
    backward_tile<D256KeysMasked>("d256_keys_masked"),
    backward_tile<D256QueriesMasked>("d256_queries_masked"),
};

// With dropout and without masks as data, a softcap and the like. MASKED_TILES take what these do
// not, and head dimensions above 128 where an SM has less than 227 KB.
constexpr core::BackwardTile DROPOUT_TILES[] = {
    backward_tile<BackwardD64Dropout>("d64_dropout"),
    backward_tile<BackwardD128WideDropout>("d128_wide_dropout", 8),
    backward_tile<BackwardD128Dropout>("d128_dropout"),
    backward_tile<BackwardD256WideDropout>("d256_wide_dropout"),
};

// The kernels that need more shared memory than 8.x and 12.x have.
const std::string WIDE_IMAGE = "ampere/bwd_wide_";

// Whether `d64`, two CTAs on an SM that take 32 queries at a time, is faster than `d64_wide` with
// 128. It is where it computes an eighth fewer rows, and its CTAs come in full rounds or in many.
// Elsewhere a model says so of calls whose tiles fill several rounds: a CTA starts beside another
// one, which is worth most where rows are few. Measured on an H200 (docs/lab/ampere.md).
bool small_blocks_pay(const Problem& call, const Device& device) {
  constexpr int64_t CTAS_PER_SM = 2, MANY_ROUNDS = 5, FEWEST_ROUNDS_OF_WIDE = 3;
  constexpr double START = 5, WIDE_BLOCK = 4.9, SMALL_BLOCK = 2.65, MARGIN = 1.05;  // us
  using Wide = D64Wide;
  using Small = D64;
  static_assert(Wide::ROWS == Small::ROWS);
  if (call.varlen || std::max(call.d, call.dv) <= D32::HEAD_DIM) return false;
  const int64_t wide_blocks = core::ceil_div(call.nq, Wide::BLOCK);
  const int64_t small_blocks = core::ceil_div(call.nq, Small::BLOCK);
  const bool has_fewer_rows = 8 * wide_blocks * Wide::BLOCK >= 9 * small_blocks * Small::BLOCK;
  if (!core::equal_tiles(call)) return has_fewer_rows;
  const int64_t tiles = call.batch * call.heads_kv * core::ceil_div(call.nk, Small::ROWS);
  const int64_t workers = CTAS_PER_SM * device.sm_count, rounds = core::ceil_div(tiles, workers);
  if (has_fewer_rows && (rounds > MANY_ROUNDS || 10 * tiles >= 9 * rounds * workers)) return true;
  if (tiles < FEWEST_ROUNDS_OF_WIDE * device.sm_count || call.heads_q != call.heads_kv)
    return false;
  const auto time = [](int64_t rounds, double of_block, int64_t blocks) {
    return static_cast<double>(rounds) * (START + of_block * static_cast<double>(blocks));
  };
  const int64_t rounds_of_wide = core::ceil_div(tiles, int64_t{device.sm_count});
  return MARGIN * time(rounds, SMALL_BLOCK, small_blocks) <=
         time(rounds_of_wide, WIDE_BLOCK, wide_blocks);
}

// Whether `d64`, two CTAs on an SM, is faster than `d64_medium`, one on an SM, where that has no
// room for `d64_wide`. The two took 1.92 times as long as the one, or 1.7 where tiles take unequal
// time (H200, 163 KB of shared memory; docs/lab/ampere.md).
bool two_small_ctas_pay(const Problem& call, const Device& device) {
  constexpr int64_t CTAS_PER_SM = 2;
  using Medium = D64Medium;
  using Small = D64;
  static_assert(Medium::ROWS == Small::ROWS);
  if (device.shared_per_block >= D64Wide::SHARED_BYTES) return false;
  if (std::max(call.d, call.dv) <= D32::HEAD_DIM) return false;
  const int64_t shares = core::share_heads(call, TILES[OF_D64], device);
  const int64_t tiles = call.varlen
                            ? call.heads_kv * (core::ceil_div(call.nk, Small::ROWS) + call.batch)
                            : call.batch * call.heads_kv * core::ceil_div(call.nk, Small::ROWS);
  const auto time = [&](int64_t ctas_per_sm, int64_t block) {
    const int64_t rounds = core::ceil_div(tiles * shares, ctas_per_sm * device.sm_count);
    return static_cast<double>(rounds * core::ceil_div(call.nq, block) * block);
  };
  const double both = core::equal_tiles(call) ? 1.92 : 1.7;
  return both * time(CTAS_PER_SM, Small::BLOCK) <= time(1, Medium::BLOCK);
}

// Whether `d192_128` is faster than `d192_128_medium`, which has twice as many keys: a CTA that has
// an SM to itself takes 0.72 of the time (as above).
bool half_tiles_pay(const Problem& call, const Device& device) {
  constexpr double OF_HALF = 0.72;
  using Medium = D192V128Medium;
  using Half = D192V128;
  const bool takes = call.d <= Half::HEAD_DIM && call.dv <= Half::HEAD_DIM_V;
  if (!takes || call.d <= D128::HEAD_DIM || call.varlen) return false;
  const auto rounds = [&](int64_t rows) {
    const int64_t tiles = call.batch * call.heads_kv * core::ceil_div(call.nk, rows);
    return static_cast<double>(core::ceil_div(tiles, int64_t{device.sm_count}));
  };
  return OF_HALF * rounds(Half::ROWS) <= rounds(Medium::ROWS);
}

// Launches start early where their image has PTX for 9.0: these kernels wait for what comes before
// them. Main kernels that need terms read K and V before, and would not without a launch of these.
void start_early(LaunchPlan& plan, const Problem& call) {
  const std::string prefix =
      std::string("ampere_attention_bwd_") + core::dtype_word(call.dtype) + "_";
  for (size_t i = 0; i < plan.launches.size(); ++i) {
    Launch& launch = plan.launches[i];
    const bool is_fused = std::ranges::any_of(TILES, [&](const core::BackwardTile& of) {
      return of.dq_block > 0 && launch.kernel == prefix + of.name;
    });
    launch.uses_pdl = (is_fused && i > 0) || launch.kernel.starts_with("ampere_backward_rows_") ||
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
    if (launch.kernel.starts_with("ampere_backward_shares_")) continue;  // it has no BackwardParams
    std::memcpy(static_cast<void*>(&params.call), launch.params.data(), sizeof params.call);
    params.call.scale *= params.dropout.scale;  // without which the main kernel leaves dS
    launch.params = core::bytes(params.call);
    if (!launch.kernel.ends_with("_dropout")) continue;
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
  if (call.key_indices > 0)
    return core::plan_list_backward(describe(), LIST_TILES, problem, device);
  if (call.dropout_p != 0 && !is_masked(call)) {
    if (auto plan = plan_dropout(problem, device)) return *std::move(plan);
  }
  const core::MaskedBackwardTiles masked{.tiles = MASKED_TILES, .base_2 = true};
  std::span<const core::BackwardTile> tiles = TILES;
  if (half_tiles_pay(call, device)) {
    tiles = tiles.subspan(BEHIND_D192_128_MEDIUM);
  } else if (small_blocks_pay(call, device) || two_small_ctas_pay(call, device)) {
    tiles = tiles.subspan(OF_D64);
  }
  PlanResult result = core::plan_backward(describe(), tiles, problem, device, masked, true);
  if (auto* plan = std::get_if<LaunchPlan>(&result)) {
    start_early(*plan, call);
    for (Launch& launch : plan->launches) {
      for (const std::string end : {"wide", "medium", "d96"}) {
        if (launch.kernel.ends_with("_" + end))
          launch.image = "ampere/bwd_" + end + "_" + core::dtype_word(call.dtype);
      }
    }
  }
  return result;
}

}  // namespace archflash::ampere
