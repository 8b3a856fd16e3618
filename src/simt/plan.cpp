// simt: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/planning/plan.h"

#include <algorithm>
#include <climits>
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
#include "common/planning/masks.h"
#include "common/planning/order.h"
#include "common/planning/split_keys.h"
#include "common/planning/tiles.h"
#include "common/problem.h"
#include "simt/config.cuh"
#include "simt/params.h"
#include "simt/tensor_config.cuh"

namespace archflash::simt {

const Description& describe() {
  static const Description description{
      .name = "simt",
      .summary =
          "fp32 attention on CUDA cores, any GPU from compute capability 7.5 on; on 9.0 also in "
          "three products of TF32",
      .home_device = "A100",
      .dtypes = {DType::F32, DType::F16, DType::BF16},
      .head_dims = "multiples of 8 up to 256 (float32: 512), d and dv independent",
      .largest_head_dim = F32D512Small::HEAD_DIM,
      .features = {"causal",
                   "q_offset",
                   "window",
                   "softcap",
                   "sinks",
                   "gqa",
                   "cu_seqlens",
                   "strides",
                   "lse",
                   "out_dtype",
                   "gradients",
                   "attn_mask",
                   "key_ranges",
                   "alibi_slopes",
                   "block_mask",
                   "dropout_p",
                   "kv_cache",
                   "cache_masks",
                   "rotary_interleaved",
                   "attention_chunk",
                   "key_indices"},
      .needs_capability = 75,
      .uses_tensor_cores = false,
      .proved_by_any_gpu = true,
  };
  return description;
}

namespace {

using core::tile;

// Measured on an H200 (NOTES.md); one CTA per SM there stands for the GPUs with 64 and 99 KB of
// shared memory.
constexpr core::Tile F32_TILES[] = {
    tile<F32D32>("d32", {}, "64 rows fit every GPU and suit short sequences"),
    tile<F32D64Large>("d64_large", {.min_ctas_per_sm = 2, .min_tiles_per_sm = 1},
                      "two CTAs per SM: the fastest in every long case"),
    tile<F32D64Medium>(
        "d64_medium", {.min_tiles_per_sm = 1},
        "99 KB: one CTA of 8 warps and 128 rows beats one of 4 warps and 64 rows by a fifth"),
    tile<F32D64Small>("d64_small", {},
                      "64 KB, few CTAs or short sequences: 8 warps share the 64 rows"),
    tile<F32D128Large>("d128_large", {.min_ctas_per_sm = 2, .min_tiles_per_sm = 0.5},
                       "two CTAs per SM from 227 KB on"),
    tile<F32D128Medium>("d128_medium", {.min_tiles_per_sm = 0.5},
                        "99 KB, or two CTAs per SM in 163 KB: 32 keys at a time"),
    tile<F32D128Small>("d128_small", {},
                       "64 KB, few CTAs or short sequences: 32 rows make twice as many"),
    tile<F32D256Large>("d256_large", {.min_tiles_per_sm = 0.5}, "64 rows where 227 KB allow it"),
    tile<F32D256Small>("d256_small", {}, "64 KB, few CTAs or short sequences: 16 rows"),
    tile<F32D512Large>("d512_large", {.min_tiles_per_sm = 0.5}, "32 rows where 227 KB allow it"),
    tile<F32D512Small>("d512_small", {}, "99 KB, few CTAs or short sequences: 16 rows"),
};

constexpr const char* THREE_PRODUCTS =
    "three products of TF32 for one of fp32, where they were measured: faster, and as exact";

// Fewer tiles, and fewer rows, were not measured, or were slower (NOTES.md).
constexpr core::Tile TENSOR_TILES[] = {
    tile<TensorD64>("d64_tensor", {.min_tiles_per_sm = 0.05}, THREE_PRODUCTS),
    tile<TensorD128>("d128_tensor", {.min_tiles_per_sm = 0.4}, THREE_PRODUCTS),
    tile<TensorD256>("d256_tensor", {.min_tiles_per_sm = 0.9}, THREE_PRODUCTS),
};

constexpr const char* ONE_PER_HEAD_DIM = "16-bit inputs: one kernel per head_dim, for every GPU";

constexpr core::Tile HALF_TILES[] = {
    tile<HalfD32>("d32", {}, ONE_PER_HEAD_DIM),
    tile<HalfD64>("d64", {}, ONE_PER_HEAD_DIM),
    tile<HalfD128>("d128", {}, ONE_PER_HEAD_DIM),
    tile<HalfD256>("d256", {}, ONE_PER_HEAD_DIM),
};

constexpr const char* WITH_MASKS =
    "masks as data: blocks of keys that no row sees are skipped; its speed is unmeasured";

constexpr core::Tile MASKED_TILES[] = {
    tile<F32D64Masked>("d64_masked", {}, WITH_MASKS),
    tile<F32D128Masked>("d128_masked", {}, WITH_MASKS),
    tile<F32D256Masked>("d256_masked", {}, WITH_MASKS),
};

constexpr const char* WITH_CACHE = "lengths and page tables are read on the device";

constexpr core::Tile CACHE_TILES[] = {
    tile<F32D64Cache>("d64_cache", {}, WITH_CACHE),
    tile<F32D128Cache>("d128_cache", {}, WITH_CACHE),
    tile<F32D256Cache>("d256_cache", {}, WITH_CACHE),
};

// The kernel on tensor cores for a call without masks as data and without a cache, or null:
// NOTES.md has their speeds and errors, which were measured on 9.0 only.
const core::Tile* tensor_tile(const Problem& problem, const Device& device) {
  if (problem.dtype != DType::F32 || device.capability() != 90) return nullptr;
  // With one CTA of so many rows on each SM the last rows of a causal mask are alone at the end.
  constexpr double CAUSAL_TILES_PER_SM = 1.8;
  for (const core::Tile& tile : TENSOR_TILES) {
    if (!core::takes_head_dims(tile, problem)) continue;
    const bool alone = tile.head_dim == TensorD256::HEAD_DIM && problem.window_right < problem.nk &&
                       core::tiles_of(problem, tile) < CAUSAL_TILES_PER_SM * device.sm_count;
    return core::serves(tile, problem, device) && !alone ? &tile : nullptr;
  }
  return nullptr;
}

// Whether the CTAs that each SM runs second take the tiles in reverse order. Where tiles take
// unequal time and an SM runs two of them, a long one and a short one then share it.
bool second_ones_reversed(const Problem& problem, const Device& device, int64_t resident,
                          int64_t ctas) {
  const bool uneven_tiles = problem.window_right < problem.nk && !problem.varlen;
  const bool two_per_sm = resident >= 2 && ctas > device.sm_count && ctas <= 2 * device.sm_count;
  return uneven_tiles && two_per_sm;
}

// The plan of a call with masks as data, for the kernels of masked_fwd.cuh.
PlanResult plan_masked(const Problem& problem, const Device& device) {
  const auto [tile, reasons] =
      core::choose("simt", std::span<const core::Tile>(MASKED_TILES), problem, device);
  if (tile == nullptr) return reasons;
  MaskedParams params;
  core::init_params(problem, params);
  core::always_transform_scores(problem, params.attention);
  params.masks = core::mask_params(problem);
  params.dropout = core::dropout_params(problem);
  LaunchPlan plan =
      core::one_launch("simt", problem, device, *tile, core::tiles_of(problem, *tile), params);
  plan.tile.heads_per_group = 0;
  Launch& launch = plan.launches[0];
  launch.image = "simt/masked_f32";
  add_pointers(launch, core::mask_pointers(problem, offsetof(MaskedParams, masks)));
  add_pointers(launch, core::dropout_pointers(problem, offsetof(MaskedParams, dropout)));
  return plan;
}

// The plan of a call with a KV cache, for the kernels of cache_fwd.cuh.
PlanResult plan_with_cache(const Problem& problem, const Device& device) {
  const auto choice =
      core::choose_with_splits("simt", std::span<const core::Tile>(CACHE_TILES), problem, device);
  if (const auto* reasons = std::get_if<Reasons>(&choice)) return *reasons;
  const auto& chosen = std::get<core::SplitChoice<core::Tile>>(choice);
  CacheParams params;
  core::init_params(problem, params);
  params.attention.order = core::choose_order(problem, device, chosen.tile);
  params.partials.splits = 1;
  params.packed_heads = core::packed_heads(chosen.tile);
  params.cache = core::kv_cache(problem);
  params.attention_chunk = core::chunk_of(problem);
  params.slopes = core::alibi_slopes(problem);
  params.masks = core::mask_params(problem);
  params.mask_keys = problem.mask_keys;
  if (problem.alibi_slopes) core::always_transform_scores(problem, params.attention);
  const int64_t ctas = core::tiles_of(problem, chosen.tile) * chosen.splits;
  LaunchPlan plan = core::one_launch("simt", problem, device, chosen.tile, ctas, params);
  if (chosen.combines()) {
    core::split_keys(plan, problem, chosen.splits, 0, offsetof(CacheParams, partials),
                     "simt_combine_f32");
    core::combine_shares(plan.launches[1], chosen.splits, false, 0, params.attention.exp2_scale);
  }
  const std::string image = "simt/cache_f32";
  for (Launch& launch : plan.launches) launch.image = image;
  add_pointers(plan.launches[0], core::kv_cache_pointers(problem, offsetof(CacheParams, cache)));
  add_pointers(plan.launches[0], core::mask_pointers(problem, offsetof(CacheParams, masks)));
  if (problem.alibi_slopes) {
    constexpr size_t SLOPES = offsetof(CacheParams, slopes) + offsetof(AlibiSlopes, gmem);
    add_pointer(plan.launches[0], Operand::AlibiSlopes, SLOPES);
  }
  const Reasons reasons = core::add_append(plan, problem, image, "simt_append_f32");
  if (!reasons.empty()) return reasons;
  return plan;
}

constexpr core::Tile GATHER_TILES[] = {
    tile<F32D64Cache>("d64_gather", {}, "listed keys"),
    tile<F32D128Cache>("d128_gather", {}, "listed keys"),
    tile<F32D256Cache>("d256_gather", {}, "listed keys"),
};

// The plan of a call with key_indices, for the kernels of gather_fwd.cuh.
PlanResult plan_lists(const Problem& problem, const Device& device) {
  const auto choice =
      core::choose_for_lists("simt", std::span<const core::Tile>(GATHER_TILES), problem, device);
  if (const auto* reasons = std::get_if<Reasons>(&choice)) return *reasons;
  const auto& chosen = std::get<core::SplitChoice<core::Tile>>(choice);
  CacheParams call;
  core::init_params(problem, call);
  call.partials.splits = 1;
  call.packed_heads = core::packed_heads(chosen.tile);
  call.cache = core::kv_cache(problem);
  const int64_t ctas = core::list_tiles(problem, chosen.tile) * chosen.splits;
  LaunchPlan plan = core::one_launch("simt", problem, device, chosen.tile, ctas, call);
  if (chosen.combines()) {
    core::split_keys(plan, problem, chosen.splits, 0, offsetof(CacheParams, partials),
                     "simt_combine_f32");
    core::combine_shares(plan.launches[1], chosen.splits, false, 0, call.attention.exp2_scale);
    plan.launches[1].image = "simt/cache_f32";
  }
  Launch& launch = plan.launches[0];
  GatherParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);
  std::memcpy(static_cast<void*>(&params.call), launch.params.data(), sizeof params.call);
  params.lists = core::key_lists(problem);
  launch.params = core::bytes(params);
  launch.image = "simt/gather_f32";
  add_pointers(launch, core::kv_cache_pointers(problem, offsetof(CacheParams, cache)));
  add_pointers(launch, core::key_list_pointers(problem, offsetof(GatherParams, lists)));
  const Reasons reasons = core::add_append(plan, problem, "simt/cache_f32", "simt_append_f32");
  if (!reasons.empty()) return reasons;
  return plan;
}

// What is served for fp32 only: `ampere` has masks as data and caches for 16 bits. Keys are split
// only where there is a cache.
Reasons why_not(const Problem& problem) {
  if (problem.dtype == DType::F32) {
    Problem asked = problem;
    if (problem.kv_cache || problem.key_indices > 0) asked.num_splits = 1;
    return core::why_not(asked, describe());
  }
  if (problem.kv_cache) {
    return {std::string("a KV cache with q of dtype ") + dtype_name(problem.dtype) +
            ": simt reads caches of float32 only; convert q and the cache, or leave the "
            "implementation out"};
  }
  if (problem.key_indices > 0) {
    return {std::string("key_indices with ") + dtype_name(problem.dtype) +
            " inputs: simt gathers float32 only; convert q, k and v, or leave the implementation "
            "out"};
  }
  Problem unmasked = problem;
  unmasked.mask = unmasked.key_ranges = 0;
  unmasked.alibi_slopes = unmasked.block_mask = false;
  unmasked.dropout_p = 0;
  Reasons reasons = core::why_not(unmasked, describe());
  for (const auto& [name, given] : core::masks_of(problem)) {
    if (!given) continue;
    reasons.push_back(std::string(name) + " with " + dtype_name(problem.dtype) +
                      " inputs: simt takes masks as data with float32 inputs only; convert q, k "
                      "and v" +
                      core::USE_TORCH);
  }
  if (problem.dropout_p != 0) {
    reasons.push_back(std::string("dropout_p with ") + dtype_name(problem.dtype) +
                      " inputs: simt drops weights of float32 inputs only; convert q, k and v" +
                      core::USE_TORCH);
  }
  return reasons;
}

// What is served for head dimensions up to 256 only.
Reasons why_not_wide(const Problem& problem) {
  Reasons reasons;
  if (std::max(problem.d, problem.dv) <= 256) return reasons;
  const std::string dims = " with head dimensions " + std::to_string(problem.d) + " and " +
                           std::to_string(problem.dv) + ": simt takes ";
  if (problem.dtype != DType::F32) {
    reasons.push_back(std::string(dtype_name(problem.dtype)) + " inputs" + dims +
                      "head dimensions above 256 with float32 inputs only; convert q, k and v" +
                      core::USE_TORCH);
  }
  const auto refuse = [&](const std::string& name, bool given) {
    if (!given) return;
    reasons.push_back(name + dims + name + " with head dimensions up to 256; drop " + name +
                      core::USE_TORCH);
  };
  for (const auto& [name, given] : core::masks_of(problem)) refuse(name, given);
  refuse("dropout_p", problem.dropout_p != 0);
  if (problem.kv_cache) {
    reasons.push_back("a KV cache" + dims +
                      "one of head dimensions up to 256; leave the implementation out");
  }
  refuse("key_indices", problem.key_indices > 0);
  return reasons;
}

}  // namespace

