// hopper: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/planning/plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/masks.h"
#include "common/planning/split_keys.h"
#include "common/planning/tensor_maps.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"
#include "common/problem.h"
#include "hopper/params.h"
#include "hopper/plan/plan_parts.h"
#include "hopper/plan/plan_tiles.h"

namespace archflash::hopper {

const Description& describe() {
  static const Description description{
      .name = "hopper",
      .summary =
          "fp8 (e4m3), fp16 and bf16 attention by TMA and wgmma in warpgroups of two roles, for "
          "H100, H200 and GH200 (9.0)",
      .home_device = "H200",
      .dtypes = {DType::F16, DType::BF16, DType::E4M3},
      .head_dims = core::HEAD_DIMS_WITH_FP8,
      .features = {"causal",      "q_offset",   "window",           "softcap",
                   "sinks",       "gqa",        "cu_seqlens",       "strides",
                   "lse",         "num_splits", "out_dtype",        "descales",
                   "gradients",   "qv",         "attention_chunk",  "rotary_interleaved",
                   "attn_mask",   "key_ranges", "alibi_slopes",     "block_mask",
                   "key_indices", "dropout_p",  "kv_cache_prefill", "fp8_cache_prefill",
                   "packed_rows"},
      .needs_capability = 90,  // wgmma
      .only_forced_on_majors = {9},
      .masks_faster_on = 90,
      // 1.3 to 1.9 times as fast as ampere, whose kernels were measured on an H200 and those of
      // hopper on an H100 (docs/masks.md).
      .dropout_faster_on = 90,
      .dropout_rows = 128,
      .dropout_head_dim = 64,
      .fp8_sums_of_13_bits_on = {90},
  };
  return description;
}

namespace {

// --- what it refuses ---

std::string refuse_with_dropout(const std::string& given) {
  return "dropout_p with " + given + ": hopper takes either alone; leave the implementation out" +
         core::USE_TORCH;
}

void refuse_dropout(const Problem& problem, Reasons& reasons) {
  const auto add = [&](const std::string& given) { reasons.push_back(refuse_with_dropout(given)); };
  if (is_fp8(problem.dtype)) add(std::string(dtype_name(problem.dtype)) + " inputs");
  if (std::max(problem.d, problem.dv) > 128) add("head dimensions above 128");
  if (is_masked(problem)) add("masks as data");
  if (problem.num_splits > 1) add("num_splits " + std::to_string(problem.num_splits));
}

void refuse_f32_outputs(const Problem& problem, Reasons& reasons) {
  const auto add = [&](const std::string& given) {
    reasons.push_back("out_dtype float32 with " + given +
                      ": hopper takes either alone; leave the implementation out" +
                      core::USE_TORCH);
  };
  if (std::max(problem.d, problem.dv) > 128) add("head dimensions above 128");
  if (is_masked(problem)) add("masks as data");
}

// Why the kernels of attention_fwd.cuh and of masks as data cannot serve a call. `given`: the call
// as it was made (plan_cache.h).
void refuse(const Problem& problem, const Problem& given, Reasons& reasons) {
  core::add_tma_reasons(problem, "hopper", true, reasons);
  if (problem.kv_cache) refuse_cached_call(problem, given, reasons);
  if (problem.dropout_p != 0) refuse_dropout(problem, reasons);
  if (core::writes_f32(problem)) refuse_f32_outputs(problem, reasons);
  if (is_fp8(problem.dtype)) refuse_fp8(problem, reasons);
}

// --- the launch ---

// Turns the launch of `plan` into that of a kernel with dropout.
void add_dropout(LaunchPlan& plan, const Problem& problem) {
  Launch& launch = plan.launches[0];
  auto params = extend_params<DroppingParams>(launch);
  params.dropout = core::dropout_params(problem);
  launch.params = core::bytes(params);
  launch.image = std::string("hopper/dropout_") + core::dtype_word(problem.dtype);
  add_pointers(launch, core::dropout_pointers(problem, offsetof(DroppingParams, dropout)));
}

// Turns the launch of `plan` into that of a kernel that writes its outputs by TMA.
void add_out_map(LaunchPlan& plan, const Problem& problem, const KernelTile& tile) {
  Launch& launch = plan.launches[0];
  launch.params = core::bytes(extend_params<StoringParams>(launch));
  launch.tensor_maps.push_back(core::tensor_map(
      problem, Operand::Out, static_cast<int>(offsetof(StoringParams, out_map)), tile.out_box));
}

// The row tiles of a head, of all packed sequences.
int64_t tiles_of_head(const Problem& problem, const KernelTile& tile) {
  return core::tiles_of(problem, tile) / (problem.heads_q / tile.packed_heads);
}

// Whether the CTAs of a kernel may lie unevenly, because that takes less time than an early start
// saves: equal ones, no more than SMs or with few keys. 31 such calls took 0.91 of the time in a
// graph and 0.83 one behind the other, two of 256 CTAs with 512 keys 1.03 and 1.09, 0.98 and 1.01
// (H200, 2026-12-01).
bool is_soon_done(const LaunchPlan& plan, const Problem& problem, const Device& device) {
  constexpr int64_t FEW_KEYS = 256;
  return core::equal_tiles(problem) && plan.tile.splits == 1 &&
         (plan.tile.ctas <= device.sm_count || problem.nk <= FEW_KEYS);
}

// The plan of a call without a latent cache, with a tile and a split that were chosen for it.
PlanResult plan_with_tile(const Problem& problem, const Problem& given, const Device& device,
                          const core::SplitChoice<KernelTile>& choice) {
  const auto& [tile, splits, share_keys] = choice;
  const int64_t v_slices = std::max<int64_t>(core::ceil_div(problem.dv, tile.v_columns_of_cta), 1);
  const bool one_tile_each = has_one_tile_each(problem, tile);
  const int64_t row_tiles = one_tile_each ? problem.batch * (problem.heads_q / tile.packed_heads)
                                          : core::tiles_of(problem, tile);
  const int64_t tiles = row_tiles * splits * v_slices;
  const bool fp8 = is_fp8(problem.dtype);
  const bool transposed_before = fp8 && !transposes_v(problem, tile);
  const int64_t largest = std::max(tiles, transposed_before ? transpose_ctas(problem) : 0);
  if (largest > core::GRID_LIMIT) return core::grid_too_large(largest);

  Params params;
  core::init_params(problem, params);
  if (problem.dropout_p != 0 && params.attention.transform_scores)
    return Reasons{refuse_with_dropout("a softcap, or a scale of 0 or less or near it")};
  params.attention.order.heads_per_group = heads_per_group(problem, device, tile);
  params.tiles = params.whole_tiles = static_cast<int32_t>(tiles);
  params.partials.splits = 1;
  if (tile.can_split) params.packed_heads = core::packed_heads(tile);
  if (tile.packs) params.groups = group_heads(tile.packed_heads, tile.q_box.rows, groups_of(tile));
  params.v_slices = static_cast<int32_t>(v_slices);
  if (transposed_before) params.v_columns = static_cast<int32_t>(v_columns(problem));
  // A CTA that goes on to the next tile loads its keys while the last one is computed and written.
  // Where several share an SM they do that for one another, but those of short sequences have
  // little else to do, and with masks as data the search for the first block of a tile comes on top
  // of it.
  const int64_t resident = core::resident_ctas(tile, device);
  const bool masked = is_masked(problem) && !problem.kv_cache;
  const bool stays = resident == 1 || tile.cuts_tiles || (masked && splits == 1);
  const int64_t ctas = stays ? std::min(tiles, resident * device.sm_count) : tiles;
  CutTiles cut{};
  if (stays && splits == 1 && tile.cuts_tiles)
    cut = cut_last_round(problem, device, tile, HeadModel(problem, tile), tiles, ctas);
  if (cut.rows > 0) {
    const int64_t parts = (tiles - cut.whole) * core::ceil_div(tile.block_q, cut.rows);
    params.tiles = static_cast<int32_t>(cut.whole + parts);
    params.whole_tiles = static_cast<int32_t>(cut.whole);
    params.part_rows = static_cast<int32_t>(cut.rows);
  }
  if (one_tile_each) params.part_rows = ONE_TILE_EACH;
  KernelTile loaded = tile;
  if (fp8 && !transposed_before) loaded.v_box = tile.raw_v_box;
  LaunchPlan plan = core::one_launch("hopper", problem, device, loaded, ctas, params);
  plan.tile.v_slices = v_slices;
  plan.tile.row_step = tile.row_step;
  plan.tile.tiles = row_tiles, plan.tile.one_tile_each = one_tile_each;
  plan.tile.whole_tiles = cut.whole, plan.tile.part_rows = cut.rows;
  if (splits > 1) {
    core::split_keys(plan, problem, splits, share_keys, offsetof(Params, partials),
                     std::string("hopper_combine_") + core::dtype_word(problem.dtype));
    plan.launches[1].uses_pdl = true;
  }
  // The combining kernel is in the image of the kernels without masks, which the plan names first.
  if (tile.image != nullptr)
    plan.launches[0].image =
        std::string("hopper/") + tile.image + "_" + core::dtype_word(problem.dtype);
  if (masked && add_masks(plan, problem, device, tile)) return plan;
  core::Workspace workspace;
  // Kernels that wait for what comes before them may start early.
  const bool may_start_early = !fp8 && !masked && !problem.kv_cache;
  const bool two_launches = transposed_before && problem.nk > 0;
  int64_t counter = 0, listed = 0;
  if (splits == 1 && stays && counts_tiles(plan, problem, tile)) {
    constexpr int64_t BYTES = sizeof(*params.taken_gmem);
    plan.tile.counts_tiles = true;
    if (may_start_early && lists_tiles(problem, tile)) listed = tiles_of_head(problem, tile);
    counter = workspace.add(listed > 0 ? PackedTiles::bytes(listed) : BYTES);
    // Before calls that start early a kernel clears it; the one that transposes V does, too.
    if (!may_start_early && !two_launches) plan.zeroed_bytes = BYTES;
    add_pointer(plan.launches[0], Operand::Workspace, offsetof(Params, taken_gmem), counter);
  }
  if (two_launches) transpose_v(plan, problem, tile, workspace);
  if (problem.dropout_p != 0) add_dropout(plan, problem);
  if (tile.out_box.columns != 0) add_out_map(plan, problem, tile);
  if (may_start_early) {
    plan.launches[0].uses_pdl = fills_places(plan, device) || is_soon_done(plan, problem, device);
    if (listed > 0) {
      TileList few{};
      if (const FewRows others = few_rows_of(problem, device, tile); others.rows > 0) {
        const PlanResult of_few = plan_with_tile(problem, given, device, {others.tile});
        if (const auto* reasons = std::get_if<Reasons>(&of_few)) return *reasons;
        plan.launches.push_back(std::get<LaunchPlan>(of_few).launches.back());
        few = {.tiles = tiles_of_head(problem, others.tile),
               .tile_rows = others.tile.block_q,
               .rows = others.rows};
        few.start = workspace.add(PackedTiles::bytes(few.tiles));
      }
      list_tiles(plan, problem, {counter, listed, tile.block_q}, few);
    } else if (plan.tile.counts_tiles) {
      clear_counter(plan, problem, counter);
    }
  }
  if (splits == 1) plan.workspace_bytes = workspace.bytes();
  if (problem.kv_cache) {
    const Reasons reasons = read_cache(plan, problem, given, device, tile);
    if (!reasons.empty()) return reasons;
  }
  return plan;
}

}  // namespace

void clear_counter(LaunchPlan& plan, const Problem& problem, int64_t counter) {
  const std::string word = core::dtype_word(problem.dtype);
  Launch first;
  first.kernel = "hopper_clear_counter_" + word;
  first.image = "hopper/fwd_" + word;
  first.uses_pdl = true;
  first.params = core::bytes(CounterParams{});
  add_pointer(first, Operand::Workspace, offsetof(CounterParams, taken_gmem), counter);
  plan.launches.insert(plan.launches.begin(), std::move(first));
}

bool fills_places(const LaunchPlan& plan, const Device& device) {
  const int64_t resident = plan.tile.ctas_per_sm;
  return resident == 1 || plan.tile.ctas >= resident * device.sm_count;
}

PlanResult plan(const Problem& given, const Device& device) {
  Reasons why_not = core::why_not(given, describe());
  const Problem problem = as_kernels_read_it(given);
  if (has_latent_cache(problem)) {
    if (is_masked(problem)) {
      why_not.push_back(
          std::string("masks as data with a latent cache: hopper takes them without a "
                      "cache only; drop them") +
          core::USE_TORCH);
    }
    if (!why_not.empty()) return why_not;
    return problem.key_indices > 0 ? plan_latent_lists(problem, device)
                                   : plan_latent_cache(problem, device);
  }
  if (problem.key_indices > 0)
    return why_not.empty() ? plan_lists(problem, device) : PlanResult(why_not);
  refuse(problem, given, why_not);
  if (!why_not.empty()) return why_not;
  const auto choice = choose_tile(problem, device);
  if (const auto* reasons = std::get_if<Reasons>(&choice)) return *reasons;
  const auto& chosen = std::get<core::SplitChoice<KernelTile>>(choice);
  if (chosen.tile.mixed) return plan_mixed(problem, device, chosen.tile);
  return plan_with_tile(problem, given, device, chosen);
}

Notes notes(const LaunchPlan& plan) {
  const KernelTile* tile = core::taken(tiles_for(as_kernels_read_it(plan.problem)), plan);
  if (tile == nullptr) return {};  // none, or that of plan_mla.cpp
  const auto str = [](int x) { return std::to_string(x); };
  Notes lines = {
      {"warps", (tile->streams > 0 ? str(tile->streams) + " times " : "") + str(tile->warps) +
                    " of " + str(tile->rows_per_warp) + " rows, 1 producer" +
                    (tile->in_turns ? "; warpgroups multiply in turns" : "")},
      {"registers", tile->consumer_registers == 0
                        ? "the same for all warps"
                        : str(tile->consumer_registers) + " for each consumer thread, " +
                              str(tile->producer_registers) +
                              " for each of the producer's warpgroup (setmaxnreg)"},
      {"stages", str(tile->q_stages) + " of Q, " + str(tile->k_stages) + " of K and " +
                     (tile->v_stages == tile->k_stages ? "of" : str(tile->v_stages) + " of") +
                     " V, " + str(tile->barriers) + " barriers"},
  };
  const auto few = std::ranges::find_if(plan.launches, [&](const Launch& launch) {
    const bool own = launch.kernel.ends_with(std::string("_") + tile->name);
    const bool is_second = launch.kernel.ends_with("_short") && !own;
    return is_second || launch.kernel.ends_with("_decode") || launch.kernel.ends_with("_cache_fp8");
  });
  if (few != plan.launches.end()) {
    lines.emplace_back("few rows",
                       "sequences of few rows have a launch of their own, " + few->kernel);
  }
  if (tile->mixed) {
    lines.emplace_back("few rows",
                       "sequences of few rows have tiles of all heads that share a head of K; a "
                       "kernel before finds the tiles, and shares out long caches");
  }
  note_converted_cache(plan.problem, lines);
  return lines;
}

}  // namespace archflash::hopper
