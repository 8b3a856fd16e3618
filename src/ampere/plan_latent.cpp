#include "ampere/plan_latent.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <variant>

#include "ampere/gather_config.cuh"
#include "ampere/mla_config.cuh"
#include "common/planning/core_set.h"
#include "common/planning/key_lists.h"
#include "common/planning/kv_cache.h"
#include "common/planning/launch.h"
#include "common/planning/mma_sync.h"
#include "common/planning/split_keys.h"
#include "common/planning/tiles.h"

namespace archflash::ampere {
namespace {

using core::tile;

constexpr core::Tile MLA_TILES[] = {
    tile<MlaConfig<DType::F16>>("mla", {}, "latent rows are read once for both products"),
};

constexpr const char* GATHERS = "listed keys: each row of K and V is copied by itself";
constexpr core::Tile GATHER_TILES[] = {
    tile<D64Gather>("d64_gather", {}, GATHERS),
    tile<D128Gather>("d128_gather", {}, GATHERS),
    tile<D256Gather>("d256_gather", {}, GATHERS),
};
constexpr core::Tile MLA_GATHER_TILES[] = {
    tile<MlaGatherConfig<DType::F16>>("mla_gather", {}, "listed latent rows, read once each"),
};
constexpr core::Tile MLA_PACKED_TILES[] = {
    tile<MlaGatherConfig<DType::BF16, true>>("mla_packed", {}, "the same in float8 with scales"),
};

}  // namespace

// The plan of a call with qv: that of a call with a cache, whose attention kernel is told of qv too
// and whose combining kernel takes 512 columns. Both are in the image "ampere/mla_<dtype>".
PlanResult plan_with_qv(const Problem& problem, const Device& device) {
  if (problem.alibi_slopes)
    return Reasons{std::string("qv with alibi_slopes: ampere takes one of them") + core::USE_TORCH};
  PlanResult result = mma_sync::plan_with_cache("ampere", MLA_TILES, problem, device);
  auto* plan = std::get_if<LaunchPlan>(&result);
  if (plan == nullptr) return result;
  const std::string word = core::dtype_word(problem.dtype), image = "ampere/mla_" + word;
  for (Launch& launch : plan->launches) {
    if (launch.kernel == "ampere_combine_" + word) {
      launch.kernel += "_mla";
      launch.image = image;
    } else if (launch.kernel == "ampere_attention_fwd_" + word + "_mla") {
      launch.image = image;
      MlaParams params;
      std::memset(static_cast<void*>(&params), 0, sizeof params);
      std::memcpy(&params.call, launch.params.data(), sizeof params.call);
      params.call.cache_dtype = problem.kv_dtype;
      AttentionParams& attention = params.call.attention;  // strides of the cache in bytes
      for (int64_t* stride : {&attention.k_batch, &attention.k_head, &attention.k_row,
                              &attention.v_batch, &attention.v_head, &attention.v_row})
        *stride *= dtype_bytes(problem.kv_dtype);
      params.qv_batch = problem.qv.batch, params.qv_head = problem.qv.head;
      params.qv_row = problem.qv.row;
      launch.params = core::bytes(params);
      add_pointer(launch, Operand::Qv, offsetof(MlaParams, qv_gmem));
    }
  }
  return result;
}

// The plan of a call with key_indices. Its kernels are in the images "ampere/gather_<dtype>",
// "ampere/mla_gather_<dtype>" and "ampere/mla_packed_<dtype>", but for those that combine shares
// and append rows, which serve other calls too.
PlanResult plan_lists(const Problem& problem, const Device& device) {
  const bool latent = problem.qv_align > 0;
  const bool f32_out = core::writes_f32(problem);
  if (f32_out && !latent) {
    return Reasons{std::string("out_dtype float32 with key_indices: ampere writes the type of its "
                               "inputs there; leave out_dtype out") +
                   core::USE_TORCH};
  }
  if (!latent && std::max(problem.d, problem.dv) > 256) {
    return Reasons{"key_indices with head dimensions " + std::to_string(problem.d) + " and " +
                   std::to_string(problem.dv) +
                   ": ampere takes them up to 256, or with qv 64 and 512; split the heads" +
                   core::USE_TORCH};
  }
  const std::span<const core::Tile> tiles = problem.packed_rows != 0
                                                ? std::span<const core::Tile>(MLA_PACKED_TILES)
                                            : latent ? std::span<const core::Tile>(MLA_GATHER_TILES)
                                                     : GATHER_TILES;
  const auto choice = core::choose_for_lists("ampere", tiles, problem, device);
  if (const auto* reasons = std::get_if<Reasons>(&choice)) return *reasons;
  const auto& [tile, splits, share_keys] = std::get<core::SplitChoice<core::Tile>>(choice);
  mma_sync::CacheParams call;
  core::init_params(problem, call);
  call.partials.splits = 1;
  call.packed_heads = core::packed_heads(tile);
  call.cache = core::kv_cache(problem);
  call.cache_dtype = problem.kv_dtype;
  const std::string word = core::dtype_word(problem.dtype);
  const int64_t ctas = core::list_tiles(problem, tile) * splits;
  LaunchPlan plan = core::one_launch("ampere", problem, device, tile, ctas, call);
  if (splits > 1 || f32_out) {  // which the combining kernel of latent rows alone writes
    core::split_keys(plan, problem, splits, 0, offsetof(mma_sync::CacheParams, partials),
                     "ampere_combine_" + word +
                         (f32_out  ? "_mla_f32_out"
                          : latent ? "_mla"
                                   : ""));
    plan.launches[1].image = (latent ? "ampere/mla_" : "ampere/fwd_") + word;
    std::memcpy(static_cast<void*>(&call), plan.launches[0].params.data(), sizeof call);
  }
  Launch& launch = plan.launches[0];
  launch.image = std::string("ampere/") + (latent ? tile.name : "gather") + "_" + word;
  add_pointers(launch, core::kv_cache_pointers(problem, offsetof(mma_sync::CacheParams, cache)));
  if (latent) {
    MlaGatherParams params;
    std::memset(static_cast<void*>(&params), 0, sizeof params);
    AttentionParams& attention = call.attention;  // strides of the cache in bytes
    for (int64_t* stride : {&attention.k_batch, &attention.k_head, &attention.k_row,
                            &attention.v_batch, &attention.v_head, &attention.v_row})
      *stride *= dtype_bytes(problem.kv_dtype);
    params.mla.call = call;
    params.mla.qv_batch = problem.qv.batch, params.mla.qv_head = problem.qv.head;
    params.mla.qv_row = problem.qv.row;
    params.lists = core::key_lists(problem);
    params.packed = static_cast<PackedRows>(problem.packed_rows);
    launch.params = core::bytes(params);
    add_pointer(launch, Operand::Qv, offsetof(MlaParams, qv_gmem));
    add_pointers(launch, core::key_list_pointers(problem, offsetof(MlaGatherParams, lists)));
  } else {
    GatherParams params;
    std::memset(static_cast<void*>(&params), 0, sizeof params);
    params.call = call;
    params.lists = core::key_lists(problem);
    const uint32_t rows = std::bit_ceil(static_cast<uint32_t>(tile.packed_heads)) * tile.block_q;
    params.row_warps = static_cast<int32_t>(std::max(rows / 16, 1u));
    launch.params = core::bytes(params);
    add_pointers(launch, core::key_list_pointers(problem, offsetof(GatherParams, lists)));
  }
  const Reasons reasons =
      core::add_append(plan, problem, "ampere/cache_" + word, "ampere_append_" + word);
  if (!reasons.empty()) return reasons;
  return plan;
}

}  // namespace archflash::ampere
