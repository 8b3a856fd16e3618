#include "common/planning/mma_sync.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <variant>

#include "common/mma_sync/params.h"
#include "common/planning/core_set.h"
#include "common/planning/masks.h"
#include "common/planning/split_keys.h"

namespace archflash::mma_sync {

PlanResult plan_16_bits(const std::string& folder, std::span<const core::Tile> tiles,
                        const Problem& problem, const Device& device) {
  const auto choice = core::choose_with_splits(folder, tiles, problem, device);
  if (const auto* reasons = std::get_if<Reasons>(&choice)) return *reasons;
  const auto& chosen = std::get<core::SplitChoice<core::Tile>>(choice);
  const auto& [tile, splits, share_keys] = chosen;
  FewRowsParams params;
  core::init_params(problem, params);
  params.attention.order = core::choose_order(problem, device, tile);
  const int64_t ctas = core::tiles_of(problem, tile) * splits;
  if (!tile.can_split) {
    ManyRowsParams of_many;
    core::init_params(problem, of_many);
    of_many.attention.order = params.attention.order;
    return core::one_launch(folder, problem, device, tile, ctas, of_many);
  }
  params.partials.splits = 1;
  params.packed_heads = core::packed_heads(tile);
  LaunchPlan plan = core::one_launch(folder, problem, device, tile, ctas, params);
  if (chosen.combines()) {
    core::split_keys(plan, problem, splits, share_keys, offsetof(FewRowsParams, partials),
                     folder + "_combine_" + core::dtype_word(problem.dtype));
  }
  return plan;
}

PlanResult plan_masked(const std::string& folder, std::span<const core::Tile> tiles,
                       const Problem& problem, const Device& device) {
  const auto choice = core::choose_with_splits(folder, tiles, problem, device);
  if (const auto* reasons = std::get_if<Reasons>(&choice)) return *reasons;
  const auto& chosen = std::get<core::SplitChoice<core::Tile>>(choice);
  const auto& [tile, splits, share_keys] = chosen;
  MaskedParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  core::init_params(problem, params.call);
  AttentionParams& attention = params.call.attention;
  core::transform_scores_to_base_2(problem, attention);
  attention.order = core::choose_order(problem, device, tile);
  params.call.partials.splits = 1;
  params.call.packed_heads = core::packed_heads(tile);
  params.masks = core::mask_params(problem);
  params.dropout = core::dropout_params(problem);
  LaunchPlan plan =
      core::one_launch(folder, problem, device, tile, core::tiles_of(problem, tile) * splits,
                       attention.order, core::bytes(params), {});
  const std::string word = core::dtype_word(problem.dtype);
  if (chosen.combines()) {
    constexpr size_t PARTIALS = offsetof(MaskedParams, call) + offsetof(FewRowsParams, partials);
    core::split_keys(plan, problem, splits, share_keys, PARTIALS, folder + "_combine_" + word);
  }
  Launch& launch = plan.launches[0];
  launch.image = folder + "/masked_" + word;
  add_pointers(launch, core::mask_pointers(problem, offsetof(MaskedParams, masks)));
  add_pointers(launch, core::dropout_pointers(problem, offsetof(MaskedParams, dropout)));
  return plan;
}

std::optional<PlanResult> plan_dropout(const std::string& folder, std::span<const core::Tile> tiles,
                                       const Problem& problem, const Device& device) {
  if (problem.num_splits > 1) return std::nullopt;
  const auto takes = [&](const core::Tile& of) { return core::takes_head_dims(of, problem); };
  const auto smallest = std::find_if(tiles.begin(), tiles.end(), takes);
  const auto tile = std::find_if(smallest, tiles.end(), [&](const core::Tile& of) {
    return of.head_dim == smallest->head_dim && of.shared_bytes <= device.shared_per_block &&
           core::serves(of, problem, device);
  });
  if (tile == tiles.end()) return std::nullopt;
  DroppingParams params;
  core::init_params(problem, params);
  if (params.attention.transform_scores) return std::nullopt;
  const int64_t ctas = core::tiles_of(problem, *tile);
  if (ctas > core::GRID_LIMIT) return core::grid_too_large(ctas);
  params.attention.order = core::choose_order(problem, device, *tile);
  params.dropout = core::dropout_params(problem);
  LaunchPlan plan = core::one_launch(folder, problem, device, *tile, ctas, params);
  Launch& launch = plan.launches[0];
  launch.image = folder + "/dropout_" + core::dtype_word(problem.dtype);
  add_pointers(launch, core::dropout_pointers(problem, offsetof(DroppingParams, dropout)));
  return plan;
}

}  // namespace archflash::mma_sync
