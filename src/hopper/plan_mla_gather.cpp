#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <variant>

#include "common/planning/core_set.h"
#include "common/planning/key_lists.h"
#include "common/planning/kv_cache.h"
#include "common/planning/launch.h"
#include "common/planning/split_keys.h"
#include "common/planning/tiles.h"
#include "hopper/mla_gather_config.cuh"
#include "hopper/plan_parts.h"

namespace archflash::hopper {
namespace {

constexpr core::Tile TILES[] = {
    core::tile<MlaGatherConfig<DType::F16>>(
        "mla_gather", {}, "chosen latent rows; two warpgroups share 64 heads of a query"),
};
constexpr core::Tile PACKED_TILES[] = {
    core::tile<MlaPackedConfig<DType::BF16>>(
        "mla_packed", {}, "the same in float8 with scales, converted by the warps that gather"),
};
constexpr core::Tile PACKED_PAIR = core::tile<MlaPackedPairConfig<DType::BF16>>(
    "mla_packed_pair", {}, "the same, converted once for two tiles of a query's heads");

}  // namespace

PlanResult plan_latent_lists(const Problem& problem, const Device& device) {
  // A tile has heads of one query, also where several share a list.
  Problem queries = problem;
  queries.list_rows = 1;
  const bool packed = problem.packed_rows != 0;
  const auto choice =
      core::choose_for_lists("hopper", packed ? PACKED_TILES : TILES, queries, device);
  if (const auto* reasons = std::get_if<Reasons>(&choice)) return *reasons;
  auto [tile, splits, share_keys] = std::get<core::SplitChoice<core::Tile>>(choice);
  const int64_t heads_per_kv = problem.heads_q / std::max<int64_t>(problem.heads_kv, 1);
  const bool pairs = packed && heads_per_kv / tile.packed_heads % 2 == 0;
  if (pairs) {
    const int packed_heads = tile.packed_heads, block_q = tile.block_q;
    tile = PACKED_PAIR;
    tile.packed_heads = packed_heads, tile.block_q = block_q;
  }
  // As device::find_list_work() counts them: of every list, whole.
  queries.nq = core::ceil_div(problem.nq, problem.list_rows) * problem.list_rows;
  const int64_t ctas = core::list_tiles(queries, tile) * splits;
  if (ctas > core::GRID_LIMIT) return core::grid_too_large(ctas);

  MlaPackedParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  core::init_params(problem, params.call);
  params.call.partials.splits = 1;
  params.call.packed_heads = core::packed_heads(tile);
  params.call.cache = core::kv_cache(problem);
  params.qv_batch = problem.qv.batch, params.qv_head = problem.qv.head;
  params.qv_row = problem.qv.row;
  params.lists = core::key_lists(problem);
  params.packed = static_cast<PackedRows>(problem.packed_rows);

  const std::string word = core::dtype_word(problem.dtype);
  LaunchPlan plan = core::one_launch("hopper", problem, device, tile, ctas, params.call);
  plan.launches[0].params =
      packed ? core::bytes(params) : core::bytes(static_cast<const MlaGatherParams&>(params));
  const bool f32_out = core::writes_f32(problem);  // what the combining kernel alone writes
  if (splits > 1 || f32_out) {
    constexpr size_t PARTIALS = offsetof(MlaGatherParams, call.partials);
    core::split_keys(plan, problem, splits, share_keys, PARTIALS,
                     "hopper_combine_" + word + (f32_out ? "_mla_f32_out" : "_mla"));
    plan.launches[1].image = "hopper/mla_" + word;
  }
  Launch& launch = plan.launches[0];
  launch.image = (packed ? "hopper/mla_packed_" : "hopper/mla_gather_") + word;
  if (pairs) launch.cluster = {2, 1, 1};  // the tiles of a list follow one another
  add_pointers(launch, core::kv_cache_pointers(problem, offsetof(MlaGatherParams, call.cache)));
  add_pointers(launch, core::key_list_pointers(problem, offsetof(MlaGatherParams, lists)));
  add_pointers(launch,
               {{Operand::Qv, static_cast<int32_t>(offsetof(MlaGatherParams, qv_gmem)), 0}});
  const Reasons reasons =
      core::add_append(plan, problem, "hopper/cache_" + word, "hopper_append_" + word);
  if (!reasons.empty()) return reasons;
  return plan;
}

}  // namespace archflash::hopper
