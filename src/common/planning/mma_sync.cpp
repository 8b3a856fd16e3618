#include "common/planning/mma_sync.h"

#include <cstddef>
#include <variant>

#include "common/mma_sync/params.h"
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
  if (!tile.can_split)
    return core::one_launch(folder, problem, device, tile, ctas, params.attention);
  params.partials.splits = 1;
  params.packed_heads = core::packed_heads(tile);
  LaunchPlan plan = core::one_launch(folder, problem, device, tile, ctas, params);
  if (chosen.combines()) {
    core::split_keys(plan, problem, splits, share_keys, offsetof(FewRowsParams, partials),
                     folder + "_combine_" + core::dtype_word(problem.dtype));
  }
  return plan;
}

}  // namespace archflash::mma_sync
