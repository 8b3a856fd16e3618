#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <variant>

#include "common/planning/core_set.h"
#include "common/planning/key_lists.h"
#include "common/planning/kv_cache.h"
#include "common/planning/launch.h"
#include "common/planning/split_keys.h"
#include "common/planning/tiles.h"
#include "hopper/lists/gather_config.cuh"
#include "hopper/plan/plan_parts.h"

namespace archflash::hopper {
namespace {

constexpr const char* ONE = "listed keys, up to 64 rows that share a list";
constexpr const char* TWO = "the same, up to 128: each row that is gathered serves twice as many";
constexpr core::Tile TILES[] = {
    core::tile<D64Gather>("d64_gather", {}, ONE),
    core::tile<D128Gather>("d128_gather", {}, ONE),
    core::tile<D256Gather>("d256_gather", {}, ONE),
};
constexpr core::Tile LARGE_TILES[] = {
    core::tile<D64GatherLarge>("d64_gather_large", {}, TWO),
    core::tile<D128GatherLarge>("d128_gather_large", {}, TWO),
    core::tile<D256GatherLarge>("d256_gather_large", {}, TWO),
};

}  // namespace

PlanResult plan_lists(const Problem& problem, const Device& device) {
  if (core::writes_f32(problem)) {
    return Reasons{std::string("out_dtype float32 with key_indices: hopper writes the type of its "
                               "inputs there; leave out_dtype out") +
                   core::USE_TORCH};
  }
  using Choice = core::SplitChoice<core::Tile>;
  const auto choose = [&](std::span<const core::Tile> tiles) {
    return core::choose_for_lists("hopper", tiles, problem, device);
  };
  auto choice = choose(TILES);
  if (const auto* reasons = std::get_if<Reasons>(&choice)) return *reasons;
  // Twice as many rows a tile, where that leaves fewer tiles.
  const auto large = choose(LARGE_TILES);
  if (const auto* larger = std::get_if<Choice>(&large)) {
    if (core::list_tiles(problem, larger->tile) <
        core::list_tiles(problem, std::get<Choice>(choice).tile))
      choice = *larger;
  }
  const auto& [tile, splits, share_keys] = std::get<Choice>(choice);
  const int64_t shares = core::list_tiles(problem, tile) * splits;
  const int64_t ctas = std::min(shares, core::resident_ctas(tile, device) * device.sm_count);
  // A CTA counts its tiles until the count is behind the last one.
  if (shares + ctas > core::GRID_LIMIT) return core::grid_too_large(shares);

  GatherParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  core::init_params(problem, params.call);
  params.call.partials.splits = 1;
  params.call.packed_heads = core::packed_heads(tile);
  params.call.cache = core::kv_cache(problem);
  params.lists = core::key_lists(problem);
  params.tiles = static_cast<int32_t>(shares);

  const std::string word = core::dtype_word(problem.dtype);
  LaunchPlan plan = core::one_launch("hopper", problem, device, tile, ctas, params.call);
  plan.launches[0].params = core::bytes(params);
  if (splits > 1) {
    constexpr size_t PARTIALS = offsetof(GatherParams, call.partials);
    core::split_keys(plan, problem, splits, share_keys, PARTIALS, "hopper_combine_" + word);
  }
  Launch& launch = plan.launches[0];
  launch.image = "hopper/gather_" + word;
  add_pointers(launch, core::kv_cache_pointers(problem, offsetof(GatherParams, call.cache)));
  add_pointers(launch, core::key_list_pointers(problem, offsetof(GatherParams, lists)));
  const Reasons reasons =
      core::add_append(plan, problem, "hopper/cache_" + word, "hopper_append_" + word);
  if (!reasons.empty()) return reasons;
  return plan;
}

}  // namespace archflash::hopper
