// blackwell_consumer: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/planning/plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <variant>

#include "blackwell_consumer/config.cuh"
#include "blackwell_consumer/params.h"
#include "blackwell_consumer/plan_nvfp4.h"
#include "blackwell_consumer/table_config.cuh"
#include "blackwell_consumer/table_params.h"
#include "common/approximate.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/masks.h"
#include "common/planning/order.h"
#include "common/planning/split_keys.h"
#include "common/planning/tensor_maps.h"
#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::blackwell_consumer {

const Description& describe() {
  static const Description description{
      .name = "blackwell_consumer",
      .summary =
          "fp8 (e4m3), fp16 and bf16 attention by TMA and mma.sync in warps of two roles, for RTX "
          "50 and GB10 (12.x)",
      .home_device = "RTX 5090",
      .dtypes = {DType::F16, DType::BF16, DType::E4M3},
      .head_dims = core::HEAD_DIMS_WITH_FP8,
      .features = {"causal", "q_offset", "window", "softcap", "sinks", "gqa", "cu_seqlens",
                   "strides", "lse", "num_splits", "out_dtype", "batch_invariant", "descales",
                   "block_scales", "block_mask", "nvfp4"},
      .needs_capability = 90,  // TMA, mbarrier
      .only_forced_on_majors = {9},
      .proved_by_any_gpu = true,
  };
  return description;
}

