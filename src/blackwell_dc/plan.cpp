// blackwell_dc: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/planning/plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "blackwell_dc/config.cuh"
#include "blackwell_dc/params.h"
#include "common/device/packed_heads.cuh"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/order.h"
#include "common/planning/split_keys.h"
#include "common/planning/tensor_maps.h"
#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::blackwell_dc {

const Description& describe() {
  static const Description description{
      .name = "blackwell_dc",
      .summary =
          "fp8 (e4m3), fp16 and bf16 attention by tcgen05 and tensor memory in 16 warps of roles, "
          "for 10.x (B200, B300, GB200, GB300) and 11.0 (Jetson Thor)",
      .home_device = "B200",
      .dtypes = {DType::F16, DType::BF16, DType::E4M3},
      .head_dims = core::HEAD_DIMS_WITH_FP8,
      .features = {"causal", "q_offset", "window", "softcap", "sinks", "gqa", "cu_seqlens",
                   "strides", "lse", "num_splits", "out_dtype", "descales", "gradients"},
      .needs_capability = 100,  // tcgen05
  };
  return description;
}

namespace {

struct RoleTile : core::Tile {
  int tiles_per_cta;  // of 128 rows
  int barriers;
  int polynomials;  // of 128 exponentials
  bool dynamic_walk;
  Registers registers;  // of a thread of each role
};

template <class C>
constexpr int polynomials_of_128 =
    C::SWITCHES.polynomial_pairs * 2 * (C::SWITCHES.polynomial_in_last_quarter ? 4 : 3);

template <class C>
constexpr RoleTile tile(const char* name) {
  const core::Tile common{.name = name,
                          .reason = "",
                          .head_dim = C::HEAD_DIM,
                          .head_dim_v = C::HEAD_DIM_V,
                          .block_q = C::BLOCK_Q,
                          .block_k = C::BLOCK_K,
                          .threads = C::THREADS,
                          .warps = C::TILES * C::SOFTMAX_WARPS,
                          .rows_per_warp = C::TILE_ROWS / C::SOFTMAX_WARPS,
                          .k_stages = C::K_STAGES,
                          .v_stages = C::V_STAGES,
                          .cluster = C::CTAS,
                          .ctas_per_sm = 1,
                          .shared_bytes = C::SHARED_BYTES,
                          .q_box = core::box<typename C::QTile>(C::PACK),
                          .k_box = core::box<typename C::KTile>(C::PACK),
                          .v_box = core::box<typename C::VTile>(C::PACK),
                          .out_box = core::box<typename C::OTile>(1)};
  return {common,      C::TILES, C::BARRIERS, polynomials_of_128<C>, C::SWITCHES.dynamic_walk,
          C::REGISTERS};
}

// One for each head dimension, the smallest first.
constexpr RoleTile TILES[] = {tile<D64>("d64"), tile<D96>("d96"), tile<D128>("d128"),
                              tile<D192>("d192"), tile<D256>("d256")};

// For pairs of CTAs: each has the head dimensions of one of TILES, and serves where pairs_pay().
constexpr RoleTile PAIRS[] = {tile<D128Pair>("d128_pair"), tile<D192Pair>("d192_pair")};

// For few query rows: one tile of 128 rows, whose keys may be split over CTAs.
constexpr int FEW_ROWS = D64Few::TILE_ROWS;
constexpr RoleTile FEW_TILES[] = {tile<D64Few>("d64_few"), tile<D96Few>("d96_few"),
                                  tile<D128Few>("d128_few"), tile<D192Few>("d192_few"),
                                  tile<D256>("d256")};

constexpr RoleTile FP8_TILES[] = {tile<Fp8D64>("d64"), tile<Fp8D128>("d128"), tile<Fp8D192>("d192"),
                                  tile<Fp8D256>("d256")};

// Tiles that replace others on 10.3. The other kernels have no polynomials, or wait for memory.
struct Replacement {
  const char* replaces;
  RoleTile tile;
};
template <class C>
constexpr Replacement on_10_3(const char* replaces, const char* name) {
  RoleTile mufu = tile<WithoutPolynomials<C>>(name);
  mufu.reason = "10.3: no polynomials, since its MUFU is said to be twice as fast";
  return {replaces, mufu};
}
constexpr Replacement ON_10_3[] = {on_10_3<D64>("d64", "d64_mufu"), on_10_3<D96>("d96", "d96_mufu"),
                                   on_10_3<D128>("d128", "d128_mufu"),
                                   on_10_3<D128Pair>("d128_pair", "d128_mufu_pair")};
constexpr Replacement FP8_ON_10_3[] = {
    on_10_3<Fp8D64>("d64", "d64_mufu"), on_10_3<Fp8D128>("d128", "d128_mufu"),
    on_10_3<Fp8D192>("d192", "d192_mufu"), on_10_3<Fp8D256>("d256", "d256_mufu")};

std::span<const Replacement> replacements(const Problem& problem) {
  if (is_fp8(problem.dtype)) return FP8_ON_10_3;
  return ON_10_3;
}

const RoleTile& smallest(std::span<const RoleTile> tiles, const Problem& problem) {
  for (const RoleTile& tile : tiles) {
    if (core::takes_head_dims(tile, problem)) return tile;
  }
  return tiles.back();  // core::why_not() refuses larger ones
}

// Whether pairs of CTAs are expected to be faster than CTAs alone: unmeasured, from a model
// (NOTES.md). For a block of 128 keys at d 128 a CTA of a pair reads 128 KB of shared memory in
// products, not 192, and brings 32 KB of K and V from L2, not 64. But a pair's tile has twice the
// rows, so that more of them may be empty, more of them do not see the tile's last keys, and there
// are half as many tiles to share out: all of which walk_time() counts. What a pair gains is taken
// to make up for a sixteenth, where there is work for all pairs. FlashAttention-4 takes pairs
// wherever there is no mask and both CTAs have rows. So do we, unless that takes a quarter longer
// by the model.
bool pairs_pay(const Problem& problem, const Device& device, const RoleTile& alone,
               const RoleTile& pair) {
  const int64_t pairs = device.sm_count / 2;
  if (core::rows_per_sequence(problem) <= alone.block_q || pairs == 0) return false;
  const bool equal = core::equal_tiles(problem);
  if (!equal && core::tiles_of(problem, pair) < pairs) return false;
  const double part = equal ? 4 : 16;
  return part * core::walk_time(problem, device, pair) <=
         (part + 1) * core::walk_time(problem, device, alone);
}

// The kernel that serves all rows of a head with all their keys.
const RoleTile& alone_or_pair(const Problem& problem, const Device& device) {
  const RoleTile& alone = smallest(TILES, problem);
  for (const RoleTile& pair : PAIRS) {
    const bool same_dims = pair.head_dim == alone.head_dim && pair.head_dim_v == alone.head_dim_v;
    if (same_dims && pairs_pay(problem, device, alone, pair)) return pair;
  }
  return alone;
}

RoleTile few_tile(const Problem& problem) {
  RoleTile few = smallest(FEW_TILES, problem);
  core::pack_heads(problem, few);
  return few;
}

// The time of all tiles without a split: in keys that an SM passes with one tile.
int64_t time_unsplit(const Problem& problem, const Device& device, const RoleTile& tile) {
  const int64_t sms = std::max(device.sm_count, 1);
  const int64_t rounds = core::ceil_div(core::tiles_of(problem, tile) * tile.cluster, sms);
  return rounds * core::visited_keys(problem, tile) * tile.tiles_per_cta;
}

struct Choice {
  RoleTile tile;
  int64_t splits;
};

// One tile of 128 rows where a head, or the packed heads together, have no more of them; and where
// packing heads or splitting the keys is expected to be faster, or a split is asked for.
Choice choose(const Problem& problem, const Device& device) {
  if (is_fp8(problem.dtype)) return {smallest(FP8_TILES, problem), 1};
  const RoleTile few = few_tile(problem);
  const int64_t longest = problem.max_seqlen_q == UNKNOWN ? problem.nq : problem.max_seqlen_q;
  const int64_t few_time = time_unsplit(problem, device, few);
  Choice choice{few, 1};
  int64_t time = few_time;
  if (longest > FEW_ROWS) {
    const RoleTile& many = alone_or_pair(problem, device);
    int64_t many_time = time_unsplit(problem, device, many);
    // What the model leaves out, the workspace's bytes and what two tiles in flight gain, is taken
    // to be a quarter.
    if (many.tiles_per_cta > few.tiles_per_cta) many_time -= many_time / 4;
    // The number of tiles of packed sequences is a bound, too rough to compare kernels by it.
    if (few.packed_heads == 1 || problem.varlen || many_time <= few_time)
      choice.tile = many, time = many_time;
  }
  choice.splits = core::choose_splits(problem, device, few, time);
  if (choice.splits > 1) choice.tile = few;
  return choice;
}

// Puts the tile for 10.3 in a tile's place, if there is one. Returns whether there is.
bool replace_on_10_3(const Problem& problem, const Device& device, RoleTile& tile) {
  if (device.capability() != 103) return false;
  for (const auto& [replaces, mufu] : replacements(problem)) {
    if (std::string_view(replaces) != tile.name) continue;
    tile = mufu;
    return true;
  }
  return false;
}

}  // namespace