PlanResult plan(const Problem& problem, const Device& device) {
  Reasons refused = why_not(problem);
  if (refused.empty()) refused = why_not_wide(problem);
  if (!refused.empty()) return refused;
  if (problem.key_indices > 0) return plan_lists(problem, device);
  if (problem.kv_cache) return plan_with_cache(problem, device);
  if (takes_masked_kernels(problem)) return plan_masked(problem, device);
  const core::Tile* const tensor = tensor_tile(problem, device);
  std::span<const core::Tile> tiles = HALF_TILES;
  if (problem.dtype == DType::F32) tiles = F32_TILES;
  if (tensor != nullptr) tiles = {tensor, 1};
  const auto [tile, reasons] = core::choose("simt", tiles, problem, device);
  if (tile == nullptr) return reasons;

  Params params;
  core::init_params(problem, params);
  const int64_t ctas = core::tiles_of(problem, *tile);
  const int64_t resident = core::resident_ctas(*tile, device);
  params.snake_from =
      second_ones_reversed(problem, device, resident, ctas) ? device.sm_count : INT32_MAX;
  LaunchPlan plan = core::one_launch("simt", problem, device, *tile, ctas, params);
  plan.tile.heads_per_group = 0;
  if (tensor != nullptr) plan.launches[0].image = "simt/tensor_f32";
  return plan;
}

Notes notes(const LaunchPlan& plan) {
  const TileChoice& tile = plan.tile;
  if (!second_ones_reversed(plan.problem, plan.device, tile.ctas_per_sm, tile.ctas)) return {};
  return {{"order", "last row tiles first, then the first ones first: two per SM balance"}};
}

}  // namespace archflash::simt