namespace {

struct ConsumerTile : core::Tile {
  int barriers;
  Registers registers;
  int consumer_registers;  // of a thread, with Registers::Roles
};

template <class C>
constexpr ConsumerTile tile(const char* name, core::ServesFrom serves, const char* reason) {
  core::Tile common = core::tile<C>(name, serves, reason);
  common.q_box = core::box<typename C::QTile>(C::QK_PACK);
  common.k_box = core::box<typename C::KTile>(C::QK_PACK);
  common.v_box = core::box<typename C::VTile>(C::V_PACK);
  return {common, C::BARRIERS, C::REGISTERS, C::CONSUMER_REGISTERS};
}

// Measured on an H200 (NOTES.md).
constexpr ConsumerTile TILES[] = {
    tile<D64Short>("d64_short", {.max_keys = D64Short::BLOCK_K}, "few keys: all of them at a time"),
    tile<D64Large>("d64_large", {.min_tiles_per_sm = 0.75, .min_uneven_tiles_per_sm = 2},
                   "one CTA per SM: 8 warps of 32 rows share K and V"),
    tile<D64Medium>("d64_medium", {.min_tiles_per_sm = 4}, "fewer tiles: 64 rows balance better"),
    tile<D64Small>("d64_small", {}, "few tiles: 64 rows with 128 keys at a time"),
    tile<D64Few>("d64_few", {}, "few query rows: keys split over CTAs, or heads packed"),
    tile<D96Large>("d96_large", {.min_tiles_per_sm = 1, .min_uneven_tiles_per_sm = 2},
                   "8 warps of 32 rows share K and V"),
    tile<D96Few>("d96_few", {}, "few tiles: 64 rows make four times as many"),
    tile<D128Large>("d128_large", {.min_tiles_per_sm = 1, .min_uneven_tiles_per_sm = 2},
                    "8 warps of 32 rows share K and V"),
    tile<D128Medium>("d128_medium", {.min_tiles_per_sm = 0.5},
                     "fewer tiles: 128 rows make twice as many"),
    tile<D128Few>("d128_few", {}, "few tiles: 64 rows make four times as many"),
    tile<D192Large>("d192_large", {.min_tiles_per_sm = 0.5}, "8 warps of 16 rows share K and V"),
    tile<D192Few>("d192_few", {}, "few tiles: 64 rows make twice as many"),
    tile<D256Pair>("d256_pair", {.min_ctas_per_sm = 2},
                   "two CTAs per SM with 64 keys where 227 KB are there"),
    tile<D256Large>("d256_large", {.min_tiles_per_sm = 0.5},
                    "one CTA per SM: 8 warps of 16 rows share K and V"),
    tile<D256Few>("d256_few", {}, "few tiles: 64 rows make twice as many"),
};

// Chosen by analogy: no GPU with 8-bit mma.sync and TMA was measured (NOTES.md).
constexpr ConsumerTile FP8_TILES[] = {
    tile<Fp8D64Pair<DType::E4M3>>(
        "d64_pair", {.min_tiles_per_sm = 1.5, .min_uneven_tiles_per_sm = 4},
        "two CTAs per SM with 4 warps of 32 rows; its speed is unmeasured on 12.x"),
    tile<Fp8D64Few<DType::E4M3>>(
        "d64_few", {}, "few tiles: 64 rows make twice as many; its speed is unmeasured on 12.x"),
    tile<Fp8D128Large<DType::E4M3>>(
        "d128_large", {.min_tiles_per_sm = 0.5},
        "8 warps of 16 rows share K and V; its speed is unmeasured on 12.x"),
    tile<Fp8D128Few<DType::E4M3>>(
        "d128_few", {}, "few tiles: 64 rows make twice as many; its speed is unmeasured on 12.x"),
    tile<Fp8D192<DType::E4M3>>("d192", {}, "4 warps of 16 rows; its speed is unmeasured on 12.x"),
    tile<Fp8D256<DType::E4M3>>("d256", {}, "8 warps of 16 rows; its speed is unmeasured on 12.x"),
};

constexpr ConsumerTile BLOCK_SCALED_TILES[] = {
    tile<MxD64<DType::E4M3>>("mx_d64", {}, "4 warps of 32 rows; its speed is unmeasured on 12.x"),
    tile<MxD128<DType::E4M3>>("mx_d128", {}, "8 warps of 16 rows; its speed is unmeasured on 12.x"),
    tile<MxD256<DType::E4M3>>("mx_d256", {}, "8 warps of 16 rows; its speed is unmeasured on 12.x"),
};

// For block_mask. Their speed is unmeasured on 12.x.
constexpr const char* TABLE =
    "a table of blocks: two rows of blocks share the blocks of keys that either sees; its speed is "
    "unmeasured on 12.x";
constexpr ConsumerTile TABLE_TILES[] = {
    tile<D64Table>("d64_table", {}, TABLE),
    tile<D128Table>("d128_table", {}, TABLE),
};

std::span<const ConsumerTile> table_of(const Problem& problem) {
  if (has_block_scales(problem)) return BLOCK_SCALED_TILES;
  if (is_fp8(problem.dtype)) return FP8_TILES;
  if (problem.block_mask) return TABLE_TILES;
  return TILES;
}

void refuse_table(const Problem& problem, Reasons& reasons) {
  const auto add = [&](const std::string& given) {
    reasons.push_back("block_mask with " + given +
                      ": blackwell_consumer takes it with float16 and bfloat16 inputs of head "
                      "dimensions up to 128; leave the implementation out" +
                      core::USE_TORCH);
  };
  if (is_fp8(problem.dtype)) add(std::string(dtype_name(problem.dtype)) + " inputs");
  if (problem.approximate != 0) add("approximate='nvfp4'");
  if (std::max(problem.d, problem.dv) > 128) add("head dimensions above 128");
  core::refuse_splits(problem, "blackwell_consumer", "block_mask", reasons);
  core::refuse_batch_invariant(problem, "blackwell_consumer", "block_mask", reasons);
}

// Turns the launch of `plan` into that of a kernel for tables of blocks.
void add_table(LaunchPlan& plan, const Problem& problem) {
  Launch& launch = plan.launches[0];
  TableParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params.call), launch.params.data(), sizeof params.call);
  params.masks = core::mask_params(problem);
  launch.params = core::bytes(params);
  launch.image = std::string("blackwell_consumer/table_") + core::dtype_word(problem.dtype);
  add_pointers(launch, core::mask_pointers(problem, offsetof(TableParams, masks)));
}

}  // namespace