PlanResult plan(const Problem& problem, const Device& device) {
  Reasons reasons = core::why_not(problem, describe());
  if (is_fp8(problem.dtype))
    core::refuse_splits(problem, "blackwell_dc", dtype_name(problem.dtype), reasons);
  core::add_tma_reasons(problem, "blackwell_dc", true, reasons);
  if (!reasons.empty()) return reasons;
  const int64_t most_tiles = core::tiles_of(problem, smallest(FEW_TILES, problem));
  if (most_tiles > core::GRID_LIMIT) return core::grid_too_large(most_tiles);
  auto [tile, splits] = choose(problem, device);
  const bool for_10_3 = replace_on_10_3(problem, device, tile);
  if (tile.shared_bytes > device.shared_per_block)
    return core::too_little_shared_memory("blackwell_dc", tile.shared_bytes, device);
  const int64_t tiles = core::tiles_of(problem, tile) * splits;
  const int64_t largest = std::max(tiles, splits > 1 ? core::combine_ctas(problem) : 0);
  if (largest > core::GRID_LIMIT) return core::grid_too_large(largest);

  Params params;
  core::init_params(problem, params);
  params.attention.order = core::choose_order(problem, device, tile);
  params.tiles = static_cast<int32_t>(tiles);
  params.partials.splits = 1;
  params.packed_heads = device::pack_heads(FEW_ROWS, tile.packed_heads);
  // One CTA per SM, all of whose tensor memory it takes, goes on to the next tile: that one's
  // products start while the last one's output is written. Or one pair of CTAs for two SMs. A
  // dynamic walk takes its tiles from CTAs that have not started: there is one for each tile.
  const int64_t groups =
      tile.dynamic_walk ? tiles : std::min<int64_t>(tiles, device.sm_count / tile.cluster);
  const int64_t ctas = tile.cluster * groups;
  LaunchPlan plan = core::one_launch("blackwell_dc", problem, device, tile, ctas, params);
  const std::string word = core::dtype_word(problem.dtype);
  std::string& image = plan.launches[0].image;
  if (tile.cluster == 2) image = "blackwell_dc/fwd_pair_" + word;
  if (for_10_3) image = "blackwell_dc/fwd_103_" + word;
  if (splits > 1) {
    core::split_keys(plan, problem, splits, 0, offsetof(Params, partials),
                     "blackwell_dc_combine_" + word);
  }
  return plan;
}

