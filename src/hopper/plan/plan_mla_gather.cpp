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
#include "common/planning/tensor_maps.h"
#include "common/planning/tiles.h"
#include "hopper/latent/mla_gather_config.cuh"
#include "hopper/plan/cache_maps.h"
#include "hopper/plan/plan_parts.h"

namespace archflash::hopper {
namespace {

using Config = MlaGatherConfig<DType::F16>;
constexpr core::Tile TILES[] = {
    core::tile<Config>("mla_gather", {},
                       "chosen latent rows; two warpgroups share 64 heads of a query"),
};
constexpr core::Tile PACKED_TILES[] = {
    core::tile<MlaPackedConfig<DType::BF16>>(
        "mla_packed", {}, "the same in float8 with scales, converted by the warps that gather"),
};
constexpr core::Tile PACKED_PAIR = core::tile<MlaPackedPairConfig<DType::BF16>>(
    "mla_packed_pair", {}, "the same, converted once for two tiles of a query's heads");
// The tiles of the kernels for calls that transform their scores.
constexpr core::Tile CAPPED = core::tile<MlaGatherConfig<DType::F16, true>>(
    "mla_gather_capped", {}, "chosen latent rows, transformed scores");
constexpr core::Tile PACKED_CAPPED = core::tile<MlaPackedConfig<DType::BF16, true>>(
    "mla_packed_capped", {}, "the same in float8 with scales");
constexpr core::Tile PACKED_PAIR_CAPPED = core::tile<MlaPackedPairConfig<DType::BF16, true>>(
    "mla_packed_pair_capped", {}, "the same, converted once for two tiles of a query's heads");

// The tile of another kernel, of the size of a chosen one.
core::Tile resized(core::Tile tile, const core::Tile& chosen) {
  tile.packed_heads = chosen.packed_heads, tile.block_q = chosen.block_q;
  return tile;
}

// The map of qv or the output: (columns, heads of a tile, tiles of heads, queries, sequences).
TensorMapSpec map_of_heads(const Problem& problem, const core::Tile& tile, Operand operand,
                           size_t offset, int box_rows) {
  using QTile = Config::QTile;
  const Strides& strides = operand == Operand::Qv ? problem.qv : problem.out;
  return make_cache_map(
      problem, operand, offset, QTile::SWIZZLE, {QTile::SLAB, box_rows, 1, 1, 1},
      {problem.dv, tile.packed_heads, problem.heads_q / tile.packed_heads, problem.nq,
       problem.batch},
      {strides.head, strides.head * tile.packed_heads, strides.row, strides.batch});
}

// What these maps cannot describe.
Reasons refusals(const Problem& problem) {
  Reasons reasons;
  core::add_stride_reasons("qv", problem.qv, problem.nq, problem.dtype, "hopper", reasons);
  core::add_stride_reasons("out", problem.out, problem.nq, problem.out_dtype, "hopper", reasons);
  const bool repeats_heads = problem.qv.head == 0 && problem.heads_q > 1;
  if (repeats_heads || (problem.qv.batch == 0 && problem.batch > 1)) {
    reasons.push_back(std::string("qv repeats one ") + (repeats_heads ? "head" : "sequence") +
                      " (a stride of 0): hopper copies its heads by tensor maps, which have no " +
                      "such stride; make qv contiguous" + core::USE_TORCH);
  }
  return reasons;
}

}  // namespace

PlanResult plan_latent_lists(const Problem& problem, const Device& device) {
  const Reasons why_not = refusals(problem);
  if (!why_not.empty()) return why_not;
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
  if (pairs) tile = resized(PACKED_PAIR, tile);
  // Tiles are counted of every list, whole.
  queries.nq = core::ceil_div(problem.nq, problem.list_rows) * problem.list_rows;
  const int64_t ctas = core::list_tiles(queries, tile) * splits;
  if (ctas > core::GRID_LIMIT) return core::grid_too_large(ctas);

  MlaPackedParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  core::init_params(problem, params.call);
  if (params.call.attention.transform_scores) {
    tile = resized(pairs ? PACKED_PAIR_CAPPED : packed ? PACKED_CAPPED : CAPPED, tile);
  }
  params.call.partials.splits = 1;
  params.call.packed_heads = core::packed_heads(tile);
  params.call.cache = core::kv_cache(problem);
  params.lists = core::key_lists(problem);
  params.packed = static_cast<PackedRows>(problem.packed_rows);
  params.grid = {.shares = mla_count(splits),
                 .head_tiles = mla_count(heads_per_kv / tile.packed_heads),
                 .list_rows = mla_count(problem.list_rows),
                 .lists = mla_count(core::ceil_div(problem.nq, problem.list_rows)),
                 .heads_kv = mla_count(problem.heads_kv),
                 .block_rows = mla_count(params.call.cache.block_rows)};

  const std::string word = core::dtype_word(problem.dtype);
  LaunchPlan plan = core::one_launch("hopper", problem, device, tile, ctas, params.call);
  plan.launches[0].params =
      packed ? core::bytes(params) : core::bytes(static_cast<const MlaGatherParams&>(params));
  const bool f32_out = core::writes_f32(problem);  // what the combining kernel alone writes
  const bool combines = splits > 1 || f32_out;
  if (combines) {
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
  launch.tensor_maps = {
      map_of_heads(problem, tile, Operand::Qv, offsetof(MlaGatherParams, qv_map), Config::BLOCK_Q)};
  if (!combines) {
    launch.tensor_maps.push_back(map_of_heads(
        problem, tile, Operand::Out, offsetof(MlaGatherParams, out_map), Config::WARP_ROWS));
  }
  const Reasons reasons =
      core::add_append(plan, problem, "hopper/cache_" + word, "hopper_append_" + word);
  if (!reasons.empty()) return reasons;
  return plan;
}

}  // namespace archflash::hopper