PlanResult plan(const Problem& problem, const Device& device) {
  const bool nvfp4 = problem.approximate == static_cast<int64_t>(Approximate::Nvfp4);
  Reasons why_not = core::why_not(problem, describe());
  if (problem.block_mask) refuse_table(problem, why_not);
  if (nvfp4) {
    add_nvfp4_reasons(problem, device, why_not);
    core::refuse_splits(problem, "blackwell_consumer", "approximate='nvfp4'", why_not);
    core::refuse_batch_invariant(problem, "blackwell_consumer", "approximate='nvfp4'", why_not);
    if (!why_not.empty()) return why_not;
    return plan_nvfp4(problem, device);
  }
  core::add_tma_reasons(problem, "blackwell_consumer", false, why_not);
  if (is_fp8(problem.dtype)) {
    core::refuse_splits(problem, "blackwell_consumer", dtype_name(problem.dtype), why_not);
    core::refuse_batch_invariant(problem, "blackwell_consumer", dtype_name(problem.dtype), why_not);
  }
  if (has_block_scales(problem) && device.major != 12) {
    why_not.push_back("descales of dtype float8_e8m0fnu on compute capability " +
                      std::to_string(device.major) + "." + std::to_string(device.minor) +
                      ": blackwell_consumer multiplies by block scales on 12.x only; use float32 "
                      "descales" +
                      core::USE_TORCH);
  }
  if (!why_not.empty()) return why_not;
  const auto choice =
      core::choose_with_splits("blackwell_consumer", table_of(problem), problem, device);
  if (const auto* reasons = std::get_if<Reasons>(&choice)) return *reasons;
  const auto& chosen = std::get<core::SplitChoice<ConsumerTile>>(choice);
  const auto& [tile, splits, share_keys] = chosen;

  const int64_t tiles = core::tiles_of(problem, tile) * splits;
  Params params;
  core::init_params(problem, params);
  params.attention.order = core::choose_order(problem, device, tile);
  params.tiles = static_cast<int32_t>(tiles);
  params.divisors = device::make_tile_divisors(params.attention, tile.block_q);
  params.partials.splits = 1;
  if (tile.can_split) params.packed_heads = core::packed_heads(tile);
  // CTAs that go on to the next tile load its keys while the last one is written. Tiles of unequal
  // length are better served by the hardware, which gives the next tile to whoever is done, and so
  // are two CTAs per SM with many keys (NOTES.md).
  constexpr int64_t FEW_KEYS = 512;
  const int64_t resident = core::resident_ctas(tile, device);
  const bool stays = core::equal_tiles(problem) && !problem.block_mask &&
                     (resident == 1 || problem.nk <= FEW_KEYS);
  const int64_t ctas = stays ? std::min<int64_t>(tiles, resident * device.sm_count) : tiles;
  LaunchPlan plan = core::one_launch("blackwell_consumer", problem, device, tile, ctas, params);
  if (has_block_scales(problem) && !plan.launches.empty())
    plan.launches[0].image = "blackwell_consumer/mxfp8";
  if (problem.block_mask && !plan.launches.empty()) add_table(plan, problem);
  if (chosen.combines()) {
    core::split_keys(plan, problem, splits, share_keys, offsetof(Params, partials),
                     std::string("blackwell_consumer_combine_") + core::dtype_word(problem.dtype));
  }
  return plan;
}

Notes notes(const LaunchPlan& plan) {
  if (plan.problem.approximate != 0) return {core::approximate_note(plan.problem)};
  const ConsumerTile* tile = core::taken(table_of(plan.problem), plan);
  if (tile == nullptr) return {};
  const auto str = [](int x) { return std::to_string(x); };
  const std::string registers = tile->registers == Registers::Roles
                                    ? str(tile->consumer_registers) +
                                          " for each consumer thread, " +
                                          str(D64Large::PRODUCER_REGISTERS) +
                                          " for each of the producer's warpgroup (setmaxnreg)"
                                    : "the same for all warps";
  return {
      {"warps", str(tile->warps) + " of " + str(tile->rows_per_warp) + " rows, 1 producer"},
      {"registers", registers},
      {"stages", str(tile->k_stages) + " of K and of V, " + str(tile->barriers) + " barriers"},
  };
}

}  // namespace archflash::blackwell_consumer
