#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <variant>

#include "common/planning/core_set.h"
#include "common/planning/kv_cache.h"
#include "common/planning/launch.h"
#include "common/planning/tensor_maps.h"
#include "common/planning/tiles.h"
#include "hopper/latent/mla_config.cuh"
#include "hopper/plan/cache_maps.h"
#include "hopper/plan/plan_parts.h"

namespace archflash::hopper {
namespace {

using Config = MlaConfig<DType::F16>;
constexpr core::Tile MLA_TILES[] = {
    core::tile<Config>("mla", {}, "two warpgroups share 64 rows, each has half of V's columns"),
};

// The map of K or V of a cache: (columns of a slab, rows of a block, slabs, heads, blocks).
TensorMapSpec cache_map(const Problem& problem, Operand operand, size_t offset, int box_rows,
                        int box_slabs) {
  using RowTile = Config::RowTile;
  const bool of_v = operand == Operand::V;
  const Strides& strides = of_v ? problem.v : problem.k;
  const int64_t rows = problem.page_size > 0 ? problem.page_size : problem.nk;
  return make_cache_map(problem, operand, offset, RowTile::SWIZZLE,
                        {RowTile::SLAB, box_rows, box_slabs, 1, 1},
                        {RowTile::SLAB, rows, (of_v ? problem.dv : problem.d) / RowTile::SLAB,
                         problem.heads_kv, problem.cache_batch},
                        {strides.row, RowTile::SLAB, strides.head, strides.batch});
}

Reasons refusals(const Problem& problem) {
  Reasons reasons;
  core::add_tma_reasons(problem, "hopper", false, reasons);
  const int64_t page = problem.page_size;
  if (page > 0 && page % Config::BLOCK_K != 0 &&
      (Config::BLOCK_K % page != 0 || page < MLA_FEWEST_BOX_ROWS)) {
    reasons.push_back("latent rows in pages of " + std::to_string(page) +
                      ": hopper copies pages of 16, 32 and multiples of 64 rows; choose another "
                      "page size" +
                      core::USE_TORCH);
  }
  refuse_cache(problem, "latent rows", reasons);
  return reasons;
}

}  // namespace

bool has_latent_cache(const Problem& problem) { return problem.kv_cache && problem.qv_align > 0; }

PlanResult plan_latent_cache(const Problem& problem, const Device& device) {
  const Reasons reasons = refusals(problem);
  if (!reasons.empty()) return reasons;
  PlanResult result = mma_sync::plan_with_cache("hopper", MLA_TILES, problem, device);
  auto* plan = std::get_if<LaunchPlan>(&result);
  if (plan == nullptr) return result;
  const std::string word = core::dtype_word(problem.dtype);
  for (Launch& launch : plan->launches) {
    const bool appends = launch.kernel.starts_with("hopper_append_");
    launch.image = (appends ? "hopper/cache_" : "hopper/mla_") + word;
    if (launch.kernel == "hopper_combine_" + word) launch.kernel += "_mla";
    if (launch.kernel != "hopper_attention_fwd_" + word + "_mla") continue;
    MlaParams params;
    std::memset(static_cast<void*>(&params), 0, sizeof params);
    std::memcpy(&params.call, launch.params.data(), sizeof params.call);
    params.qv_batch = problem.qv.batch, params.qv_head = problem.qv.head;
    params.qv_row = problem.qv.row;
    const int64_t page = problem.page_size;
    params.box_rows =
        static_cast<int32_t>(page > 0 ? std::min<int64_t>(page, Config::BLOCK_K) : Config::BLOCK_K);
    // The slabs of a box follow one another in shared memory, where each has BLOCK_K rows.
    params.box_slabs = params.box_rows == Config::BLOCK_K ? Config::HALF_SLABS : 1;
    launch.params = core::bytes(params);
    add_pointer(launch, Operand::Qv, offsetof(MlaParams, qv_gmem));
    if (problem.nk > 0) {  // an empty cache is never read
      launch.tensor_maps = {
          cache_map(problem, Operand::K, offsetof(MlaParams, k_map), params.box_rows, 1),
          cache_map(problem, Operand::V, offsetof(MlaParams, v_map), params.box_rows,
                    params.box_slabs)};
    }
  }
  return result;
}

}  // namespace archflash::hopper