Notes notes(const LaunchPlan& plan) {
  const RoleTile* tile = nullptr;
  if (is_fp8(plan.problem.dtype)) {
    tile = core::taken<RoleTile>(FP8_TILES, plan);
  } else {
    using Tiles = std::span<const RoleTile>;
    for (Tiles tiles : {Tiles(TILES), Tiles(PAIRS), Tiles(FEW_TILES)}) {
      if (tile == nullptr) tile = core::taken(tiles, plan);
    }
  }
  for (const Replacement& replacement : replacements(plan.problem)) {
    if (plan.tile.name == replacement.tile.name) tile = &replacement.tile;
  }
  if (tile == nullptr) return {};
  const auto str = [](int x) { return std::to_string(x); };
  const bool pair = tile->cluster == 2;
  const std::string halves = pair ? ", half a block each" : "";
  const std::string stages =
      tile->v_stages == 0
          ? str(tile->k_stages) + " that K and V share" + halves
          : str(tile->k_stages) + " of K, " + str(tile->v_stages) + " of V" + halves;
  return {
      {"products",
       pair ? "2 CTAs: 256 rows each, 128 of either CTA (cta_group::2)" : "1 CTA: 128 rows each"},
      {"warps", str(tile->warps) + " softmax, 4 correction, 1 each for products, loads and stores"},
      {"registers", str(tile->registers.softmax) + " softmax, " + str(tile->registers.correction) +
                        " correction, " + str(tile->registers.other) + " others (setmaxnreg)"},
      {"stages", stages + ", " + str(tile->barriers) + " barriers"},
      {"exponentials", str(tile->polynomials) + " of 128 by polynomial"},
  };
}

}  // namespace archflash::blackwell_dc
